"""Functions without reductions: elementwise, broadcast, transpose, gather, in any fused combination."""

from __future__ import annotations

from collections.abc import Iterator

from relax_tune.errors import ScheduleError
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import blocks
from relax_tune.schedules.analysis import inlinable, reductions
from relax_tune.schedules.nest import find_block
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import Machine


def sketches(func: PrimFunc, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """On several workers, and on one thread, in a function without a parallel region."""
    if reductions(func):
        return
    for parallel in (True, False):
        if machine.groups and not parallel:
            continue
        try:
            schedule = build(func, machine, parallel)
        except ScheduleError:
            continue
        yield f"injective.{'parallel' if parallel else 'serial'}", schedule


def build(func: PrimFunc, machine: Machine, parallel: bool) -> Schedule:
    """Everything inlined into the outputs; of each the last dimension in vectors, and on several workers all of it cut into runs
    of vectors, of which each of GP parts gets as many as the others."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    left = blocks(s.func.body)
    if not all(b.body.buffer in func.output_buffers and s.loops_of(b.name) for b in left):
        raise ScheduleError(f"{func.name}: does not reduce to spatial blocks that write outputs")
    width = s.tunable("VL", [machine.lanes * u for u in (1, 2, 4)])
    if not parallel:
        for block in left:
            c_0, c_1 = s.split(s.loops_of(block.name)[-1], [None, width])
            s.set_tail(c_0, "peel")
            s.set_kind(c_1, "vectorized")
        return s
    run = s.tunable("RB", (1, 4, 16, 64, 256))
    parts = s.tunable("GP", [machine.workers * k for k in (1, 2, 4, 8)])
    for block in left:
        *outer, column = s.loops_of(block.name)
        if outer:
            c_0, c_1, c_2 = s.split(column, [None, run, width])
            top, rest = s.split(s.fuse([*outer, c_0]), [parts, None])
        else:
            top, rest, c_1, c_2 = s.split(column, [parts, None, run, width])
        s.set_tail(rest, "peel")
        s.set_tail(c_1, "peel")
        s.set_kind(c_2, "vectorized")
        if machine.groups:
            s.set_kind(top, "group", axis=0)
        else:
            s.set_kind(top, "parallel")
    return s
