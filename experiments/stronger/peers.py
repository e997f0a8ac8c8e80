"""Two whole models and stronger peers, by class of weights: OpenVINO, IREE, llama.cpp, ONNX Runtime and torch.

    python -m experiments.stronger.peers --work FOLDER --peer-python PYTHON [--db URL] [--trials 32] [--rounds 7] [--only MODEL,...]

Models: MiniLM over batches and lengths, and a Llama-style decoder of six layers of 512 with 16,000 words, its weights drawn from a
seed: prefill, and decode of one token after others. For decode, each contender holds the caches in the way that suits it best: ours in
a session, OpenVINO in the model's state, llama.cpp internally; ONNX Runtime, IREE and torch take and return them. A visit begins with a
prefill's caches of the case's length, and each of its steps adds a token. All run in turns on two processors and two threads. Classes:
float32 weights, 16, 8 and 4 bits. Before anything is timed, every contender's results are compared with torch's in float32. The page
names contenders that differ by more than their class may, are not installed or do not compile; these are not timed.

`--peer-python` has any of torch, transformers, onnxscript, onnxruntime, openvino, nncf, iree-base-compiler, iree-base-runtime,
llama-cpp-python (built here: `CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python`), gguf and
safetensors. Ours are tuned with `caches="model"` into the database that `--db` names (by default one in the folder; existing records
are used). Exports, artifacts and each model's times stay in the folder: the same command continues an interrupted run, and `--again`
measures all times again. `--few` takes few cases, as a check of the script; `--contenders` selects contenders. Writes
results/stronger_peers.json and .md, of all models that were timed in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.end_to_end.e2e import say
from experiments.harness.contenders import Answer, Contender, serve, visits
from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import minilm_folder
from experiments.harness.pages import RESULTS, environment, write_page
from experiments.stronger.cases import (
    BATCH,
    CASES,
    CLASSES,
    DECODER,
    ENCODERS_ONLY,
    FEW,
    LENGTH,
    POSITIONS,
    REFERENCE,
    SERVED,
    THREADS,
    error,
    given,
    numbers,
    tolerance_of,
)
from experiments.stronger.page import page
from relax_tune.database.store import open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Settings

PACKAGES = (
    "torch", "transformers", "onnxruntime", "openvino", "nncf", "iree-base-compiler", "iree-base-runtime", "llama-cpp-python", "gguf",
)  # fmt: skip
REPEATS, VISIT_SECS = 5, 0.5
EXPORT_SECS, FIRST_SECS = 1800, 180


@cache
def imported(kind: str, work: Path) -> IRModule:
    """Import minilm or the decoder."""
    if kind == "minilm":
        return load_model(minilm_folder(), {"b": (1, BATCH), "n": (1, LENGTH)})
    place = work / "decoder/llama"
    if not (place / "model.safetensors").exists():
        write_folder(place, DECODER, POSITIONS)
    return load_model(place, {"b": (1, 1), "n": (1, LENGTH), "m": (0, POSITIONS - 1)})


def artifact_of(name: str, model: str, work: Path) -> Path:
    """Return the path of one of our artifacts: prefill and decode are functions of one artifact."""
    return work / ("minilm" if model == "minilm" else "decoder") / f"{name}.rta"


def tune(name: str, model: str, work: Path, db: str, trials: int) -> None:
    """Tune and save one of ours, unless that was done with as many trials or more."""
    path = artifact_of(name, model, work)
    told = path.with_suffix(".json")
    if path.exists() and told.exists() and json.loads(told.read_text())["trials"] >= trials:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    module, settings = imported(path.parent.name, work), Settings(target="c", trials=trials, caches="model")
    kind, _, more = name.removeprefix("ours.").partition(".")
    if more == "weights" or kind in ("int8", "int4"):
        settings = replace(settings, weights=kind)
    elif kind not in ("f32", "activations"):
        settings = replace(settings, precision=kind)
    if "activations" in (kind, more):
        settings = replace(settings, activations="int8")
    with open_store(db) as store:
        runner = open_runner(settings)
        job = device_job(module, runner.device_info(), store, settings)
        found = job.tune(runner, lambda p: say(f"  {p.task[:48]:48} {p.trials:4}"))
        built = job.tested_build(runner)
        runner.close()
    job.artifact(built).save(path)
    done = {"trials": trials, "candidates": found.trials, "wall_secs": round(found.wall_secs)}
    told.write_text(json.dumps(done | {"problems": [": ".join(p) for p in found.problems]}))
    say(f"{path.parent.name}, {name}: {found.trials} candidates in {found.wall_secs:.0f} s")


def our_answers(name: str, model: str, work: Path) -> Answer:
    """Return the cases of one of ours. Decode runs in a session; a restore opens a new one."""
    opened = load_artifact(artifact_of(name, model, work)).open()

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        arrays = given(model, case, work / model)
        function = None if model == "minilm" else model
        if model != "decode":
            return lambda: opened.run(arrays, function), lambda: numbers(opened.run(arrays, function)[0])
        held: list[Any] = []

        def restore() -> None:
            for session in held:
                session.close()
            held[:] = [opened.session(list(arrays[1:]), function)]

        step = lambda: held[0].run([arrays[0]])
        return step, lambda: numbers(step()[0]), restore

    return answer


def last_line(text: str) -> str:
    """Return the last line that says something, without paths."""
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return " ".join(w for w in (lines or ["it said nothing"])[-1].split() if "/" not in w)[:300]


def prepare(names: Sequence[str], model: str, work: Path, python: str) -> dict[str, str]:
    """Write the files from which peers are served; return the reason for each peer that cannot be served, by name."""
    folder, only = work / model, ENCODERS_ONLY if model != "minilm" else ()
    failed = {n: "not asked: activations of decoders are not quantised ahead here" for n in names if n in only}
    wanted = {"past.npz": "caches"} if model == "decode" else {}
    served = {SERVED[n]: n for n in names if n in SERVED and n not in failed}
    if any(n.startswith(("onnxruntime", "openvino", "iree")) for n in names):
        wanted |= {"model.onnx": "model.onnx"}
    for file in wanted | served:
        if (folder / file).exists():
            continue
        say(f"{model}: writing {file}")
        command = [python, "-m", "experiments.stronger.exports", model, str(folder / file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_SECS)
            why = last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"took longer than {EXPORT_SECS} s"
        if why:
            say(f"{model}: {file}: {why}")
            failed |= {n: f"{file} could not be written: {why}" for n in names if SERVED.get(n) == file}
            if file in wanted:
                raise SystemExit(f"{model}: {file}: {why}")
    return failed


def opened(names: Sequence[str], model: str, work: Path, python: str, failed: dict[str, str]) -> list[Contender]:
    """Start the contenders' processes; say why one did not start."""
    found = []
    for name in names:
        log = work / model / f"{name}.log"
        if name.startswith("ours."):
            command = [
                sys.executable,
                "-m",
                "experiments.stronger.peers",
                "--work",
                str(work),
                "--only",
                model,
                "--serve",
                name,
            ]
        else:
            command = [python, "-m", "experiments.stronger.serve", name, model, str(work / model)]
        try:
            found.append(Contender(name, command, log=log))
        except SystemExit:
            failed[name] = f"did not start: {last_line(log.read_text())}"
            say(f"{model}: {name} {failed[name]}")
    return found


def checked(
    taking_part: Sequence[Contender], model: str, cases: Sequence[str], work: Path, failed: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Compare all results with the first contender's; leave each only the cases where it is near. The errors by name and case."""
    wanted: dict[str, list[float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for c in taking_part:
        tolerance, own, said = tolerance_of(c.name), errors.setdefault(c.name, {}), dict[str, str]()
        for case in cases:
            try:
                found = c.time(case, 0, FIRST_SECS)
            except (SystemExit, BrokenPipeError):
                found = {"error": f"died: {last_line((work / model / f'{c.name}.log').read_text())}"}
            if "error" in found:
                said[case] = found["error"].replace(str(work), "FOLDER")
                continue
            if c.name == REFERENCE:
                wanted[case] = found["head"]
            if case not in wanted:
                said[case] = f"{REFERENCE} gave nothing to compare with"
                continue
            own[case] = error(found["head"], wanted[case])
            if not own[case] <= tolerance:
                said[case] = f"results off by {own[case]:.2g}, more than the {tolerance:g} allowed"
        c.cases = [case for case in cases if case not in said]
        for why in dict.fromkeys(said.values()):
            at = ", ".join(case for case in said if said[case] == why)
            failed[c.name] = "; ".join(filter(None, (failed.get(c.name), f"{at}: {why}")))
            say(f"{model}: {c.name}, {at}: {why}")
    return errors


def timed(model: str, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Prepare, check and time the contenders of a model."""
    folder, cases = work / model, (FEW if args.few else CASES)[model]
    folder.mkdir(parents=True, exist_ok=True)
    if model == "minilm":
        (folder / "minilm").write_text(str(minilm_folder()))
    every = [n for w in CLASSES.values() for n in (*w.ours, *w.peers) if n != REFERENCE]
    chosen = set(args.contenders.split(",")) if args.contenders else set(every)
    names = [REFERENCE, *(n for n in every if n in chosen)]
    failed = prepare(names, model, work, args.peer_python)
    for name in names:
        if name.startswith("ours."):
            tune(name, model, work, args.db, args.trials)
    before = environment()
    taking_part = opened([n for n in names if n not in failed], model, work, args.peer_python, failed)
    try:
        errors = checked(taking_part, model, cases, work, failed)
        able = [c for c in taking_part if c.cases]
        say(f"{model}: timing {', '.join(c.name for c in able)}")
        samples = visits(able, cases, args.rounds, REPEATS, float("inf"), VISIT_SECS)
    finally:
        for c in taking_part:
            if c.process.poll() is None:
                c.close()
    # The last round alone is sure to have as many repeats as fit a visit: the first asks once, to learn how many do.
    flat = {
        case: {n: [s for v in (own[1:] or own) for s in v] for n, own in by.items() if own}
        for case, by in samples.items()
    }
    times = {
        case: {n: {"median_us": statistics.median(s) * 1e6, "least_us": min(s) * 1e6, "samples": len(s)} for n, s in by.items()}
        for case, by in flat.items()
    }  # fmt: skip
    ours = [n for n in names if n.startswith("ours.")]
    return {
        "environment": before, "rounds": args.rounds, "trials": args.trials, "times": times, "errors": errors, "failed": failed,
        "notes": {n: p.read_text() for n in names if (p := folder / f"{n}.note").exists() and p.read_text()},
        "tuning": {n: json.loads(artifact_of(n, model, work).with_suffix(".json").read_text()) for n in ours},
    }  # fmt: skip


def versions(python: str) -> dict[str, str]:
    """Return the versions of the peers' packages, or that one is not installed."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "def version(p):\n"
        "    try: return m.version(p)\n"
        "    except m.PackageNotFoundError: return 'not installed'\n"
        f"print(json.dumps({{p: version(p) for p in {PACKAGES!r}}}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def use_two_processors() -> None:
    """Bind this process and its children to two processors, and their pools to two threads."""
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[:THREADS])
    os.environ["OMP_NUM_THREADS"] = str(THREADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--db")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--contenders", help="NAME,...: these beside torch eager; by default all")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(our_answers(args.serve, args.only, args.work))
        return
    models = args.only.split(",")
    if args.peer_python is None or not set(models) <= set(CASES):
        parser.error(f"expected --peer-python PYTHON, and --only of {', '.join(CASES)}")
    args.work.mkdir(parents=True, exist_ok=True)
    args.db = args.db or f"sqlite:///{args.work / 'ours.db'}"
    use_two_processors()
    asked = {"cases": "few" if args.few else "all", "contenders": args.contenders or "all"}
    asked |= {"trials": args.trials, "rounds": args.rounds, "versions": versions(args.peer_python)}
    for model in models:
        path = args.work / model / "times.json"
        if not args.again and path.exists() and json.loads(path.read_text())["asked"] == asked:
            continue
        record = timed(model, args.work, args) | {"asked": asked}
        path.write_text(json.dumps(record))
    found = {m: json.loads(p.read_text()) for m in CASES if (p := args.work / m / "times.json").exists()}
    measured = {m: r["environment"] for m, r in found.items()}
    write_page("stronger_peers", page(found), found, measured, args.results)


if __name__ == "__main__":
    main()
