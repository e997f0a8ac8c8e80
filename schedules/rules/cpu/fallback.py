"""The schedule that fits every function: a nest per block, chunks of points spread over workers, reductions inside.

It schedules functions that no other rule accepts, and is the `generic` variant of every task.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Var, as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.deduce.rankings import pick
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import block_loads, find_block, find_loop
from relax_tune.schedules.primitives.reduction.scans import scan_of
from relax_tune.schedules.rules.shared.scans import scan_rows, serial_scans
from relax_tune.schedules.rules.shared.searches import picks, row_length, select_rows, serial_scatters, sort_rows, sorts
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

CHUNK = 64
FEW = 16
"""Elements of a row whose ranks are counted in less time than chunks take."""
LEAST = 8
"""Elements of the least chunk of a dim whose size is known."""
DIGIT_BITS = 8
"""Bits of a digit that rows are sorted by."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield exactly one sketch, for any function."""
    s, handled = Schedule(func), set[str]()
    for block in () if hardware.is_gpu else picks(func):
        handled |= _select(s, block, hardware)
    # Computed by the plain nest, a scan or a scatter reduces over all elements for each result: quadratic work. The
    # ordered forms are linear.
    ordered = {b.name for b in serial_scans(func, hardware)}
    scattered = {b.name for b in serial_scatters(func, hardware)}
    for block in blocks(func.body):
        if block.name in handled or (block.name in ordered and _scan(s, block, hardware)):
            continue
        if block.name not in scattered or not _scatter(s, block, hardware):
            _schedule_block(s, block, hardware)
    yield "fallback", s


def _scatter(s: Schedule, block: Block, hardware: HardwareInfo) -> bool:
    """Combine updates in their order; rows that no update leaves are spread over workers. Return whether that fits."""
    before = s.func, list(s.steps)
    try:
        new = s.serial_scatter(block=block.name)
    except ScheduleError:
        s.func, s.steps = before
        return False
    for name in new:
        _schedule_block(s, find_block(s.func, name), hardware)
    node, (*rows, step) = find_block(s.func, block.name), s.loops_of(block.name)
    try:
        if rows:
            column = node.iters[len(rows) - 1]
            if _is_contiguous_along(node, column.var) and not _is_short(column.extent):
                outer, inner = s.split(rows[-1], [None, _chunk_size(column.extent)])
                rows = [*rows[:-1], outer]
                s.reorder([*rows, step, inner])
            s.set_kind(s.fuse(rows), "group" if hardware.has_grid else "parallel")
    except ScheduleError:
        pass  # rows that are not independent stay serial
    return True


def _select(s: Schedule, block: Block, hardware: HardwareInfo) -> set[str]:
    """Select or sort the elements row by row. Return the names of the blocks that this replaces, none where it does not fit."""
    # The state is restored where a step fails half-way: this rule must succeed for every function.
    before, pattern, length = (s.func, list(s.steps)), pick(block), row_length(block)
    if length is not None and length <= FEW:
        return set()
    try:
        if sorts(block):
            rows = sort_rows(s, block.name, DIGIT_BITS)
        else:
            rows = select_rows(s, block.name, CHUNK if length is None or length > CHUNK**2 else 2 * FEW).rows
        if rows:
            s.set_kind(s.fuse(rows), "group" if hardware.has_grid else "parallel")
    except ScheduleError:
        s.func, s.steps = before
        return set()
    # The ranks are not needed any more: the selection finds the places without counting.
    return set() if pattern is None else {block.name, *(b.name for b in writers(before[0], pattern.ranks.buffer))}


def _scan(s: Schedule, block: Block, hardware: HardwareInfo) -> bool:
    """Compute the rows of a prefix scan in order, several together where they are neighbours in memory. Return whether that fits."""
    before = s.func, list(s.steps)
    column = next(
        (i for i in reversed(block.iters) if i.kind == "spatial" and i.var is not scan_of(block).position.var), None
    )
    try:
        across = column is not None and _is_contiguous_along(block, column.var)
        rows = scan_rows(s, block.name, _chunk_size(column.extent) if column is not None and across else None).rows
        if rows:
            s.set_kind(s.fuse(rows), "group" if hardware.has_grid else "parallel")
    except ScheduleError:
        s.func, s.steps = before
        return False
    return True


def _schedule_block(s: Schedule, block: Block, hardware: HardwareInfo) -> None:
    """Split the last spatial dimension into chunks. A nest that this does not fit, such as one of several blocks, stays serial.

    Reductions run outside a chunk where that makes its points neighbours in memory.
    """
    before = s.func, list(s.steps)
    try:
        _cut_nest(s, block, hardware)
    except ScheduleError:
        s.func, s.steps = before


def _cut_nest(s: Schedule, block: Block, hardware: HardwareInfo) -> None:
    node = find_block(s.func, block.name)
    names = s.loops_of(block.name)
    spatial = [n for n, i in zip(names, node.iters) if i.kind == "spatial"]
    reduce = [n for n, i in zip(names, node.iters) if i.kind == "reduce"]
    top = None
    if spatial:
        last = [i for i in node.iters if i.kind == "spatial"][-1]
        column, extent = last.var, last.extent
        # A chunk of a short row would start a worker for a few elements.
        if not reduce and len(spatial) > 1 and _is_short(extent):
            spatial = [s.fuse(spatial)]
            extent = find_loop(s.func, spatial[0]).extent
        outer, inner = s.split(spatial[-1], [None, _chunk_size(extent)])
        # Summing along memory reads each element once either way. Across memory, the reduction outside lets the
        # compiler vectorise the points of a chunk.
        across = bool(reduce) and _is_contiguous_along(node, column)
        s.reorder([*spatial[:-1], outer, *reduce, inner] if across else [*spatial[:-1], outer, inner, *reduce])
        top = s.fuse([*spatial[:-1], outer])
    if node.init is not None and reduce:
        s.decompose_reduction(block=block.name, loop=reduce[0])
    if top is not None:
        try:
            s.set_kind(top, "group" if hardware.has_grid else "parallel")
        except ScheduleError:
            return  # a nest whose points are not independent stays serial


def _chunk_size(extent: Expr) -> int:
    """Return the largest divisor of a constant extent from LEAST to CHUNK, else CHUNK."""
    size = as_int(extent)
    divisors = [d for d in range(LEAST, CHUNK + 1) if size and size % d == 0]
    return max(divisors, default=CHUNK)


def _is_short(extent: Expr) -> bool:
    """Return whether a dim has fewer elements than the least chunk."""
    size = as_int(extent)
    return size is not None and size < LEAST


def _is_contiguous_along(block: Block, column: Var) -> bool:
    """Return True if neighbours along `column` are neighbours in memory for every operand that has it."""
    with_column = [x for x in block_loads(block) if column in free_vars(*x.indices)]
    return bool(with_column) and all(x.indices[-1] is column for x in with_column)
