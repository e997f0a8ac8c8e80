"""Proofs of independent rows: what is proved holds in the interpreter, and rows that depend on others or on their place are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.support.tuner_models import attention, feed_forward

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, Var, cast, const, div, floordiv, floormod, lt, minimum, select
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean, Softmax, Sum
from relax_tune.ir.passes.independent_rows import independent_rows
from relax_tune.ir.passes.pipeline import lower

WIDTH = 4
Value = Callable[[Tensor, Expr, Expr, Expr], Expr]
"""From the input (b, WIDTH), b and the indices of an element to the element of the result."""


def loops(value: Value) -> IRModule:
    """A function of one tensor function, whose elements are given."""
    g = GraphBuilder()
    b = g.symbol("b", 1, 8)
    x = g.input("x", (b, WIDTH))
    t = TensorBuilder("f")
    rows = Var("rows")
    source, out = t.input("x", (rows, WIDTH)), t.output("y", (rows, WIDTH))
    t.compute(out, lambda i, j: value(source, rows, i, j))
    name = g.add(t.finish())
    return g.finish(g.call_tir(name, (x,), (TensorInfo((b, const(WIDTH)), f32),)))


INDEPENDENT: dict[str, Value] = {
    "the same element": lambda x, b, i, j: x[i, j] * 2.0,
    "another column": lambda x, b, i, j: x[i, floormod(j + 1, const(WIDTH))],
    "the number of the column": lambda x, b, i, j: x[i, j] + cast(j, f32),
}
DEPENDENT: dict[str, Value] = {
    "the number of the row": lambda x, b, i, j: x[i, j] + cast(i, f32),
    "zero times the number of the row": lambda x, b, i, j: x[i, j] * 0.0 * cast(i, f32),
    "the number of rows": lambda x, b, i, j: div(x[i, j], cast(b, f32)),
    "the first row": lambda x, b, i, j: x[i, j] + x[0, j],
    "the last row": lambda x, b, i, j: x[b - 1, j],
    "the next row": lambda x, b, i, j: x[minimum(i + 1, b - 1), j],
    "rows in reverse": lambda x, b, i, j: x[b - 1 - i, j],
    "a column by the number of the row": lambda x, b, i, j: x[i, minimum(i, 3)],
    "a row by a column": lambda x, b, i, j: x[minimum(j, b - 1), j],
    "a row by an element": lambda x, b, i, j: x[minimum(cast(x[i, j], i64), b - 1), j],
    "another half": lambda x, b, i, j: select(lt(i, floordiv(b, 2)), x[i, j], 0.0),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_without_dependence_on_other_rows_are_proved(name: str) -> None:
    assert independent_rows(lower(loops(INDEPENDENT[name]))) == {"main": "b"}


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_with_other_dependences_are_not_proved(name: str) -> None:
    assert independent_rows(lower(loops(DEPENDENT[name]))) == {}


def graph(build: Callable[[GraphBuilder, Any, Any], Any]) -> IRModule:
    """A function of x (b, 3, WIDTH)."""
    g = GraphBuilder()
    b = g.symbol("b", 1, 8)
    return g.finish(build(g, b, g.input("x", (b, 3, WIDTH))))


@pytest.mark.parametrize("make", [feed_forward, attention])
def test_rows_of_models_are_proved(make: Callable[[], IRModule]) -> None:
    assert set(independent_rows(lower(make()))) == {"main"}


def test_rows_of_operators_over_the_batch_are_not_proved() -> None:
    cases: dict[str, Callable[[GraphBuilder, Any, Any], Any]] = {
        "mean over rows": lambda g, b, x: g.call(Add(), x, g.call(Mean((0,), True), x)),
        "softmax over rows": lambda g, b, x: g.call(
            Permute((2, 1, 0)), g.call(Softmax(), g.call(Permute((2, 1, 0)), x))
        ),
        "rows twice": lambda g, b, x: g.call(Concat(0), x, x),
        "sum of all": lambda g, b, x: g.call(Sum((0,), False), x),
        "rows mixed by a reshape": lambda g, b, x: g.call(
            Reshape((b, const(3), const(WIDTH))), g.call(Relu(), g.call(Permute((1, 0, 2)), x))
        ),
        "products of rows": lambda g, b, x: g.call(
            Matmul(), g.call(Reshape((b, const(12))), x), g.call(Permute((1, 0)), g.call(Reshape((b, const(12))), x))
        ),
    }
    for name, build in cases.items():
        assert independent_rows(lower(graph(build))) == {}, name


STEPS: dict[str, Callable[[GraphBuilder, Any, Any], Any]] = {
    "relu": lambda g, b, x: g.call(Relu(), x),
    "softmax": lambda g, b, x: g.call(Softmax(), x),
    "merge": lambda g, b, x: g.call(Reshape((b * 3, const(WIDTH))), x),
    "split": lambda g, b, x: g.call(Reshape((b, const(3), const(WIDTH))), x),
    "transpose": lambda g, b, x: g.call(Permute((0, 2, 1)), x),
    "outwards": lambda g, b, x: g.call(Permute((1, 0, 2)), x),
    "mean": lambda g, b, x: g.call(Add(), x, g.call(Mean((1,), True), x)),
    "mean over the first": lambda g, b, x: g.call(Add(), x, g.call(Mean((0,), True), x)),
    "double": lambda g, b, x: g.call(Add(), x, x),
}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=6), st.integers(0, 99))
def test_proved_rows_are_independent_in_the_interpreter(steps: list[str], seed: int) -> None:
    g = GraphBuilder()
    b = g.symbol("b", 1, 8)
    value = g.input("x", (b, 3, WIDTH))
    try:
        for step in steps:
            value = STEPS[step](g, b, value)
        module = g.finish(value)
    except DeduceError:
        return  # a step does not fit the rank
    if independent_rows(lower(module)) != {"main": "b"}:
        return
    x = np.random.default_rng(seed).standard_normal((5, 3, WIDTH)).astype(np.float32)
    whole = evaluate_function(module, [x])
    for row in range(len(x)):
        np.testing.assert_allclose(evaluate_function(module, [x[row : row + 1]])[0], whole[row], rtol=1e-12)
