"""Reductions across memory: sums over leading and middle dimensions, masked pooling.

Neighbouring results are neighbours in memory, so vectors lie along the results. A few vectors accumulate in registers
over the reduction, and the epilogue is computed while they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.reductions import stages_across
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import decompose, hoist_reciprocal, in_vectors, strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield strips of columns spread over threads, and the same on one thread; none unless a reduction is across columns."""
    if not reductions(func) or searches(func):
        return
    yield from try_forms(
        (f"reductions.columns.{order}", partial(build, func, machine, order == "parallel")) for order in machine.orders
    )


def build(func: PrimFunc, machine: HardwareInfo, parallel: bool) -> Schedule:
    """Compute all stages inside the loop over strips of columns of the last one."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    if final_block(s.func).is_reduction:
        s.apply("cache_write", block=final_block(s.func).name, scope="local")
    last = final_block(s.func)
    stages, across = stages_across(s.func)
    hoist_reciprocal(s, last.name)
    *outer, column = s.loops_of(last.name)
    widths = strip_widths(last.iters[-1], machine)
    width = s.tunable("W", widths)
    extent = as_int(last.iters[-1].extent)
    divides = extent is not None and all(extent % w == 0 for w in widths)
    strip, lanes = s.split(column, [None, width], divides)
    if not divides:
        s.set_tail(strip, "peel")
    for block in reversed(stages):
        s.compute_at(block.name, strip)
    for block in stages:
        buffer = find_block(s.func, block.name).body.buffer
        s.apply("set_scope", buffer=buffer.name, scope="local")
        if block.name in across:
            _strip(s, block.name, strip)
        else:
            in_vectors(s, block.name, s.inner_loops(block.name, strip)[-1], machine.lanes)
            decompose(s, block.name, s.inner_loops(block.name, strip))
    s.set_kind(lanes, "vectorized")
    if machine.has_grid and parallel:
        s.set_kind(strip, "group", axis=0)
        if outer:
            s.set_kind(s.fuse(outer), "group", axis=1)
    elif parallel:
        # a strip that may be incomplete is a loop of its own
        s.set_kind(s.fuse([*outer, strip]) if divides else s.fuse(outer) if outer else strip, "parallel")
    return s


def _strip(s: Schedule, block: str, strip: str) -> None:
    """Put the reduction outside the columns of a strip, whose sums stay in registers."""
    node = find_block(s.func, block)
    inner = s.inner_loops(block, strip)
    steps = {v.name for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    columns = [n for n in inner if n not in steps]
    if len(columns) != 1:
        raise ScheduleError(f"{s.func.name}: block {block!r} has no loop over the columns of a strip")
    reduce = [n for n in inner if n in steps]
    s.reorder([*reduce, *columns])
    for made in decompose(s, block, reduce):
        s.set_kind(s.loops_of(made)[-1], "vectorized")
    s.set_kind(columns[0], "vectorized")
