"""Five kinds of whole models that `e2e.py` lacks, one dynamic build each, with torch eager, torch.compile and ONNX Runtime.

    python -m experiments.end_to_end.whole_models --work FOLDER --peer-python PYTHON [--only MODEL,...] [--targets c,opencl] [--trials 16]

A CNN over batches, a U-Net over heights and widths, a speech encoder with a text decoder over frames and tokens, a mixture of experts
over tokens, a recommender over batches (whole_model_peers.py). All are imported from the programs that torch.export writes of the peers'
modules. Every contender has a process and is called in turns; one whose results differ from torch eager's is not timed. Exports and
records stay in the folder. Writes results/whole_models.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import geomean, head, ratios
from experiments.harness.pages import environment, write_page
from relax_tune.database.store import open_store
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import from_json
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Settings

PEERS = ("torch-eager", "torch-compile", "onnxruntime")
# The sizes of each model, as `whole_model_peers.inputs` reads them.
CASES = {
    "cnn": ("1", "2", "5", "16"),
    "unet": ("64x64", "72x104", "128x128", "200x152"),
    "speech": ("50x4", "200x16", "500x32", "1000x64"),
    "experts": ("1", "16", "100", "256"),
    "recommender": ("1", "16", "100", "512"),
}
GOAL = 1.1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepare(model: str, folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, made in (("plain", "program.json"), ("onnxruntime", "model.onnx")):
        if (folder / made).exists() or (folder / f"{kind}.failed").exists():
            continue
        command = [python, "-m", "experiments.end_to_end.whole_model_peers", "prepare", kind, model, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            (folder / f"{kind}.failed").write_text(done.stderr[-2000:])
            say(f"{model}: {kind} failed: {(done.stderr.strip().splitlines() or [''])[-1][:300]}")


def tune(model: str, folder: Path, work: Path, targets: Sequence[str], trials: int) -> dict[str, Any]:
    with np.load(folder / "weights.npz") as weights:
        module = import_program(from_json((folder / "program.json").read_text(), dict(weights)))
    done: dict[str, Any] = {}
    with open_store(f"sqlite:///{work / 'ours.db'}") as store:
        for target in targets:
            note = folder / f"ours-{target}.json"
            if not note.exists():
                settings = Settings(target=target, trials=trials)
                runner = open_runner(settings)
                job = device_job(module, runner.device_info(), store, settings)
                found = job.tune(runner)
                runner.close()
                built = job.build("measured")
                job.artifact(built).save(folder / f"ours-{target}.rta")
                sketches = {
                    t: list(dict.fromkeys(p.variants[e.variant].sketch for e in p.plan.entries))
                    for t, p in built.plans.items()
                }
                told = {"candidates": found.trials, "secs": round(found.wall_secs), "sketches": sketches}
                note.write_text(json.dumps(told))
                say(f"{model}, {target}: {found.trials} candidates in {found.wall_secs:.0f} s")
            done[f"ours-{target}"] = json.loads(note.read_text())
    return done


def answers(path: Path) -> Callable[[str], tuple[Callable[[], Any], Callable[[], Sequence[float]]]]:
    opened = load_artifact(path).open()
    with np.load(path.parent / "cases.npz") as arrays:
        held = dict(arrays)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given = [held[f"{case}/{k}"] for k in range(len([n for n in held if n.startswith(f"{case}/")]))]
        kept: list[Any] = []

        def run() -> None:
            kept[:] = opened.run(given)

        return run, lambda: head([np.asarray(a) for a in kept])

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--targets", default="c")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(answers(args.serve))
        return
    if args.work is None or args.peer_python is None:
        parser.error(
            "expected --work FOLDER and --peer-python PYTHON, of an environment with torch, onnxscript and onnxruntime"
        )
    if unknown := set(args.only.split(",")) - set(CASES):
        parser.error(f"--only: expected models among {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    before, times, tuned = environment(), {}, {}
    for model in args.only.split(","):
        folder = args.work / model
        prepare(model, folder, args.peer_python)
        tuned[model] = tune(model, folder, args.work, args.targets.split(","), args.trials)
        peers = [p for p in PEERS if p != "onnxruntime" or (folder / "model.onnx").exists()]
        serving = "-m", "experiments.end_to_end.whole_model_peers"
        found = [Contender(p, [args.peer_python, serving, "serve", p, model, str(folder)]) for p in peers]
        for name in tuned[model]:
            command = [
                sys.executable,
                "-m",
                "experiments.end_to_end.whole_models",
                "--serve",
                str(folder / f"{name}.rta"),
            ]
            found.append(Contender(name, command))
        times[model] = summary(in_rounds(found, CASES[model], args.rounds, 3))
        for c in found:
            c.close()
    write_page(
        "whole_models", page(times, tuned, args), {"environment": before, "times": times, "tuning": tuned}, before
    )


def page(times: Any, tuned: Any, args: argparse.Namespace) -> list[str]:
    lines = [
        "# Whole models",
        "",
        f"Written by `experiments/end_to_end/whole_models.py`, tuned with {args.trials} trials per task; medians in milliseconds, in "
        "turns. "
        f"The last columns: how many times as fast as the fastest peer (goal: {GOAL}).",
    ]
    for model, by in times.items():
        ours = list(tuned[model])
        names = [*PEERS, *ours]
        medians = {case: {n: r["median_us"] / 1000 for n, r in row.items()} for case, row in by.items()}
        lines += ["", f"## {model}", "", "| size | " + " | ".join([*names, *(f"{o}: times" for o in ours)]) + " |"]
        lines += ["|---" * (1 + len(names) + len(ours)) + "|"]
        faster = {o: ratios(medians, o, PEERS) for o in ours}
        for case, row in medians.items():
            cells = [f"{row[n]:.2f}" if n in row else "-" for n in names]
            cells += [f"{faster[o][case]:.2f}" if case in faster[o] else "-" for o in ours]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
        for o in ours:
            told = tuned[model][o]
            lines.append(
                f"\n{o}: geometric mean {geomean(list(faster[o].values())):.2f}; {told['candidates']} candidates in {told['secs']} s"
            )
    return lines


if __name__ == "__main__":
    main()
