"""Long reductions with few results in two passes: sums over everything, over a leading dimension, of few long rows.

Each reduction is split into chunks; a thread or work-group computes a partial result of each. A later nest combines
them.
Blocks between reductions are inlined.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Tunable, as_int, free_vars, le
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.reductions import reduce_in_chunks
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import hoist_reciprocal, in_vectors, strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# Shorter reductions have enough results to occupy the threads, or too little work for several.
SHORT = 2048
ROWS = (1 << 6, 1 << 8, 1 << 10, 1 << 12)
CHUNKS = (1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16)


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the chunks spread over threads, and the same on one thread; none for functions without a long reduction.

    Each result of a search reduces others' terms again, which is too much work where chunks are long."""
    if not reductions(func) or searches(func):
        return
    yield from try_forms(
        func,
        (
            (f"reductions.two_pass.{order}", partial(build, func, hardware, order == "parallel"))
            for order in hardware.orders
        ),
    )


@dataclass(frozen=True, slots=True)
class _RowChunks:
    """Tunables of reductions along memory.

    Attributes:
        chunk: Elements of a chunk.
        width: Elements of the vectors of accumulators.
    """

    chunk: Tunable
    width: Tunable


@dataclass(frozen=True, slots=True)
class _ColumnChunks:
    """Tunables of reductions across memory.

    Attributes:
        chunk: Steps of a chunk.
        width: Neighbouring results in registers.
        rows: Steps with separate accumulators.
    """

    chunk: Tunable
    width: Tunable
    rows: Tunable


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Split every reduction into chunks; inline the other blocks or spread them over the workers."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    nodes = reductions(s.func)
    across = [_reduces_columns(block, hardware) for block in nodes]
    kind = "serial" if not parallel else "group" if hardware.has_grid else "parallel"
    along = column_chunks = None
    if False in across:
        along = _RowChunks(s.tunable("L", CHUNKS), s.tunable("VL", [hardware.lanes * u for u in (2, 4, 8)]))
    if True in across:
        columns = next(b.iters[len(b.body.indices) - 1] for b, yes in zip(nodes, across) if yes)
        width, rows = s.tunable("W", strip_widths(columns, hardware)), s.tunable("U", (1, 2, 4, 8))
        column_chunks = _ColumnChunks(s.tunable("LR", ROWS), width, rows)
        s.require(le(rows * width, (hardware.registers - 4) * hardware.lanes))
    for block in blocks(s.func.body):
        if block not in nodes:
            _elementwise(s, block.name, hardware, kind)
        elif across[nodes.index(block)]:
            assert column_chunks is not None
            _reduce_columns(s, block, column_chunks, kind)
        else:
            assert along is not None
            _reduce_rows(s, block, along, kind)
    return s


def _reduces_columns(block: Block, hardware: HardwareInfo) -> bool:
    """Return True if the reduction walks across memory with neighbouring results, False if it walks along memory.

    Raises:
        ScheduleError: For any other access, several reduction dimensions, short reductions, and for enough results to occupy the workers.
    """
    reduce = [i for i in block.iters if i.kind == "reduce"]
    step = reduce[0].var
    reads = [x for x in block_loads(block) if step in free_vars(*x.indices)]
    fast = block.body.indices[-1] if block.body.indices else None
    ends = {x.indices[-1] for x in reads}
    plain = all(e is step or step not in free_vars(e) for x in reads for e in x.indices)
    if len(reduce) != 1 or not plain or (ends != {step} and (fast is None or ends != {fast})):
        raise ScheduleError(f"block {block.name!r} steps neither along memory nor across its results, in one dimension")
    # A diagonal moves along two dims at once, so its elements are no neighbours.
    if ends == {step} and any(step in x.indices[:-1] for x in reads):
        raise ScheduleError(f"block {block.name!r} reads diagonals")
    length = as_int(reduce[0].extent)
    results = 1
    for i in block.iters:
        results *= (as_int(i.extent) or 1) if i.kind == "spatial" else 1
    # With 64 results per worker, spreading the results occupies all workers evenly, and no second pass is needed.
    if (length is not None and length < SHORT) or results >= 64 * hardware.workers:
        raise ScheduleError(f"block {block.name!r} has enough rows for all workers, or too few steps")
    return ends != {step}


def _parallelise(s: Schedule, block: str, part: str, depth: int, kind: str) -> None:
    """Spread chunks over threads or work-groups, and the results of the combining nest over work-groups."""
    if kind == "serial":
        return
    s.set_kind(s.fuse(s.loops_of(part)[: depth + 1]), "group" if kind == "group" else "parallel")
    if kind == "group" and depth:
        s.bind(s.fuse(s.loops_of(block)[:depth]), "group")


def _reduce_rows(s: Schedule, block: Block, numbers: _RowChunks, kind: str) -> None:
    """Reduce chunks of rows, in vectors with an accumulator for every lane."""
    *outer, along = s.loops_of(block.name)
    chunk, inside = s.split(along, [None, numbers.chunk])
    part = reduce_in_chunks(s, block.name, chunk, len(outer))
    in_vectors(s, part, inside, numbers.width, divides=True)
    _parallelise(s, block.name, part, len(outer), kind)


def _reduce_columns(s: Schedule, block: Block, numbers: _ColumnChunks, kind: str) -> None:
    """Reduce chunks of steps: strips of results stay in registers, with separate accumulators for several steps."""
    *outer, column, steps = s.loops_of(block.name)
    chunk, inside = s.split(steps, [None, numbers.chunk])
    several, row = s.split(inside, [None, numbers.rows], divides=True)
    s.set_tail(several, "peel")
    strip, lanes = s.split(column, [None, numbers.width])
    s.set_tail(strip, "peel")
    s.reorder([*outer, chunk, strip, several, row, lanes])
    part = reduce_in_chunks(s, block.name, chunk, len(outer))
    partial_sums = s.buffer_of(part)
    rank = len(partial_sums.shape)
    # Results last, so that the sums of a strip are one vector; `rfactor` puts the new dim last.
    s.permute_layout(buffer=partial_sums.name, order=[*range(rank - 2), rank - 1, rank - 2])
    s.rfactor(block=part, loop=row)
    sums = next(b for b in s.func.allocs if b.name == f"{partial_sums.name}_rf")
    s.permute_layout(buffer=sums.name, order=[*range(rank - 1), rank, rank - 1])
    for b in blocks(s.func.body):
        if b.body.buffer.name in (partial_sums.name, sums.name, block.body.buffer.name):
            names = s.loops_of(b.name)
            s.vectorize(names[-1])
            if b.body.buffer.name != block.body.buffer.name and names[-2] not in (several, strip):
                s.unroll(names[-2])
    _parallelise(s, block.name, part, len(outer), kind)


def _elementwise(s: Schedule, block: str, hardware: HardwareInfo, kind: str) -> None:
    """Schedule a block without a reduction: vectors along its last dimension, chunks over workers."""
    hoist_reciprocal(s, block)
    names = s.loops_of(block)
    if not names:
        return
    *outer, column = names
    vectors = in_vectors(s, block, column, hardware.lanes)
    if kind != "serial":
        chunk = s.fuse(outer) if outer else s.split(vectors, [None, 64])[0]
        s.set_kind(chunk, "group" if kind == "group" else "parallel")
