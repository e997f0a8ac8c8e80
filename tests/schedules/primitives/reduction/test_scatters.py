"""Scatters in the order of their updates: what they compute, how much they do, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import outputs_of, size_of

from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64, i8, i64
from relax_tune.ir.core.expr import Expr, Var, and_, const, eq, lt, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks, loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.indexing.scatter import Mode
from relax_tune.schedules.rules.cpu import fallback
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

MODES: dict[Mode, str] = {m: "last_1" if m == "replace" else "total_1" for m in get_args(Mode)}
SHAPES = ((5, 9, 3), (1, 1, 1), (0, 4, 2), (4, 0, 2), (3, 8, 0), (2, 40, 1))


def inputs(func: PrimFunc, dims: dict[str, int], most: int) -> list[np.ndarray[Any, Any]]:
    """Whole numbers from -most to most, and indices, some of them outside."""
    rng = np.random.default_rng(4)
    x, where, updates = func.input_buffers
    shapes = [tuple(size_of(d, dims, func) for d in b.shape) for b in func.input_buffers]
    size = dims["n"] if where.dtype is i64 else dims["w"]
    return [
        rng.integers(-most, most + 1, shapes[0]).astype(x.dtype.numpy),
        rng.integers(-1, size + 1, shapes[1]).astype(where.dtype.numpy),
        rng.integers(-most, most + 1, shapes[2]).astype(updates.dtype.numpy),
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", [f16, bf16, f32, f64, i8, i64], ids=str)
@pytest.mark.parametrize("rows", [True, False])
def test_serial_scatter_any_mode_and_type_keeps_the_meaning(mode: Mode, stored: DType, rows: bool) -> None:
    func = (make.scattered_rows if rows else make.scattered_columns)(mode, stored)
    s = Schedule(func)
    s.apply("serial_scatter", block=MODES[mode])
    for n, m, w in SHAPES:
        dims = {"n": n, "m": m, "w": w}
        arrays = inputs(func, dims, 1 if mode == "mul" else 3)  # no product is too large for 16 bits
        (expected,), (actual,) = outputs_of(func, dims, arrays), outputs_of(s.func, dims, arrays)
        np.testing.assert_array_equal(actual, expected)


def test_serial_scatter_of_many_updates_keeps_all_digits() -> None:
    func, many = make.scattered_rows("add", bf16), 1 << 12
    s = Schedule(func)
    s.apply("serial_scatter", block="total_1")
    x, where, updates = np.zeros((1, 1)), np.zeros((many, 1), np.int64), np.ones((many, 1))
    arrays = [x.astype(bf16.numpy), where, updates.astype(bf16.numpy)]
    assert outputs_of(s.func, {"n": 1, "m": many, "w": 1}, arrays)[0] == many


def test_serial_scatter_has_no_loop_over_results_and_updates() -> None:
    s = Schedule(make.scattered_rows("max"))
    s.apply("serial_scatter", block="total_1")
    assert [x.var.name for x in loops(s.func.body)].count("total_1_i") == 0


@pytest.mark.parametrize("language", ["c", "opencl"])
def test_fallback_of_scatters_without_doubles_keeps_pairs(language: str) -> None:
    for stored, limits in ((f32, {}), (f32, {"doubles": 0}), (i8, {"doubles": 0})):
        s = next(fallback.sketches(make.scattered_rows("add", stored), HardwareInfo.from_limits(language, limits)))[1]
        serial = any(step.primitive == "serial_scatter" for step in s.trace.steps)
        assert serial == (stored is i8 or not limits)
        assert all(b.body.buffer.dtype is not f64 for b in blocks(s.func.body)) or not limits


def own_position() -> PrimFunc:
    """Sums of the terms whose index is the position, where the terms depend on the position too."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("own")
    where, x, y = b.input("I", (m,), i64), b.input("A", (n, m)), b.output("Y", (n,))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + select(eq(where[k], i), x[i, k], const(0.0)), name="sum")
    return b.finish()


def guarded() -> PrimFunc:
    """Sums of terms by an index that is read only where a condition allows it."""
    m = Var("m")
    b = TensorBuilder("guarded")
    where, x, y = b.input("I", (m,), i64), b.input("A", (m,)), b.output("Y", (m,))

    def term(acc: Expr, i: Expr, k: Expr) -> Expr:
        return acc + select(and_(lt(k, m), eq(where[k], i)), x[k], const(0.0))

    b.reduce(y, (m + 3,), const(0.0), term, name="sum")
    return b.finish()


def even_places() -> PrimFunc:
    """Sums by an index that is computed, not read: each result has at most one term."""
    m = Var("m")
    b = TensorBuilder("even")
    x, y = b.input("A", (m,)), b.output("Y", (m,))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + select(eq(k * 2, i), x[k], const(0.0)), name="sum")
    return b.finish()


SCATTER = step("serial_scatter", block="total_1")
REFUSED = [
    refuse("another reduction", make.dot, step("serial_scatter", block="dot"), message="expects 'dot' to reduce"),
    refuse("terms of the position", own_position, step("serial_scatter", block="sum"), message="for its own position"),
    refuse("a guarded index", guarded, step("serial_scatter", block="sum"), message="for its own position"),
    refuse("a computed index", even_places, step("serial_scatter", block="sum"), message="for its own position"),
    refuse("parallel results", make.scattered_rows, step("set_kind", loop="total_1_i", kind="parallel"), SCATTER, message="serial loop"),
    refuse(
        "split updates", make.scattered_rows, step("split", loop="total_1_k", factors=[None, 4]), SCATTER,
        message="one loop per iterator",
    ),
    refuse("a second time", make.scattered_rows, SCATTER, SCATTER, message="expects 'total_1' to reduce"),
    refuse(
        "spreading its updates", make.scattered_rows, SCATTER, step("set_kind", loop="total_1_k", kind="parallel"),
        message="may write the same element",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.what)
def test_serial_scatter_of_other_forms_is_refused(case: Refusal) -> None:
    check(case)
