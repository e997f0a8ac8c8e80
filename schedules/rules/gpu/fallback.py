"""GPU rule that applies to every function: each block is a kernel, with one thread for each element of its output.

It serves functions that no other rule accepts, and is the `generic` variant of every task.
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
"""Threads of a thread block."""


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield exactly one sketch, for any function."""
    s = Schedule(func)
    for block in blocks(func.body):
        _bind_block(s, block.name, min(ITEMS, machine.group_size))
    yield "fallback", s


def _bind_block(s: Schedule, block: str, items: int) -> None:
    """Bind consecutive elements to consecutive threads; each thread computes its whole reduction."""
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
        s.func, s.steps = before  # elements that depend on each other stay with one thread
