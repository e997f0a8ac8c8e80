"""Powers of one half: roots, but at -0 and at negative infinity, against NumPy in float64 and ONNX's reference."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model

from relax_tune.ir.core.graph_walk import nested_values, operator_of
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Rsqrt
from relax_tune.ir.op.math.logic import Where

# C, F.10.4.4: pow(-0, y) is +0 or +inf, and pow(-inf, y) is +inf or +0
ENDS = np.array([-0.0, 0.0, -np.inf, np.inf, -1, 4, np.nan], np.float32)
ROOTS = {0.5: [0.0, 0.0, np.inf, np.inf, np.nan, 2.0, np.nan], -0.5: [np.inf, np.inf, 0.0, 0.0, np.nan, 0.5, np.nan]}


@pytest.mark.parametrize("exponent", ROOTS)
def test_power_of_one_half_at_the_ends(exponent: float) -> None:
    module = load_onnx(model(f"(float[n] x) => (float[n] y) <float e = {{{exponent}}}> {{ y = Pow(x, e) }}"))
    y = np.asarray(run_function(module, "main", [ENDS]))
    np.testing.assert_array_equal(y, ROOTS[exponent])
    assert not np.signbit(y[~np.isnan(y)]).any()


def test_norm_by_a_power_is_a_plain_root() -> None:
    proto = model("""(float[n, 4] x) => (float[n, 4] y) <float two = {2.0}, float e = {-0.5}, float small = {1e-6}> {
        s = Pow(x, two)
        m = ReduceMean<axes = [1]>(s)
        a = Add(m, small)
        r = Pow(a, e)
        y = Mul(x, r) }""", opset=13)  # fmt: skip
    main = load_onnx(proto).graphs["main"]
    assert any(operator_of(v, Rsqrt) for v in nested_values(main)) and not any(
        operator_of(v, Where) for v in nested_values(main)
    )
    check(proto, [np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)])
