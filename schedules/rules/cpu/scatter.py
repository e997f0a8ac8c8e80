"""Scatters: each update is combined with the result at its index, in the order of the updates.

Results that no index chooses, such as the columns of an embedding, are the lanes of vectors and are shared by workers.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import find_block, find_loop
from relax_tune.schedules.rules.shared.blocks import inline_except
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import serial_scatters
from relax_tune.schedules.rules.shared.vectorize import strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield a sketch that is spread over workers and one for a single thread, if the function is one scatter."""
    if len(serial_scatters(func, hardware)) != 1:
        return
    forms = ((f"scatter.{order}", partial(build, func, hardware, order == "parallel")) for order in hardware.orders)
    yield from try_forms(func, forms)


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Inline the blocks before and after the scatter, and vectorise initial values, updates and results."""
    (scatter,) = serial_scatters(func, hardware)
    s = inline_except(func, scatter)
    new = s.serial_scatter(block=scatter.name)
    # A block after the scatter is applied to each result where it is stored for the last time.
    for block in blocks(s.func.body):
        if block.name not in (scatter.name, *new):
            s.reverse_compute_inline(block=block.name)
    if {b.name for b in blocks(s.func.body)} != {scatter.name, *new}:
        raise ScheduleError(f"{func.name}: expected one scatter, and other blocks that can be inlined")
    width = s.tunable("VL", [hardware.lanes * u for u in (1, 2, 4)])
    parts = s.tunable("GP", [hardware.workers * k for k in (1, 2, 4, 8)]) if parallel else None
    for name in new:
        _over_results(s, name, hardware, width, parts)
    _updates(s, scatter.name, hardware, parallel)
    return s


def _over_results(s: Schedule, block: str, hardware: HardwareInfo, width: Expr, parts: Expr | None) -> None:
    """Vectorise a block over all results, and spread the vectors over workers in equal parts."""
    rows = s.loops_of(block)
    if _is_short(s, rows[-1], hardware):
        rows = [s.fuse(rows)]
    vectors, lane = s.split(rows[-1], [None, width])
    s.set_tail(vectors, "peel")
    s.vectorize(lane)
    if parts is not None:
        part, rest = s.split(s.fuse([*rows[:-1], vectors]), [parts, None])
        s.set_tail(rest, "peel")
        s.set_kind(part, "group" if hardware.has_grid else "parallel")


def _updates(s: Schedule, block: str, hardware: HardwareInfo, parallel: bool) -> None:
    """Combine the updates in their order, each strip of columns independently."""
    *rows, step = s.loops_of(block)
    # Updates of one result must keep their order (floating-point sums), so without columns there is nothing to share
    # between workers.
    if not rows or _is_short(s, rows[-1], hardware):
        s.reorder([*rows[:-1], step, *rows[-1:]])
        return
    column = find_block(s.func, block).iters[len(rows) - 1]
    strip, inner = s.split(rows[-1], [None, s.tunable("W", strip_widths(column, hardware))])
    s.reorder([*rows[:-1], strip, step, inner])
    s.set_tail(strip, "peel")
    s.vectorize(inner)
    if parallel:
        s.set_kind(s.fuse([*rows[:-1], strip]), "group" if hardware.has_grid else "parallel")


def _is_short(s: Schedule, loop: str, hardware: HardwareInfo) -> bool:
    """Return whether a loop has too few elements for a vector."""
    size = as_int(find_loop(s.func, loop).extent)
    return size is not None and size < hardware.lanes
