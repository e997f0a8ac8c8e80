"""Bytes of planned activations against what any plan must hold, at several bindings of the symbols.

    python experiments/memory_plan.py

Models: the MiniLM encoder and tiny_bert (ONNX), a chain of feed-forward parts, and 24 layers of a decoder (see compile_time) as prefill
and as decode with a cache. Each is lowered and planned once; then its symbols are bound. Columns, all without inputs, weights and results:

* bound: the live-set lower bound, the most bytes that are in use at one time; no plan can be below it.
* planned: one symbolic plan for every shape, storages reused when the wanted size is provably at most their own.
* growing: the same plan, but a free storage whose size cannot be compared becomes the larger of both (a `max`). Not built: it loses
  up to 57 % where sizes grow apart (MiniLM at 512 tokens, long prefills).
* equal sizes: the same walk, but a storage is reused only for the very same size expression.
* per shape: the same walk when the shape is known, a plan for every shape.
* no reuse: every value in memory of its own.

Writes experiments/results/memory_plan.json and .md. Nothing is timed: the numbers do not depend on the machine. TVM is not run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from compile_time import MINILM, decoder

from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.expr import Expr, as_int, const, le, maximum, substitute
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph_builder import GraphBuilder
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.elementwise import Add, Gelu
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.passes.memory import Lifetime, PlanMemory, lifetimes
from relax_tune.ir.passes.pipeline import lower

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
Sizes = Mapping[str, int]


def feed_forward(parts: int = 6, width: int = 384, inner: int = 1536) -> IRModule:
    """x + gelu(x w1) w2, `parts` times, over n rows."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 1024), width))
    for i in range(parts):
        first, second = (
            g.constant(f"{name}{i}", np.broadcast_to(np.float32(0.1), shape))
            for name, shape in (("w", (width, inner)), ("v", (inner, width)))
        )
        x = g.call(Add(), x, g.call(Matmul(), g.call(Gelu(), g.call(Matmul(), x, first)), second))
    return g.finish(x)


def grid(batch: str, length: str, lengths: Sequence[int], batches: Sequence[int]) -> list[Sizes]:
    return [{batch: b, length: n} for n in lengths for b in batches]


MODELS: Mapping[str, tuple[Callable[[], IRModule], list[Sizes]]] = {
    "MiniLM": (lambda: load_model(MINILM), grid("b", "n", (1, 16, 128, 512), (1, 8))),
    "tiny_bert (ONNX)": (
        lambda: load_model(ROOT.parent / "tests" / "data" / "tiny_bert.onnx"),
        grid("batch", "seq", (1, 13, 32), (1, 3)),
    ),
    "feed-forward, 6 parts": (feed_forward, [{"n": n} for n in (1, 64, 1024)]),
    "prefill, 24 layers": (lambda: decoder(24), [{"b": 1, "n": n} for n in (128, 256, 512, 1024)]),
    "decode, 24 layers": (lambda: decoder(24, cache=True), [{"b": b, "n": 1, "m": 512} for b in (1, 4, 16, 64)]),
}


def bind(module: IRModule, sizes: Sizes) -> Callable[[Expr], int]:
    known = {b.var: const(sizes[b.var.name]) for b in module.bounds}

    def number(e: Expr) -> int:
        found = as_int(substitute(e, known))
        assert found is not None, e
        return found

    return number


def walk(
    lives: Sequence[Lifetime],
    size: Callable[[Lifetime], Expr],
    number: Callable[[Expr], int],
    fits: Callable[[Expr, Expr], bool],
    grow: bool = False,
) -> int:
    """Bytes of a plan that reuses the smallest free storage that fits. grow: where none does, one that is free and that the wanted
    size cannot be compared with becomes the larger of both."""
    sizes: list[Expr] = []
    free: list[int] = []
    live: list[tuple[int, int]] = []
    for life in lives:
        for item in [x for x in live if x[0] < life.first]:
            live.remove(item)
            free.append(item[1])
        wanted = size(life)
        fitting = sorted((s for s in free if fits(wanted, sizes[s])), key=lambda s: number(sizes[s]))
        unknown = [s for s in free if grow and not fits(sizes[s], wanted)]
        if fitting or unknown:
            slot = fitting[0] if fitting else unknown[-1]
            free.remove(slot)
            sizes[slot] = sizes[slot] if fitting else maximum(sizes[slot], wanted)
        else:
            sizes.append(wanted)
            slot = len(sizes) - 1
        live.append((life.last, slot))
    return sum(map(number, sizes))


def row(module: IRModule, sizes: Sizes) -> dict[str, int]:
    """Bytes of every column at one binding."""
    number, lives = bind(module, sizes), lifetimes(module)
    nbytes = {life: number(life.nbytes) for life in lives}
    steps = {life.first for life in lives}
    env = env_of(module.bounds)

    def proved(a: Expr, b: Expr) -> bool:
        return a is b or prove(le(a, b), env) is Proof.YES

    return {
        "bound": max(
            (sum(v for life, v in nbytes.items() if life.first <= at <= life.last) for at in steps), default=0
        ),
        "planned": sum(map(number, PlanMemory().plan(module).storages)),
        "growing": walk(lives, lambda life: life.nbytes, number, proved, grow=True),
        "equal sizes": walk(lives, lambda life: life.nbytes, number, lambda a, b: a is b),
        "per shape": walk(lives, lambda life: const(nbytes[life]), number, lambda a, b: number(a) <= number(b)),
        "no reuse": sum(nbytes.values()),
    }


def main() -> None:
    result = {}
    columns = ("bound", "planned", "growing", "equal sizes", "per shape", "no reuse")
    lines = [
        "# Planned activation bytes",
        "",
        "Written by `experiments/memory_plan.py`, which says what the columns are; KiB.",
    ]
    lines += ["", f"| model | storages | binding | {' | '.join(columns)} | planned / bound | planned / no reuse |"]
    lines += ["|---" * (len(columns) + 5) + "|"]
    for name, (make, bindings) in MODELS.items():
        module = lower(make()).module
        count = len(PlanMemory().plan(module).storages)
        rows = [(sizes, row(module, sizes)) for sizes in bindings]
        for sizes, found in rows:
            where = ", ".join(f"{k}={v}" for k, v in sizes.items())
            kib = " | ".join(f"{found[c] / 1024:.1f}" for c in columns)
            ratios = f"{found['planned'] / found['bound']:.3f} | {found['planned'] / found['no reuse']:.3f}"
            lines.append(f"| {name} | {count} | {where} | {kib} | {ratios} |")
        result[name] = {"storages": count, "rows": [{"binding": dict(s), "bytes": r} for s, r in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory_plan.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "memory_plan.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
