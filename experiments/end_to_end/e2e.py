"""Table 5: whole models, one dynamic build each, against torch eager, torch.compile, ONNX Runtime and TVM.

    python -m experiments.end_to_end.e2e --work FOLDER --peer-python PYTHON [--only MODEL] [--builds c:model,opencl:measured] [--no-tvm]

Models: the sentence encoder all-MiniLM-L6-v2 over 1 to 512 tokens, and a Llama-style decoder with weights from a seed: prefill of 1 to
512 tokens (the last token's logits and a cache), and decode of one token after 1 to 512 (logits and the grown cache). The encoder is
imported from its Hugging Face folder, the decoder from the very program that torch.export made of the peers' module. Every contender
lives in a process of its own and is asked in turns; one whose numbers are not torch eager's is not timed. TVM is what it builds of a
dynamic model by default: since that takes seconds, it is asked once a size, up to 128 tokens. Our builds: `measured` from times of
kernels that find their weights in the caches, `model` without them there (`tune --caches model`), which is what peers are compared
with; `library` with a library for every matrix product that it has one for.

`--peer-python` has torch, transformers, onnxruntime, onnxscript, apache-tvm (with apache-tvm-ffi pinned as CONTRIBUTING says) and what
our importer needs; without it only our own builds are timed. What is exported, tuned and timed is kept in the folder and found again
there; the results are written of all models that were timed in it. `--tiny` takes a tiny decoder and few sizes, to see that it works.
Writes results/e2e.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Answer, Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import (
    LARGEST,
    MODELS,
    SIZES,
    decoder_of,
    geomean,
    head,
    inputs,
    minilm_folder,
    ratios,
)
from experiments.harness.pages import RESULTS, environment, write_page
from relax_tune.database.store import open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import from_json
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Caches, Policy, Settings

PEERS = ("torch-eager", "torch-compile", "onnxruntime", "tvm")
PACKAGES = ("torch", "transformers", "onnxruntime", "apache-tvm")
OURS = "ours-c-model"
# By name: what kernels find in the caches when they are timed, and the policy.
BUILDS: Mapping[str, tuple[Caches, Policy]] = {
    "measured": ("warm", "measured"),
    "model": ("model", "measured"),
    "library": ("warm", "library"),
    "generic": ("warm", "generic"),
}
# Builds that take seconds a call: these sizes, in the first round alone.
SLOW, SLOW_LARGEST = ("tvm", "generic"), 128
REPEATS, TOLERANCE = 3, 1e-3
GOAL = 1.2


def prepare(model: str, work: Path, python: str, tiny: bool, tvm: bool) -> dict[str, str]:
    """Export the files of the contenders; return the reason for each contender that cannot be exported, by name."""
    folder, failed = work / model, {}
    (folder / "minilm").write_text(str(minilm_folder()) if model == "minilm" else "")
    kinds = {"plain": "program.json", "onnxruntime": "model.onnx", "tvm": "tvm.so"}
    for kind in kinds if model != "minilm" else ("onnxruntime", "tvm"):
        if (folder / kinds[kind]).exists() or (kind == "tvm" and not tvm):
            continue
        say(f"{model}: exporting for {kind}")
        command = [
            python,
            "-m",
            "experiments.end_to_end.peers",
            "prepare",
            kind,
            model,
            str(folder),
            *["--tiny"] * tiny,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [""])[-1]
            failed[kind] = why[:300] or f"ended with status {done.returncode}"
            say(f"{model}: {kind} failed: {failed[kind]}")
    if "plain" in failed:
        raise SystemExit(f"{model}: no program to import: {failed['plain']}")
    return failed


def imported(model: str, folder: Path) -> IRModule:
    if model == "minilm":
        return load_model(minilm_folder(), {"b": (1, 1), "n": (1, LARGEST)})
    with np.load(folder / "weights.npz") as weights:
        return import_program(from_json((folder / "program.json").read_text(), dict(weights)))


def tune(model: str, work: Path, builds: Sequence[str], trials: int) -> dict[str, Any]:
    """Measure what the database lacks and write an artifact for each target and kind of build; return figures by contender."""
    module, done = imported(model, work / model), {}
    with open_store(f"sqlite:///{work / 'ours.db'}") as store:
        for target, _, build in (b.rpartition(":") for b in builds):
            caches, policy = BUILDS[build]
            settings = Settings(target=target, trials=trials, caches=caches)
            runner = open_runner(settings)
            job = device_job(module, runner.device_info(), store, settings)
            found = job.tune(runner, lambda p: say(f"  {p.task[:48]:48} {p.trials:4}"))
            runner.close()
            say(f"{model}, {target}, {build}: {found.trials} candidates in {found.wall_secs:.0f} s")
            name = f"ours-{target.replace(':', '_')}-{build}"
            built = job.build(policy)
            job.artifact(built).save(work / model / f"{name}.rta")
            plans = {
                task: list(dict.fromkeys(p.variants[e.variant].sketch for e in p.plan.entries))
                for task, p in built.plans.items()
            }
            done[name] = {
                "dispatched": plans,
                "problems": [": ".join(p) for p in found.problems],
                "tuned now": {"candidates": found.trials, "wall_secs": round(found.wall_secs)},
            }
    return done


def contenders(
    model: str, work: Path, peers: Sequence[str], ours: Sequence[str], python: str | None, args: Sequence[str]
) -> list[Contender]:
    """Return the contenders, torch eager first: others are compared with its results. A peer without its exported files is left out."""
    sizes = [str(n) for n in SIZES if n <= SLOW_LARGEST]
    commands = {}
    if python is not None:
        served = {"onnxruntime": "model.onnx", "tvm": "tvm.so"}
        for kind in peers:
            if kind not in served or (work / model / served[kind]).exists():
                commands[kind] = [
                    python,
                    "-m",
                    "experiments.end_to_end.peers",
                    "serve",
                    kind,
                    model,
                    str(work / model),
                    *args,
                ]
    for name in ours:
        commands[name] = [
            sys.executable,
            "-m",
            "experiments.end_to_end.e2e",
            "--work",
            str(work),
            "--only",
            model,
            "--serve",
            name,
            *args,
        ]
    return [
        Contender(name, command, sizes if name.endswith(SLOW) else None, 1 if name.endswith(SLOW) else None)
        for name, command in commands.items()
    ]


def answers(artifact: Path, model: str, tiny: bool) -> Answer:
    """The cases of one of our builds, each a size."""
    opened = load_artifact(artifact).open()

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given = list(inputs(model, int(case), decoder_of(tiny)))
        return lambda: opened.run(given), lambda: head(opened.run(given))

    return answer


def report(found: Mapping[str, Any]) -> list[str]:
    """A table a model, the ratios, and which contender could not take part."""
    lines = [
        "# Whole models (table 5)",
        "",
        "Written by `experiments/end_to_end/e2e.py`; median milliseconds of a call, in turns.",
        "",
    ]
    everything = []
    for model, record in found.items():
        times = record["times"]
        medians = {n: {c: v["median_us"] / 1e3 for c, v in row.items()} for n, row in times.items()}
        names = list(dict.fromkeys(c for row in medians.values() for c in row))
        symbol = "past" if model == "decode" else "n"
        lines += [
            f"| {model} | " + " | ".join(f"{symbol}={n}" for n in medians) + " |",
            "|---" * (len(medians) + 1) + "|",
        ]
        for name in names:
            cells = [f"{row[name]:.2f}" if name in row else "-" for row in medians.values()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        times_as_fast = ratios(medians, OURS, PEERS)
        everything += times_as_fast.values()
        cells = [f"{times_as_fast[n]:.2f}" if n in times_as_fast else "-" for n in medians]
        lines += ["| **times as fast as the best peer** | " + " | ".join(cells) + " |", ""]
        lines += [
            f"{model}: {geomean(list(times_as_fast.values())):.2f} times as fast as the best peer (geometric mean).",
            "",
        ]
        lines += [f"{model}, {kind}: {why}" for kind, why in record["failed"].items()] + [""] * bool(record["failed"])
    lines += [f"All: {geomean(everything):.2f} times (goal {GOAL})."]
    return lines


def versions(python: str | None) -> dict[str, str]:
    """The peers' versions."""
    if python is None:
        return {}
    code = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {PACKAGES!r}}}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--builds", default="c:measured,c:model,c:library", help=f"TARGET:BUILD,... of {', '.join(BUILDS)}"
    )
    parser.add_argument("--no-tvm", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in [n for n in os.environ if n.startswith("OPENBLAS_")]:
        del os.environ[name]  # OpenBLAS chooses its kernels, as for the peers
    if args.serve:
        serve(answers(args.work / args.only / f"{args.serve}.rta", args.only, args.tiny))
        return
    for model in MODELS if args.only is None else (args.only,):
        folder = args.work / model
        folder.mkdir(parents=True, exist_ok=True)
        if args.peer_python is None and model != "minilm" and not (folder / "program.json").exists():
            raise SystemExit(f"{model}: the decoder is exported by torch; give --peer-python")
        before = environment() | versions(args.peer_python)
        failed = (
            prepare(model, args.work, args.peer_python, args.tiny, not args.no_tvm)
            if args.peer_python is not None
            else {}
        )
        ours = tune(model, args.work, args.builds.split(","), args.trials)
        peers = [p for p in PEERS if not (args.no_tvm and p == "tvm")]
        taking_part = contenders(model, args.work, peers, list(ours), args.peer_python, ["--tiny"] * args.tiny)
        say(f"{model}: timing {', '.join(c.name for c in taking_part)}")
        cases = [str(n) for n in SIZES if not args.tiny or n <= 16]
        try:
            times = summary(in_rounds(taking_part, cases, args.rounds, REPEATS, TOLERANCE))
        finally:
            for c in taking_part:
                c.close()
        for c in taking_part:
            missing = [n for n in cases if c.takes(n) and c.name not in times.get(n, {})]
            if missing:
                failed[c.name] = f"failed, or gave other numbers than torch eager, at {', '.join(missing)}"
        record = {"environment": before, "trials": args.trials, "rounds": args.rounds, "times": times}
        (folder / "times.json").write_text(json.dumps(record | {"failed": failed, "ours": ours}))
    timed = {m: args.work / m / "times.json" for m in MODELS}
    found = {m: json.loads(path.read_text()) for m, path in timed.items() if path.exists()}
    write_page("e2e", report(found), found, {m: r["environment"] for m, r in found.items()}, args.results)


if __name__ == "__main__":
    main()
