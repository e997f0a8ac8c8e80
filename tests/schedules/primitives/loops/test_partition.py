"""Refusals of partition and fission, what partition makes of split, reduced and local things; its main loop has no predicate."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import TRUE, Tunable, as_int, const, minimum, substitute
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import block_loads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import simplify_func


def step_of(loop: str, factor: int = 4) -> tuple[str, dict[str, object]]:
    return step("partition", loop=loop, factor=factor)


REFUSALS = [
    refuse("by nothing", make.chain, step_of("inc_i", 0), message="positive factor, got 0"),
    refuse("a marked loop", make.chain, step("set_kind", loop="inc_i", kind="parallel"), step_of("inc_i"), message="marked parallel"),
    refuse("around a grid axis", make.chain, step("set_kind", loop="inc_j", kind="group"), step_of("inc_i"), message="grid axis 'inc_j'"),
    refuse(
        "a nest that runs once",
        lambda: make.matmul(4, 6, epilogue=False),
        step("cache_read", block="mm", buffer="W"),
        step("mark_prepack", block="W_cache_copy"),
        step_of("W_cache_copy_i"),
        message="runs once",
    ),
    refuse(
        "a loop of elements and reduction points",
        lambda: make.matmul(4, 6, epilogue=False),
        step("fuse", names=["mm_j", "mm_k"]),
        step_of("mm_j_mm_k_fused"),
        message="either spatial or reduction iterators of 'mm'",
    ),
    refuse("fission of one statement", make.chain, step("fission", loop="inc_i", block="inc"), message="behind the one with 'inc'"),
    refuse("fission at a loop of another block", make.chain, step("fission", loop="inc_i", block="double"), message="in it are inc"),
    refuse(
        "fission of what overlaps",
        make.stencil,
        step("split", loop="pair_i", factors=[None, 4]),
        step("compute_at", block="square", loop="pair_i_0"),
        step("fission", loop="pair_i_0", block="square"),
        message="fission .*'pair_i_0' see elements of 'B'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_partition_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def test_the_main_loop_splits_without_a_predicate() -> None:
    for factor in (4, Tunable("T", (2, 4))):
        s = Schedule(make.pointwise(2))
        loop = s.fuse(["squash_i", "squash_j"])
        s.apply("partition", loop=loop, factor=factor)
        _, inner = s.split(loop, [None, factor])
        s.vectorize(inner)
        assert all(b.predicate is TRUE for b in blocks(s.func.body))
        values = {factor: 2} if isinstance(factor, Tunable) else {}
        for n, m in ((0, 3), (1, 1), (3, 5), (2, 8)):
            assert_same_meaning(make.pointwise(2), s.func, {"n": n, "m": m}, tunables=values)


def test_a_split_reduction_goes_on_in_the_tail() -> None:
    s = Schedule(make.two_outputs())
    outer, inner = s.split("sum_k", [None, 4])
    for loop in (inner, outer, "sum_i"):
        s.apply("partition", loop=loop, factor=3)
    for n, m in ((0, 3), (1, 0), (2, 1), (4, 12), (5, 13)):
        assert_same_meaning(make.two_outputs(), s.func, {"n": n, "m": m})


def test_simplified_main_loop_without_iterations_stores_initial_value() -> None:
    """In the main loop m is 4 at least, but the initial value is stored where it runs no iteration."""
    s = Schedule(make.two_outputs())
    s.apply("partition", loop="sum_k", factor=4)
    s.split("sum_i", [minimum(s.func.symbols[1], 4) + 1, None])
    plain = simplify_func(s.func)
    for n, m in ((5, 2), (16, 2), (6, 3), (3, 0), (7, 9)):
        assert_same_meaning(make.two_outputs(), plain, {"n": n, "m": m})


def test_partition_keeps_extents_where_the_main_loop_does_not_run() -> None:
    """With a last row, n is at least 1, but a copy of what the main loop reads has its dims where n is 0 too."""
    s = Schedule(make.two_outputs())
    n = s.func.symbols[0]
    s.apply("partition", loop="sum_i", at=n - minimum(n, 2))
    (block,) = [b for b in blocks(s.func.body) if b.name == "sum"]
    buffer = block_loads(block)[-1].buffer.name
    s.apply("reindex", block="sum", buffer=buffer, dims=[0])
    for size in (0, 1, 2, 5):
        (copied,) = [b for b in s.func.allocs if b.name == f"{buffer}_reindex"]
        assert as_int(substitute(copied.shape[0], {n: const(size)})) == max(size - 2, 0)
        assert_same_meaning(make.two_outputs(), s.func, {"n": size, "m": 3})


@pytest.mark.parametrize("first", [0, 1])
def test_partition_of_steps_next_to_fused_step_needs_first_iterations(first: int) -> None:
    """A loop over channels and taps has no place for initial values, which the main loop stores if it runs."""
    whole = lambda: make.convolution((2, 3), (2, 2), (5, "w"))
    s = Schedule(whole())
    s.reorder(["conv_k2", "conv_j", "conv_l", "conv_p", "conv_k1"])
    s.fuse(["conv_k2", "conv_j"])
    if first == 0:
        with pytest.raises(ScheduleError, match="use decompose_reduction first"):
            s.apply("partition", loop="conv_k1", at=first)
        return
    s.apply("partition", loop="conv_k1", at=first)
    assert_same_meaning(whole(), s.func, {"n": 1, "w": 3})


def test_partition_gives_tail_separate_local_buffers() -> None:
    s = Schedule(make.stencil())
    outer, _ = s.split("pair_i", [None, 4])
    s.compute_at("square", outer)
    s.apply("set_scope", buffer="B", scope="local")
    s.apply("partition", loop=outer, factor=2)
    assert [b.name for b in s.func.allocs] == ["B"], "iterations share an element, so the regions overlap"
    s = Schedule(make.chain())
    outer, _ = s.split("inc_i", [None, 4])
    s.compute_at("double", outer)
    s.apply("set_scope", buffer="B", scope="local")
    s.apply("partition", loop=outer, factor=2)
    assert [b.name for b in s.func.allocs] == ["B", "B_tail"]
    for n in (0, 1, 7, 8, 9):
        assert_same_meaning(make.chain(), s.func, {"n": n, "m": 3})


@pytest.mark.parametrize("decomposed", [False, True])
def test_partition_with_tail_of_at_most_one_element_keeps_meaning(decomposed: bool) -> None:
    """Simplified, the iterators of such a tail no longer name its loop, which still says whether there is a tail."""
    s = Schedule(make.mean_over_middle(5))
    s.reorder(["total_j", "total_k", "total_i"] if not decomposed else ["total_i", "total_k", "total_j"])
    s.apply("partition", loop="total_i", factor=2)
    func = simplify_func(s.func)
    if decomposed:
        after = Schedule(func)
        after.apply("decompose_reduction", block="total_tail", loop="total_i_tail")
        func = after.func
    for b, n in ((0, 0), (1, 0), (2, 0), (2, 3), (5, 0), (5, 2)):
        assert_same_meaning(make.mean_over_middle(5), func, {"b": b, "n": n})
