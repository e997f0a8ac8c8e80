"""The graph builder: annotations at emit time, match_cast, declared results, calls across levels."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.math.elementwise import Add, Exp, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text


def test_match_cast_names_value_dim_and_sizes() -> None:
    g = GraphBuilder()
    y = g.input("y", (4, 2))
    g.input("x", (g.symbol("n"), 2))
    with pytest.raises(DeduceError, match=r"y: dim 0: expected 3, got 4"):
        g.match_cast(y, TensorInfo((const(3), const(2)), f32))
    z = g.input("z", (3, 5))
    with pytest.raises(DeduceError, match=r"z: dim 1: expected 2, got 5"):
        g.match_cast(z, TensorInfo((const(3), const(2)), f32))


def test_match_cast_binds_new_symbols_and_checks_known_ones() -> None:
    g = GraphBuilder()
    n, k = g.symbol("n"), Var("k")
    x, y = g.input("x", (n,)), g.input("y", None)
    refined = g.match_cast(y, TensorInfo((k,), f32))
    assert refined.info == TensorInfo((k,), f32) and not g.checks
    wider = g.match_cast(x, TensorInfo((k,), f32))
    (check,) = g.checks
    assert set(check.values) == {n, k}
    assert g.call(Add(), refined, wider).info == TensorInfo((k,), f32)


def test_declared_result_is_checked() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    y = g.call(Exp(), g.input("x", (n + 1,)))
    with pytest.raises(DeduceError, match="result of main: dim 0"):
        g.finish(y, TensorInfo((n,), f32))


def test_names_are_distinct_and_symbols_sensible() -> None:
    g = GraphBuilder()
    x = g.input("x", (3,))
    assert [g.call(Exp(), x).name for _ in range(3)] == ["exp", "exp_1", "exp_2"]
    with pytest.raises(UserError, match="'x' twice"):
        g.input("x", (3,))
    with pytest.raises(UserError, match="lower <= upper, got 4 and 2"):
        g.symbol("n", 4, 2)


def doubling() -> PrimFunc:
    """y holds x twice: y[i] = x[i % n]."""
    n = Var("n")
    b = TensorBuilder("twice")
    x, y = b.input("x", (n,)), b.output("y", (mul(n, 2),))
    b.compute(y, lambda i: x[i % n])
    return b.finish()


@pytest.mark.parametrize("size", [0, 1, 3])
def test_doubling_twice(size: int) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n,))
    twice = g.add(doubling())
    y = g.call_tir(twice, (x,), TensorInfo((n * 2,), f32))
    module = g.finish(g.call_tir(twice, (y,), TensorInfo((n * 4,), f32)))
    data = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(evaluate_function(module, [data]), np.tile(data, 4))
    np.testing.assert_array_equal(evaluate_function(lower(module).module, [data]), np.tile(data, 4))


def test_levels_mix_and_every_stage_prints() -> None:
    g = GraphBuilder()
    n = g.symbol("n", 1, 9)
    x = g.input("x", (n, 4))
    y = g.call(Relu(), g.call(Matmul(), x, g.constant("w", np.eye(4, dtype=np.float32))))
    row = g.call(Sum((1,)), y)
    module = g.finish(g.call_tir(g.add(doubling()), (row,), TensorInfo((n * 2,), f32)))
    lowered = lower(module)
    data = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_allclose(
        evaluate_function(lowered.module, [data]), np.tile(np.maximum(data, 0).sum(1), 2), rtol=1e-6
    )
    for name, stage in lowered.stages:
        assert name and "def main" in print_text(stage)
