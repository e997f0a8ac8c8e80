"""GPU rule for row-wise functions: softmax, normalisations and row reductions with fused elementwise stages.

Consecutive threads read consecutive elements of a row, reduce their own elements in registers, and then exchange partial results.
warp_per_row: at most one warp shares a row and exchanges with shuffles.
block_per_row: several warps share a row and exchange through shared memory.
in_registers: intermediates of a row stay in the registers of the thread that owns the element in every stage. Without it, stages
recompute them from the row, which the first pass has brought into the cache.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, as_int, const, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import inlinable, reductions
from relax_tune.schedules.loop_tree import find_alloc, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.reductions import require_rowwise
from relax_tune.schedules.rules.shared.threads import (
    LANES_PER_ROW,
    bind_threads,
    limit_threads,
    reduce_across_threads,
    split_over_threads,
    vector_widths,
    warps_per_row,
)
from relax_tune.schedules.rules.shared.vectorize import hoist_reciprocal
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

MOST_ROUNDS = 8
"""Vectors of a row that a thread may keep in registers."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a row-wise function; none for other functions."""
    if not reductions(func):
        return
    forms = (
        ("warp_per_row", False, False),
        ("block_per_row", True, False),
        ("warp_per_row.in_registers", False, True),
        ("block_per_row.in_registers", True, True),
    )
    yield from try_forms(func, ((f"rowwise.{name}", partial(build, func, hardware, *kind)) for name, *kind in forms))


def build(func: PrimFunc, hardware: HardwareInfo, many: bool, in_registers: bool = False) -> Schedule:
    """Compute every stage of a row by the same threads.

    Args:
        many: Several warps share a row; otherwise at most one warp does.
        in_registers: Intermediates of a row stay in registers.

    Raises:
        ScheduleError: Unless every stage has the same leading dimensions as rows.
    """
    s = Schedule(func)
    row_buffers = _inline_stages(s, in_registers)
    rows = min(len(b.body.indices) for b in reductions(s.func))
    if any(len(find_alloc(s.func, name).shape) != rows + 1 for name in row_buffers):
        raise ScheduleError(f"{func.name}: rows in registers have one dimension")
    across: Sequence[Expr | int] = warps_per_row(s, hardware) if many else (s.tunable("TX", LANES_PER_ROW),)
    one: Expr = const(1)
    items = reduce(mul, across, one)
    height = s.tunable("TY", [n for n in (1, 2, 4, 8, 16, 32) if n <= (_known_rows(s, rows) or 32)])
    columns = [b.iters[-1].extent for b in blocks(s.func.body) if len(b.iters) > rows]
    width = s.tunable("VL", vector_widths(columns, hardware))
    limit_threads(s, hardware, mul(items, height))
    outer, f_0, f_1 = _by_rows(s, rows, height)
    for name in row_buffers:
        # A row in registers must fit the vectors of its threads; longer rows would spill to memory.
        s.require(le(find_alloc(s.func, name).shape[-1], mul(mul(items, width), MOST_ROUNDS)))
    for a in s.func.allocs:
        if a.name not in row_buffers:
            s.set_scope(buffer=a.name, scope="local")
    for block in blocks(s.func.body):
        inner = s.inner_loops(block.name, f_1)
        if inner:
            rounds, item, lanes = split_over_threads(s, inner[-1], across, width)
            s.reorder([*item, *inner[:-1], rounds, lanes])
            # Registers have no index at run time: the loop over a thread's vectors must be unrolled to name each of
            # them.
            if in_registers:
                s.unroll(rounds)
            if block.is_reduction:
                reduce_across_threads(s, block.name, item, lanes)
            else:
                s.vectorize(lanes)
                bind_threads(s, item)
    for name in row_buffers:
        dim = len(find_alloc(s.func, name).shape) - 1
        # From the elements of a vector outwards: after each split, `dim` is the quotient, which the next one divides.
        for factor in (width, *reversed(across)):
            rank = len(find_alloc(s.func, name).shape)
            s.tile_layout(buffer=name, dim=dim, factor=factor, order=[*range(rank + 1)])
        s.set_scope(buffer=name, scope="local")
    s.bind(f_1, "item", len(across))
    s.bind(f_0, "group")
    if outer:
        s.bind(s.fuse(outer), "group", 1)
    shape = {"TW": min(8, hardware.group_size // 32), "TY": 1} if many else {"TX": 32, "TY": 4}
    s.guess({**shape, "VL": width.domain[-1]})
    return s


def _inline_stages(s: Schedule, in_registers: bool) -> list[str]:
    """Inline the elementwise stages, and give each reduction an intermediate; return the buffers to keep in registers.

    Args:
        in_registers: Keep intermediates of whole rows instead of inlining them.
    """
    row_buffers: list[str] = []
    for block in blocks(s.func.body):
        current = find_block(s.func, block.name)
        if not inlinable(s.func, current):
            continue
        if in_registers and as_int(current.body.buffer.shape[-1]) not in (None, 1):
            row_buffers.append(current.body.buffer.name)
        else:
            s.compute_inline(block.name)
    if in_registers and not row_buffers:
        raise ScheduleError(f"{s.func.name}: no stage has a known row length")
    for block in reductions(s.func):
        require_rowwise(block)
        if block.body.buffer in s.func.output_buffers:
            s.cache_write(block=block.name, scope="global")
    for block in blocks(s.func.body):
        hoist_reciprocal(s, block.name)
    return row_buffers


def _by_rows(s: Schedule, rows: int, height: Tunable) -> tuple[list[str], str, str]:
    """Put all stages under the same loops over rows, and split the innermost by thread blocks.

    Args:
        height: The rows of a thread block.

    Returns:
        The outer loops, the loop over thread blocks, and the loop over the rows of a thread block.
    """
    stages = blocks(s.func.body)
    if rows == 0 or any(not _leads(b, rows) for b in stages):
        raise ScheduleError(f"{s.func.name}: rows are not the leading dimensions of every stage")
    first, *others = [s.loops_of(b.name)[:rows] for b in stages]
    for other in others:
        for a, b in zip(first, other, strict=True):
            s.fuse_sibling_loops(a, b)
    f_0, f_1 = s.split(first[-1], [None, height])
    return first[:-1], f_0, f_1


def _known_rows(s: Schedule, rows: int) -> int | None:
    return as_int(blocks(s.func.body)[0].iters[rows - 1].extent) if rows else None


def _leads(block: Block, rows: int) -> bool:
    return block.body.indices[:rows] == tuple(i.var for i in block.iters[:rows])
