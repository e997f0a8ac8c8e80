"""Reductions whose results search all terms for their few: selections of the largest elements, and scatters."""

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


def searches(func: PrimFunc) -> bool:
    """Return whether results search all terms for their few: prefix scans, selections and scatters.

    The loops take as many steps as pairs of a term and a result. Primitives of their own take about as many as terms and results."""
    return any(prefix_scan(b) or pick(b) or scatter(b) for b in blocks(func.body))


def serial_scatters(func: PrimFunc, machine: HardwareInfo) -> tuple[Block, ...]:
    """Return the scatters whose results the machine can keep: those of float32 are float64 while updates are added.

    None for a machine whose workers are many, since updates are combined one after the other."""
    if machine.is_gpu:
        return ()
    found = {b: pattern for b in blocks(func.body) if (pattern := scatter(b)) is not None and pick(b) is None}
    return tuple(b for b, p in found.items() if machine.has_doubles or total_dtype(p, b.body.buffer.dtype) is not f64)


def picks(func: PrimFunc) -> tuple[Block, ...]:
    """Return the blocks that pick places by ranks."""
    return tuple(b for b in blocks(func.body) if pick(b) is not None)


def row_length(block: Block) -> int | None:
    """Return the number of elements of a row that a block picks from, if it is a number."""
    found = pick(block)
    return None if found is None else as_int(found.step.extent)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """A selection whose rows are computed one by one.

    rows: the loops over rows, outermost first
    blocks: the names of the blocks that `quadratic_select` made, by their part
    """

    rows: list[str]
    blocks: Mapping[str, str]


def select_rows(s: Schedule, block: str, size: Expr | int) -> SelectedRows:
    """Select from chunks of `size` elements; what concerns one result stays in registers.

    Raises ScheduleError for a block that does not pick places by ranks."""
    made = dict(zip(PARTS, s.apply("quadratic_select", block=block, factor=size), strict=True))
    for part in ("take", "take_chunk", "take_place", "seek", "seek_place"):
        s.apply("set_scope", buffer=find_block(s.func, made[part]).body.buffer.name, scope="local")
    return SelectedRows(s.loops_of(block)[:-1], made)
