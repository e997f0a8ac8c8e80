"""Parts of the GPU rules: loops over the threads of a thread block, and reductions across them.

Consecutive threads lie along axis 0. Up to a warp of them reduce in registers with shuffles (scope `warp`); several warps reduce through
shared memory.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.buffer import Scope
from relax_tune.ir.core.expr import Expr, Var, as_int, const, le
from relax_tune.ir.core.stmt import LoopKind
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.vectorize import set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

LANES_PER_ROW = (4, 8, 16, 32)
"""Threads that share a row and reduce with shuffles: a warp or an equal part of one."""
WARPS = (2, 4, 8, 16, 32)
"""Warps that share a row and reduce through shared memory."""


def thread_counts(hardware: HardwareInfo, least: int = 64) -> list[int]:
    """Return the sizes of a thread block along one axis, from `least` to the device's limit."""
    return [n for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= n <= hardware.group_size] or [
        hardware.group_size
    ]


def vector_widths(columns: Sequence[Expr], hardware: HardwareInfo, size: int = 4) -> list[int]:
    """Return the vector widths that divide every number of columns.

    A number of columns that is not constant allows single elements only, since its rows start at any address.

    Args:
        size: Bytes of an element.
    """
    sizes = [as_int(c) for c in columns]
    most = hardware.lanes * 4 // min(size, 4)
    return [w for w in (1, 2, 4, 8, 16) if w <= most and all(w == 1 or (e is not None and e % w == 0) for e in sizes)]


def warps_per_row(s: Schedule, hardware: HardwareInfo) -> tuple[Expr, int]:
    """Declare the number of warps that share a row; return it and the threads of a warp."""
    most = max(hardware.group_size // LANES_PER_ROW[-1], WARPS[0])
    return s.tunable("TW", [n for n in WARPS if n <= most]), LANES_PER_ROW[-1]


def split_over_threads(
    s: Schedule, column: str, threads: Sequence[Expr | int], width: Expr | int
) -> tuple[str, list[str], str]:
    """Split a loop over elements so that consecutive threads take consecutive vectors (coalescing).

    Returns:
        The loops over rounds, over threads, and over the elements of a vector.
    """
    vectors, lanes = s.split(column, [None, width], divides=as_int(s.extent(column)) is not None)
    rounds, *thread = s.split(vectors, [None, *threads])
    return rounds, thread, lanes


def bind_threads(s: Schedule, threads: Sequence[str], axis: int = 0) -> None:
    """Bind loops to consecutive thread axes, the innermost loop to `axis`."""
    for at, loop in enumerate(reversed(threads)):
        s.bind(loop, "item", axis + at)


def thread_per_element(s: Schedule, loops: Sequence[str], threads: Expr | int) -> tuple[str, str]:
    """Give every point of some loops a thread; return the loops over thread blocks and over threads."""
    group, thread = s.split(s.fuse(loops), [None, threads])
    s.bind(group, "group")
    s.bind(thread, "item")
    return group, thread


def reduce_across_threads(
    s: Schedule, block: str, threads: Sequence[str], lanes: str, axis: int = 0, rows: Sequence[str] = ()
) -> str:
    """Reduce in the registers of each thread, then across the threads of axis 0, then across the other axes.

    Args:
        block: a reduction whose outermost reduction loops are `threads` and whose innermost one is `lanes`.
        axis: The thread axis of the innermost of `threads`.
        rows: Loops over results, between `threads` and `lanes`.

    Returns:
        The block that computes the partial results of single threads.
    """
    partial = block
    for thread in threads:
        factored = rfactor_into_scope(s, partial, thread, "warp" if thread == threads[-1] and axis == 0 else "shared")
        left, *each = s.loops_of(partial)[-1 - len(rows) :]
        if each:
            s.reorder([*each, left])
        partial = factored
    rfactor_into_scope(s, partial, lanes, "local")
    bind_threads(s, threads, axis)
    set_kind_of_copies(s, {n: "unrolled" for n in rows})
    if find_block(s.func, block).init is not None:
        s.decompose_reduction(block=block, loop=s.loops_of(block)[-1])
    return partial


def rfactor_into_scope(s: Schedule, block: str, loop: str, scope: Scope, kind: LoopKind = "vectorized") -> str:
    """Factor a reduction by a loop, with the partial results in a memory scope; return the block that computes them.

    Args:
        kind: Of the factored loop, for partial results in registers (scope `local`).
    """
    new = s.rfactor(block=block, loop=loop, scope="local" if scope == "local" else "global")
    for name in new:
        if scope == "local":
            s.set_kind(s.loops_of(name)[-1], kind)
    partial = find_block(s.func, next(n for n in new if not n.endswith("_init")))
    if scope != "local":
        s.set_scope(buffer=partial.body.buffer.name, scope=scope)
        return partial.name
    node = find_block(s.func, block)
    (over,) = (b for i, b in zip(node.iters, node.bindings) if i.kind == "reduce")
    assert isinstance(over, Var)
    s.unroll(over.name)
    return partial.name


def limit_threads(s: Schedule, hardware: HardwareInfo, threads: Expr) -> None:
    """Require a thread block of at least one warp and at most the device's limit."""
    s.require(le(const(hardware.warp), threads))
    s.require(le(threads, const(hardware.group_size)))


Parts = Sequence[tuple[Expr | int | None, Literal["group", "warp", "item", "each", "lane"]]]
"""The factors of a tile's dimension, outermost first, each with its kind: a group of warps, a warp, a thread (item), an
element that a thread computes in turn (each), a lane of a vector. One factor is None: the rest of the extent.
"""


def epilogue_on_fragments(s: Schedule, loops: Sequence[str], rows: Parts, columns: Parts, whole: bool) -> None:
    """Compute an epilogue on the elements of a tile that each thread holds in registers (its fragment).

    Threads are bound to axes 0 (columns) and 1 (rows), warps to axis 2, groups of warps to axis 3.

    Args:
        loops: The epilogue's loops over the rows and the columns of a tile.
        whole: Every vector is complete, so that lanes are vectorized.
    """
    *leading, last = loops
    if len(leading) != 1:
        raise ScheduleError(f"{s.func.name}: the rows of the epilogue and the product differ")
    loops_by_kind: dict[str, list[str]] = {"group": [], "warp": [], "item": [], "each": [], "lane": []}
    for loop, parts in ((leading[0], rows), (last, columns)):
        for name, (_, kind) in zip(s.split(loop, [count for count, _ in parts]), parts, strict=True):
            loops_by_kind[kind].append(name)
    s.reorder([name for names in loops_by_kind.values() for name in names])
    for name in loops_by_kind["lane"]:
        s.set_kind(name, "vectorized" if whole else "unrolled")
    s.unroll(*loops_by_kind["each"])
    for axis, name in zip((1, 0), loops_by_kind["item"], strict=True):
        s.bind(name, "item", axis)
    for axis, kind in ((2, "warp"), (3, "group")):
        if loops_by_kind[kind]:
            s.bind(s.fuse(loops_by_kind[kind]), "item", axis)
