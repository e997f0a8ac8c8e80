"""Activations in 8 bits: results of dynamic quantisation, and which products use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.math.quantize import Quantize
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.graph.quantize_activations import QuantizeActivations
from relax_tune.ir.passes.pipeline import lower, passes_for
from relax_tune.ir.text.printer import print_text

Array = np.ndarray[Any, Any]


def products(weights: list[tuple[Array, bool]], batched: bool = False) -> IRModule:
    """The sum of several products of one value with different weights."""
    g = GraphBuilder()
    m = g.symbol("m", 1, 64)
    depth = weights[0][0].shape[1 if weights[0][1] else 0]
    x = g.input("x", (2, m, depth) if batched else (m, depth))
    terms = [g.call(Matmul(t), x, g.constant(f"w{n}", w)) for n, (w, t) in enumerate(weights)]
    total = terms[0]
    for other in terms[1:]:
        total = g.call(Add(), total, other)
    return g.finish(g.call(Relu(), total))


def reference_product(x: Array, w: Array) -> Array:
    """x w in NumPy, both rounded to 8 bits, with a scale for each row of x and each column of w."""
    rows = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(127), np.float32(1e-30))
    columns = np.abs(w).max(0)
    columns = np.where(columns == 0, 1, columns).astype(np.float32) / np.float32(127)
    numbers = np.clip(np.rint(x / rows), -128, 127) @ np.clip(np.rint(w / columns), -128, 127).astype(np.float64)
    return np.asarray(numbers * rows * columns)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 1 << 30))
def test_product_rounds_rows_and_columns(m: int, k: int, n: int, transposed: bool, batched: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((k, n)) * rng.choice([0, 1, 50], n)).astype(np.float32)
    x = (rng.standard_normal((2, m, k) if batched else (m, k)) * 3).astype(np.float32)
    if m > 1:
        x[..., 0, :] = 0
    module = QuantizeActivations()(
        QuantizeWeights()(products([(w.T.copy() if transposed else w, transposed)], batched))
    )
    expected = np.maximum(reference_product(x, w), 0)
    actual = np.asarray(evaluate_function(module, [x], double=False))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    exact = np.maximum(x @ w, 0)
    loss = np.abs(x).max() * np.abs(w).sum(0) + np.abs(w).max() * np.abs(x).sum(-1, keepdims=True)
    assert (np.abs(actual - exact) <= loss / 127 + 1e-6).all()


def test_value_of_several_products_is_quantised_once() -> None:
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((8, 4)).astype(np.float32), False) for _ in range(3)]
    module = QuantizeActivations()(QuantizeWeights()(products(weights)))
    values = [b.value for b in module.graphs["main"].bindings]
    assert sum(isinstance(getattr(v, "op", None), Quantize) for v in values) == 1


def test_lowered_products_multiply_numbers_and_weights_stay_small() -> None:
    rng = np.random.default_rng(0)
    module = products([(rng.standard_normal((32, 24)).astype(np.float32), False)])
    low = lower(module, passes_for(activations="int8"))
    (product,) = [p for name, p in low.prims.items() if "matmul" in name]
    assert "cast(x[vi, vk], i32) * cast(x_1[vk, vj], i32)" in print_text(product)
    assert sorted(str(a.dtype) for a in low.module.constants.values()) == ["float32", "int32", "int8"]
    x = rng.standard_normal((5, 32)).astype(np.float32)
    expected = np.maximum(reference_product(x, module.constants["w0"]), 0)
    np.testing.assert_allclose(evaluate_function(low.module, [x], double=False), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_row_of_a_nan_or_infinity_gives_nan(value: float) -> None:
    rng = np.random.default_rng(0)
    module = QuantizeActivations()(
        QuantizeWeights()(products([(rng.standard_normal((6, 3)).astype(np.float32), False)]))
    )
    x = rng.standard_normal((3, 6)).astype(np.float32)
    x[1, 2] = value
    with np.errstate(invalid="ignore"):
        actual = np.asarray(evaluate_function(module, [x], double=False))
    assert np.isnan(actual[1]).all() and np.isfinite(actual[[0, 2]]).all()


@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([(4, 32), (8, 32), (8, 2)]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_sum_of_a_group_is_multiplied_by_the_scale(
    m: int, n: int, stored: tuple[int, int], transposed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((64, n)) * rng.choice([0, 1, 50], n)).astype(np.float32)
    floats = QuantizeWeights(*stored)(products([(w.T.copy() if transposed else w, transposed)]))
    module = QuantizeActivations()(floats)
    assert module is not floats
    x = (rng.standard_normal((m, 64)) * 3).astype(np.float32)
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(127), np.float32(1e-30))
    rounded = np.clip(np.rint(x / scale), -128, 127) * scale
    expected = np.asarray(evaluate_function(floats, [rounded.astype(np.float32)], double=False))
    actual = np.asarray(evaluate_function(module, [x], double=False))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * max(1, np.abs(expected).max()))


def test_groups_of_an_odd_number_of_rows_are_read_as_floats() -> None:
    rng = np.random.default_rng(0)
    for group in (3, 48):  # 64 rows are no whole number of groups of 48
        module = QuantizeWeights(8, group)(products([(rng.standard_normal((64, 3)).astype(np.float32), False)]))
        assert QuantizeActivations()(module) is module


def test_every_product_of_a_value_reads_eight_bits() -> None:
    rng = np.random.default_rng(0)
    module = products([(rng.standard_normal((8, n)).astype(np.float32), False) for n in (4, 4, 4)])
    low = lower(module, passes_for(activations="int8"))
    read = {str(b.dtype) for name, p in low.prims.items() if "matmul" in name for b in p.buffers[:2]}
    assert read == {"u8", "i8"}
