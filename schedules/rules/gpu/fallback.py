"""GPU rule that applies to every function: each block is a kernel, with one thread for each element of its output.

It serves functions that no other rule accepts, and is the `generic` variant of every task.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import free_vars, loads
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.scans import scan_rows, serial_scans
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ITEMS = 128
"""Threads of a thread block."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield exactly one sketch, for any function."""
    s, items = Schedule(func), min(ITEMS, hardware.group_size)
    ordered = {b.name for b in serial_scans(func, hardware)}
    for block in blocks(func.body):
        if block.name not in ordered or not _bind_rows(s, block.name, items):
            _bind_block(s, block.name, items)
    yield "fallback", s


def _bind_rows(s: Schedule, block: str, items: int) -> bool:
    """Bind the rows of a prefix scan to consecutive threads, each in order. Return whether that fits."""
    before = s.func, list(s.steps)
    try:
        rows = scan_rows(s, block).rows
        if rows:
            points = s.split(s.fuse(rows), [None, items])
            s.bind(points[0], "group")
            s.bind(points[1], "item")
    except ScheduleError:
        s.func, s.steps = before
        return False
    return True


def _bind_block(s: Schedule, block: str, items: int) -> None:
    """Bind consecutive elements to consecutive threads; each thread computes its whole reduction."""
    node = find_block(s.func, block)
    pairs = list(zip(s.loops_of(block), node.iters, strict=True))
    # Iterators that choose the element through data may choose one element twice: a thread runs through them in order.
    through_data = set(free_vars(*(e for x in loads(*node.body.indices) for e in x.indices)))
    spatial = [n for n, i in pairs if i.kind == "spatial" and i.var not in through_data]
    ordered = [n for n, i in pairs if i.kind == "spatial" and i.var in through_data]
    reduce = [n for n, i in pairs if i.kind == "reduce"]
    points = None
    if spatial:
        s.reorder([*spatial, *ordered, *reduce])
        points = s.split(s.fuse(spatial), [None, items])
    if node.init is not None and reduce:
        s.decompose_reduction(block=block, loop=reduce[0])
    if points is None:
        return
    before = s.func, list(s.steps)
    try:
        s.bind(points[0], "group")
        s.bind(points[1], "item")
    except ScheduleError:
        s.func, s.steps = before  # elements that depend on each other stay with one thread
