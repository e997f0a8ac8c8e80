"""Programs where the interpreter and built models have differed, or one of them ended in a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import DEVICES, opened
from tests.tuner.emit.test_checked_indices import agree, both, refused

from relax_tune.errors import DeduceError, VerifyError
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, i64
from relax_tune.ir.core.expr import Expr, lt
from relax_tune.ir.core.graph import PrimValue, ShapeValue, Value
from relax_tune.ir.core.struct_info import PrimInfo, ShapeInfo, TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.indexing.scatter import Mode, ScatterND
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.runtime.device.base import Device


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as result:
        yield result


@pytest.mark.parametrize("kind", ["tensor", "scalar", "shape", "branch"])
def test_division_by_a_symbol_of_zero_in_a_value_is_refused(device: Device, kind: str) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    x, y = g.input("x", (n,)), g.input("y", (m,))
    quotient: Value
    if kind == "branch":
        quotient = g.branch(lt(1, n // m), lambda: g.call(Relu(), x), lambda: x)
    elif kind == "tensor":
        quotient = g.call(Scalars((n // m,)))
    else:
        quotient = PrimValue(n // m) if kind == "scalar" else ShapeValue((n // m,))
    module = g.finish([quotient, g.call(Relu(), x), g.call(Relu(), y)])
    agree(module, device, np.ones(5, np.float32), np.ones(2, np.float32), checks=False)
    text = "expected m, the divisor in n // m, to be non-zero, got 0"
    refused(text, module, device, np.ones(5, np.float32), np.ones(0, np.float32), checks=False)


@pytest.mark.parametrize("mode", ["add", "mul"])
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_scatter_of_many_updates_rounds_once(device: Device, dtype: DType, mode: Mode) -> None:
    g = GraphBuilder()
    m, x = g.symbol("m"), g.input("x", (1,), dtype)
    module = g.finish(g.call(ScatterND(mode), x, g.input("i", (m, 1), i64), g.input("u", (m,), dtype)))
    count, update = (4096, 1.0) if mode == "add" else (200, 1 + 2.0**-7)
    start, updates = np.full(1, mode == "mul", dtype.numpy), np.full(count, update, dtype.numpy)
    expected = np.float64(count if mode == "add" else update**count).astype(dtype.numpy).astype(np.float64)
    for (actual,) in both(module, device, start, np.zeros((count, 1), np.int64), updates, checks=False):
        np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_halves_of_two_batches_broadcast(device: Device, dtype: DType) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    product = g.call(Matmul(), g.input("x", (n, 2, 2), dtype), g.input("y", (m, 2, 2), dtype))
    module = g.finish(g.call(Sum((2,)), g.call(Relu(), product)))
    for first, second in ((1, 3), (3, 1), (3, 3), (1, 1)):
        arrays = [np.ones((k, 2, 2), dtype.numpy) for k in (first, second)]
        for (result,) in both(module, device, *arrays, checks=False):
            np.testing.assert_array_equal(result.astype(np.float32), np.full((max(first, second), 2), 4))


@pytest.mark.parametrize("size", [np.int64(4), np.uint8(4), 4])
def test_numbers_of_numpy_are_dims(device: Device, size: Any) -> None:
    g = GraphBuilder()
    m = g.symbol("m")
    module = g.finish(g.call(Reshape((m, size)), g.input("x", (m, size))))
    agree(module, device, np.ones((3, 4), np.float32), checks=False)


@pytest.mark.parametrize("size", [4.0, "4", True, np.float32(4)])
def test_other_values_are_no_dims(size: Any) -> None:
    with pytest.raises(DeduceError, match="reshape: shape: expected whole numbers"):
        Reshape((size,))


@pytest.mark.parametrize("dim", ["square", "half", "rest"])
def test_symbols_left_open_by_arguments_are_refused(dim: str) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    dims: dict[str, Expr] = {"square": n * n, "half": n // 2, "rest": n % 3}
    module = g.finish(g.call(Relu(), g.input("x", (dims[dim],))))
    with pytest.raises(VerifyError, match="nothing determines symbol n of"):
        run_function(module, "main", [np.ones(7, np.float32)])


def test_match_cast_outside_bounds_is_refused_with_bounds() -> None:
    g = GraphBuilder()
    n, m = g.symbol("n", 0, 8), g.symbol("m", 10)
    with pytest.raises(DeduceError, match=r"\(10 <= m\), got n \(n <= 8\)"):
        g.match_cast(g.input("x", (n,)), TensorInfo((m,), f32))


@pytest.mark.parametrize("given", [(2,), [2], np.array([2]), (np.int64(2),)], ids=repr)
def test_shapes_are_sequences_of_whole_numbers(device: Device, given: Any) -> None:
    agree(shaped(), device, given, np.ones(4, np.float32), checks=False)


@pytest.mark.parametrize("given", [(True,), (2.0,), 2, (2, 3), (2**70,), [[1], [2, 3]]], ids=repr)
def test_other_values_are_no_shapes(device: Device, given: Any) -> None:
    refused("expected ", shaped(), device, given, np.ones(4, np.float32), checks=False)


def test_shape_below_bounds_is_refused_with_bounds(device: Device) -> None:
    refused("expected 0 <= n, got n = -3", shaped(), device, (-3,), np.ones(4, np.float32), checks=False)


@pytest.mark.parametrize("given", [3, np.int64(3), np.array(3)], ids=repr)
def test_scalars_are_numbers_or_arrays_without_dims(device: Device, given: Any) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    g.parameter("k", PrimInfo(i64, n))
    module = g.finish(g.call(Iota(n)))
    agree(module, device, given, checks=False)
    for wrong in (True, 3.0, 2**70):
        refused("expected Prim(i64, n), got the number", module, device, wrong, checks=False)


def shaped() -> Any:
    """A shape [n] and a tensor (n * 2,), both returned."""
    g = GraphBuilder()
    n = g.symbol("n")
    s = g.parameter("s", ShapeInfo((n,), 1))
    return g.finish([g.call(Relu(), g.input("x", (n * 2,))), s])
