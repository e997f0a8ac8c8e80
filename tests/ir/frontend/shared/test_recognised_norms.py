"""Norms and rotations spelled out of smaller operators become one; what only looks like them stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.recognised_norms import RULES
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Mul, MulScalar, Rsqrt, Sqrt
from relax_tune.ir.op.math.numeric import Cos, Sin
from relax_tune.ir.op.neural.decoder import RmsNorm, Rotary
from relax_tune.ir.op.reduction.reduce import Mean
from relax_tune.ir.rewrite.rules import rewrite

Array = np.ndarray[Any, Any]
WIDTH, ROWS = 6, 9


def operators(module: IRModule) -> list[type]:
    main = module.functions["main"]
    assert isinstance(main, Function)
    return [type(b.value.op) for b in main.bindings if isinstance(b.value, Call)]


def same_meaning(module: IRModule, *inputs: Array) -> IRModule:
    """The module rewritten, which gives what it gave."""
    found = rewrite(module, RULES)
    verify(found)
    before, after = (evaluate_function(m, list(inputs)) for m in (module, found))
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)
    return found


def turned(g: GraphBuilder, x: GVar, first: tuple[int, int], second: tuple[int, int]) -> GVar:
    parts = [g.call(Slice(3, const(a), const(b)), x) for a, b in (first, second)]
    return g.call(Concat(3), g.call(MulScalar(-1.0), parts[1]), parts[0])


def rotation(
    tables: tuple[Array, Array], begin: int = 0, parts: tuple[tuple[int, int], tuple[int, int]] = ((0, 3), (3, 6))
) -> IRModule:
    """x (1, 2, n, 6) at positions from `begin`, by rows of two tables (9, 6)."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 4)
    x = g.input("x", (1, 2, n, WIDTH))
    at = const(begin)
    cos, sin = (g.call(Slice(0, at, at + n), g.constant(k, t)) for k, t in zip(("cos", "sin"), tables))
    return g.finish(g.call(Add(), g.call(Mul(), x, cos), g.call(Mul(), sin, turned(g, x, *parts))))


def tables(paired: bool = True) -> tuple[Array, Array]:
    rng = np.random.default_rng(int(paired))
    found = [rng.standard_normal((ROWS, WIDTH // 2)).astype(np.float32) for _ in range(2)]
    first, second = (np.concatenate([t, t if paired else t + 1], 1) for t in found)
    return first, second


def example(n: int) -> Array:
    return np.random.default_rng(n).standard_normal((1, 2, n, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("begin", (0, 5))
def test_rotation_by_table_rows_is_recognised(begin: int) -> None:
    for n in (1, 3, 4):
        found = same_meaning(rotation(tables(), begin), example(n))
        assert operators(found).count(Rotary) == 1 and Mul not in operators(found)


def test_rotation_by_computed_angles_is_recognised() -> None:
    g = GraphBuilder()
    n = g.symbol("n", 1, 4)
    x, angles = g.input("x", (1, 2, n, WIDTH)), g.input("angles", (n, WIDTH // 2))
    rows = g.call(ExpandDims((0,)), g.call(Concat(1), angles, angles))
    cos, sin = g.call(MulScalar(1.5), g.call(Cos(), rows)), g.call(Sin(), rows)
    module = g.finish(g.call(Add(), g.call(Mul(), x, cos), g.call(Mul(), turned(g, x, (0, 3), (3, 6)), sin)))
    found = same_meaning(module, example(3), np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32))
    assert operators(found).count(Rotary) == 1


def test_rotation_by_unknown_rows_stays() -> None:
    g = GraphBuilder()
    x, sin = g.input("x", (1, 2, 1, WIDTH)), g.input("sin", (1, WIDTH))
    cos = g.call(ExpandDims((0,)), g.call(Cast(f32), g.call(Iota(const(WIDTH)))))
    module = g.finish(g.call(Add(), g.call(Mul(), x, cos), g.call(Mul(), turned(g, x, (0, 3), (3, 6)), sin)))
    assert rewrite(module, RULES) is module


@pytest.mark.parametrize(
    "module",
    (
        rotation(tables(paired=False)),
        rotation(tables(), begin=7),  # past the end of the table for some n: what is sliced there is shorter
        rotation(tables(), parts=((3, 6), (0, 3))),
    ),
    ids=("halves that differ", "rows that are missing", "halves the other way round"),
)
def test_near_rotation_stays(module: IRModule) -> None:
    assert rewrite(module, RULES) is module


def norm(axes: tuple[int, ...], gamma: Array | None, other: bool = False, root: str = "x * rsqrt") -> IRModule:
    g = GraphBuilder()
    n: Expr = g.symbol("n", 1, 9)
    x, y = g.input("x", (n, WIDTH)), g.input("y", (n, WIDTH))
    spread = g.call(Mean(axes, True), g.call(Mul(), x, y if other else x))
    moved = g.call(AddScalar(1e-3), spread)
    if root == "x * rsqrt":
        made = g.call(Mul(), x, g.call(Rsqrt(), moved))
    elif root == "x / sqrt":
        made = g.call(Div(), x, g.call(Sqrt(), moved))
    else:
        one = g.constant("one", np.full((), float(root[0]), np.float32))
        made = g.call(Mul(), x, g.call(Div(), one, g.call(Sqrt(), moved)))
    return g.finish(made if gamma is None else g.call(Mul(), g.constant("gamma", gamma), made))


def test_rms_norm_is_recognised() -> None:
    gamma = np.arange(1, WIDTH + 1, dtype=np.float32)
    x = example(2)[0, 0]
    for root in ("x * rsqrt", "x / sqrt", "1 / sqrt * x"):
        assert operators(same_meaning(norm((1,), gamma, root=root), x, x)) == [RmsNorm]
    # over another axis, without weights, with a weight a row, of a product of two values, over another root
    roots = norm((1,), gamma, root="2 / sqrt * x")
    for module in (norm((0,), gamma), norm((1,), None), norm((1,), gamma[:1]), norm((1,), gamma, other=True), roots):
        assert rewrite(module, RULES) is module
