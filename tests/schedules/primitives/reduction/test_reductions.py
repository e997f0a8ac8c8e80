"""Refusals of decompose_reduction, rfactor and tree_reduce, and reductions that are easy to get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.expr import Tunable, Var, const, maximum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks, loops, seq
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.loop_tree import rebind
from relax_tune.schedules.schedule import Schedule


def row_sum() -> PrimFunc:
    return zoo.row_sum().func


def row_max() -> PrimFunc:
    return zoo.row_max().func


def matmul() -> PrimFunc:
    return make.matmul(4, 6)


def clipped() -> PrimFunc:
    """max(0, row maximum): an initial value that is not neutral but may be combined twice."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("clipped")
    x, y = b.input("A", (n, m)), b.output("B", (n,))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: maximum(acc, x[i, k]), name="max")
    return b.finish()


def two_axes() -> PrimFunc:
    """Sums over the last two of (n, m, 3)."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("two_axes")
    x, y = b.input("A", (n, m, 3)), b.output("B", (n,))
    b.reduce(y, (m, 3), const(0.0), lambda acc, i, p, q: acc + x[i, p, q], name="sum")
    return b.finish()


def fixed_axes() -> PrimFunc:
    """Sums over the last two of (5, 4, 3)."""
    b = TensorBuilder("fixed_axes")
    x, y = b.input("A", (5, 4, 3)), b.output("B", (5,))
    b.reduce(y, (4, 3), const(0.0), lambda acc, i, p, q: acc + x[i, p, q], name="sum")
    return b.finish()


def difference() -> PrimFunc:
    """B = B - A over a row: subtraction is not associative."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("difference")
    x, y = b.input("A", (n, m)), b.output("B", (n,))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc - x[i, k], name="sub")
    return b.finish()


def running() -> PrimFunc:
    """Row sums, and what they are at each step: a block that no primitive would put there reads them on the way."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("running")
    x, y, z = b.input("A", (n, m)), b.output("B", (n,)), b.output("C", (n, m))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + x[i, k], name="sum")
    b.compute(z, lambda i, j: y[i] + 0.0, name="seen")
    func = b.finish()
    rows, steps, _, columns = loops(func.body)
    body = rebind(columns.body, dict(zip([p.var for p in loops(func.body)[2:]], [rows.var, steps.var])))
    return replace(func, body=replace(rows, body=replace(steps, body=seq(steps.body, body))))


DECOMPOSED = step("decompose_reduction", block="mm", loop="mm_i")

REFUSALS = [
    refuse("decompose a spatial block", matmul, step("decompose_reduction", block="relu", loop="relu_i"), message="no initial"),
    refuse("decompose twice", matmul, DECOMPOSED, DECOMPOSED, message="no initial value"),
    refuse("decompose at a loop of another block", matmul, step("decompose_reduction", block="mm", loop="relu_i"), message="not around"),
    refuse(
        "decompose inside the reduction",
        matmul,
        step("split", loop="mm_k", factors=[None, 2]),
        step("decompose_reduction", block="mm", loop="mm_k_1"),
        message="starts outside",
    ),
    refuse(
        "decompose around a repetition",
        lambda: zoo.softmax().func,
        step("compute_at", block="row_sum", loop="div_j"),
        step("decompose_reduction", block="row_sum", loop="div_i"),
        message="'div_j' may repeat",
    ),
    refuse(
        "rfactor a difference",
        difference,
        step("rfactor", block="sub", loop="sub_k"),
        message="op one of",
    ),
    refuse(
        "rfactor a sum that is read on the way",
        running,
        step("rfactor", block="sum", loop="sum_k"),
        message="which 'seen' touches",
    ),
    refuse("rfactor an initial value twice", make.dot, step("rfactor", block="dot", loop="dot_k"), message="once per accumulator"),
    refuse("rfactor a row", matmul, step("rfactor", block="mm", loop="mm_i"), message="feed one reduction"),
    refuse("rfactor by an unrelated loop", matmul, step("rfactor", block="mm", loop="relu_i"), message="feed one reduction"),
    refuse(
        "rfactor digits",
        two_axes,
        step("fuse", names=["sum_k", "sum_k1"]),
        step("rfactor", block="sum", loop="sum_k_sum_k1_fused"),
        message="feed one reduction",
    ),
    refuse(
        "rfactor next to a loop over elements and steps",
        fixed_axes,
        step("reorder", names=["sum_k", "sum_i", "sum_k1"]),
        step("fuse", names=["sum_k", "sum_i"]),
        step("rfactor", block="sum", loop="sum_k1"),
        message="'sum_k_sum_i_fused' over both",
    ),
    refuse(
        "rfactor a loop whose length a loop around changes",
        lambda: make.matmul(3, 5, epilogue=True),
        step("cache_write", block="mm", scope="global"),
        step("pad", block="mm", factors=[2, None, None]),
        step("compute_inline", block="C_local_pad_take"),
        step("split", loop="mm_i", factors=[None, 2]),
        step("reorder", names=["mm_i_0", "mm_k", "mm_i_1", "mm_j"]),
        step("reverse_compute_at", block="C_write", loop="mm_i_0"),
        step("stream_k", block="mm", tiles=["mm_i_0"], steps="mm_k", workers=3),
        step("rfactor", block="C_write_sum", loop="C_write_sum_r", scope="global"),
        message="as many accumulators for every element",
    ),
    refuse("tree of a spatial block", matmul, step("tree_reduce", block="relu"), message="expected `C = op"),
    refuse("tree of two axes", two_axes, step("tree_reduce", block="sum"), message="one reduction iterator"),
    refuse("tree after decomposition", matmul, DECOMPOSED, step("tree_reduce", block="mm"), message="its initial value"),
    refuse("tree of unknown size", row_sum, step("tree_reduce", block="row_sum"), message="small constant extent"),
    refuse("tree of many", lambda: make.matmul(4, 65), step("tree_reduce", block="mm"), message="small constant extent"),
    refuse(
        "tree of a split loop",
        matmul,
        step("split", loop="mm_k", factors=[None, 2]),
        step("tree_reduce", block="mm"),
        message="innermost",
    ),
    refuse(
        "tree under a row",
        matmul,
        step("reorder", names=["mm_k", "mm_j"]),
        step("tree_reduce", block="mm"),
        message="innermost",
    ),
    refuse(
        "tree from a biased start",
        lambda: biased(4),
        step("tree_reduce", block="sum"),
        message="not neutral",
    ),
]  # fmt: skip


def biased(count: int) -> PrimFunc:
    n = Var("n")
    b = TensorBuilder("biased")
    x, y = b.input("A", (n, count)), b.output("B", (n,))
    b.reduce(y, (count,), const(2.0), lambda acc, i, k: acc + x[i, k], name="sum")
    return b.finish()


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_reductions_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


ROWS = ({"n": 3, "m": 1}, {"n": 1, "m": 2}, {"n": 0, "m": 3}, {"n": 2, "m": 4}, {"n": 2, "m": 13})


@pytest.mark.parametrize("factors", [[None, 4], [4, None], [None, 2, 4]])
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("func", [row_sum, row_max, clipped])
def test_rfactor_with_empty_accumulators_keeps_meaning(func: object, which: int, factors: list[int | None]) -> None:
    # rows shorter than the number of accumulators: each of them must still hold a neutral value
    assert callable(func)
    start = func()
    s = Schedule(start)
    name = s.func.body.body.body.name
    parts = s.split(f"{name}_k", factors)
    s.apply("rfactor", block=name, loop=parts[which])
    for dims in ROWS:
        assert_same_meaning(start, s.func, dims)


def test_a_whole_reduction_loop_as_accumulators() -> None:
    s = Schedule(row_sum())
    s.apply("rfactor", block="row_sum", loop="row_sum_k", scope="global")
    for dims in ROWS:
        assert_same_meaning(row_sum(), s.func, dims)


def test_one_of_two_reduction_axes() -> None:
    for loop in ("sum_k", "sum_k1"):
        s = Schedule(two_axes())
        if loop == "sum_k":
            s.reorder(["sum_k1", "sum_k"])
        s.apply("rfactor", block="sum", loop=loop)
        for dims in ROWS:
            assert_same_meaning(two_axes(), s.func, dims)


@pytest.mark.parametrize("func", [row_sum, row_max, clipped, lambda: biased(7)])
@pytest.mark.parametrize("which", [0, 1])
def test_accumulators_after_decomposition(func: Callable[[], PrimFunc], which: int) -> None:
    # the initial value is stored already, and combined once: the accumulators start from what changes nothing
    s = Schedule(func())
    name = blocks(s.func.body)[0].name
    s.apply("decompose_reduction", block=name, loop=f"{name}_k")
    s.apply("rfactor", block=name, loop=s.split(f"{name}_k", [None, 4])[which])
    for dims in ROWS:
        assert_same_meaning(func(), s.func, dims)


def test_accumulators_around_loops_over_elements() -> None:
    # chunks of steps outermost, strips of columns and several steps inside, as the rule for long reductions has it
    factor, strip = Tunable("T", (2, 3)), Tunable("W", (2, 4))
    start = make.column_extremes()
    s = Schedule(start)
    chunk, inside = s.split("top_k", [None, 4])
    several, row = s.split(inside, [None, factor])
    outer, lanes = s.split("top_i", [None, strip])
    s.reorder([chunk, outer, several, row, lanes])
    s.apply("rfactor", block="top", loop=chunk, scope="global")
    s.apply("rfactor", block="top_rf", loop=row)
    assert loops(s.func.body)[0].var.name == chunk, "accumulators of chunks are set inside these"
    for dims in ({"n": 13, "m": 5}, {"n": 4, "m": 4}, {"n": 1, "m": 3}, {"n": 0, "m": 2}, {"n": 3, "m": 0}):
        for f in factor.domain:
            for w in strip.domain:
                assert_same_meaning(start, s.func, dims, tunables={factor: f, strip: w})


def test_accumulators_of_accumulators_end_in_a_tree() -> None:
    # vectors of accumulators, then the lanes of one vector
    lanes = Tunable("T", (4, 8))
    s = Schedule(row_sum())
    _, c_1 = s.split("row_sum_k", [None, lanes])
    s.apply("rfactor", block="row_sum", loop=c_1)
    _, r_1 = s.split(s.loops_of("row_sum")[-1], [None, 4], divides=True)
    s.apply("rfactor", block="row_sum", loop=r_1)
    s.apply("tree_reduce", block="row_sum")
    for dims in ROWS:
        for width in lanes.domain:
            assert_same_meaning(row_sum(), s.func, dims, tunables={lanes: width})


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_trees_of_any_size(count: int) -> None:
    n = Var("n")
    b = TensorBuilder("small")
    x, y = b.input("A", (n, count)), b.output("B", (n,))
    b.reduce(y, (count,), const(-math.inf), lambda acc, i, k: maximum(acc, x[i, k]), name="max")
    func = b.finish()
    s = Schedule(func)
    s.apply("tree_reduce", block="max")
    for size in (0, 1, 3):
        assert_same_meaning(func, s.func, {"n": size})


def test_decompose_reduction_of_mixed_loop_keeps_guard() -> None:
    s = Schedule(make.row_sum_of_six())
    fused = s.fuse(["row_sum_i", "row_sum_k"])
    parts = s.split(fused, [None, 4])
    s.apply("decompose_reduction", block="row_sum", loop=parts[0])
    for n in (0, 1, 3, 9):
        assert_same_meaning(make.row_sum_of_six(), s.func, {"n": n})
