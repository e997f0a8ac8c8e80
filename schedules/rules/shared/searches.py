"""Reductions whose results search all terms for their few: selections of the largest elements, sorts, and scatters.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.deduce.pattern_kinds import prefix_scan
from relax_tune.ir.deduce.rankings import pick
from relax_tune.ir.deduce.scatters import scatter
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.primitives.reduction.scatters import total_dtype
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

PARTS = (
    "key",
    "fill",
    "chunk_best",
    "chunk_place",
    "take",
    "take_chunk",
    "take_place",
    "seek",
    "seek_place",
    "keep_best",
    "keep_place",
)
"""The blocks that `quadratic_select` makes, in program order."""
SORTED_SHARE = 128
"""Elements that a radix sort orders in the time in which quadratic selection takes one (f32 on C, rows of 1000 to 32,000)."""
USUAL_LENGTH = 64 * SORTED_SHARE
"""The length of a row that is assumed where it is a symbol."""


def searches(func: PrimFunc) -> bool:
    """Return whether results search all terms for their few: prefix scans, selections and scatters.

    The loops take as many steps as pairs of a term and a result. Primitives of their own take about as many as terms and results."""
    return any(prefix_scan(b) or pick(b) or scatter(b) for b in blocks(func.body))


def serial_scatters(func: PrimFunc, hardware: HardwareInfo) -> tuple[Block, ...]:
    """Return the scatters whose results the hardware can store: sums of float32 are float64 while updates are added.

    None for hardware with many workers, since updates are combined one after the other."""
    if hardware.is_gpu:
        return ()
    patterns = {b: pattern for b in blocks(func.body) if (pattern := scatter(b)) is not None and pick(b) is None}
    return tuple(
        b for b, p in patterns.items() if hardware.has_doubles or total_dtype(p, b.body.buffer.dtype) is not f64
    )


def picks(func: PrimFunc) -> tuple[Block, ...]:
    """Return the blocks that pick places by ranks."""
    return tuple(b for b in blocks(func.body) if pick(b) is not None)


def row_length(block: Block) -> int | None:
    """Return the number of elements of a row that a block picks from, if it is a number."""
    pattern = pick(block)
    return None if pattern is None else as_int(pattern.step.extent)


def inline_elements(func: PrimFunc) -> tuple[Schedule, Block]:
    """Inline what makes the elements of a function's one pick; return the schedule and the block that picks."""
    s = Schedule(func)
    (chosen,) = picks(func)
    for block in blocks(func.body):
        if block is not chosen and inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    return s, chosen


def sorts(block: Block) -> bool:
    """Return whether a sort of all elements is expected to be faster than a selection of a block's places.

    A symbolic number of places may be the length. A sort is slower by a constant factor at worst, a selection by the length."""
    pattern = pick(block)
    if pattern is None:
        return False
    count, length = as_int(pattern.slot.extent), as_int(pattern.step.extent)
    return count is None or count * SORTED_SHARE >= (USUAL_LENGTH if length is None else length)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """A selection whose rows are computed one by one.

    Attributes:
        rows: The loops over rows, outermost first.
        blocks: Names of the blocks of `quadratic_select`, by part.
    """

    rows: list[str]
    blocks: Mapping[str, str]


def select_rows(s: Schedule, block: str, size: Expr | int) -> SelectedRows:
    """Select from chunks of `size` elements; what concerns one result stays in registers.

    Raises:
        ScheduleError: For a block that does not pick places by ranks.
    """
    parts = dict(zip(PARTS, s.quadratic_select(block=block, factor=size), strict=True))
    for part in ("take", "take_chunk", "take_place", "seek", "seek_place"):
        s.set_scope(buffer=s.buffer_of(parts[part]).name, scope="local")
    return SelectedRows(s.loops_of(block)[:-1], parts)


def sort_rows(s: Schedule, block: str, digit_bits: int) -> list[str]:
    """Sort each row by digits, whose counts stay with the row's worker; return the loops over rows, outermost first.

    Raises:
        ScheduleError: For a block that does not pick places by ranks.
    """
    _, _, _, count, start, first, *_ = s.radix_sort(block=block, digit_bits=digit_bits)
    for name in (count, start, first):
        s.set_scope(buffer=s.buffer_of(name).name, scope="local")
    s.unroll(s.loops_of(count)[-1])
    return s.loops_of(block)[:-1]
