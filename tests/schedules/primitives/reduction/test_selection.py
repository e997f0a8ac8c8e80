"""Quadratic selection: what it computes, how much it does, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import outputs_of

from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64, i8, i32, i64, u8, u32, u64
from relax_tune.ir.core.expr import Var, const, eq, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.reduction.scan import counts_ahead
from relax_tune.schedules.loop_tree import enclosing, find_block
from relax_tune.schedules.rules.cpu import selection
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

TYPES = (f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64)
SHAPES = ((0, 3, 0), (1, 1, 1), (3, 0, 0), (5, 7, 7), (2, 33, 5), (4, 9, 0), (2, 3, 5))


def elements(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray[Any, Any]:
    """Few different numbers, the ends of the type, and for floats NaN, infinities, denormals and both zeros."""
    drawn = rng.integers(0, 4, shape).astype(dtype.numpy)
    if dtype.is_float:
        least = ml_dtypes.finfo(dtype.numpy).smallest_subnormal
        special = [np.nan, -np.nan, np.inf, -np.inf, -0.0, -1.5, least, -least]
    else:
        special = [np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max]
    for value in special:
        drawn[rng.random(shape) < 0.15] = value
    return drawn


def selected(func: PrimFunc, size: int) -> PrimFunc:
    s = Schedule(func)
    s.apply("quadratic_select", block="find", factor=size)
    return s.func


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_quadratic_select_any_type_keeps_the_order(axis: int, largest: bool, stored: DType) -> None:
    func, rng = make.top_places(axis, largest, stored), np.random.default_rng(5)
    for size, (n, m, k) in itertools.product((1, 4), SHAPES):
        dims = {"n": n, "m": m, "k": k if axis == 1 else min(n, k)}
        arrays = [elements(rng, (n, m), stored)]
        (expected,), (actual,) = outputs_of(func, dims, arrays), outputs_of(selected(func, size), dims, arrays)
        assert np.array_equal(actual, expected), (size, dims, arrays)


def test_quadratic_select_leaves_no_loops_over_pairs() -> None:
    scheduled = selected(make.top_places(), 8)
    assert not any(x.var.name.startswith("rank_1_k") for x in loops(scheduled.body))
    path = [x.extent for x in enclosing(scheduled, find_block(scheduled, "find_seek"))]
    assert path[-1] is const(8) and len(path) == 3


@pytest.mark.parametrize("language", ["c", "opencl"])
def test_selection_rule_keeps_the_order(language: str) -> None:
    func, rng = make.top_places(), np.random.default_rng(6)
    schedules = [s for _, s in selection.sketches(func, HardwareInfo.from_limits(language, {})) if s.tunables]
    assert schedules
    for s in schedules:
        size = min(s.tunables["C"].domain)
        arrays = [elements(rng, (3, 41), f32)]
        dims = {"n": 3, "m": 41, "k": 41}
        (expected,), (given,) = (
            outputs_of(func, dims, arrays),
            outputs_of(s.func, dims, arrays, {s.tunables["C"]: size}),
        )
        assert np.array_equal(given, expected)


def other_ranks() -> PrimFunc:
    """Places by numbers that are given, not counted."""
    n = Var("n")
    b = TensorBuilder("given")
    ranks, y = b.input("R", (n,), i64), b.output("Y", (n,), i64)
    b.reduce(y, (n,), const(0), lambda old, i, k: old + select(eq(ranks[k], i), k, const(0)), name="find")
    return b.finish()


def ranked(terms: int, picked: int, again: bool = False) -> PrimFunc:
    """Places by ranks of six elements, counted or picked over fewer, or of elements that are written again."""
    b = TensorBuilder("partly")
    x, y = b.input("X", (6,), i32), b.output("Y", (6,), i64)
    z, r = b.output("Z", (6,), i32), b.alloc("R", (6,), i64)
    b.compute(z, lambda i: x[i] + const(1, i32), name="before")
    b.reduce(
        r, (terms,), const(0),
        lambda old, i, k: old + select(counts_ahead(z[i], z[k], i, k, True), const(1), const(0)), name="rank",
    )  # fmt: skip
    if again:
        b.compute(z, lambda i: const(0, i32) - x[i], name="after")
    b.reduce(y, (picked,), const(0), lambda old, j, k: old + select(eq(r[k], j), k, const(0)), name="find")
    return b.finish()


SELECT = step("quadratic_select", block="find", factor=4)
REFUSED = [
    refuse("the ranking", make.top_places, step("quadratic_select", block="rank_1", factor=4), message="to pick places by ranks"),
    refuse("ranks that are given", other_ranks, SELECT, message="to pick places by ranks"),
    refuse("ranks among fewer", lambda: ranked(3, 6), SELECT, message="all elements of a row"),
    refuse("a pick among fewer", lambda: ranked(6, 3), SELECT, message="all elements of a row"),
    refuse("elements written again", lambda: ranked(6, 6, again=True), SELECT, message="'Z' is written again"),
    refuse("a factor of 0", make.top_places, step("quadratic_select", block="find", factor=0), message="positive factor"),
    refuse(
        "split loops", make.top_places, step("split", loop="find_j", factors=[None, 4]), SELECT, message="one loop per iterator",
    ),
    refuse("parallel rows", make.top_places, step("set_kind", loop="rank_1_i", kind="parallel"), SELECT, message="serial loop"),
    refuse("a second time", make.top_places, SELECT, SELECT, message="to pick places by ranks"),
    refuse(
        "spreading its results", make.top_places, SELECT, step("set_kind", loop="find_j", kind="parallel"),
        message="may write the same element",
    ),
    refuse("its blocks separated", make.top_places, SELECT, step("fission", loop="find_j", block="find"), message="fission"),
    refuse("a stored key inlined", make.top_places, SELECT, step("compute_inline", block="find_take_place"), message="find_take_place"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda r: r.what)
def test_quadratic_select_refusal_says_why(case: Refusal) -> None:
    check(case)
