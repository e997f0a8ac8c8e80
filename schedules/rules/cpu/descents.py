"""Reductions whose steps read where the step before leads, such as the descent of decision trees.

A step waits for the loads of the step before it, so several descents are interleaved, their places in registers:

- `rows`: several rows descend one tree after the other. A tree stays in the nearest cache while a block of rows descends it.
- `trees`: one row descends several trees, and workers share the trees, for functions of few rows.

Tests: `tests/schedules/rules/test_on_devices.py`, `tests/schedules/rules/cpu/test_descents.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import loads
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.vectorize import decompose
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

TOGETHER = (4, 8, 16)
"""Descents that are interleaved."""
GROUPS = (1, 4, 16, 64)
"""Groups of interleaved rows that descend a tree before the next tree is read."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield rows and trees descended together, spread over workers and on one thread, if one reduction follows its own places."""
    if sum(map(follows, blocks(func.body))) != 1:
        return
    for form, make in (("rows", build_rows), ("trees", build_trees)):
        yield from try_forms(
            func,
            (
                (f"descents.{form}.{order}", partial(make, func, hardware, order == "parallel"))
                for order in hardware.orders
            ),
        )


def follows(block: Block) -> bool:
    """Return whether a block is a reduction that reads memory where its result of the step before says."""
    return block.is_reduction and any(
        inner.buffer is block.body.buffer for x in block_loads(block) for inner in loads(*x.indices)
    )


def _inlined(func: PrimFunc) -> tuple[Schedule, str, str]:
    """Inline the blocks between the descent and the reduction over trees. Returns the schedule and the names of these two."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    descent = next(b for b in blocks(s.func.body) if follows(b))
    readers = [
        b
        for b in reductions(s.func)
        if any(x.buffer is descent.body.buffer for x in block_loads(b)) and b is not descent
    ]
    if len(readers) != 1 or len(s.loops_of(descent.name)) != 3 or len(s.loops_of(readers[0].name)) != 3:
        raise ScheduleError(f"{func.name}: expected rows and trees, and one reduction over the trees")
    return s, descent.name, readers[0].name


def _interleave(s: Schedule, descent: str, around: str) -> None:
    """Descend step by step, each step for all places in registers."""
    s.set_scope(buffer=s.buffer_of(descent).name, scope="local")
    *places, step = s.inner_loops(descent, around)
    # Steps outside, places inside: the loads of one step are independent of each other, so they overlap.
    s.reorder([step, *places])
    decompose(s, descent, [step])
    for block in (b.name for b in blocks(s.func.body) if b.body.buffer is s.buffer_of(descent)):
        s.unroll(*[loop for loop in s.inner_loops(block, around) if loop != step])


def build_rows(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Descend one tree by several rows at a time, a block of rows by all trees."""
    s, descent, total = _inlined(func)
    row, column, tree = s.loops_of(total)
    block, group, together = s.split(row, [None, s.tunable("G", GROUPS), s.tunable("R", TOGETHER)])
    s.guess({"G": 16, "R": 8})
    s.set_tail(block, "peel")
    # The tree is outside of the groups: its nodes are read into the cache once for the whole block of rows.
    s.reorder([block, tree, group, together, column])
    s.decompose_reduction(block=total, loop=tree)
    s.compute_at(descent, group)
    _interleave(s, descent, group)
    if parallel:
        s.set_kind(block, "group" if hardware.has_grid else "parallel")
    return s


def build_trees(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Descend several trees by one row at a time."""
    s, descent, total = _inlined(func)
    # The places that the descents end at are stored for all trees; a second nest adds up the leaves of a row.
    copy = s.cache_write(block=descent, scope="local")[-1]
    row, tree = s.loops_of(copy)
    group, together = s.split(tree, [None, s.tunable("T", TOGETHER)])
    s.guess({"T": 8})
    s.set_tail(group, "peel")
    s.compute_at(descent, group)
    _interleave(s, descent, group)
    s.unroll(together)
    decompose(s, total, s.loops_of(total))
    if parallel:
        for loop in (s.fuse([row, group]), s.loops_of(total)[0]):
            s.set_kind(loop, "group" if hardware.has_grid else "parallel")
    return s
