"""Transfers between devices: as few as possible, with equal results, in flat and nested programs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.random_graphs import SIZES, SLOW, Made, graphs

from relax_tune.errors import DeduceError, UserError, VerifyError
from relax_tune.home import HOME
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, CallDPSLibrary, CallTIR, GVar
from relax_tune.ir.core.graph_walk import all_bindings, operator_of
from relax_tune.ir.core.struct_info import devices_of
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.devices import HintOnDevice, ToDevice
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Add, Maximum, MulScalar, Relu, Sub, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.passes.placement.device_requests import DropDevices, device_requests
from relax_tune.ir.passes.placement.parts import cut
from relax_tune.ir.passes.placement.transfers import InsertTransfers, transfers
from relax_tune.ir.text.parser import parse_text
from relax_tune.ir.text.printer import print_text

DEVICES = ("c", "opencl", "cuda")
Draw = Callable[..., Any]


@dataclass
class Placed:
    """A program, and a device for each of its calls."""

    module: IRModule
    devices: Mapping[GVar, str]


def computed(module: IRModule) -> list[GVar]:
    """The variables of all calls that a device can run."""
    kinds = (Call, CallTIR, CallDPSLibrary)
    return [b.var for f in module.graphs.values() for b in all_bindings(f) if isinstance(b.value, kinds)]


def outcome(module: IRModule, args: Sequence[Any]) -> Any:
    try:
        return run_function(module, "main", list(args))
    except UserError as error:
        return str(error)


def agree(a: Any, b: Any) -> None:
    if isinstance(a, tuple) and isinstance(b, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            agree(x, y)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif not isinstance(a, str) or not isinstance(b, str):
        assert a == b


def chain(devices: Sequence[str]) -> Placed:
    """A chain of calls, each on the given device."""
    g = GraphBuilder()
    x: Any = g.input("x", (g.symbol("n", 0, 64), 3))
    placement = {}
    for number, device in enumerate(devices):
        x = g.call(Relu() if number % 2 else Tanh(), x)
        placement[x] = device
    return Placed(g.finish(x), placement)


@st.composite
def layers(draw: Draw) -> Placed:
    """Graphs of up to 64 calls in up to 4 layers: elementwise calls, views and products."""
    g = GraphBuilder()
    n = g.symbol("n", 0, 6)
    shape = draw(st.sampled_from([(n, 3), (n, 4, 2), (3,), (2, n), (n, 1), (5, 3)]))
    values: list[Any] = [g.input(f"x{i}", shape) for i in range(draw(st.integers(1, 3)))]
    devices: dict[GVar, str] = {}
    for _ in range(draw(st.integers(1, 4))):
        before = list(values)
        for _ in range(draw(st.integers(1, 16))):
            a, b = draw(st.sampled_from(before)), draw(st.sampled_from(before))
            kind = draw(st.integers(0, 5))
            if kind == 0:
                a = g.call(Reshape(tuple(a.info.shape)), a)
            op = (Add(), Sub(), Maximum(), Relu(), Tanh(), MulScalar(0.5))[kind]
            y = g.call(op, a, b) if kind < 3 else g.call(op, a)
            devices[y] = draw(st.sampled_from(DEVICES))
            values.append(y)
    return Placed(g.finish(draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=3))), devices)


@SLOW
@given(layers(), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_transfers_of_random_placements_keep_the_meaning_and_are_few(case: Placed, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    main = case.module.graphs["main"]
    sizes = {v: n for p in main.params for v in getattr(p.info, "shape", ()) if isinstance(v, Var)}
    args = [
        rng.standard_normal([sizes.get(d, getattr(d, "value", n)) for d in p.info.shape]).astype(np.float32)
        for p in main.params
    ]
    placed = InsertTransfers(case.devices)(case.module)
    verify(placed)
    agree(outcome(placed, args), outcome(case.module, args))
    moves = transfers(placed.graphs["main"])
    versions = Counter((b.value.operands[0], b.value.op.device) for b in moves)  # type: ignore[attr-defined]
    assert set(versions.values()) <= {1}
    read = {v for b in placed.graphs["main"].bindings for v in b.value.operands}
    returned = placed.graphs["main"].ret
    assert all(b.var in read or b.var in (returned, *returned.operands) for b in moves), "a transfer that nothing reads"
    assert print_text(parse_text(print_text(placed), OPERATORS)) == print_text(placed)


@pytest.mark.parametrize("devices", [*itertools.product(("c", "opencl"), repeat=4), ("opencl", "cuda", "c", "cuda")])
def test_transfers_of_a_chain_are_the_changes_of_device(devices: tuple[str, ...]) -> None:
    case = chain(devices)
    inserted = transfers(InsertTransfers(case.devices)(case.module).graphs["main"])
    path = (HOME, *devices, HOME)
    # values between two devices other than the host's pass through the host
    assert len(inserted) == sum((a != b) * (1 + (HOME not in (a, b))) for a, b in itertools.pairwise(path))


def test_transfers_of_a_value_read_on_several_devices_are_one_for_each() -> None:
    g = GraphBuilder()
    x = g.call(Tanh(), g.input("x", (4,)))
    readers = [g.call(MulScalar(float(i)), x) for i in range(6)]
    devices = {x: "opencl"} | {v: DEVICES[i % 3] for i, v in enumerate(readers)}
    f = InsertTransfers(devices)(g.finish(readers)).graphs["main"]
    source = next(b.var for b in f.bindings if operator_of(b.value, Tanh) is not None)
    home = next(b.var for b in transfers(f) if b.value.operands[0] is source)
    assert [b.value.op.device for b in transfers(f) if b.value.operands[0] is home] == ["cuda"]  # type: ignore[attr-defined]
    assert sum(b.value.operands[0] in (source, home) for b in transfers(f)) == 2


def test_transfers_do_not_move_weights_and_views() -> None:
    g = GraphBuilder()
    w = g.constant("w", np.ones((4, 4), np.float32))
    x = g.input("x", (2, 2, 4))
    y, z = (g.call(Matmul(), g.call(Reshape((4, 4)), x), w) for _ in range(2))
    f = InsertTransfers({y: "opencl", z: "opencl"})(g.finish([y, z])).graphs["main"]
    sources = [b.value.operands[0] for b in transfers(f)]
    assert [getattr(s, "name", "") for s in sources] == ["x", "matmul", "matmul_1"]


@SLOW
@given(graphs(), SIZES, st.integers(0, 2**32 - 1), st.data())
def test_transfers_in_inner_functions_and_flat_programs_mean_the_same(
    program: Made, sizes: Mapping[str, int], seed: int, data: Any
) -> None:
    devices = {v: data.draw(st.sampled_from(DEVICES)) for v in computed(program.module)}
    args = program.arguments(sizes, np.random.default_rng(seed))
    nested = InsertTransfers(devices)(program.module)
    verify(nested)
    try:
        flat, _ = Inline().run(program.module)
    except DeduceError:
        return
    flat_placed = InsertTransfers({v: data.draw(st.sampled_from(DEVICES)) for v in computed(flat)})(flat)
    expected = outcome(program.module, args)
    if not isinstance(expected, str):  # without dead code there may be nothing to refuse
        agree(outcome(nested, args), expected)
        agree(outcome(flat_placed, args), expected)


@SLOW
@given(layers())
def test_parts_of_random_placements_keep_the_meaning(case: Placed) -> None:
    placed = InsertTransfers(case.devices)(case.module)
    lowered = lower(placed, devices=True).module
    again = InsertTransfers()(lowered)  # the devices are taken from the annotations
    functions: dict[str, Any] = dict(again.functions)
    parts = cut(again.graphs["main"], functions)
    module = IRModule(functions, again.constants, again.bounds)
    verify(module)
    for part in parts:
        assert {d for b in all_bindings(functions[part.name]) for d in devices_of(b.var.info)} == {part.device}
    args = [
        np.ones([getattr(d, "value", None) or 2 for d in p.info.shape], np.float32)
        for p in placed.graphs["main"].params
    ]
    agree(outcome(module, args), outcome(again, args))


def test_parts_are_followed_by_the_way_home_of_results() -> None:
    """A result is copied to the host before its device runs later parts; copies to a device follow its parts."""
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    first, other = g.call(Matmul(), x, x), g.call(Matmul(), g.call(Tanh(), x), x)
    last = g.call(Matmul(), first, first)
    f = g.finish([last, other])
    lowered = lower(f, devices=True).module
    on = {b.var: "c" if b.var.name == last.name else "opencl" for b in lowered.graphs["main"].bindings}
    functions: dict[str, Any] = dict(InsertTransfers(on)(lowered).functions)
    cut(functions["main"], functions)
    shown = [_shown(b.value) for b in all_bindings(functions["main"])]
    assert shown == ["to opencl", "part", "to c", "part", "to c", "part"], shown


def _shown(value: Any) -> str:
    move = operator_of(value, ToDevice)
    return "part" if move is None else f"to {move.device}"


def test_deduction_carries_a_device_and_refuses_two() -> None:
    g = GraphBuilder()
    x = g.input("x", (4,))
    there = g.call(ToDevice("opencl"), x)
    assert devices_of(g.call(Tanh(), there).info) == ("opencl",)
    with pytest.raises(DeduceError, match=r"add: .* got c and opencl; .*to_device"):
        g.call(Add(), g.call(ToDevice("c"), x), there)


def test_verify_refuses_a_call_between_devices() -> None:
    case = chain(("opencl", "c"))
    text = print_text(InsertTransfers(case.devices)(case.module))
    wrong = text.replace(
        'Tensor((n, 3), f32, device="opencl") = op.tanh', 'Tensor((n, 3), f32, device="cuda") = op.tanh'
    )
    assert wrong != text
    with pytest.raises((VerifyError, DeduceError), match="device"):
        verify(parse_text(wrong, OPERATORS))


def test_hints_name_the_maker_of_a_value() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    y = g.call(HintOnDevice("opencl"), g.call(Reshape((16,)), g.call(Matmul(), x, x)))
    z = g.call(Tanh(), g.call(ToDevice("cuda"), y))
    lowered = lower(g.finish(z), devices=True).module
    requests = device_requests(lowered.graphs["main"])
    assert {v.name: d for v, d in requests.preferred.items()} == {"matmul": "opencl"}
    assert {v.name: d for v, d in requests.required.items()} == {"tanh": "cuda"}


def test_programs_for_one_device_lose_devices() -> None:
    case = chain(("opencl", "c"))
    placed = InsertTransfers(case.devices)(case.module)
    assert print_text(lower(placed).module) == print_text(lower(case.module).module)
    assert DropDevices()(case.module) is case.module
