"""Whole models next to busy processes: how much slower each contender gets when others compute on the same processors.

    python -m experiments.end_to_end.busy_neighbour --work FOLDER --peer-python PYTHON [--rounds 10] [--repeats 10] [--busy 0,1,2]
        [--servers 4] [--targets c,library,export,opencl]

Two encoders: four layers of a BERT of width 768 with weights drawn from a seed (one text of 33 tokens), and all-MiniLM-L6-v2 (128 tokens).
A busy process is `while True: pass`. Each contender has a process and is called in turns, first without and then with busy processes;
results are compared with the first contender's. At the end, `--servers` processes of one contender are called at the same time, each with
as many threads as it has alone, and one contender after the other in each round. Ours are untuned builds: target `c` with kernels only,
with OpenBLAS's products where a library has one, exported as C and compiled by gcc, and PoCL. Peers: ONNX Runtime and OpenVINO with their
defaults. `--peer-python` has torch, transformers, onnx, onnxscript, onnxruntime and openvino. Writes results/busy_neighbour.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Contender, serve, visits
from experiments.harness.pages import environment, write_page

SELF = ["-m", "experiments.end_to_end.busy_neighbour"]
CASES = {"bert": 33, "minilm": 128}
BOUNDS = {"b": (1, 8), "n": (1, 512)}
PEERS = ("onnxruntime", "openvino")
OURS = {"c": "ours, C", "library": "ours, C with OpenBLAS", "export": "ours, exported C", "opencl": "ours, PoCL"}
GOAL = 1.7


def arguments(case: str) -> dict[str, Any]:
    """Token ids and a mask of one text."""
    n = CASES[case]
    ids = np.random.default_rng(0).integers(1000, 30000, (1, n)).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def write_bert(folder: Path) -> None:
    """Write the folder of a BERT of four layers, as transformers does."""
    from safetensors.numpy import save_file

    width, inner, words, positions = 768, 3072, 30522, 512
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32) * 0.02

    rows_of = {"word": words, "position": positions, "token_type": 2}
    weights = {f"embeddings.{name}_embeddings.weight": drawn(rows, width) for name, rows in rows_of.items()}
    dense = {"pooler.dense": (width, width)}
    norms = ["embeddings.LayerNorm"]
    for at in (f"encoder.layer.{k}." for k in range(4)):
        dense |= {f"{at}attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        dense |= {
            f"{at}attention.output.dense": (width, width),
            f"{at}intermediate.dense": (inner, width),
            f"{at}output.dense": (width, inner),
        }
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    for name, (rows, columns) in dense.items():
        weights |= {f"{name}.weight": drawn(rows, columns), f"{name}.bias": drawn(rows)}
    for name in norms:
        weights |= {f"{name}.weight": 1 + drawn(width), f"{name}.bias": drawn(width)}
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 12,
        "intermediate_size": inner, "vocab_size": words, "max_position_embeddings": positions, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def write_onnx(folder: Path, file: Path) -> None:
    """Export a folder's encoder with its last hidden state, over batches and lengths (peers' Python)."""
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModel.from_pretrained(str(folder)).eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.inner(input_ids, attention_mask, token_type_ids).last_hidden_state

    names = ("input_ids", "attention_mask", "token_type_ids")
    given = tuple(torch.ones((2, 16), dtype=torch.int64) for _ in names)
    b, n = torch.export.Dim("b", min=1, max=64), torch.export.Dim("n", min=1, max=512)
    dims = {name: {0: b, 1: n} for name in names}
    torch.onnx.export(
        Hidden(), given, str(file), dynamo=True, dynamic_shapes=dims, input_names=list(names), output_names=["hidden"]
    )


def first(array: Any) -> list[float]:
    return [float(x) for x in np.asarray(array).reshape(-1)[:8]]


def serve_peer(kind: str, work: Path) -> None:
    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        file, given = str(work / f"{case}.onnx"), arguments(case)
        if kind == "onnxruntime":
            import onnxruntime

            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            feed = {i.name: given[i.name] for i in session.get_inputs()}
            return (lambda: session.run(None, feed)), lambda: first(session.run(None, feed)[0])
        import openvino

        hint = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(file, "CPU", hint)
        request = compiled.create_infer_request()
        named = {i.any_name: given[i.any_name] for i in compiled.inputs}
        return (lambda: request.infer(named)), lambda: first(request.infer(named)[0])

    serve(answer)


def serve_ours(kind: str, work: Path) -> None:
    from relax_tune.runtime.artifact import load_artifact

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        given = arguments(case)
        artifact = load_artifact(str(work / f"{case}.{kind}.rta"))
        names = [s.name for s in (artifact.program.buffers[i] for i in artifact.program.inputs)]
        arrays = [given[name] for name in names]
        if kind == "export":
            run = exported(work / f"{case}.export", artifact.program, arrays)
            return run, lambda: first(run())
        model = artifact.open("opencl" if kind == "opencl" else "c")
        return (lambda: model.run(arrays)), lambda: first(model.run(arrays)[0])

    serve(answer)


def exported(folder: Path, program: Any, arrays: Sequence[Any]) -> Callable[[], Any]:
    """Return a call of the exported library, whose first result it returns."""
    import ctypes

    library = ctypes.CDLL(str(folder / "libnet.so"))
    library.net_error.restype = ctypes.c_char_p
    model, weights = ctypes.c_void_p(), str(folder / "net.weights").encode()
    options = (ctypes.c_char_p * 8)(weights)  # the other members are 0
    if library.net_create(ctypes.byref(model), options):
        raise SystemExit(library.net_error(model).decode())
    symbols = (ctypes.c_int64 * 2)(*(dict(zip("bn", arrays[0].shape))[s.name] for s in program.symbols))
    results, places = [], []
    for k in range(len(program.outputs)):
        nbytes = ctypes.c_size_t()
        library.net_output_bytes(model, 0, symbols, k, ctypes.byref(nbytes))
        results.append(np.empty(nbytes.value // 4, np.float32))
        places.append(results[-1].ctypes.data)
    inputs = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    outputs = (ctypes.c_void_p * len(places))(*places)

    def run() -> Any:
        if arrays and library.net_run(model, 0, symbols, inputs, outputs):  # whose memory `inputs` points at
            raise SystemExit(library.net_error(model).decode())
        return results[0]

    return run


def prepare(work: Path, python: str, kinds: Sequence[str]) -> None:
    """Write folders, ONNX files, artifacts and exports that are not there yet."""
    import relax_tune as rt
    from experiments.harness.e2e_cases import minilm_folder
    from relax_tune.runtime.artifact import load_artifact
    from relax_tune.tuner.export.c_export import export_c

    work.mkdir(parents=True, exist_ok=True)
    folders = {"bert": work / "bert", "minilm": Path(minilm_folder())}
    if not (folders["bert"] / "model.safetensors").exists():
        write_bert(folders["bert"])
    for case, folder in folders.items():
        if not (work / f"{case}.onnx").exists():
            subprocess.run([python, *SELF, "--export", str(folder), str(work / f"{case}.onnx")], check=True)
        for kind in kinds:
            file = work / f"{case}.{kind}.rta"
            if not file.exists():
                target, policy = (
                    ("opencl" if kind == "opencl" else "c"),
                    ("library" if kind == "library" else "measured"),
                )
                artifact = rt.build(
                    work / f"{case}.onnx",
                    target=target,
                    policy=policy,
                    bounds=BOUNDS,
                    db="memory://",
                    libraries=kind == "library",
                )
                artifact.save(str(file))
            if kind == "export" and not (work / f"{case}.export" / "libnet.so").exists():
                export_c(load_artifact(str(file)), work / f"{case}.export", "net")
                compile_export(work / f"{case}.export")


def compile_export(folder: Path) -> None:
    """Compile an export as a shared library with threads."""
    from relax_tune.runtime.device.c_compiler import KERNEL_FLAGS

    sources = [str(folder / "net.c"), str(folder / "net_team.c"), *map(str, sorted(folder.glob("net_kernels*.c")))]
    flags = ("-std=c11", "-march=native", *KERNEL_FLAGS, "-Wno-psabi", "-Dnet_TEAM", "-pthread", "-shared", "-fPIC")
    subprocess.run(["gcc", *flags, *sources, "-o", str(folder / "libnet.so"), "-lm"], check=True)


Figures = dict[str, dict[str, dict[str, dict[str, float]]]]
"""Milliseconds (`median`, `mean`, `p90`, `p99`) by case, contender and condition: a number of busy processes, or `SERVERS`."""
SERVERS = "servers"


def statistics_of(samples: Sequence[float]) -> dict[str, float]:
    """Return the figures of samples in seconds, in milliseconds."""
    ordered = sorted(x * 1e3 for x in samples)
    parts = {f"p{q}": ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))] for q in (90, 99)}
    return {"median": statistics.median(ordered), "mean": statistics.fmean(ordered), **parts, "samples": len(ordered)}


def timed(contenders: Sequence[Contender], busy: Sequence[int], rounds: int, repeats: int) -> Figures:
    """Time all contenders in turns, next to each number of busy processes."""
    figures: Figures = {case: {c.name: {} for c in contenders} for case in CASES}
    for count in busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            time.sleep(0.5)
            for case, by in visits(contenders, list(CASES), rounds, repeats, tolerance=2e-3).items():
                for name, rows in by.items():
                    samples = [x for row in rows for x in row]
                    if samples:
                        figures[case][name][str(count)] = statistics_of(samples)
        finally:
            for other in others:
                other.kill()
                other.wait()
    return figures


def timed_together(groups: Sequence[Sequence[Contender]], rounds: int, repeats: int, figures: Figures) -> None:
    """Time the processes of each group, which are of one contender, all at the same time. The groups take turns."""
    for case in CASES:
        samples: dict[str, list[float]] = {group[0].name: [] for group in groups}
        for round_ in range(rounds):
            for k in range(len(groups)):
                group = groups[(k + round_) % len(groups)]
                if not figures[case][group[0].name]:
                    continue  # wrong or refused
                with ThreadPoolExecutor(len(group)) as pool:
                    for answer in pool.map(Contender.time, group, repeat(case), repeat(repeats)):
                        samples[group[0].name] += answer["secs"]
                time.sleep(0.15)
        for name, own in samples.items():
            if own:
                figures[case][name][SERVERS] = statistics_of(own)


def quantiles(figures: Figures, conditions: Sequence[str], headings: Sequence[str]) -> list[str]:
    """Return the tables of medians and 99th percentiles."""
    lines = ["## Median and 99th percentile, milliseconds", ""]
    for case, by in figures.items():
        lines += [f"| {case} | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
        for name, row in by.items():
            cells = [f"{own['median']:.1f}, {own['p99']:.1f}" if (own := row.get(c)) else "-" for c in conditions]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def page(figures: Figures, busy: Sequence[int]) -> list[str]:
    lines = [
        "# Whole models next to busy processes",
        "",
        "Milliseconds per call, mean (p90), and the ratio to the time without busy processes. Goal next to one: at most "
        f"{GOAL} in both.",
        "",
    ]
    for case, by in figures.items():
        lines += [
            f"## {case}, {CASES[case]} tokens",
            "",
            "| | " + " | ".join(f"{n} busy" for n in busy) + " |",
            "|---" * (len(busy) + 1) + "|",
        ]
        for name, row in by.items():
            quiet, cells = row.get(str(busy[0])), []
            for n in busy:
                own = row.get(str(n))
                if own is None or quiet is None:
                    cells.append("-")
                    continue
                text = f"{own['mean']:.1f} ({own['p90']:.1f})"
                cells.append(
                    text
                    if n == busy[0]
                    else f"{text}: {own['mean'] / quiet['mean']:.2f} ({own['p90'] / quiet['p90']:.2f})"
                )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--busy", default="0,1,2")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--targets", default="c,library,export,opencl")
    parser.add_argument("--export", nargs=2, metavar=("FOLDER", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.export:
        write_onnx(Path(given.export[0]), Path(given.export[1]))
        return
    if given.serve:
        (serve_peer if given.serve in PEERS else serve_ours)(given.serve, given.work)
        return
    kinds, busy = given.targets.split(","), [int(x) for x in given.busy.split(",")]
    prepare(given.work, given.peer_python, kinds)
    pythons = {OURS[k]: (sys.executable, k) for k in kinds} | {p: (given.peer_python, p) for p in PEERS}
    facts = environment()

    def started(name: str) -> Contender:
        python, kind = pythons[name]
        log = given.work / f"{kind}.log"
        return Contender(name, [python, *SELF, "--serve", kind, "--work", str(given.work)], log=log)

    contenders = [started(name) for name in pythons]
    groups = [[c, *(started(c.name) for _ in range(given.servers - 1))] for c in contenders]
    try:
        figures = timed(contenders, busy, given.rounds, given.repeats)
        timed_together(groups, given.rounds, given.repeats, figures)
    finally:
        for c in (c for group in groups for c in group):
            c.close()
    conditions = [*map(str, busy), SERVERS]
    headings = [*(f"{n} busy" for n in busy), f"{given.servers} servers"]
    text = [*page(figures, busy), *quantiles(figures, conditions, headings)]
    write_page("busy_neighbour", text, {"environment": facts, "milliseconds": figures}, facts)


if __name__ == "__main__":
    main()
