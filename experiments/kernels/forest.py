"""A random forest of scikit-learn, converted by skl2onnx: ours against ONNX Runtime, timed in turns.

    python -m experiments.kernels.forest --work FOLDER [--trees 500] [--trials 64]

It needs onnxruntime, scikit-learn and skl2onnx. Writes results/forest.md and .json.
"""

from __future__ import annotations

import argparse
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Answer, Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import geomean
from experiments.harness.pages import environment, write_page

FEATURES, TRAINING_ROWS, LEAVES = 20, 4000, 256
INPUTS = 64
BATCHES = (1, 4, 16, 64, 256, 1024)


def forest(trees: int) -> Any:
    """Return a regression forest as an ONNX model."""
    from skl2onnx import to_onnx
    from sklearn.ensemble import RandomForestRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((TRAINING_ROWS, FEATURES)).astype(np.float32)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(TRAINING_ROWS)
    fitted = RandomForestRegressor(trees, max_leaf_nodes=LEAVES, random_state=0, n_jobs=2).fit(x, y)
    return to_onnx(fitted, x[:1])


def rows(batch: str) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return several inputs: a processor learns the paths of one that is repeated."""
    rng = np.random.default_rng(int(batch))
    return [rng.standard_normal((int(batch), FEATURES)).astype(np.float32) for _ in range(INPUTS)]


def ours(path: Path) -> Answer:
    import relax_tune as rt

    model = rt.load(path)

    def answer(case: str) -> tuple[Any, ...]:
        inputs = rows(case)
        turns = cycle(inputs)
        return lambda: model.run([next(turns)]), lambda: np.ravel(model.run([inputs[0]]))[:8]

    return answer


def theirs(path: Path) -> Answer:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (i.name for i in session.get_inputs())

    def answer(case: str) -> tuple[Any, ...]:
        inputs = rows(case)
        turns = cycle(inputs)
        return lambda: session.run(None, {name: next(turns)}), lambda: np.ravel(
            session.run(None, {name: inputs[0]})[0]
        )[:8]

    return answer


def tuned(model: Path, artifact: Path, trials: int) -> list[str]:
    """Tune the model, write its artifact, and return the sketches that it dispatches."""
    import relax_tune as rt

    module = rt.load_model(model, {"X_0": (1, max(BATCHES))})
    result = rt.tune(module, target="c", db=f"sqlite:///{artifact.parent / 'forest.db'}", trials=trials)
    built = rt.build(module, target="c", db=f"sqlite:///{artifact.parent / 'forest.db'}")
    built.save(artifact)
    print(result, file=sys.stderr)
    return sorted({v.label for p in built.programs for c in p.calls for v in c.variants})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trees", type=int, default=500)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", choices=("ours", "onnxruntime"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, artifact = args.work / "forest.onnx", args.work / "forest.rta"
    if args.serve:
        serve(ours(artifact) if args.serve == "ours" else theirs(model))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    model.write_bytes(forest(args.trees).SerializeToString())
    before = environment()
    labels = tuned(model, artifact, args.trials)
    names = ("onnxruntime", "ours")
    command = [sys.executable, "-m", "experiments.kernels.forest", "--work", str(args.work), "--serve"]
    contenders = [Contender(name, [*command, name]) for name in names]
    found = summary(in_rounds(contenders, [str(b) for b in BATCHES], args.rounds, 10))
    for c in contenders:
        c.close()
    medians = {b: {n: t["median_us"] for n, t in by.items()} for b, by in found.items()}
    ratios = [by["onnxruntime"] / by["ours"] for by in medians.values()]
    lines = [f"# A forest of {args.trees} trees", "",
             f"`python -m experiments.kernels.forest`: {FEATURES} features, at most {LEAVES} leaves a tree; {args.trials} trials; medians",
             "in microseconds, in turns.", "",
             "| rows | ONNX Runtime | ours | ONNX Runtime / ours |", "|---:|---:|---:|---:|"]  # fmt: skip
    lines += [
        f"| {b} | {by['onnxruntime']:.1f} | {by['ours']:.1f} | {by['onnxruntime'] / by['ours']:.2f} |"
        for b, by in medians.items()
    ]
    lines += [
        "",
        f"Geometric mean {geomean(ratios):.2f}, least {min(ratios):.2f}. Variants in the artifact: {', '.join(labels)}.",
    ]
    write_page("forest", lines, {"environment": before, "trials": args.trials, "times": found}, before)


if __name__ == "__main__":
    main()
