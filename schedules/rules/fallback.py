"""The schedule that is always correct: every block in its own nest, points shared out in chunks, reductions inside.

It serves functions no other rule takes, and as the `generic` variant of every task.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_tune.errors import ScheduleError
from relax_tune.ir.expr import const
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import Block, blocks
from relax_tune.schedules.nest import find_block
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import Machine

CHUNK = 64


def sketches(func: PrimFunc, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """Exactly one sketch, for any function."""
    s = Schedule(func)
    for block in blocks(func.body):
        _one(s, block, machine)
    yield "fallback", s


def _one(s: Schedule, block: Block, machine: Machine) -> None:
    node = find_block(s.func, block.name)
    names = s.loops_of(block.name)
    spatial = [n for n, i in zip(names, node.iters) if i.kind == "spatial"]
    reduce = [n for n, i in zip(names, node.iters) if i.kind == "reduce"]
    if spatial and reduce:
        s.reorder([*spatial, *reduce])
    top = None
    if spatial:
        top, _ = s.split(s.fuse(spatial), [None, const(CHUNK)])
    if node.init is not None and reduce:
        s.apply("decompose_reduction", block=block.name, loop=reduce[0])
    if top is not None:
        try:
            s.set_kind(top, "group" if machine.groups else "parallel")
        except ScheduleError:
            return  # a nest whose points are not independent stays serial
