"""Models that the heuristics of this package were not made with, untuned and tuned, beside four peers.

    python -m experiments.end_to_end.unseen_models --work FOLDER --peer-python PYTHON [--only MODEL,...] [--effort quick] [--untuned]

Models are in `unseen_peers.py`; `encoder-int8` and `decoder-int8` have int8 weights and activations. `untuned` is a build without any
record, `tuned` one with the records of `--effort`. All read the same ONNX file. Every contender has a process and is called in turns; one
whose results differ from torch eager's is not timed. Exports and artifacts stay in the folder. A model that is measured again replaces its
rows in results/unseen_models.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import relax_tune as rt
from experiments.end_to_end.whole_models import answers
from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import geomean, ratios
from experiments.harness.pages import RESULTS, environment, write_page

PEERS = ("torch-eager", "torch-compile", "onnxruntime", "openvino")
BUILDS = ("untuned", "tuned")
# Sizes: batch and tokens; new tokens and earlier ones; batch; steps and batch; height and width; samples of sound.
CASES: Mapping[str, Sequence[str]] = {
    "encoder": ("1x16", "1x64", "1x128", "1x384", "4x64"),
    "encoder-int8": ("1x16", "1x64", "1x128", "1x384", "4x64"),
    "decoder": ("16x16", "64x16", "256x16", "1x32", "1x128", "1x512"),
    "decoder-int8": ("16x16", "64x16", "256x16", "1x32", "1x128", "1x512"),
    "vit": ("1", "5"),
    "resnet50": ("1", "2", "8"),
    "mobilenet": ("1", "4"),
    "lstm": ("16x1", "100x1"),
    "gru": ("16x1", "100x1"),
    "efficientnet": ("1", "4"),
    "unet": ("64x64", "128x128", "200x152"),
    "speech": ("4000", "16000", "48000"),
}
BOUNDS: Mapping[str, dict[str, tuple[int, int]]] = {
    "encoder": {"b": (1, 8), "n": (1, 512)},
    "decoder": {"n": (1, 256), "m": (1, 768)},
    "lstm": {"n": (1, 256), "b": (1, 32)},
    "gru": {"n": (1, 256), "b": (1, 32)},
    "unet": {"h": (32, 256), "w": (32, 256)},
    "speech": {"n": (400, 64000)},
}
# Relative to the largest number. Quantised peers differ from the float32 model by their own rounding.
TOLERANCE, INT8_TOLERANCE = 2e-3, 0.5


def plain_name(name: str) -> str:
    """Return the name of a model without its precision."""
    return name.removesuffix("-int8")


def sizes_of(case: str) -> tuple[int, ...]:
    return tuple(map(int, case.split("x")))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def built(name: str, folder: Path, build: str, effort: str) -> dict[str, Any]:
    """Build an artifact unless it is there; return seconds of tuning and of the build."""
    facts = folder / f"{build}.json"
    if not facts.exists():
        bounds = BOUNDS.get(plain_name(name), {"b": (1, 16)})
        options: dict[str, Any] = {"target": "c", "effort": effort}
        if name != plain_name(name):
            options["activations"] = "int8"
        row: dict[str, Any] = {}
        began = time.perf_counter()
        module = rt.load_model(folder / "model.onnx", bounds=bounds)
        if build == "tuned":
            result = rt.tune(module, db=str(folder / "ours.db"), **options)
            row = {"candidates": result.work.trials, "tuning_secs": time.perf_counter() - began}
            began = time.perf_counter()
        database = str(folder / "ours.db") if build == "tuned" else "memory://"
        rt.build(module, db=database, **options).save(folder / f"{build}.rta")
        row["build_secs"] = time.perf_counter() - began
        facts.write_text(json.dumps(row))
        say(f"{name}, {build}: {row}")
    known: dict[str, Any] = json.loads(facts.read_text())
    return known


def measured(name: str, folder: Path, builds: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Build a model and time it beside the peers."""
    before = environment()
    if not (folder / "cases.npz").exists() or not (folder / "model.onnx").exists():
        command = [args.peer_python, "-m", "experiments.end_to_end.unseen_peers", "prepare", name, str(folder)]
        subprocess.run(command, check=True, timeout=1200)
    facts = {build: built(name, folder, build, args.effort) for build in builds}
    serving = [args.peer_python, "-m", "experiments.end_to_end.unseen_peers", "serve"]
    contenders = [Contender(p, [*serving, p, name, str(folder)], log=folder / f"{p}.log") for p in PEERS]
    own = [sys.executable, "-m", "experiments.end_to_end.unseen_models", "--serve"]
    contenders += [Contender(b, [*own, str(folder / f"{b}.rta")], log=folder / f"{b}.log") for b in builds]
    tolerance = TOLERANCE if name == plain_name(name) else INT8_TOLERANCE
    times = summary(in_rounds(contenders, CASES[name], args.rounds, 3, tolerance))
    for contender in contenders:
        contender.close()
    return {"times": times, "builds": facts, "effort": args.effort, "environment": before}


def page(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "# Models that the heuristics were not made with",
        "",
        "Written by `experiments/end_to_end/unseen_models.py`, which describes the comparison; medians in milliseconds, in turns, target",
        "`c`. First the time of the fastest peer over ours: the geometric mean over the sizes, and the least. Artifacts may have been",
        "built and tuned on a busy machine, so the seconds of builds and tuning are upper bounds.",
        "",
        "| model | untuned | tuned | build, s | tuning, s |",
        "|---|---|---|---|---|",
    ]
    tables = []
    for name, row in rows.items():
        medians = {c: {n: r["median_us"] / 1000 for n, r in by.items()} for c, by in row["times"].items()}
        peers = PEERS if name == plain_name(name) else PEERS[2:]  # torch computes in float32
        faster = {b: ratios(medians, b, peers) for b in BUILDS}
        cells = [f"{geomean(list(f.values())):.2f} ({min(f.values()):.2f})" if f else "" for f in faster.values()]
        secs = row["builds"]["untuned"]["build_secs"]
        tuning = row["builds"].get("tuned", {}).get("tuning_secs")
        lines.append(f"| {name} | {' | '.join(cells)} | {secs:.1f} | {'' if tuning is None else round(tuning)} |")
        known = [n for n in (*PEERS, *BUILDS) if any(n in by for by in medians.values())]
        where = row["environment"]
        facts = ", ".join(str(where[k]) for k in ("cpu", "date", "commit", "load"))
        tables += [
            "",
            f"## {name}",
            "",
            f"{facts}.",
            "",
            f"| size | {' | '.join(known)} |",
            "|---" * (len(known) + 1) + "|",
        ]
        for case in (c for c in CASES[name] if c in medians):
            by = medians[case]
            tables.append(f"| {case} | " + " | ".join(f"{by[n]:.2f}" if n in by else "" for n in known) + " |")
    return lines + tables


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--untuned", action="store_true", help="only builds without records")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(answers(args.serve))
        return
    names = args.only.split(",")
    if args.work is None or args.peer_python is None:
        parser.error(
            "expected --work FOLDER and --peer-python PYTHON, of an environment with torch and the other peers"
        )
    if unknown := set(names) - set(CASES):
        parser.error(f"--only: expected models among {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    stored = RESULTS / "unseen_models.json"
    rows = json.loads(stored.read_text())["models"] if stored.exists() else {}
    for name in names:
        rows[name] = measured(name, args.work / name, BUILDS[: 1 if args.untuned else 2], args)
        rows = {n: rows[n] for n in CASES if n in rows}
        facts = environment()
        write_page("unseen_models", page(rows), {"models": rows, "environment": facts}, facts)


if __name__ == "__main__":
    main()
