"""Indices that are made of parameters by moving, casting, choosing and adding constants: the elements that are used are checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.support.tuner_models import DEVICES, opened
from tests.tuner.emit.test_checked_indices import agree, refused
from tests.tuner.emit.test_indices_compiled import TABLE

from relax_tune.ir.core.dtype import DType, f32, i8, i32, i64, u8
from relax_tune.ir.core.expr import Var, const, lt, maximum, minimum, select
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function, GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.index_ranges import IndexRange, computed_indices, index_ranges
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.indexing.movement import Concat, Flatten, Permute, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, MaximumScalar, Mul, Relu
from relax_tune.ir.op.math.numeric import Abs
from relax_tune.ir.op.reduction.scan import ArgMax
from relax_tune.runtime.device.base import Device

INDEX = "expected indices of at least 0 and below 5"


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def row(g: GraphBuilder, i: GVar, k: int) -> GVar:
    return g.call(Flatten(), g.call(Slice(0, const(k), const(k + 1)), i))


def taken(dtype: DType, *ops: Cast | AddScalar) -> IRModule:
    """Rows of a (5, 3) table at what operators make of a parameter."""
    g = GraphBuilder()
    i = g.input("i", (g.symbol("m"),), dtype)
    for op in ops:
        i = g.call(op, i)
    return g.finish(g.call(Take(), g.input("x", (5, 3)), i))


def test_rows_of_one_parameter_index_tables_of_different_sizes(device: Device) -> None:
    g = GraphBuilder()
    i, a, b = g.input("i", (2, g.symbol("n")), i64), g.input("a", (5, 3)), g.input("b", (3, 3))
    module = g.finish(g.call(Add(), g.call(Take(), a, row(g, i, 0)), g.call(Take(), b, row(g, i, 1))))
    agree(module, device, np.array([[4, 0], [2, 1]]), TABLE, TABLE[:3], checks=False)
    refused("below 3, got 3 at [0]", module, device, np.array([[4], [3]]), TABLE, TABLE[:3], checks=False)
    refused(f"{INDEX}, got 5 at [0]", module, device, np.array([[5], [2]]), TABLE, TABLE[:3], checks=False)


@pytest.mark.parametrize("columns", [(0, 1), (1, 2)])
def test_columns_of_a_moved_parameter_are_checked_each(device: Device, columns: Sequence[int]) -> None:
    g = GraphBuilder()
    i = g.input("i", (3, g.symbol("m")), i64)
    pairs = g.call(Permute((1, 0)), g.call(Slice(0, const(columns[0]), const(columns[1] + 1)), i))
    module = g.finish(g.call(GatherND(), g.input("x", (5, 3)), pairs))
    good = np.full((3, 2), 99)
    good[list(columns)] = [[4, 0], [2, 1]]
    agree(module, device, good, TABLE, checks=False)
    good[columns[1], 0] = 3
    refused("below 3, got 3 at [0, 1]", module, device, good, TABLE, checks=False)


def test_no_columns_of_a_backward_slice_are_checked(device: Device) -> None:
    g = GraphBuilder()
    none = g.call(Slice(1, const(1), const(2), -1), g.input("i", (g.symbol("m"), 3), i64))
    module = g.finish(g.call(Take(), g.input("x", (5, 3)), none))
    agree(module, device, np.array([[0, 99, -9]]), TABLE, checks=False)


def test_index_behind_a_deep_model_is_computed() -> None:
    g = GraphBuilder()
    h = g.input("x", (g.symbol("n"), 5))
    for _ in range(2000):
        h = g.call(Relu(), h)
    f = g.finish(g.call(Take(), g.input("table", (5, 3)), g.call(ArgMax(1), h))).functions["main"]
    assert isinstance(f, Function)
    assert not list(computed_indices(f, {})) and len(list(computed_indices(f, {}, computed=True))) == 1


def test_parameters_side_by_side_are_checked_each(device: Device) -> None:
    g = GraphBuilder()
    m = g.symbol("m")
    i, j = g.input("i", (m, 1), i64), g.input("j", (m, 1), i64)
    module = g.finish(g.call(GatherND(), g.input("x", (5, 3)), g.call(Concat(1), i, j)))
    agree(module, device, np.array([[4], [0]]), np.array([[2], [1]]), TABLE, checks=False)
    refused(
        f"{INDEX}, got 5 at [1, 0]", module, device, np.array([[4], [5]]), np.array([[2], [1]]), TABLE, checks=False
    )
    refused("got -1 at [0, 1]", module, device, np.array([[4], [0]]), np.array([[-1], [1]]), TABLE, checks=False)


def test_whole_parts_of_floats_are_indices_from_outside(device: Device) -> None:
    module = taken(f32, Cast(i64))
    agree(module, device, np.float32([4.9, -0.5, 0]), TABLE, checks=False)
    refused(f"{INDEX}, got 9 at [1]", module, device, np.float32([0, 9]), TABLE, checks=False)


def test_sums_of_few_bits_wrap_before_checks(device: Device) -> None:
    agree(taken(u8, AddScalar(100), Cast(i64)), device, np.uint8([160, 156]), TABLE, checks=False)
    text = f"{INDEX}, got -56 at [0]"
    refused(text, taken(i8, AddScalar(100), Cast(i64)), device, np.int8([100]), TABLE, checks=False)


def test_added_constants_move_the_range_of_the_parameter(device: Device) -> None:
    module = taken(i32, AddScalar(-2), Cast(i64))
    agree(module, device, np.int32([2, 6]), TABLE, checks=False)
    refused("parameter i: expected values from 2 to 6", module, device, np.int32([7]), TABLE, checks=False)


def test_products_of_parameters_are_computed_indices(device: Device) -> None:
    g = GraphBuilder()
    i = g.input("i", (g.symbol("m"),), i64)
    module = g.finish(g.call(Take(), g.input("x", (5, 3)), g.call(Mul(), i, i)))
    agree(module, device, np.array([1, 9]), TABLE, checks=False)
    refused(f"{INDEX}, got 81 at [1]", module, device, np.array([1, 9]), TABLE)


@pytest.mark.parametrize("op", [Relu(), MaximumScalar(1.0), Abs()])
def test_clamped_parameters_are_computed_indices(device: Device, op: Relu | MaximumScalar | Abs) -> None:
    g = GraphBuilder()
    i = g.input("i", (g.symbol("m"),), i64)
    module = g.finish(g.call(Take(), g.input("x", (5, 3)), g.call(op, i)))
    agree(module, device, np.array([-4, 3, 99]), TABLE, checks=False)


def test_indices_behind_an_asserted_shape_are_from_outside(device: Device) -> None:
    g = GraphBuilder()
    m = g.symbol("m")
    part = g.call(Slice(0, const(0), m), g.input("i", (m + 2,), i64))
    module = g.finish(g.call(Take(), g.input("x", (5, 3)), g.match_cast(part, TensorInfo((m,), i64))))
    agree(module, device, np.array([4, 0, 99, -9]), TABLE, checks=False)
    refused(f"{INDEX}, got 5 at [1]", module, device, np.array([4, 5, 0, 0]), TABLE, checks=False)


@pytest.mark.parametrize("read", ["whole", "part", "guarded", "clamped"])
def test_range_of_a_tensor_function_needs_whole_reads(device: Device, read: str) -> None:
    n, b = Var("n"), TensorBuilder("rows")
    table, where = b.input("table", (5,)), b.input("where", (n,), i64)
    y = b.output("y", (maximum(n - 1, 0) if read == "part" else n,))
    index = {"clamped": lambda i: maximum(minimum(where[i], 4), 0)}.get(read, lambda i: where[i])
    value = {"guarded": lambda i: select(lt(where[i], 5), table[minimum(index(i), 4)], 0.0)}
    b.compute(y, value.get(read, lambda i: table[index(i)]))
    g = GraphBuilder()
    g.add(b.finish())
    m = g.symbol("m")
    args = g.input("x", (5,)), g.input("i", (m,), i64)
    module = g.finish(g.call_tir("rows", args, TensorInfo((m - 1 if read == "part" else m,), f32)))
    f = module.functions["main"]
    assert isinstance(f, Function)
    ranges = index_ranges(f, module)
    assert ranges == ((IndexRange(1, const(0), const(5)),) if read == "whole" else ())
    if read != "whole":
        agree(module, device, TABLE[:, 0].copy(), np.array([4, 0, 9]), checks=False)


def test_index_of_many_moves_is_from_outside() -> None:
    g = GraphBuilder()
    i = g.input("i", (g.symbol("n"), 2), i64)
    for _ in range(2000):
        i = g.call(Permute((1, 0)), g.call(Permute((1, 0)), i))
    f = g.finish(g.call(Take(), g.input("x", (5, 3)), g.call(Concat(1), i, i))).functions["main"]
    assert isinstance(f, Function)
    assert len(list(computed_indices(f, {}))) == 1
