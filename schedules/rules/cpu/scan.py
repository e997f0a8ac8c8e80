"""Prefix scans: cumulative sums and products.

- `rows`: each row is scanned in order, several rows together. Rows that are neighbours in memory are the lanes of vectors; others
  are unrolled, so that their chains of additions overlap.
- `chunks`: rows are cut into chunks, which are summed and then scanned independently, several together.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.primitives.reduction.scans import scan_of
from relax_tune.schedules.rules.shared.blocks import inline_except
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.scans import scan_rows, serial_scans
from relax_tune.schedules.rules.shared.vectorize import decompose, in_vectors, strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ROWS = (1, 2, 4, 8)
CHUNKS = (256, 1024, 4096, 16384)


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield rows and chunks spread over workers, and the same on one thread, if the function is one scan."""
    if len(serial_scans(func, hardware)) != 1:
        return
    for form, make in (("rows", build), ("chunks", build_chunks)):
        yield from try_forms(
            func,
            ((f"scan.{form}.{order}", partial(make, func, hardware, order == "parallel")) for order in hardware.orders),
        )


def _inlined(func: PrimFunc, hardware: HardwareInfo) -> tuple[Schedule, Block]:
    """Inline the blocks before the scan. Returns the schedule and the scan."""
    (scan,) = serial_scans(func, hardware)
    s = inline_except(func, scan)
    return s, find_block(s.func, scan.name)


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Inline the blocks before and after the scan, and scan several rows together."""
    s, node = _inlined(func, hardware)
    position = scan_of(node).position.var
    column = next((i for i in reversed(node.iters) if i.kind == "spatial" and i.var is not position), None)
    if column is None:
        nests = scan_rows(s, node.name)
    else:
        read = [x for x in block_loads(node) if column.var in free_vars(*x.indices)]
        vectors = node.body.indices[-1] is column.var and all(x.indices[-1] is column.var for x in read)
        width = s.tunable("W", strip_widths(column, hardware) if vectors else ROWS)
        nests = scan_rows(s, node.name, width)
        rows = nests.rows
        for loop in nests.together:
            s.set_kind(loop, "vectorized" if vectors else "unrolled")
        s.set_tail(rows[-1], "peel")
        if parallel:
            outer = s.fuse(rows[:-1]) if len(rows) > 1 else rows[-1]
            s.set_kind(outer, "group" if hardware.has_grid else "parallel")
    for block in blocks(s.func.body):
        if block.name not in nests.blocks:
            s.reverse_compute_inline(block=block.name)
    if {b.name for b in blocks(s.func.body)} != set(nests.blocks):
        raise ScheduleError(f"{func.name}: expected one scan, and other blocks that can be inlined")
    return s


def build_chunks(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Sum chunks of every row, scan the sums in order, and scan the chunks from these sums, several together."""
    s, node = _inlined(func, hardware)
    extent = as_int(scan_of(node).position.extent)
    # Each element is read twice, once for the sum of its chunk and once for the scan: with a single chunk that is
    # only a loss.
    lengths = [n for n in CHUNKS if extent is None or 2 * n <= extent]
    if not lengths:
        raise ScheduleError(f"{func.name}: rows of {extent} elements are too short for chunks")
    at = {v.name: i for i, b in zip(node.iters, node.bindings) for v in free_vars(b)}
    position = next(n for n in s.loops_of(node.name) if at[n] is scan_of(node).position)
    sums, before = s.chunk_scan(block=node.name, loop=position, factor=s.tunable("L", lengths))
    *rows, chunk, step = s.loops_of(sums)
    in_vectors(s, sums, step, s.tunable("VL", [hardware.lanes * u for u in (1, 2, 4)]))
    decompose(s, sums, s.inner_loops(sums, chunk))
    summed = s.fuse([*rows, chunk])
    *rows, chunk, step = s.loops_of(before)
    s.reorder([*rows, chunk, step])
    # The scan of the sums stays serial. There are few chunks, and each needs the sum before it.
    s.serial_scan(block=before, loop=chunk)
    s.set_scope(buffer=s.buffer_of(before).name, scope="local")
    *rows, chunk, place, step = s.loops_of(node.name)
    outer, inner = s.split(chunk, [None, s.tunable("U", ROWS)])
    s.reorder([*rows, outer, place, inner, step])
    new = (*s.serial_scan(block=node.name, loop=place), node.name)
    s.set_scope(buffer=s.buffer_of(node.name).name, scope="local")
    for name in new:
        s.unroll(s.loops_of(name)[-1])
    s.set_tail(outer, "peel")
    scanned = s.fuse([*rows, outer]) if rows else outer
    if parallel:
        for loop in (summed, scanned):
            s.set_kind(loop, "group" if hardware.has_grid else "parallel")
    for block in blocks(func.body):
        if block.name != node.name and block.name in {b.name for b in blocks(s.func.body)}:
            s.reverse_compute_inline(block=block.name)
    return s
