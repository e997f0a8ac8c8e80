"""Prefix scans in the order of their results: what they compute, how much they do, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning, make_inputs, outputs_of

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType, bf16, f32, f64, i8
from relax_tune.ir.core.expr import Expr, Var, const, le, lt, op, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.loop_tree import enclosing, find_block, find_loop, replace_node
from relax_tune.schedules.rules.cpu import fallback, scan
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

KINDS = tuple(itertools.product((0, 1), (False, True), (False, True)))


def scheduled(func: PrimFunc, axis: int) -> Schedule:
    s = Schedule(func)
    s.reorder([f"scan_{'ji'[axis]}", f"scan_{'ij'[axis]}", "scan_k"])
    s.apply("serial_scan", block="scan", loop=f"scan_{'ij'[axis]}")
    return s


@pytest.mark.parametrize(("axis", "exclusive", "from_end"), KINDS)
@pytest.mark.parametrize("stored", [f32, i8])
def test_serial_scan_of_each_kind_keeps_the_meaning(axis: int, exclusive: bool, from_end: bool, stored: DType) -> None:
    func = make.prefix_sums(axis, exclusive, from_end, stored)
    func_in_order = scheduled(func, axis).func
    for n, m in ((0, 3), (1, 1), (3, 0), (5, 7)):
        assert_same_meaning(func, func_in_order, {"n": n, "m": m})


def test_serial_scan_has_no_loop_over_steps() -> None:
    func_in_order = scheduled(make.prefix_sums(), 1).func
    assert [x.var.name for x in enclosing(func_in_order, find_block(func_in_order, "scan"))] == ["scan_i", "scan_j"]
    assert not any(x.var.name == "scan_k" for x in loops(func_in_order.body))


def test_serial_scan_of_long_sums_keeps_all_digits() -> None:
    n = 1 << 13
    b = TensorBuilder("long")
    x, y = b.input("A", (n,), bf16), b.output("B", (n,), bf16)
    b.reduce(y, (n,), const(0, bf16), lambda acc, i, k: acc + select(le(k, i), x[k], const(0, bf16)), name="scan")
    s = Schedule(b.finish())
    s.apply("serial_scan", block="scan", loop="scan_i")
    (actual,) = outputs_of(s.func, {}, [np.ones(n, bf16.numpy)])
    assert np.array_equal(actual, np.arange(1, n + 1).astype(bf16.numpy))


@pytest.mark.ccompiler
def test_serial_scan_of_rows_in_vectors_has_a_total_each() -> None:
    func, device = make.prefix_sums(), opened("c")
    s = Schedule(func)
    s.apply("serial_scan", block="scan", loop="scan_j")
    s.apply("set_scope", buffer=find_block(s.func, "scan").body.buffer.name, scope="local")
    rows = s.split("scan_i", [None, 8])
    s.set_kind(rows[1], "vectorized")
    arrays = make_inputs(func, {"n": 19, "m": 5})
    try:
        actual = Compiled(device, "c", s.func)([*arrays, np.zeros((19, 5), np.float32)], [])
        np.testing.assert_allclose(actual[-1], outputs_of(func, {"n": 19, "m": 5}, arrays)[0], rtol=1e-5)
    finally:
        device.close()


def triangular() -> PrimFunc:
    """Sums of A[i, k] up to i, which is no scan: the terms of two results differ."""
    n = Var("n")
    b = TensorBuilder("triangle")
    x, y = b.input("A", (n, n)), b.output("B", (n,))

    def term(acc: Expr, i: Expr, k: Expr) -> Expr:
        return acc + select(le(k, i), x[i, k], const(0.0))

    b.reduce(y, (n,), const(0.0), term, name="scan")
    return b.finish()


def shifted() -> PrimFunc:
    """Sums from an initial value that is not neutral."""
    n = Var("n")
    b = TensorBuilder("shifted")
    x, y = b.input("A", (n,)), b.output("B", (n,))
    b.reduce(y, (n,), const(1.0), lambda acc, i, k: acc + select(le(k, i), x[k], const(0.0)), name="scan")
    return b.finish()


@pytest.mark.parametrize("stored", [f32, i8])
@pytest.mark.parametrize("language", ["c", "opencl"])
def test_schedules_of_scans_on_machines_without_doubles_have_no_double(language: str, stored: DType) -> None:
    func = make.prefix_sums(stored=stored)
    for machine in (limited(language), limited(language, doubles=0)):
        scheduled = next(fallback.sketches(func, machine))[1].func
        assert_same_meaning(func, scheduled, {"n": 3, "m": 5})
        dtypes = {x.dtype for x in scheduled.allocs}
        assert (f64 in dtypes) == (stored is f32 and machine.has_doubles)
        offered = list(scan.sketches(func, machine))
        assert bool(offered) == (stored is not f32 or machine.has_doubles)


def limited(language: str, **limits: int) -> HardwareInfo:
    return HardwareInfo.from_limits(language, limits)


SCAN = step("serial_scan", block="scan", loop="scan_j")
REFUSED = [
    refuse("another reduction", make.dot, step("serial_scan", block="dot", loop="dot_k"), message="expected 'dot' to reduce"),
    refuse("terms of the position", triangular, step("serial_scan", block="scan", loop="scan_i"), message="up to its own position"),
    refuse("the loop of rows", make.prefix_sums, step("serial_scan", block="scan", loop="scan_i"), message="loop of the positions"),
    refuse(
        "split positions", make.prefix_sums, step("split", loop="scan_j", factors=[None, 4]),
        step("serial_scan", block="scan", loop="scan_j_0"), message="loop of the positions",
    ),
    refuse("a parallel loop", make.prefix_sums, step("set_kind", loop="scan_j", kind="parallel"), SCAN, message="expects a serial loop"),
    refuse(
        "steps outside", make.prefix_sums, step("reorder", names=["scan_k", "scan_j"]), SCAN, message="innermost",
    ),
    refuse("a second time", make.prefix_sums, SCAN, SCAN, message="expected 'scan' to reduce"),
    refuse(
        "spreading its positions", make.prefix_sums, SCAN, step("set_kind", loop="scan_j", kind="parallel"),
        message="independent iterations",
    ),
    refuse("its blocks separated", make.prefix_sums, SCAN, step("fission", loop="scan_j", block="scan"), message="fission"),
    refuse("its results inlined", make.prefix_sums, SCAN, step("compute_inline", block="scan_store"), message="other statements"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.what)
def test_serial_scan_of_other_forms_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize(("axis", "exclusive"), list(itertools.product((0, 1), (False, True))))
@pytest.mark.parametrize("stored", [f32, i8])
def test_chunk_scan_keeps_the_meaning(axis: int, exclusive: bool, stored: DType) -> None:
    func = make.prefix_sums(axis, exclusive, False, stored)
    s = Schedule(func)
    _, before = s.apply("chunk_scan", block="scan", loop=f"scan_{'ij'[axis]}", factor=3)
    for n, m in ((0, 3), (1, 1), (3, 0), (5, 7)):
        assert_same_meaning(func, s.func, {"n": n, "m": m})
    row, chunk, place, step = s.loops_of("scan")
    outer, inner = s.split(chunk, [None, 2])
    s.reorder([row, outer, place, inner, step])
    s.apply("serial_scan", block="scan", loop=place)
    s.apply("serial_scan", block=before, loop=s.loops_of(before)[-2])
    for n, m in ((0, 3), (1, 1), (3, 0), (5, 7), (13, 14)):
        assert_same_meaning(func, s.func, {"n": n, "m": m})


def test_serial_scan_starts_from_any_initial_value() -> None:
    s = Schedule(shifted())
    s.apply("serial_scan", block="scan", loop="scan_i")
    for n in (0, 1, 6):
        assert_same_meaning(shifted(), s.func, {"n": n})


def test_chunk_scan_of_long_sums_keeps_all_digits() -> None:
    n = 1 << 11
    b = TensorBuilder("long")
    x, y = b.input("A", (n,), bf16), b.output("B", (n,), bf16)
    b.reduce(y, (n,), const(0, bf16), lambda acc, i, k: acc + select(le(k, i), x[k], const(0, bf16)), name="scan")
    s = Schedule(b.finish())
    _, before = s.apply("chunk_scan", block="scan", loop="scan_i", factor=100)
    chunk, place, _ = s.loops_of("scan")
    assert chunk != place
    s.apply("serial_scan", block="scan", loop=place)
    s.apply("serial_scan", block=before, loop=s.loops_of(before)[0])
    (actual,) = outputs_of(s.func, {}, [np.ones(n, bf16.numpy)])
    assert np.array_equal(actual, np.arange(1, n + 1).astype(bf16.numpy))


def test_chunk_scan_refuses_scans_from_the_end_and_other_sums() -> None:
    for func in (make.prefix_sums(1, False, True), triangular()):
        with pytest.raises(ScheduleError, match="from the start of an axis"):
            Schedule(func).apply("chunk_scan", block="scan", loop=Schedule(func).loops_of("scan")[-2], factor=4)
    with pytest.raises(ScheduleError, match="loop of the positions"):
        Schedule(make.prefix_sums()).apply("chunk_scan", block="scan", loop="scan_i", factor=4)


@pytest.mark.parametrize(("operation", "stored"), [("mul", f32), ("add", f64)])
def test_chunk_scan_refuses_totals_overflowing_in_a_chunk(operation: str, stored: DType) -> None:
    """Tiny numbers, then huge ones: the product of the second chunk is infinite, and 0 of the first times it would be NaN."""
    n, neutral = Var("n"), const(1.0 if operation == "mul" else 0.0, stored)
    b = TensorBuilder("totals")
    x, y = b.input("A", (n,), stored), b.output("B", (n,), stored)
    step = lambda acc, i, k: op(operation, (acc, select(le(k, i), x[k], neutral)), stored)
    b.reduce(y, (n,), neutral, step, name="scan")
    with pytest.raises(ScheduleError, match=f"got {operation} of"):
        Schedule(b.finish()).apply("chunk_scan", block="scan", loop="scan_i", factor=2)


def test_serial_scan_refuses_conditions_on_later_positions() -> None:
    s = Schedule(make.prefix_sums())
    s.apply("chunk_scan", block="scan", loop="scan_j", factor=4)
    node = find_block(s.func, "scan")
    place = s.loops_of("scan")[-2]
    other = replace(node, predicate=lt(const(1), find_loop(s.func, place).var))
    func = replace(s.func, body=replace_node(s.func.body, node, other))
    with pytest.raises(ScheduleError, match="from the first one on"):
        Schedule(func).apply("serial_scan", block="scan", loop=place)
