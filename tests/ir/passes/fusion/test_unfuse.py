"""Functions cut at their buffers: the parts, called one after the other, compute the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tests.support.schedule_functions as make

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bool_, f32
from relax_tune.ir.core.expr import Var, as_int, call, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import plain_blocks
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.pattern_kinds import PatternKind, block_kind
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.passes.fusion.unfuse import cut_points, split_at

Array = np.ndarray[Any, Any]


def decoded_product_and_norm() -> PrimFunc:
    """Rows of x * decoded(w), minus their sums of squares; all of w is decoded first."""
    b = TensorBuilder("decoded")
    n, zero = Var("n"), const(0.0, f32)
    x, w = b.input("x", (n, 5)), b.input("w", (5, 7))
    y = b.output("y", (n, 7))
    decoded, product, total = b.alloc("decoded", (5, 7)), b.alloc("product", (n, 7)), b.alloc("total", (n,))
    b.compute(decoded, lambda k, j: call("exp", w[k, j]), name="decode")
    b.reduce(product, (5,), zero, lambda acc, i, j, k: acc + x[i, k] * decoded[k, j], name="product")
    b.reduce(total, (7,), zero, lambda acc, i, j: acc + product[i, j] * product[i, j], name="total")
    b.compute(y, lambda i, j: product[i, j] - total[i], name="norm")
    return b.finish()


CASES = {
    "attention": (make.attention, 3, ({"n": 0, "m": 3}, {"n": 3, "m": 0}, {"n": 1, "m": 1}, {"n": 7, "m": 17})),
    "a mask": (make.attention_of_positions, 3, ({"b": 0, "n": 2}, {"b": 1, "n": 1}, {"b": 2, "n": 13})),
    "a cache": (make.attention_over_cache, 3, ({"n": 5, "m": 11},)),
    "16 bits": (make.attention_of_halves, 3, ({"n": 5, "m": 11},)),
    "decoded": (decoded_product_and_norm, 3, ({"n": 0}, {"n": 1}, {"n": 13})),
}


def inputs_of(func: PrimFunc, at: dict[str, int]) -> list[Array]:
    rng = np.random.default_rng(sum(at.values()))
    shapes = [tuple(number(d, func, at) for d in b.shape) for b in func.input_buffers]
    numbers = [rng.standard_normal(s) for s in shapes]
    return [(a > -0.5) if b.dtype is bool_ else a.astype(b.dtype.name) for a, b in zip(numbers, func.input_buffers)]


def number(e: Any, func: PrimFunc, at: dict[str, int]) -> int:
    value = as_int(substitute(e, {v: const(at[v.name]) for v in func.symbols}))
    assert value is not None
    return value


@pytest.mark.parametrize("name", CASES)
def test_unfused_parts_compute_the_whole(name: str) -> None:
    build, count, sizes = CASES[name]
    func = build()
    steps = split_at(func, cut_points(func))
    assert len(steps) == count
    blocks_of = [plain_blocks(s.func) for s in steps]
    assert sum(len(b) for b in blocks_of if b) == len(plain_blocks(func) or ()), "each block is in one part"
    kinds = [[block_kind(b) for b in blocks or ()] for blocks in blocks_of]
    assert all(k.count(PatternKind.OUT_FUSIBLE) <= 1 for k in kinds)
    assert all(PatternKind.OUT_FUSIBLE not in k[1:] for k in kinds), "a routine takes what a part begins with"
    for at in sizes:
        arrays = inputs_of(func, at)
        memory: dict[Buffer, Array] = dict(zip(func.input_buffers, arrays, strict=True))
        for s in steps:
            inputs = len(s.args) - s.func.outputs
            scalars = [number(e, func, at) for e in s.scalars]
            results = evaluate_prim(s.func, [memory[b] for b in s.args[:inputs]], scalars)
            memory |= dict(zip(s.args[inputs:], results, strict=True))
        whole = evaluate_prim(func, arrays, [at[v.name] for v in func.scalar_params])
        for b, expected in zip(func.output_buffers, whole, strict=True):
            np.testing.assert_allclose(memory[b], expected, rtol=1e-6, atol=1e-6, err_msg=f"{name} at {at}")


def test_unfuse_needs_two_matmuls() -> None:
    assert cut_points(make.matmul(None, 6, epilogue=True, const_weight=False)) == ()
    assert cut_points(make.softmax_mask()) == ()


@pytest.mark.parametrize("begins", [(), ("nothing",), ("scores",), ("softmax_max", "softmax_max"), ("context", "mask")])
def test_unfuse_keeps_the_order_of_blocks(begins: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match="names of blocks"):
        split_at(make.attention(), begins)
