"""The places of the largest elements of each row (`top_k`), by quadratic selection; a sort takes all of them.

Rows are spread over workers. Vectors lie along the elements of a chunk, and along the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import SelectedRows, picks, row_length, select_rows
from relax_tune.schedules.rules.shared.vectorize import decompose, in_vectors
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Vectors of a chunk."""


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield rows spread over workers, and the same on one thread; none unless the function picks places once."""
    if len(picks(func)) != 1:
        return
    orders = ("parallel",) if machine.has_grid else ("parallel", "serial")
    yield from try_forms(
        (f"selection.chunks.{order}", partial(build, func, machine, order == "parallel")) for order in orders
    )


def build(func: PrimFunc, machine: HardwareInfo, parallel: bool) -> Schedule:
    """Inline what makes the elements, and select them row by row."""
    s = Schedule(func)
    (chosen,) = picks(func)
    for block in blocks(func.body):
        if block is not chosen and inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    length = row_length(chosen)
    sizes = [machine.lanes * v for v in CHUNKS]
    size = s.tunable("C", [c for c in sizes if length is None or c < 2 * length] or sizes[:1])
    made = select_rows(s, chosen.name, size)
    if {b.name for b in blocks(s.func.body)} != {*made.blocks.values(), chosen.name}:
        raise ScheduleError(f"{func.name}: wanted one selection with what can be computed before it")
    _vectorise(s, made, size, machine)
    for name in made.blocks.values():
        decompose(s, name, s.loops_of(name))
    if made.rows and (machine.has_grid or parallel):
        s.set_kind(s.fuse(made.rows), "group" if machine.has_grid else "parallel")
    s.guess(*({"C": c} for c in (32 * machine.lanes, 8 * machine.lanes, max(size.domain)) if c in size.domain))
    return s


def _vectorise(s: Schedule, made: SelectedRows, size: Expr, machine: HardwareInfo) -> None:
    """Put vectors along the loops over chunks and over the elements of a chunk."""
    for suffix in ("chunk_best", "chunk_place", "seek", "seek_place"):
        in_vectors(s, made.blocks[suffix], s.loops_of(made.blocks[suffix])[-1], machine.lanes, divides=True)
    for suffix in ("take", "take_chunk"):
        in_vectors(s, made.blocks[suffix], s.loops_of(made.blocks[suffix])[-1], machine.lanes)
