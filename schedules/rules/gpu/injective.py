"""GPU rule for functions without reductions: elementwise, broadcast, transpose and gather, in any fused combination.

flat: the elements of an output form one long row of vectors. A thread block takes a run of it, and consecutive threads take
consecutive vectors, so that accesses are coalesced.
transposed: square tiles pass through shared memory, so that reads and writes are both coalesced.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import find_block, find_loop
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.injective import inline_into_outputs, transposed_reads
from relax_tune.schedules.rules.shared.threads import thread_counts, vector_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

SIDE = 32
"""Rows and columns of a tile that is transposed."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a function without reductions; none for other functions."""
    if reductions(func):
        return
    forms = (("flat", _flat), ("transposed", _transposed))
    yield from try_forms(func, ((f"injective.{name}", partial(make, func, hardware)) for name, make in forms))


def epilogues(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketch of the epilogue kernel of a library call."""
    if not reductions(func):
        yield from try_forms(func, (("injective.flat", partial(_flat, func, hardware)),))


def _flat(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Give each thread block a run of RB times TX vectors."""
    s = Schedule(func)
    left = inline_into_outputs(s)
    items = s.tunable("TX", thread_counts(hardware))
    run = s.tunable("RB", (1, 2, 4, 8))
    width = s.tunable("VL", vector_widths([b.iters[-1].extent for b in left], hardware))
    for block in left:
        *outer, column = s.loops_of(block.name)
        c_0, c_1 = s.split(column, [None, width], divides=as_int(s.extent(column)) is not None)
        top, several, item = s.split(s.fuse([*outer, c_0]), [None, run, items])
        s.reorder([top, item, several])
        s.set_tail(top, "peel")
        s.vectorize(c_1)
        s.bind(top, "group")
        s.bind(item, "item")
    s.guess({"TX": min(256, hardware.group_size), "RB": 1, "VL": width.domain[-1]})
    return s


def _transposed(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Transpose square tiles in shared memory, padded by a column against bank conflicts.

    Raises:
        ScheduleError: Unless one block reads arrays along another dimension than it writes.
    """
    s = Schedule(func)
    block, *more = inline_into_outputs(s)
    if more:
        raise ScheduleError(f"{func.name}: expected one block, got {len(more) + 1}")
    node, loops = find_block(s.func, block.name), s.loops_of(block.name)
    column = node.iters[-1].var
    if node.body.indices[-1] is not column or node.bindings[-1] is not find_loop(s.func, loops[-1]).var:
        raise ScheduleError(f"{func.name}: {block.name!r} does not write along its last iterator")
    reads = transposed_reads(node, column)
    at = next(k for k, i in enumerate(node.iters) if i.var is reads[0].indices[-1])
    items = s.tunable("TY", [n for n in (4, 8, 16, 32) if n * SIDE <= hardware.group_size])
    copies: list[tuple[str, int]] = []
    for access in reads:
        wide = next(d for d, e in enumerate(access.indices) if column in free_vars(e))
        (copy,) = s.cache_read(block=block.name, buffer=access.buffer.name, scope="shared")
        copies.append((copy, wide))
    others = [n for k, n in enumerate(loops[:-1]) if k != at]
    r_0, r_1 = s.split(loops[at], [None, SIDE])
    c_0, c_1 = s.split(loops[-1], [None, SIDE])
    s.reorder([*others, r_0, c_0, r_1, c_1])
    for copy, wide in copies:
        s.compute_at(copy, c_0)
        copy_loops = s.inner_loops(copy, c_0)
        place = find_block(s.func, copy)
        across = [n for n in copy_loops if find_loop(s.func, n).var in free_vars(place.bindings[wide])]
        along = [n for n in copy_loops if n not in across]
        if len(across) != 1 or len(along) != 1:
            raise ScheduleError(f"{func.name}: {place.body.buffer.name!r} is not read in square tiles")
        s.reorder([*across, *along])
        _bind_tile(s, across[0], along[0], items)
        s.storage_align(buffer=place.body.buffer.name, factor=SIDE, offset=1)
    _bind_tile(s, r_1, c_1, items)
    s.bind(c_0, "group", 0)
    s.bind(r_0, "group", 1)
    if others:
        s.bind(s.fuse(others), "group", 2)
    return s


def _bind_tile(s: Schedule, rows: str, columns: str, items: Expr) -> None:
    """Bind the columns of a tile to thread axis 0, and distribute its rows over axis 1."""
    several, row = s.split(rows, [None, items])
    s.reorder([row, columns, several])
    s.bind(row, "item", 1)
    s.bind(columns, "item", 0)
