"""The schedule for GPUs that is always correct: every block a kernel of its own, an item of a group for each point it makes.

It serves functions no other rule takes, and as the `generic` variant of every task.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ITEMS = 128


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Exactly one sketch, for any function."""
    s = Schedule(func)
    for block in blocks(func.body):
        _one(s, block.name, min(ITEMS, machine.group_size))
    yield "fallback", s


def _one(s: Schedule, block: str, items: int) -> None:
    """Neighbouring points to neighbouring items; each runs its own reduction."""
    node = find_block(s.func, block)
    pairs = list(zip(s.loops_of(block), node.iters, strict=True))
    spatial = [n for n, i in pairs if i.kind == "spatial"]
    reduce = [n for n, i in pairs if i.kind == "reduce"]
    points = None
    if spatial:
        s.reorder([*spatial, *reduce])
        points = s.split(s.fuse(spatial), [None, items])
    if node.init is not None and reduce:
        s.apply("decompose_reduction", block=block, loop=reduce[0])
    if points is None:
        return
    before = s.func, list(s.steps)
    try:
        s.bind(points[0], "group")
        s.bind(points[1], "item")
    except ScheduleError:
        s.func, s.steps = before  # a nest whose points are not independent stays with one item
