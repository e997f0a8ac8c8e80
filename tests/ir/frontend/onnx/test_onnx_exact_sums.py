"""Sums of floats keep their order: with large weights each order rounds to another result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model, reference

from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
MAGIC = 12582912.0
"""1.5 * 2**23: adding and subtracting it rounds to whole numbers."""


def same_as_reference(text: str, x: Array) -> None:
    proto = model(text)
    wanted = reference(proto, [x])[0]
    module = load_onnx(proto)
    for form in (module, lower(module).module):
        np.testing.assert_array_equal(run_function(form, "main", [x]), wanted)


@pytest.mark.parametrize("first, second", [(MAGIC, -MAGIC), (3e38, -3e38), (1e-8, 1.0), (1e30, -1e30)])
@pytest.mark.parametrize("steps", [
    "s = Add(x, a)\n y = Add(s, b)", "s = Add(a, x)\n y = Add(b, s)", "s = Sub(x, b)\n y = Sub(s, a)",
    "s = Add(x, a)\n t = Identity(s)\n y = Add(t, b)",
])  # fmt: skip
def test_sum_with_two_weights_keeps_order(steps: str, first: float, second: float) -> None:
    values = [f"{{{v}, {v}, {v}}}" for v in (first, second)]
    text = f"(float[n, 3] x) => (float[n, 3] y) <float[3] a = {values[0]}, float[3] b = {values[1]}> {{ {steps} }}"
    same_as_reference(text, np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32) * 100)


@pytest.mark.parametrize("first, second", [(MAGIC, -MAGIC), (3e38, -3e38)])
@pytest.mark.parametrize("steps", ["s = Add(x, a)\n y = Add(s, b)", "s = Mul(x, a)\n y = Mul(s, b)"])
def test_numbers_keep_order(steps: str, first: float, second: float) -> None:
    text = f"(float[n, 3] x) => (float[n, 3] y) <float a = {{{first}}}, float b = {{{second}}}> {{ {steps} }}"
    with np.errstate(over="ignore"):
        same_as_reference(text, np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32))


def test_sum_with_row_and_table_keeps_order() -> None:
    text = f"""(float[n, 2] x) => (float[n, 2] y) <float[2] row = {{{MAGIC}, {MAGIC}}}, int64[1] zero = {{0}},
      float[4, 2] table = {{-{MAGIC}, -{MAGIC}, -{MAGIC}, -{MAGIC}, -{MAGIC}, -{MAGIC}, -{MAGIC}, -{MAGIC}}}> {{
      n = Shape<start = 0, end = 1>(x)
      t = Slice(table, zero, n)
      s = Add(x, row)
      y = Add(s, t) }}"""
    same_as_reference(text, np.array([[0.3, 2.6], [-7.7, 1.5], [3.5, 0.49]], np.float32))


def test_bias_behind_a_convolution_keeps_order() -> None:
    text = f"""(float[1, 1, n] x) => (float[1, 1, n] y)
      <float[1, 1, 1] k = {{1.0}}, float[1] c = {{0.25}}, float[1, 1, 1] m = {{{MAGIC}}}, float[1, 1, 1] b = {{-{MAGIC}}}> {{
      d = Conv(x, k, c)
      s = Add(d, m)
      y = Add(s, b) }}"""
    same_as_reference(text, np.array([[[0.3, 2.6, -7.7, 1.5, 3.5]]], np.float32))
