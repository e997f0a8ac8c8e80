"""Quotients by numbers from ONNX are rounded once, as a division is; rounding them shows each digit that is off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, reference

from relax_tune.ir.core.graph import Call
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]


def results(text: str, inputs: Sequence[Array], opset: int = 20) -> list[Array]:
    """Return the result by the imported graph, and by what it is lowered to."""
    module = load_onnx(model(text, opset))
    return [np.asarray(run_function(form, "main", list(inputs))) for form in (module, lower(module).module)]


@pytest.mark.parametrize("kind, element, divisors", [
    ("float", np.float32, (3, 7, 41, 47, 55, 61, 82, 83, 94, 97, 0.1)), ("double", np.float64, (3, 49, 98, 103, 0.1)),
])  # fmt: skip
def test_div_by_constant_gives_the_rounded_quotient(kind: str, element: type[Any], divisors: Sequence[float]) -> None:
    for c in divisors:
        text = f"({kind}[n] x) => ({kind}[n] y) <{kind} c = {{{float(c)}}}> {{ y = Div(x, c) }}"
        x = (np.arange(1.0, 300) * c).astype(element)
        for found in results(text, [x]):
            np.testing.assert_array_equal(found, x / element(c))


def test_quotient_of_multiple_is_a_whole_number() -> None:
    text = "(float[n] x) => (bool[n] y) <float c = {41.0}> { q = Div(x, c)\n r = Round(q)\n y = Equal(q, r) }"
    for found in results(text, [np.arange(0, 4100, 41, dtype=np.float32)]):
        assert found.all()


def test_mean_of_equal_tensors_is_the_tensor() -> None:
    """A sum of 41 small whole numbers is exact."""
    names = ", ".join(["x"] * 41)
    for found in results(f"(float[n] x) => (float[n] y) {{ y = Mean({names}) }}", [np.arange(100, dtype=np.float32)]):
        np.testing.assert_array_equal(found, np.arange(100, dtype=np.float32))


@pytest.mark.parametrize("size", [9, 41, 47, 61])
def test_average_pool_of_ones_is_one(size: int) -> None:
    text = f"(float[1, 1, n] x) => (float[1, 1, m] y) {{ y = AveragePool<kernel_shape = [{size}], strides = [{size}]>(x) }}"
    for found in results(text, [np.ones((1, 1, 3 * size), np.float32)]):
        np.testing.assert_array_equal(found, np.ones((1, 1, 3), np.float32))


@pytest.mark.parametrize("extent", [21.0, 42.0, 35.0, 77.0, 10.5])
@pytest.mark.parametrize("ratio", [0, 2, 3])
def test_roi_align_takes_as_many_samples_as_the_bins_are_large(extent: float, ratio: int) -> None:
    text = f"""(float[1, 1, 80, 80] x, float[1, 4] rois, int64[1] batch) => (float[1, 1, 7, 7] y) {{
      y = RoiAlign<coordinate_transformation_mode = "output_half_pixel", output_height = 7, output_width = 7,
        sampling_ratio = {ratio}>(x, rois, batch) }}"""
    x = np.random.default_rng(0).standard_normal((1, 1, 80, 80)).astype(np.float32)
    check(model(text), [x, np.array([[0, 0, extent, extent]], np.float32), np.zeros(1, np.int64)])


def test_scaled_operand_of_product_keeps_rounding() -> None:
    """Behind a product with the identity, `x / 41` rounds as it does before."""
    text = """(float[n, 3] x) => (float[n, 3] y) <float c = {41.0},
      float[3, 3] unit = {1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0}> {
      q = Div(x, c)
      p = MatMul(q, unit)
      y = Floor(p) }"""
    x = (np.arange(60, dtype=np.float32) * 41).reshape(20, 3)
    for found in results(text, [x]):
        np.testing.assert_array_equal(found, reference(model(text), [x])[0])


def test_product_of_large_operands_with_a_small_scale_is_finite() -> None:
    text = (
        "(float[2, 1] x, float[1, 2] z) => (float[2, 2] y) <float c = {0.00001}> { s = Mul(x, c)\n y = MatMul(s, z) }"
    )
    x = np.full((2, 1), 1e20, np.float32)
    for found in results(text, [x, x.T]):
        np.testing.assert_allclose(found, 1e35, rtol=1e-5)


@pytest.mark.parametrize("scale", ["Div(s, root)", "Mul(s, inverse)"])
def test_attention_with_divided_scores_is_recognised(scale: str) -> None:
    text = f"""(float[b, n, 5] q, float[b, m, 5] k, float[b, m, 5] v) => (float[b, n, 5] y)
      <float root = {{2.236068}}, float inverse = {{0.4472136}}> {{
      t = Transpose<perm = [0, 2, 1]>(k)
      s = MatMul(q, t)
      c = {scale}
      w = Softmax<axis = -1>(c)
      y = MatMul(w, v) }}"""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, n, 5)).astype(np.float32) for n in (3, 4, 4)]
    module = check(model(text), inputs)
    calls = [b.value for b in DeadCode()(module).graphs["main"].bindings]
    assert [c.op.name for c in calls if isinstance(c, Call)] == ["attention"]
