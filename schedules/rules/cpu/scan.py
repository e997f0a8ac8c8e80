"""Prefix scans: cumulative sums and products. Each row is scanned in order, several rows together.

Rows that are neighbours in memory are the lanes of vectors; others are unrolled, so that their chains of additions overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.primitives.reduction.scans import scan_of
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.scans import scan_rows, serial_scans
from relax_tune.schedules.rules.shared.vectorize import strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ROWS = (1, 2, 4, 8)


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield rows spread over workers, and the same on one thread; none unless the function is one scan."""
    if len(serial_scans(func, machine)) != 1:
        return
    orders = ("parallel",) if machine.has_grid else ("parallel", "serial")
    yield from try_forms((f"scan.rows.{order}", partial(build, func, machine, order == "parallel")) for order in orders)


def build(func: PrimFunc, machine: HardwareInfo, parallel: bool) -> Schedule:
    """Inline what is before and behind the scan, and scan rows together."""
    s = Schedule(func)
    (scan,) = serial_scans(func, machine)
    for block in blocks(func.body):
        if block is not scan and inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    node = find_block(s.func, scan.name)
    position = scan_of(node).position.var
    column = next((i for i in reversed(node.iters) if i.kind == "spatial" and i.var is not position), None)
    if column is None:
        made = scan_rows(s, scan.name)
    else:
        read = [x for x in block_loads(node) if column.var in free_vars(*x.indices)]
        vectors = node.body.indices[-1] is column.var and all(x.indices[-1] is column.var for x in read)
        width = s.tunable("W", strip_widths(column, machine) if vectors else ROWS)
        made = scan_rows(s, scan.name, width)
        rows = made.rows
        for loop in made.together:
            s.set_kind(loop, "vectorized" if vectors else "unrolled")
        s.set_tail(rows[-1], "peel")
        if machine.has_grid or parallel:
            outer = s.fuse(rows[:-1]) if len(rows) > 1 else rows[-1]
            s.set_kind(outer, "group" if machine.has_grid else "parallel")
    for block in blocks(s.func.body):
        if block.name not in made.blocks:
            s.apply("reverse_compute_inline", block=block.name)
    if {b.name for b in blocks(s.func.body)} != set(made.blocks):
        raise ScheduleError(f"{func.name}: wanted one scan with what can be computed beside it")
    return s
