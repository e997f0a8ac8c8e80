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
    """Rows shared out to threads with the last dimension in vectors; and the same on one thread."""
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
    """Everything inlined into the outputs; of each the outer dimensions fused and chunked, the last one vectorised."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    left = blocks(s.func.body)
    if len(left) != len(func.output_buffers) or not all(s.loops_of(b.name) for b in left):
        raise ScheduleError(f"{func.name}: does not reduce to one spatial block for each output")
    width = s.tunable("VL", [machine.lanes * u for u in (1, 2, 4)])
    chunk = s.tunable("RB", (1, 2, 4, 8, 16, 32, 64, 128, 256))
    for block in left:
        *outer, column = s.loops_of(block.name)
        c_0, c_1 = s.split(column, [None, width])
        s.set_tail(c_0, "peel")
        s.set_kind(c_1, "vectorized")
        top, _ = s.split(s.fuse(outer), [None, chunk]) if outer else s.split(c_0, [None, chunk])
        if machine.groups:
            s.set_kind(top, "group", axis=0)
        elif parallel:
            s.set_kind(top, "parallel")
    return s
