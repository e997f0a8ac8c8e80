"""Activations of ONNX where their results are small or their arguments special, against formulas in NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model
from tests.support.programs import compiled, opened

from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
VALUES = (
    -np.inf, -100, -88, -80, -40, -20, -17, -16.5, -15, -10, -3, -1, -0.5, -1e-3, -1e-8, -0.0, 0.0, 1e-8, 1e-3, 0.5, 1, 3, 15,
    17, 80, 100, 3e4, np.inf, np.nan,
)  # fmt: skip


def softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def mish(x: Array) -> Array:
    return x * np.tanh(softplus(x))


def elu(x: Array, alpha: float = 1.0) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(x))


# Attributes of ONNX files are 32-bit numbers, and so are the defaults of the standard.
ALPHA = float(np.float32(0.3))
SELU_ALPHA, SELU_GAMMA = float(np.float32(1.6732632423543772)), float(np.float32(1.0507009873554805))


def celu(x: Array) -> Array:
    return np.where(x > 0, x, ALPHA * np.expm1(x / ALPHA))


def selu(x: Array) -> Array:
    return SELU_GAMMA * elu(x, SELU_ALPHA)


FUNCTIONS: list[tuple[str, Callable[[Array], Array]]] = [
    ("Softplus(x)", softplus), ("Mish(x)", mish), ("Elu(x)", elu), ("Elu<alpha = 0.3>(x)", lambda x: elu(x, ALPHA)),
    ("Celu<alpha = 0.3>(x)", celu), ("Selu(x)", selu), ("Sign(x)", np.sign),
]  # fmt: skip
TYPES = (("float16", np.float16, 1e-3, 1.2e-7), ("float", np.float32, 3e-6, 1e-37), ("double", np.float64, 3e-15, 0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind, element, rtol, atol", TYPES, ids=[t[0] for t in TYPES])
@pytest.mark.parametrize("call, wanted", FUNCTIONS, ids=[c for c, _ in FUNCTIONS])
def test_activation_of_special_values_is_accurate(
    call: str, wanted: Callable[[Array], Array], kind: str, element: type[Any], rtol: float, atol: float
) -> None:
    if kind != "float" and call.startswith("Celu"):
        pytest.skip("ONNX defines Celu for float alone")
    module = load_onnx(model(f"({kind}[n] x) => ({kind}[n] y) {{ y = {call} }}", 22))
    x = np.array(VALUES, element)
    expected = wanted(x.astype(np.float64)).astype(element)
    for form in (module, lower(module).module):
        found = np.asarray(run_function(form, "main", [x]))
        assert found.dtype == element
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize("call, wanted", FUNCTIONS, ids=[c for c, _ in FUNCTIONS])
def test_built_activation_of_special_values_is_accurate(call: str, wanted: Callable[[Array], Array]) -> None:
    module = load_onnx(model(f"(float[n] x) => (float[n] y) {{ y = {call} }}", 22))
    x = np.array(VALUES, np.float32)
    with np.errstate(all="ignore"):
        expected = wanted(x.astype(np.float64)).astype(np.float32)
    with opened("c") as device, compiled(module, device) as program:
        np.testing.assert_allclose(program(x), expected, rtol=3e-6, atol=1e-37)


def test_celu_of_large_values_is_finite() -> None:
    module = load_onnx(model("(float[n] x) => (float[n] y) { y = Celu<alpha = 0.3>(x) }", 22))
    x = np.array([3e38, 1e30], np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run_function(module, "main", [x]), x)


def test_sign_of_integers_and_zeros() -> None:
    for kind, element in (("int32", np.int32), ("float", np.float32)):
        module = load_onnx(model(f"({kind}[n] x) => ({kind}[n] y) {{ y = Sign(x) }}"))
        x = np.array([-5, 0, 7], element)
        np.testing.assert_array_equal(run_function(module, "main", [x]), np.sign(x))
