"""The places of the largest elements of each row (`top_k`), by quadratic selection or by a radix sort.

Rows are spread over workers. Vectors of a selection lie along the elements of a chunk, and along the chunks.
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


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield selections and sorts, with rows spread over workers and on one thread; none unless the function picks places once.

    The kind that is expected to be faster comes first."""
    found = picks(func)
    if len(found) != 1:
        return
    chunks = [(f"selection.chunks.{o}", partial(build, func, machine, o == "parallel")) for o in machine.orders]
    digits = [
        (f"selection.radix_{bits}.{o}", partial(build_sort, func, machine, bits, o == "parallel"))
        for bits in DIGIT_BITS
        for o in machine.orders
    ]
    yield from try_forms([*digits, *chunks] if sorts(found[0]) else [*chunks, *digits])


def build(func: PrimFunc, machine: HardwareInfo, parallel: bool) -> Schedule:
    """Inline what makes the elements, and select them row by row."""
    s, chosen = inline_elements(func)
    length = row_length(chosen)
    sizes = [machine.lanes * v for v in CHUNKS]
    size = s.tunable("C", [c for c in sizes if length is None or c < 2 * length] or sizes[:1])
    made = select_rows(s, chosen.name, size)
    _require_alone(s, {*made.blocks.values(), chosen.name})
    _vectorise(s, made, size, machine)
    for name in made.blocks.values():
        decompose(s, name, s.loops_of(name))
    _spread(s, made.rows, machine, parallel)
    s.guess(*({"C": c} for c in (32 * machine.lanes, 8 * machine.lanes, max(size.domain)) if c in size.domain))
    return s


def build_sort(func: PrimFunc, machine: HardwareInfo, digit_bits: int, parallel: bool) -> Schedule:
    """Inline what makes the elements, and sort them row by row."""
    s, chosen = inline_elements(func)
    others = {b.name for b in blocks(s.func.body)}
    rows = sort_rows(s, chosen.name, digit_bits)
    _require_alone(s, {b.name for b in blocks(s.func.body)} - others | {chosen.name})
    _spread(s, rows, machine, parallel)
    return s


def _require_alone(s: Schedule, made: set[str]) -> None:
    if {b.name for b in blocks(s.func.body)} != made:
        raise ScheduleError(f"{s.func.name}: wanted one selection with what can be computed before it")


def _spread(s: Schedule, rows: list[str], machine: HardwareInfo, parallel: bool) -> None:
    """Spread rows over workers."""
    if rows and parallel:
        s.set_kind(s.fuse(rows), "group" if machine.has_grid else "parallel")


def _vectorise(s: Schedule, made: SelectedRows, size: Expr, machine: HardwareInfo) -> None:
    """Put vectors along the loops over chunks and over the elements of a chunk."""
    for suffix in ("chunk_best", "chunk_place", "seek", "seek_place"):
        in_vectors(s, made.blocks[suffix], s.loops_of(made.blocks[suffix])[-1], machine.lanes, divides=True)
    for suffix in ("take", "take_chunk"):
        in_vectors(s, made.blocks[suffix], s.loops_of(made.blocks[suffix])[-1], machine.lanes)
