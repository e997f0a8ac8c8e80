"""The places of the largest elements of each row (`top_k`), by quadratic selection or by a radix sort.

Rows are spread over workers. Vectors of a selection lie along the elements of a chunk, and along the chunks.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import (
    SelectedRows,
    inline_elements,
    picks,
    row_length,
    select_rows,
    sort_rows,
    sorts,
)
from relax_tune.schedules.rules.shared.vectorize import decompose, in_vectors
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Vectors of a chunk."""


DIGIT_BITS = (8, 11)
"""Bits of a digit: a table of 256 counts suits short rows, one of 2048 takes fewer passes."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield selections and sorts, with rows spread over workers and on one thread, if the function picks places once.

    The kind that is expected to be faster comes first."""
    nodes = picks(func)
    if len(nodes) != 1:
        return
    chunks = [(f"selection.chunks.{o}", partial(build, func, hardware, o == "parallel")) for o in hardware.orders]
    digits = [
        (f"selection.radix_{bits}.{o}", partial(build_sort, func, hardware, bits, o == "parallel"))
        for bits in DIGIT_BITS
        for o in hardware.orders
    ]
    yield from try_forms(func, [*digits, *chunks] if sorts(nodes[0]) else [*chunks, *digits])


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Inline the producers of the elements, and select them row by row."""
    s, chosen = inline_elements(func)
    length = row_length(chosen)
    sizes = [hardware.lanes * v for v in CHUNKS]
    size = s.tunable("C", [c for c in sizes if length is None or c < 2 * length] or sizes[:1])
    selected = select_rows(s, chosen.name, size)
    _require_no_other_block(s, {*selected.blocks.values(), chosen.name})
    _vectorise(s, selected, size, hardware)
    for name in selected.blocks.values():
        decompose(s, name, s.loops_of(name))
    _spread(s, selected.rows, hardware, parallel)
    s.guess(*({"C": c} for c in (32 * hardware.lanes, 8 * hardware.lanes, max(size.domain)) if c in size.domain))
    return s


def build_sort(func: PrimFunc, hardware: HardwareInfo, digit_bits: int, parallel: bool) -> Schedule:
    """Inline the producers of the elements, and sort them row by row."""
    s, chosen = inline_elements(func)
    others = {b.name for b in blocks(s.func.body)}
    rows = sort_rows(s, chosen.name, digit_bits)
    _require_no_other_block(s, {b.name for b in blocks(s.func.body)} - others | {chosen.name})
    _spread(s, rows, hardware, parallel)
    return s


def _require_no_other_block(s: Schedule, names: set[str]) -> None:
    if {b.name for b in blocks(s.func.body)} != names:
        raise ScheduleError(f"{s.func.name}: expected one selection, and earlier blocks that can be inlined")


def _spread(s: Schedule, rows: list[str], hardware: HardwareInfo, parallel: bool) -> None:
    """Spread rows over workers."""
    if rows and parallel:
        s.set_kind(s.fuse(rows), "group" if hardware.has_grid else "parallel")


def _vectorise(s: Schedule, selected: SelectedRows, size: Expr, hardware: HardwareInfo) -> None:
    """Put vectors along the loops over chunks and over the elements of a chunk."""
    for suffix in ("chunk_best", "chunk_place", "seek", "seek_place"):
        in_vectors(s, selected.blocks[suffix], s.loops_of(selected.blocks[suffix])[-1], hardware.lanes, divides=True)
    for suffix in ("take", "take_chunk"):
        in_vectors(s, selected.blocks[suffix], s.loops_of(selected.blocks[suffix])[-1], hardware.lanes)
