"""Refusals of the primitives on loops, and cases that they must accept."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.reduction.test_radix_sorts import MACHINES
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import TRUE, Tunable, Var, const, load
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Seq, Stmt, blocks, loops
from relax_tune.schedules.loop_tree import find_block, find_loop
from relax_tune.schedules.rules.cpu import fallback
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def row_sum() -> PrimFunc:
    return zoo.row_sum().func


def triangle() -> PrimFunc:
    """B[i, j] = A[i, j] below the diagonal of an (8, 8): an inner extent that depends on the outer loop."""
    a, b = Buffer("A", (const(8), const(8)), f32), Buffer("B", (const(8), const(8)), f32)
    i, j, vi, vj = Var("i"), Var("j"), Var("vi"), Var("vj")
    block = Block(
        "copy", (IterVar(vi, const(8)), IterVar(vj, const(8))), (i, j), BufferStore(b, (vi, vj), load(a, (vi, vj)))
    )
    return PrimFunc("triangle", (a, b), 1, For(i, const(8), For(j, i + 1, block)))


def mixed() -> PrimFunc:
    """Row sums with the row and the reduction in one loop."""
    s = Schedule(make.row_sum_of_six())
    s.fuse(["row_sum_i", "row_sum_k"])
    return s.func


def turns() -> PrimFunc:
    """A[p + 1, i] = A[p, 7 - i] + 1, row by row: each row reads the one before."""
    a, p, i, vp, vi = Buffer("A", (const(4), const(8)), f32), Var("p"), Var("i"), Var("vp"), Var("vi")
    block = Block(
        "turn",
        (IterVar(vp, const(3)), IterVar(vi, const(8))),
        (p, i),
        BufferStore(a, (vp + 1, vi), load(a, (vp, 7 - vi)) + 1.0),
    )
    return PrimFunc("turns", (a,), 1, For(p, const(3), For(i, const(8), block)))


def two_in_one(turned: bool, rows: bool = False) -> PrimFunc:
    """T = X, then Y = T, point by point in one loop, or row by row: of the same element, or row, or of the one from the end."""
    shape = (const(8), const(4)) if rows else (const(8),)
    x, t, y = (Buffer(n, shape, f32) for n in "XTY")
    i = Var("i")

    def copy(name: str, source: Buffer, target: Buffer, turned: bool) -> Stmt:
        vi, vj, j = Var("vi"), Var("vj"), Var(f"{name}_j")
        where = (vi, vj) if rows else (vi,)
        read = (7 - vi if turned else vi, *where[1:])
        iters = tuple(IterVar(v, n) for v, n in zip(where, shape))
        block = Block(name, iters, (i, j)[: len(where)], BufferStore(target, where, load(source, read)))
        return For(j, const(4), block) if rows else block

    body = Seq((copy("first", x, t, False), copy("second", t, y, turned)))
    return PrimFunc("two_in_one", (x, y), 1, For(i, const(8), body), allocs=(t,))


PARALLEL = step("set_kind", loop="inc_i", kind="parallel")
SPLIT_J = step("split", loop="inc_j", factors=[None, 4])

REFUSALS = [
    refuse("split an unknown loop", make.chain, step("split", loop="x", factors=[None, 2]), message="loop called 'x'"),
    refuse("split a marked loop", make.chain, PARALLEL, step("split", loop="inc_i", factors=[None, 2]), message="serial"),
    refuse("split without None", make.chain, step("split", loop="inc_i", factors=[2]), message="exactly one None"),
    refuse("split with two None", make.chain, step("split", loop="inc_i", factors=[None, None]), message="exactly one"),
    refuse("split by zero", make.chain, step("split", loop="inc_i", factors=[None, 0]), message="positive"),
    refuse("split by less", make.chain, step("split", loop="inc_i", factors=[-2, None]), message="positive"),
    refuse(
        "split by what does not divide",
        lambda: make.matmul(7, 3),
        step("split", loop="mm_j", factors=[None, 4], divides=True),
        message="does not divide",
    ),
    refuse("fuse marked loops", make.chain, PARALLEL, step("fuse", names=["inc_i", "inc_j"]), message="serial"),
    refuse("fuse unrelated loops", make.chain, step("fuse", names=["double_i", "inc_j"]), message="directly inside"),
    refuse("fuse inside out", make.chain, step("fuse", names=["inc_j", "inc_i"]), message="directly inside"),
    refuse("fuse a triangle", triangle, step("fuse", names=["i", "j"]), message="independent of each other"),
    refuse("fuse elements and steps", make.two_outputs, step("fuse", names=["sum_i", "sum_k"]), message="decompose_reduction"),
    refuse("reorder one twice", make.chain, step("reorder", names=["inc_i", "inc_i"]), message="distinct"),
    refuse("reorder two nests", make.chain, step("reorder", names=["inc_i", "double_i"]), message="one nest"),
    refuse("reorder a marked loop", make.chain, PARALLEL, step("reorder", names=["inc_j", "inc_i"]), message="serial"),
    refuse("reorder a triangle", triangle, step("reorder", names=["j", "i"]), message="independent of each other"),
    refuse(
        "reorder two blocks",
        make.chain,
        step("fuse_sibling_loops", first="double_i", second="inc_i"),
        step("fuse_sibling_loops", first="double_j", second="inc_j"),
        step("reorder", names=["double_j", "double_i"]),
        message="one block",
    ),
    refuse(
        "reorder an imperfect nest",
        make.chain,
        step("fuse_sibling_loops", first="double_i", second="inc_i"),
        step("reorder", names=["inc_j", "double_i"]),
        message="perfect nest",
    ),
    refuse(
        "reorder what would lose the first point",
        mixed,
        step("split", loop="row_sum_i_row_sum_k_fused", factors=[None, 3]),
        step("reorder", names=["row_sum_i_row_sum_k_fused_1", "row_sum_i_row_sum_k_fused_0"]),
        message="either spatial or reduction",
    ),
    refuse("an unknown kind", make.chain, step("set_kind", loop="inc_i", kind="fast"), message="kind of loop"),
    refuse("mark twice", make.chain, PARALLEL, PARALLEL, message="serial"),
    refuse("parallel rows of a recurrence", turns, step("set_kind", loop="p", kind="parallel"), message="read no result of another"),
    refuse("reordered rows of a recurrence", turns, step("reorder", names=["i", "p"]), message="read no result of another"),
    refuse("parallel points read from the end", lambda: two_in_one(True),
           step("set_kind", loop="i", kind="parallel"), message="read no result of another"),
    refuse("parallel rows read from the end", lambda: two_in_one(True, True),
           step("set_kind", loop="i", kind="group"), message="read no result of another"),
    refuse("parallel reduction", row_sum, step("set_kind", loop="row_sum_k", kind="parallel"), message="rfactor"),
    refuse("vector of symbolic extent", make.chain, step("set_kind", loop="inc_j", kind="vectorized"), message="split it"),
    refuse("unrolled symbolic extent", make.chain, step("set_kind", loop="inc_j", kind="unrolled"), message="split it"),
    refuse("a fourth grid axis", make.chain, step("set_kind", loop="inc_i", kind="group", axis=3), message="an axis below 3"),
    refuse(
        "one grid axis twice",
        make.chain,
        step("set_kind", loop="inc_i", kind="group", axis=1),
        step("set_kind", loop="inc_j", kind="group", axis=1),
        message="already bound to 'inc_i'",
    ),
    refuse("nested parallel", make.chain, PARALLEL, step("set_kind", loop="inc_j", kind="parallel"), message="nested"),
    refuse(
        "parallel iterations that both write the overlap",
        make.stencil,
        step("split", loop="pair_i", factors=[None, 4]),
        step("compute_at", block="square", loop="pair_i_0"),
        step("set_kind", loop="pair_i_0", kind="parallel"),
        message="may write the same element of 'B'",
    ),
    refuse(
        "parallel iterations that all write one element",
        lambda: make.matmul(3, 2),
        step("compute_at", block="mm", loop="relu_i"),
        step("split", loop="relu_j", factors=[None, 2]),
        step("set_kind", loop="relu_j_0", kind="parallel"),
        step("set_kind", loop="relu_i", kind="parallel"),
        message="nested",
    ),
    refuse("an unknown tail", make.chain, step("set_tail", loop="inc_i", tail="shark"), message="expected a tail"),
    refuse("merge what is marked", make.chain, PARALLEL, step("fuse_sibling_loops", first="double_i", second="inc_i"), message="serial"),
    refuse("merge backwards", make.chain, step("fuse_sibling_loops", first="inc_i", second="double_i"), message="to follow"),
    refuse("merge other depths", make.chain, step("fuse_sibling_loops", first="double_i", second="inc_j"), message="to follow"),
    refuse("merge other extents", make.chain, SPLIT_J, step("fuse_sibling_loops", first="double_j", second="inc_j_0"), message="follow"),
    refuse("stream of a serial loop", make.chain, step("nontemporal_stores", loop="inc_j"), message="vectorized loop, got 'inc_j'"),
    refuse(
        "stream into registers",
        make.chain,
        step("set_scope", buffer="B", scope="local"),
        step("split", loop="double_j", factors=[None, 4]),
        step("set_kind", loop="double_j_1", kind="vectorized"),
        step("nontemporal_stores", loop="double_j_1"),
        message="stores of 'double' to 'B'",
    ),
    refuse("ask ahead of nothing", make.chain, step("prefetch", loop="inc_j", iterations=0), message="1 to 4096 iterations"),
    refuse("hold many", make.chain, PARALLEL, step("hold_vectors", loop="inc_i"), message="which is parallel"),
    refuse(
        "hold registers",
        make.chain,
        step("set_scope", buffer="B", scope="local"),
        step("hold_vectors", loop="inc_j"),
        message="got none below 'inc_j'",
    ),
    refuse("ask ahead of many", make.chain, PARALLEL, step("prefetch", loop="inc_i", iterations=2), message="which is parallel"),
    refuse(
        "ask ahead of registers",
        make.chain,
        step("set_scope", buffer="B", scope="local"),
        step("prefetch", loop="inc_j", iterations=2),
        message="got none below 'inc_j'",
    ),
    refuse("merge other sizes", make.stencil, step("fuse_sibling_loops", first="square_i", second="pair_i"), message="equal extents"),
    refuse("merge with the past", make.reverse, step("fuse_sibling_loops", first="inc_i", second="flip_i"), message="another iteration"),
    refuse(
        "merge a sum with its reader",
        lambda: zoo.softmax().func,
        step("fuse_sibling_loops", first="row_max_i", second="exp_i"),
        step("fuse_sibling_loops", first="row_max_k", second="exp_j"),
        message="another iteration",
    ),
    refuse(
        "merge past what is needed",
        lambda: zoo.softmax().func,
        step("fuse_sibling_loops", first="row_max_i", second="row_sum_i"),
        message="before 'row_max_i', which it needs",
    ),
    refuse(
        "merge what runs once",
        lambda: make.matmul(4, 4, epilogue=False),
        step("cache_read", block="mm", buffer="W"),
        step("mark_prepack", block="W_cache_copy"),
        step("reorder", names=["mm_k", "mm_i"]),
        step("fuse_sibling_loops", first="W_cache_copy_i", second="mm_k"),
        message="runs once",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_loop_primitives_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def test_split_keeps_dependent_inner_extents() -> None:
    s = Schedule(triangle())
    s.split("i", [None, 3])
    assert str(find_loop(s.func, "j").extent) == "i_0 * 3 + i_1 + 1"


def test_split_dividing_factor_adds_no_guard() -> None:
    s = Schedule(make.matmul(8, 3))
    s.split("mm_j", [None, 4])
    assert find_block(s.func, "mm").predicate is TRUE
    tile = Tunable("T", (2, 3, 4))
    s.split("relu_j", [None, tile], divides=True)
    assert find_block(s.func, "relu").predicate is TRUE
    assert [str(c) for c in s.constraints] == ["8 % T == 0"]


def test_fuse_of_one_loop_changes_nothing() -> None:
    s = Schedule(make.chain())
    before = s.func
    s.apply("fuse", names=["inc_i"])
    assert s.func is before


@pytest.mark.parametrize("order", ["ij", "ji"])
def test_threads_may_take_fused_and_split_rows(order: str) -> None:
    # the digits distinguish the elements of the fused index, with symbolic and with tiled extents between
    s = Schedule(make.pointwise(4))
    s.compute_inline("half")
    tile = Tunable("T", (2, 3))
    names = s.loops_of("squash")
    if order == "ji":
        s.reorder([names[1], names[0]])
        names[:2] = names[1::-1]
    inner, _ = s.split(names[-1], [None, tile])
    fused = s.fuse([*names[:-1], inner])
    s.set_kind(fused, "parallel")
    for dims in ({"b": 2, "n": 3}, {"b": 1, "n": 1}, {"b": 0, "n": 2}):
        assert_same_meaning(make.pointwise(4), s.func, dims, tunables={tile: 2})


def test_fuse_sibling_loops_moves_statements_between_to_front() -> None:
    s = Schedule(make.softmax_mask(2))
    s.apply("decompose_reduction", block="row_max", loop="row_max_i")
    s.fuse_sibling_loops("add_mask_i", "row_max_i")
    assert isinstance(s.func.body, Seq)
    first, second, *_ = s.func.body.stmts
    assert [b.name for b in blocks(first)] == ["row_max_init"]
    assert [b.name for b in blocks(second)] == ["add_mask", "row_max"]
    assert_same_meaning(make.softmax_mask(2), s.func, {"b": 2, "n": 3})


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", ["parallel", "group"])
def test_set_kind_iterations_with_own_reads_are_independent(rows: bool, kind: str) -> None:
    func = two_in_one(False, rows)
    s = Schedule(func)
    s.set_kind("i", kind)
    assert_same_meaning(func, s.func, {})


@pytest.mark.parametrize("func", [turns(), two_in_one(True), two_in_one(True, True)], ids=["turns", "points", "rows"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_fallback_leaves_nests_of_ordered_iterations_serial(func: PrimFunc, machine: HardwareInfo) -> None:
    ((_, scheduled),) = fallback.sketches(func, machine)
    assert {f.kind for f in loops(scheduled.func.body)} == {"serial"}
