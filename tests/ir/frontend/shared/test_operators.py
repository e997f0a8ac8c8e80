"""Methods of the writer against NumPy, each on vectors of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.finish import finish_import
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.interp.reference import evaluate_function

X, Y = np.array([-1.5, 0.0, 2.0, 3.5], np.float32), np.array([2.0, -4.0, 0.5, 3.5], np.float32)


def evaluated(compute: Callable[[Writer, Value, Value], Value]) -> Any:
    w = Writer(GraphBuilder())
    n = w.g.symbol("n", 1, None)
    x, y = (w.g.input(name, [n], f32) for name in "xy")
    return evaluate_function(finish_import(w, [w.of(compute(w, x, y))], ["z"]), [X, Y])


@pytest.mark.parametrize("compute, expected", [
    (lambda w, x, y: w.add(w.mul(x, y), x), X * Y + X),
    (lambda w, x, y: w.add(w.mul(x, 3.0), 1.0), X * 3 + 1),
    (lambda w, x, y: w.div(x, 2.0), X / 2),
    (lambda w, x, y: w.div(x, y), X / Y),
    (lambda w, x, y: w.maximum(x, 0.0), np.maximum(X, 0)),
    (lambda w, x, y: w.minimum(x, y), np.minimum(X, Y)),
    (lambda w, x, y: w.where(w.less(x, y), x, w.abs(y)), np.where(X < Y, X, abs(Y))),
    (lambda w, x, y: w.logical_or(w.equal(x, y), w.less_equal(y, x)), X >= Y),
    (lambda w, x, y: w.sum(w.exp(x), (0,), True), np.exp(X).sum(keepdims=True)),
    (lambda w, x, y: w.reversed(x, 0), X[::-1]),
    (lambda w, x, y: w.slice(x, 0, const(1), const(3)), X[1:3]),
    (lambda w, x, y: w.concat(0, x, w.permute(y, (0,))), np.concatenate([X, Y])),
    (lambda w, x, y: w.take(x, 0, w.top_k(y, const(2), 0)), X[[3, 0]]),
    (lambda w, x, y: w.broadcast_to(w.expand_dims(x, (1,)), (tensor_dims(x)[0], const(2))), np.stack([X, X], 1)),
    (lambda w, x, y: w.gather_elements(x, w.iota(const(2)), 0), X[:2]),
])  # fmt: skip
def test_operator_method_gives_the_result_of_numpy(
    compute: Callable[[Writer, Value, Value], Value], expected: np.ndarray[Any, Any]
) -> None:
    np.testing.assert_allclose(evaluated(compute), expected, rtol=1e-6)


def test_cast_to_bool_is_true_but_for_zero() -> None:
    assert evaluated(lambda w, x, y: w.cast(x, bool_)).tolist() == [True, False, True, True]
    assert evaluated(lambda w, x, y: w.cast(x, i64)).tolist() == [-1, 0, 2, 3]


def test_method_without_effect_returns_the_operand() -> None:
    def compute(w: Writer, x: Value, y: Value) -> Value:
        assert w.cast(x, element_of(x)) is w.permute(x, (0,)) is w.slice(x, 0, const(0), tensor_dims(x)[0]) is x
        return x

    assert evaluated(compute).tolist() == X.tolist()
