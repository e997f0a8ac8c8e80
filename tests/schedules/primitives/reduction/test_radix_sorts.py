"""Radix sorts: what they compute, how much they do, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.reduction.test_selection import TYPES, elements, other_ranks, ranked
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES
from tests.support.effort import thinned
from tests.support.meaning import outputs_of

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import DType, bf16, bool_, f16, f32, f64, i8, i16, i32, i64, u16
from relax_tune.ir.core.expr import Expr, Var, as_int, const, eq, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.reduction.scan import TopK, counts_ahead
from relax_tune.schedules.primitives.reduction.radix_sorts import key_bits
from relax_tune.schedules.rules.cpu import fallback, selection
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ALL = (*TYPES, bool_, i16, u16)
SHAPES = ((0, 3, 0), (1, 1, 1), (3, 0, 0), (3, 7, 7), (2, 23, 5), (2, 5, 0))
LARGE = ((3, 301, 301), (2, 1000, 17), (1, 5000, 5000), (3, 0, 0), (1, 1, 1))


def mixed(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray[Any, Any]:
    """Few different elements with the ends of the type, and half of them with any bits."""
    if dtype is bool_:
        return rng.random(shape) < 0.5
    drawn, size = elements(rng, shape, dtype), dtype.bytes * int(np.prod(shape))
    bits = np.frombuffer(rng.bytes(size), dtype.numpy).reshape(shape)
    return np.where(rng.random(shape) < 0.5, bits, drawn).astype(dtype.numpy)


def ordered(func: PrimFunc, digit_bits: int) -> PrimFunc:
    s = Schedule(func)
    s.apply("radix_sort", block="find", digit_bits=digit_bits)
    return s.func


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stored", ALL, ids=str)
def test_radix_sort_any_type_keeps_the_order(axis: int, largest: bool, stored: DType) -> None:
    func, rng = make.top_places(axis, largest, stored), np.random.default_rng(5)
    scheduled = ordered(func, 5 if axis else 4)
    verify(scheduled)
    for n, m, k in SHAPES:
        dims = {"n": n, "m": m, "k": k if axis == 1 else min(n, k)}
        arrays = [mixed(rng, (n, m), stored)]
        (expected,), (actual,) = outputs_of(func, dims, arrays), outputs_of(scheduled, dims, arrays)
        assert np.array_equal(actual, expected), (dims, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("digit_bits", [1, 8, 11])
def test_radix_sort_digits_of_any_size_keep_the_order(digit_bits: int) -> None:
    func, dims = make.top_places(stored=i8), {"n": 1, "m": 13, "k": 13}
    arrays = [elements(np.random.default_rng(digit_bits), (1, 13), i8)]
    (expected,), (actual,) = outputs_of(func, dims, arrays), outputs_of(ordered(func, digit_bits), dims, arrays)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("given", [[], [3, 5]])
def test_radix_sort_more_places_than_elements_are_zero(given: list[int]) -> None:
    func, dims = make.top_places(stored=i8), {"n": 1, "m": len(given), "k": 4}
    arrays = [np.array([given], np.int8)]
    assert outputs_of(ordered(func, 4), dims, arrays)[0].tolist() == [[len(given) // 2, 0, 0, 0]]


def test_radix_sort_passes_follow_the_bits_of_keys() -> None:
    assert [key_bits(t) for t in (bool_, i8, bf16, f16, i32, f64)] == [1, 8, 16, 16, 32, 64]
    for stored, digit_bits, passes in ((i8, 8, 1), (bf16, 8, 2), (f16, 8, 2), (f32, 8, 4), (f32, 11, 3), (i64, 11, 6)):
        scheduled = ordered(make.top_places(stored=stored), digit_bits)
        assert sum(x.var.name.startswith("find_element_") for x in loops(scheduled.body)) == passes


def test_radix_sort_leaves_no_loops_over_pairs() -> None:
    m = Var("m")
    scheduled = ordered(TopK(m, 0).legalize("order", [TensorInfo((m,), f32)]), 8)
    for x in loops(scheduled.body):
        inside = [y for y in loops(x.body) if as_int(y.extent) is None]
        assert as_int(x.extent) is not None or not inside


def test_radix_sort_known_length_keeps_places_in_32_bits() -> None:
    places = [a.dtype for a in ordered(top(const(5), const(100)), 8).allocs if "places" in a.name]
    assert places == [i32, i32]
    places = [a.dtype for a in ordered(make.top_places(), 8).allocs if "places" in a.name]
    assert places == [i64, i64]


def top(k: Expr, length: Expr) -> PrimFunc:
    return TopK(k, 1).legalize("top", [TensorInfo((Var("rows"), length), f32)])


@pytest.mark.parametrize(
    ("k", "length", "radix"),
    [
        (Var("m"), Var("m"), True),
        (Var("k"), Var("m"), True),
        (const(5), Var("m"), False),
        (const(500), Var("m"), True),
        (const(5), const(100), True),
        (const(5), const(50_000), False),
        (const(1000), const(1000), True),
    ],
)
def test_rules_number_of_places_decides_the_first_form(k: Expr, length: Expr, radix: bool) -> None:
    machine, func = MACHINES["c"], top(k, length)
    names = [name for name, _ in selection.sketches(func, machine)]
    assert names[0].startswith("selection.radix_" if radix else "selection.chunks")
    assert len([n for n in names if "radix" in n]) == 4 and len([n for n in names if "chunks" in n]) == 2
    steps = [x.primitive for x in next(fallback.sketches(func, machine))[1].trace.steps]
    assert ("radix_sort" in steps, "quadratic_select" in steps) == (radix, not radix)


def test_fallback_few_elements_counts_ranks() -> None:
    steps = [x.primitive for x in next(fallback.sketches(top(const(8), const(8)), MACHINES["c"]))[1].trace.steps]
    assert not {"radix_sort", "quadratic_select"} & set(steps)


def test_fallback_gpu_keeps_ranks() -> None:
    machine = HardwareInfo.from_limits("opencl", {"warp": 32})
    steps = [x.primitive for x in next(fallback.sketches(make.top_places(), machine))[1].trace.steps]
    assert "radix_sort" not in steps


def sort_on(language: str, stored: DType) -> None:
    """Sort large rows of any bits in every form that the rules have, and compare with NumPy."""
    device, rng = opened(language), np.random.default_rng(8)
    try:
        for axis, largest in ((1, True), (0, False)):
            func = make.top_places(axis, largest, stored)
            schedules = [*selection.sketches(func, MACHINES[language]), *fallback.sketches(func, MACHINES[language])]
            forms = [(name, s.func) for name, s in schedules if not s.tunables]
            kernels = Compiled.together(device, language, [f for _, f in forms])
            for rows, length, k in LARGE:
                shape = (rows, length) if axis else (length, rows)
                x = mixed(rng, shape, stored)
                places = np.zeros((rows, k) if axis else (k, rows), np.int64)
                with np.errstate(invalid="ignore"):  # signalling NaN
                    expected = TopK(const(k), axis, largest).evaluate([x])
                for (name, _), kernel in zip(forms, kernels, strict=True):
                    assert np.array_equal(kernel([x, places])[0], expected), (name, shape, k)
    finally:
        device.close()


@pytest.mark.ccompiler
@pytest.mark.parametrize("stored", thinned(ALL, 3), ids=str)
def test_radix_sort_c_any_bits_match_numpy(stored: DType) -> None:
    sort_on("c", stored)


@pytest.mark.opencl
@pytest.mark.parametrize("stored", thinned([f16, i8, f32, f64, i64], 3), ids=str)
def test_radix_sort_opencl_any_bits_match_numpy(stored: DType) -> None:
    sort_on("opencl", stored)


def squares(stored: DType) -> PrimFunc:
    """Places by the squares of elements, the smallest first."""
    n, b = Var("n"), TensorBuilder("squares")
    x, y = b.input("X", (n,), stored), b.output("Y", (n,), i64)
    z, r = b.alloc("Z", (n,), stored), b.alloc("R", (n,), i64)
    b.compute(z, lambda i: x[i] * x[i], name="square")
    b.reduce(
        r, (n,), const(0),
        lambda old, i, k: old + select(counts_ahead(z[i], z[k], i, k, False), const(1), const(0)), name="rank",
    )  # fmt: skip
    b.reduce(y, (n,), const(0), lambda old, j, k: old + select(eq(r[k], j), k, const(0)), name="find")
    return b.finish()


@pytest.mark.ccompiler
@pytest.mark.parametrize("stored", [f16, bf16], ids=str)
def test_radix_sort_computed_halves_are_sorted_as_rounded(stored: DType) -> None:
    scheduled = selection.build_sort(squares(stored), MACHINES["c"], 8, False)
    assert [step.primitive for step in scheduled.trace.steps][:2] == ["compute_inline", "radix_sort"]
    device = opened("c")
    x = np.random.default_rng(3).standard_normal(5000).astype(stored.numpy)
    rounded = (x.astype(np.float32) ** 2).astype(stored.numpy).astype(np.float32)
    actual = Compiled(device, "c", scheduled.func)([x, np.zeros(5000, np.int64)])[0]
    device.close()
    assert np.array_equal(actual, np.argsort(rounded, kind="stable"))


def small() -> PrimFunc:
    return make.top_places(stored=i8)


SORT = step("radix_sort", block="find", digit_bits=4)
REFUSED = [
    refuse("the ranking", make.top_places, step("radix_sort", block="rank_1", digit_bits=4), message="to pick places by ranks"),
    refuse("ranks that are given", other_ranks, SORT, message="to pick places by ranks"),
    refuse("ranks among fewer", lambda: ranked(3, 6), SORT, message="all elements of a row"),
    refuse("elements written again", lambda: ranked(6, 6, again=True), SORT, message="'Z' is written again"),
    refuse("digits without bits", make.top_places, step("radix_sort", block="find", digit_bits=0), message="digits of 1 to 16 bits"),
    refuse("digits of 17 bits", make.top_places, step("radix_sort", block="find", digit_bits=17), message="digits of 1 to 16 bits"),
    refuse("parallel rows", make.top_places, step("set_kind", loop="rank_1_i", kind="parallel"), SORT, message="serial loop"),
    refuse("a second time", make.top_places, SORT, SORT, message="to pick places by ranks"),
    refuse(
        "spreading a pass", small, SORT, step("set_kind", loop="find_element_0", kind="parallel"),
        message="may write the same element",
    ),
    refuse(
        "spreading counts", small, SORT, step("set_kind", loop="find_count_c", kind="parallel"),
        message="may write the same element",
    ),
    refuse(
        "spreading sums of counts", small, SORT, step("set_kind", loop="find_digit_1", kind="vectorized"),
        message="feeds the reduction iterator",
    ),
    refuse("a separated pass", small, SORT, step("fission", loop="find_element_0", block="find_move_0"), message="fission"),
    refuse("a separated sum", small, SORT, step("fission", loop="find_digit_0", block="find_first_0"), message="fission"),
    refuse("two passes at once", small, SORT, step("fuse_sibling_loops", first="find_element_0", second="find_element_1"), message="needs"),
    refuse("a position inlined", small, SORT, step("compute_inline", block="find_first_0"), message="find_first_0"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda r: r.what)
def test_radix_sort_refusal_says_why(case: Refusal) -> None:
    check(case)
