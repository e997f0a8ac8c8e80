"""Throughput of a stream of two models, each on its own core, against its slowest stage.

    OMP_NUM_THREADS=1 python -m experiments.end_to_end.streams [--items 200] [--rounds 5]

Both stages are models of matrix products on separate devices with one thread each; the second takes the results of the first. The
slowest stage is timed alone in the same rounds, over the same items. The ratio is the stream's items per second times the seconds
per item of the slowest stage; it is 1 if the stream costs nothing beyond that stage.

Writes results/streams.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.harness.pages import environment, write_page
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul

WIDTH = 256
ROWS = (32, 160)
CASES = {"equal stages": (6, 6), "the second twice as long": (4, 8), "the first twice as long": (8, 4)}


def layers(count: int) -> rt.IRModule:
    g = rt.GraphBuilder()
    x: Any = g.input("x", (g.symbol("n", 1, 1024), WIDTH))
    for at in range(count):
        weight = np.random.default_rng(at).standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
        x = g.call(Relu(), g.call(Matmul(), x, g.constant(f"w{at}", weight)))
    return g.finish(x)


def secs_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_case(first: rt.Model, second: rt.Model, rows: int, items: int, rounds: int) -> dict[str, float]:
    inputs = [[np.random.default_rng(i).random((rows, WIDTH), np.float32)] for i in range(4)]
    middle = [first.run(x) for x in inputs]
    wanted = [second.run(x) for x in middle]
    alone: dict[str, list[float]] = {"first": [], "second": [], "stream": []}
    for _ in range(rounds):
        alone["first"].append(secs_of(lambda: [first.run(inputs[i % 4]) for i in range(items)]) / items)
        alone["second"].append(secs_of(lambda: [second.run(middle[i % 4]) for i in range(items)]) / items)
        found: list[Any] = []
        stream = first.stream((inputs[i % 4] for i in range(items)), depth=4).then(second.run)
        alone["stream"].append(secs_of(lambda f=found, s=stream: f.extend(s)) / items)  # type: ignore[misc]
        assert len(found) == items
        assert all(np.array_equal(y[0], wanted[i % 4][0]) for i, y in enumerate(found)), "results differ"
    secs = {name: statistics.median(t) for name, t in alone.items()}
    return {**secs, "ratio": max(secs["first"], secs["second"]) / secs["stream"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("set OMP_NUM_THREADS=1: each stage has a core of its own")
    facts = environment()
    made = {n: rt.build(layers(n), target="c", db="memory://", policy="generic", libraries=False) for n in (4, 6, 8)}
    rows = {}
    for count, (name, (one, two)) in itertools.product(ROWS, CASES.items()):
        with made[one].open() as first, made[two].open() as second:
            rows[f"{name}, {count} rows"] = time_case(first, second, count, a.items, a.rounds)
    lines = ["# A stream of two models", ""]
    lines += [f"{a.items} items, one thread a stage; medians of {a.rounds} rounds in turns, milliseconds an item.", ""]
    lines += ["| case | first alone | second alone | stream | throughput x slowest |", "|---|---|---|---|---|"]
    for name, r in rows.items():
        cells = [f"{r[k] * 1e3:.3f}" for k in ("first", "second", "stream")]
        lines.append(f"| {name} | {' | '.join(cells)} | {r['ratio']:.2f} |")
    write_page("streams", lines, {"environment": facts, "cases": rows}, facts)


if __name__ == "__main__":
    main()
