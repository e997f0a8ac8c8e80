"""Refusals of compute_at, reverse_compute_at and compute_inline, and regions that are easy to get wrong."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Tunable, Var, const, load, lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, loops, seq
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule


def softmax() -> PrimFunc:
    return zoo.softmax().func


def matmul() -> PrimFunc:
    return make.matmul(4, 6)


def shared_rows() -> PrimFunc:
    """T = A + 1; S[i] = T[i, 0]; C = T + S: the last block reads two intermediates."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("shared_rows")
    x, t, s, y = b.input("A", (n, m)), b.alloc("T", (n, m)), b.alloc("S", (n,)), b.output("C", (n, m))
    b.compute(t, lambda i, j: x[i, j] + 1.0, name="inc")
    b.reduce(s, (m,), const(0.0), lambda acc, i, k: acc + t[i, k], name="sum")
    b.compute(y, lambda i, j: t[i, j] + s[i], name="add")
    return b.finish()


def in_parts() -> PrimFunc:
    """An intermediate written by two blocks: B[0] = 1, B[1:] = A, then C = B + 1."""
    n = Var("n")
    a, t, c = Buffer("A", (n,), f32), Buffer("B", (n + 1,), f32), Buffer("C", (n + 1,), f32)
    i, j, k, vi, vj, vk = (Var(x) for x in ("i", "j", "k", "vi", "vj", "vk"))
    first = For(i, const(1), Block("first", (IterVar(vi, const(1)),), (i,), BufferStore(t, (vi,), const(1.0))))
    rest = For(j, n, Block("rest", (IterVar(vj, n),), (j,), BufferStore(t, (vj + 1,), load(a, (vj,)))))
    last = For(k, n + 1, Block("last", (IterVar(vk, n + 1),), (k,), BufferStore(c, (vk,), load(t, (vk,)) + 1.0)))
    return PrimFunc("in_parts", (a, c, n), 1, seq(first, rest, last), (t,))


def guarded() -> PrimFunc:
    """B = A where i < 3, and C = B for those."""
    a, t, c = Buffer("A", (const(5),), f32), Buffer("B", (const(5),), f32), Buffer("C", (const(3),), f32)
    i, j, vi, vj = (Var(x) for x in ("i", "j", "vi", "vj"))
    some = Block("some", (IterVar(vi, const(5)),), (i,), BufferStore(t, (vi,), load(a, (vi,))), None, lt(i, 3))
    copy = Block("copy", (IterVar(vj, const(3)),), (j,), BufferStore(c, (vj,), load(t, (vj,))))
    return PrimFunc("guarded", (a, c), 1, seq(For(i, const(5), some), For(j, const(3), copy)), (t,))


def first_rows() -> PrimFunc:
    """C has the first m of the n elements of B = A + 1."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("first_rows")
    b.scalar(m)
    x, t, y = b.input("A", (n + m,)), b.alloc("B", (n + m,)), b.output("C", (m,))
    b.scalar(n)
    b.compute(t, lambda i: x[i] + 1.0, name="inc")
    b.compute(y, lambda i: t[i] * 2.0, name="double")
    return b.finish()


REUSED = step("reuse_output", buffer="e", output="y")
PREPARED = (step("cache_read", block="mm", buffer="W"), step("mark_prepack", block="W_cache_copy"))

REFUSALS = [
    refuse("an unknown block", make.chain, step("compute_at", block="x", loop="inc_i"), message="block called 'x'"),
    refuse("move an output", make.chain, step("compute_at", block="inc", loop="double_i"), message="is an output"),
    refuse(
        "move with a reader outside",
        softmax,
        step("compute_at", block="exp", loop="div_i"),
        message="outside it: row_sum",
    ),
    refuse("move into its own nest", make.chain, step("compute_at", block="double", loop="double_i"), message="itself|inc"),
    refuse(
        "move after a split",
        make.chain,
        step("split", loop="double_i", factors=[None, 2]),
        step("compute_at", block="double", loop="inc_i"),
        message="one loop per iterator",
    ),
    refuse(
        "move out of a shared nest",
        softmax,
        step("fuse_sibling_loops", first="exp_i", second="row_sum_i"),
        step("compute_at", block="exp", loop="div_i"),
        message="has other statements",
    ),
    refuse("move under a condition", guarded, step("compute_at", block="some", loop="j"), message="run without a condition"),
    refuse("move one of two writers", in_parts, step("compute_at", block="first", loop="k"), message="another block wrote"),
    refuse(
        "move a decomposed sum",
        matmul,
        step("decompose_reduction", block="mm", loop="mm_i"),
        step("compute_at", block="mm", loop="relu_i"),
        message="another block wrote",
    ),
    refuse(
        "move past an overwrite",
        softmax,
        REUSED,
        step("compute_at", block="row_sum", loop="div_j"),
        message="after it was written again",
    ),
    refuse("move what runs once", matmul, *PREPARED, step("compute_at", block="W_cache_copy", loop="mm_i"), message="runs once"),
    refuse("reverse: a reduction", softmax, step("reverse_compute_at", block="row_sum", loop="exp_i"), message="is a reduction"),
    refuse("reverse: an unrelated block", make.chain, step("reverse_compute_at", block="double", loop="inc_i"), message="reads nothing"),
    refuse("reverse: unfinished", matmul, step("reverse_compute_at", block="relu", loop="mm_k"), message="not complete"),
    refuse(
        "reverse: after a split",
        matmul,
        step("split", loop="relu_i", factors=[None, 2]),
        step("reverse_compute_at", block="relu", loop="mm_i"),
        message="one loop per iterator",
    ),
    refuse("reverse: two regions", make.stencil, step("reverse_compute_at", block="pair", loop="square_i"), message="distinct iterators"),
    refuse("reverse: other positions", make.reverse, step("reverse_compute_at", block="flip", loop="inc_i"), message="distinct iterators"),
    refuse(
        "reverse: in place",
        softmax,
        REUSED,
        step("reverse_compute_at", block="div", loop="exp_i"),
        message="in place",
    ),
    refuse(
        "reverse: before what else it needs",
        shared_rows,
        step("reverse_compute_at", block="add", loop="inc_i"),
        message="cannot move before 'sum'",
    ),
    refuse("reverse: written in parts, first", in_parts, step("reverse_compute_at", block="last", loop="i"), message="before 'rest'"),
    refuse("reverse: written in parts, rest", in_parts, step("reverse_compute_at", block="last", loop="j"), message="reads nothing"),
    refuse(
        "reverse: digits of a fused loop",
        matmul,
        step("fuse", names=["mm_i", "mm_j"]),
        step("split", loop="mm_i_mm_j_fused", factors=[None, 3]),
        step("reverse_compute_at", block="relu", loop="mm_i_mm_j_fused_0"),
        message="not an interval",
    ),
    refuse(
        "reverse: strided tiles",
        make.chain,
        step("split", loop="double_i", factors=[3, None]),
        step("reorder", names=["double_i_1", "double_i_0"]),
        step("reverse_compute_at", block="inc", loop="double_i_1"),
        message="not an interval",
    ),
    refuse(
        "reverse: into what runs once",
        lambda: make.matmul(4, 6, epilogue=False),
        *PREPARED,
        step("cache_read", block="mm", buffer="W_cache"),
        step("reverse_compute_at", block="W_cache_cache_copy", loop="W_cache_copy_i"),
        message="runs once",
    ),
    refuse("inline a reduction", matmul, step("compute_inline", block="mm"), message="is a reduction"),
    refuse("inline an output", make.chain, step("compute_inline", block="inc"), message="is an output"),
    refuse("inline in parts", in_parts, step("compute_inline", block="first"), message="another block wrote"),
    refuse("inline shifted elements", in_parts, step("compute_inline", block="rest"), message="distinct spatial iterators"),
    refuse("inline under a condition", guarded, step("compute_inline", block="some"), message="run without a condition"),
    refuse(
        "inline after a split",
        make.chain,
        step("split", loop="double_i", factors=[None, 2]),
        step("compute_inline", block="double"),
        message="one loop per iterator",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_compute_location_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


SIZES = (0, 1, 3, 4, 5, 7)


@pytest.mark.parametrize("factors", [[None, 4], [4, None], [2, None, 2]])
def test_regions_of_falling_indices(factors: list[int | None]) -> None:
    s = Schedule(make.reverse())
    parts = s.split("flip_i", factors)
    s.compute_at("inc", parts[0])
    for n in SIZES:
        assert_same_meaning(make.reverse(), s.func, {"n": n})


def test_compute_at_under_split_loop_computes_one_tile() -> None:
    tile = Tunable("T", (2, 3))
    s = Schedule(make.chain())
    i_0, _ = s.split("inc_i", [None, tile])
    new_loops = s.compute_at("double", i_0)
    assert [str(s.extent(x)) for x in new_loops] == ["T", "m"]
    for n in SIZES:
        for t in tile.domain:
            assert_same_meaning(make.chain(), s.func, {"n": n, "m": 3}, tunables={tile: t})


def test_compute_at_of_readers_with_different_guards_covers_both() -> None:
    s = Schedule(shared_rows())
    s.fuse_sibling_loops("sum_i", "add_i")
    s.split("add_j", [None, 4])
    s.split("sum_k", [None, 3])
    s.compute_at("inc", "sum_i")
    for n, m in ((0, 3), (1, 1), (2, 5), (3, 8)):
        assert_same_meaning(shared_rows(), s.func, {"n": n, "m": m})


def test_reverse_compute_at_of_partial_consumer_keeps_range() -> None:
    s = Schedule(first_rows())
    s.reverse_compute_at("double", "inc_i")
    assert str(find_block(s.func, "double").predicate) == "inc_i < m"
    for n, m in ((0, 1), (2, 3), (4, 0)):
        assert_same_meaning(first_rows(), s.func, {"n": n, "m": m})


def test_compute_at_leaves_no_empty_loops() -> None:
    s = Schedule(make.chain())
    s.compute_at("double", "inc_j")
    assert [x.var.name for x in loops(s.func.body)] == ["inc_i", "inc_j"]


def test_compute_inline_removes_buffer() -> None:
    s = Schedule(make.softmax_mask())
    s.compute_inline("add_mask")
    assert "T" not in [b.name for b in s.func.allocs]
    assert_same_meaning(make.softmax_mask(), s.func, {"b": 2, "n": 5})
