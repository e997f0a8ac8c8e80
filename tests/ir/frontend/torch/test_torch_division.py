"""Quotients by numbers from torch are rounded once, as a division is; rounding them shows each digit that is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from relax_tune.ir.core.dtype import DType, dtype, f32, i64
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchSymbol, TorchTensor
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
Step = tuple[str, tuple[Any, ...], Mapping[str, Any], TorchTensor]


def tensor(dims: Sequence[Any], element: DType) -> TorchTensor:
    return TorchTensor(tuple(dims), element, f"torch.{np.dtype(element.numpy).name}")


def results(x: Array, dims: Sequence[Any], steps: Sequence[Step]) -> list[Array]:
    """Return the last step's result by the imported program, and by what it is lowered to. `x` names the input, `s0` a step."""
    calls = tuple(TorchCall(f"s{k}", op, args, kwargs, info, "") for k, (op, args, kwargs, info) in enumerate(steps))
    symbols = tuple(TorchSymbol(d, 1, None) for d in dims if isinstance(d, str))
    program = TorchProgram(
        symbols, (("x", tensor(dims, dtype(x.dtype))),), {}, {}, calls, (("y", Ref(f"s{len(steps) - 1}")),)
    )
    module = import_program(program)
    return [np.asarray(run_function(form, "main", [x])) for form in (module, lower(module).module)]


@pytest.mark.parametrize("element, divisors", [
    (np.float32, (3, 7, 41, 47, 55, 61, 82, 83, 94, 97, 0.1, 1e-39, 2e38)), (np.float64, (3, 49, 98, 103, 0.1, 1e300)),
])  # fmt: skip
def test_div_by_number_gives_the_rounded_quotient(element: type[Any], divisors: Sequence[float]) -> None:
    for c in divisors:
        x = np.arange(1.0, 300) * c
        x = x[x < np.finfo(element).max].astype(element)
        steps = [("aten.div.Tensor", (Ref("x"), c), {}, tensor(["n"], dtype(x.dtype)))]
        for found in results(x, ["n"], steps):
            np.testing.assert_array_equal(found, x / element(c))


@pytest.mark.parametrize("name, times", [("float16", 41), ("float16", 0.1), ("bfloat16", 41)])
def test_div_of_half_floats_by_number_divides_in_f32(name: str, times: float) -> None:
    element = dtype(name)
    x = (np.arange(0.0, 1000) * times).astype(element.numpy)
    steps = [("aten.div.Tensor", (Ref("x"), 41), {}, tensor(["n"], element))]
    for found in results(x, ["n"], steps):
        np.testing.assert_array_equal(found, (x.astype(np.float32) / np.float32(41)).astype(element.numpy))


def test_div_by_powers_of_two_keeps_subnormal_quotients() -> None:
    x = np.array([3e-39, -1e-45, 1e38, 0.0, -0.0, np.inf, np.nan], np.float32)
    for c in (2.0, -0.5, 2.0**127, 2.0**100):
        wanted = x / np.float32(c)
        steps = [("aten.div.Scalar", (Ref("x"), c), {}, tensor(["n"], f32))]
        for found in results(x, ["n"], steps):
            np.testing.assert_array_equal(found, wanted)


def test_div_by_zero_is_infinite_or_nan() -> None:
    steps = [("aten.div.Tensor", (Ref("x"), 0.0), {}, tensor(["n"], f32))]
    for found in results(np.array([1, -1, 0], np.float32), ["n"], steps):
        np.testing.assert_array_equal(found, np.array([np.inf, -np.inf, np.nan], np.float32))


def test_index_from_a_quotient_is_the_number_of_the_multiple() -> None:
    steps: list[Step] = [
        ("aten._to_copy.default", (Ref("x"),), {"dtype": f32}, tensor(["n"], f32)),
        ("aten.div.Tensor", (Ref("s0"), 41), {}, tensor(["n"], f32)),
        ("aten._to_copy.default", (Ref("s1"),), {"dtype": i64}, tensor(["n"], i64)),
    ]
    for found in results(np.arange(0, 41 * 50, 41), ["n"], steps):
        np.testing.assert_array_equal(found, np.arange(50))


def test_avg_pool_of_ones_is_one() -> None:
    for size in (9, 41, 47, 49, 61):
        steps = [("aten.avg_pool1d.default", (Ref("x"), [size]), {}, tensor([1, 1, 2], f32))]
        for found in results(np.ones((1, 1, 2 * size), np.float32), [1, 1, 2 * size], steps):
            np.testing.assert_array_equal(found, np.ones((1, 1, 2), np.float32))


def test_variance_divides_the_sum_of_squares_once() -> None:
    """The sums are whole numbers, which floats hold exactly."""
    for n in range(2, 60):
        x = np.tile(np.array([0, 2], np.float32), n)
        wanted = np.float32(2 * n) / np.float32(2 * n - 1)
        for dims in ([2 * n], ["n"]):
            steps = [("aten.var.correction", (Ref("x"), [0]), {"correction": 1}, tensor([], f32))]
            for found in results(x, dims, steps):
                assert found == wanted


def test_quotient_of_complex_numbers_by_number_divides_both_parts() -> None:
    pairs = TorchTensor(("n",), None, "torch.complex64")
    steps: list[Step] = [
        ("aten.view_as_complex.default", (Ref("x"),), {}, pairs),
        ("aten.div.Tensor", (Ref("s0"), 41), {}, pairs),
        ("aten.view_as_real.default", (Ref("s1"),), {}, tensor(["n", 2], f32)),
    ]
    x = (np.arange(100, dtype=np.float32) * 41).reshape(50, 2)
    for found in results(x, ["n", 2], steps):
        np.testing.assert_array_equal(found, np.arange(100, dtype=np.float32).reshape(50, 2))


def test_inverse_transform_of_an_impulse_is_one() -> None:
    pairs = TorchTensor((41,), None, "torch.complex64")
    steps: list[Step] = [
        ("aten.view_as_complex.default", (Ref("x"),), {}, pairs),
        ("aten._fft_c2c.default", (Ref("s0"), [0], 2, False), {}, pairs),
        ("aten.view_as_real.default", (Ref("s1"),), {}, tensor([41, 2], f32)),
    ]
    x = np.zeros((41, 2), np.float32)
    x[0, 0] = 41
    for found in results(x, [41, 2], steps):
        np.testing.assert_array_equal(found[:, 0], np.ones(41, np.float32))
