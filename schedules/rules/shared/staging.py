"""Parts of the GPU rules: staging of operands in shared memory.

The threads of a thread block copy a tile of an operand to shared memory together, in vectors along its rows, so that global reads are
coalesced. Asynchronous copies (`cp.async`, PTX ISA) fill a circular buffer while earlier slots are multiplied.

Tests: `tests/schedules/rules/test_pipelined_copies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, const, free_vars, le
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.contraction import Contraction
from relax_tune.schedules.rules.shared.stream_k import SLICE_STEPS
from relax_tune.schedules.rules.shared.threads import bind_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import only_tunables
from relax_tune.schedules.target import HardwareInfo

PIPELINE_STAGES = (2, 3, 4)
"""Slots of a circular buffer: slices of an operand in shared memory at once."""
EVEN = 64
"""A constant number of rows or columns that this divides is split without padding."""


@dataclass(frozen=True, slots=True)
class StagedOperand:
    """An operand of a product that is staged in shared memory.

    Attributes:
        block: The block that copies it.
        step: The dimension of the reduction steps.
        place: The dimension of the rows or columns.
        has_rows: `place` holds the product's rows, not its columns.
        multiple: a divisor of the length of its rows in memory.
    """

    block: str
    step: int
    place: int
    has_rows: bool
    multiple: int

    @property
    def k_major(self) -> bool:
        """The steps come last: consecutive steps are contiguous in memory."""
        return self.step > self.place

    def width(self, most: int) -> int:
        """Return the elements of one access, at most `most`."""
        return gcd(self.multiple, most)


@dataclass(frozen=True, slots=True)
class PipelineRing:
    """Slots of shared memory that hold the tiles of successive iterations (multistage pipeline).

    Attributes:
        stages: The number of slots.
        dim: The dimension of the buffer that iterations advance along.
        extent: The elements of a slot along `dim`.
        outer: The number of dimensions in front of the dimension of the slots.
    """

    stages: Tunable
    dim: int
    extent: Expr
    outer: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The distribution of a copy to shared memory over the threads of a thread block.

    Attributes:
        threads: The extents of the thread axes, axis 0 last.
        vector: The elements of one access.
        whole: The threads must divide the accesses of a tile.
        pipeline: The circular buffer of an asynchronous copy; None for a copy that threads wait for.
        asynchronous: Use `cp.async` where the copy changes no bits.
    """

    threads: tuple[Expr | int, ...]
    vector: int = 1
    whole: bool = False
    pipeline: PipelineRing | None = None
    asynchronous: bool = False


def stage_tile(
    s: Schedule,
    block: str,
    loop: str,
    plan: CopyPlan,
    layout: Callable[[], object] | None = None,
    spread: Callable[[str, list[str]], None] | None = None,
) -> None:
    """Compute the copy of an operand inside `loop`, and divide it among threads.

    Args:
        plan: The threads and vectors of the copy, and its pipeline, if any.
        layout: Changes the layout of the staged buffer, after the pipeline has added its slots.
        spread: Divides a block with the given loops among threads; by default `copy_rows` along the innermost loop.
    """
    if loop not in s.loops_of(block):
        s.compute_at(block, loop)
    copies = [block]
    if plan.pipeline is not None:
        copies += add_pipeline(s, block, loop, plan.pipeline)
    if layout is not None:
        layout()
    depth = s.loops_of(block).index(loop) + 1
    for name in copies:
        copy_loops = s.loops_of(name)[depth:]
        if spread is not None:
            spread(name, copy_loops)
        else:
            copy_rows(s, name, copy_loops[:-1], copy_loops[-1], plan)


def add_pipeline(s: Schedule, block: str, loop: str, ring: PipelineRing) -> tuple[str, ...]:
    """Copy iterations ahead of their use into a circular buffer whose slots are contiguous; return the blocks of the prologue."""
    buffer = s.buffer_of(block)
    prologue = s.software_pipeline(block=block, loop=loop, stages=ring.stages)
    rest = [d for d in range(ring.outer, len(buffer.shape) + 1) if d != ring.dim]
    order = [*range(ring.outer), ring.dim, *rest]
    s.tile_layout(buffer=buffer.name, dim=ring.dim, factor=ring.extent, order=order)
    return prologue


def copy_rows(s: Schedule, block: str, rows: Sequence[str], column: str, plan: CopyPlan) -> None:
    """Let consecutive threads copy consecutive vectors of rows."""
    vectors, vector = s.split(column, [None, plan.vector], divides=True)
    share_accesses(s, block, [*rows, vectors], vector, plan)


def share_accesses(s: Schedule, block: str, accesses: Sequence[str], vector: str, plan: CopyPlan) -> None:
    """Divide the accesses of a copy among threads, in the order of the loops over them."""
    rounds, *threads = s.split(s.fuse(accesses), [None, *plan.threads], divides=plan.whole)
    s.reorder([*threads, rounds, vector])
    s.vectorize(vector)
    bind_threads(s, threads)
    if plan.asynchronous and is_copy(s, block):
        s.copy_async(loop=vector)


def row_and_column_loops(
    s: Schedule, block: str, copy_loops: Sequence[str], rows: int, columns: int
) -> tuple[str, str]:
    """Return the loops of a copy along two dimensions. Raises ScheduleError unless it has exactly these two loops."""
    bindings = find_block(s.func, block).bindings
    along = [[n for n in copy_loops if n in {v.name for v in free_vars(bindings[d])}] for d in (rows, columns)]
    if any(len(names) != 1 for names in along) or len(copy_loops) != 2:
        raise ScheduleError(f"{s.func.name}: {block!r} does not copy contiguous rows")
    return along[0][0], along[1][0]


def is_copy(s: Schedule, block: str) -> bool:
    """Return whether a block that stages an operand leaves its bits as they are."""
    node = find_block(s.func, block)
    return all(x.buffer.dtype is node.body.buffer.dtype for x in block_loads(node))


def copy_strategies(hardware: HardwareInfo) -> tuple[bool, ...]:
    """Return whether to copy asynchronously, the better choice first."""
    return (True, False) if hardware.has_cp_async else (False,)


def pipeline_stages(s: Schedule, roles: Contraction, slices: str, least: int) -> Tunable:
    """Declare the slots of the circular buffers, at most the number of slices.

    Args:
        slices: The loop over slices.
        least: The steps of the shortest slice.

    Raises:
        ScheduleError: When one slice has all steps.
    """
    known = next(as_int(i.extent) for i in roles.block.iters if i.var in roles.reduce)
    if known is not None and known <= least:
        raise ScheduleError(f"{s.func.name}: expected several slices of steps to copy ahead")
    stages, count = s.tunable("STAGES", PIPELINE_STAGES), s.extent(slices)
    if only_tunables(count):
        s.require(le(stages, count))
    return stages


def divides_tile(roles: Contraction, var: Var, least: int = min(SLICE_STEPS)) -> bool:
    """Return whether tiles are required to divide the extent of an iterator, so that it needs no padding.

    They are for extents over tunables (a share of the steps) and for constant multiples of EVEN, or of `least` steps.
    """
    extent = next(i.extent for i in roles.block.iters if i.var is var)
    known = as_int(extent)
    if known is None:
        return bool(free_vars(extent)) and only_tunables(extent)
    return known > 0 and known % (least * values_per_byte(roles) if var in roles.reduce else EVEN) == 0


def values_per_byte(roles: Contraction) -> int:
    """Return the number of reduction steps that share one stored byte: more than one for packed integers of a few bits."""
    counts = [
        as_int(n.args[1]) or 1
        for x in block_loads(roles.block)
        if x.buffer.dtype.is_int
        for n in x.indices
        if n.op == "floordiv" and n.args[0] is roles.reduce[0]
    ]
    return max(counts, default=1)


def stage_operands(
    s: Schedule,
    roles: Contraction,
    rows: Expr,
    columns: Expr,
    steps: Expr,
    packed: int = 1,
    least: int = min(SLICE_STEPS),
) -> list[StagedOperand]:
    """Stage the operands of a product in shared memory, padded to whole tiles where tiles do not divide an extent.

    Operands without steps, or without rows and columns, are small and stay in global memory.

    Args:
        rows, columns, steps: The extents of a tile.
        packed: The steps that share one byte.
        least: The steps of the shortest slice.
    """
    main = roles.block.name
    whole = {roles.row: rows, roles.column: columns, roles.reduce[0]: steps}
    factors = [
        None if i.var not in whole or divides_tile(roles, i.var, least) else whole[i.var] for i in roles.block.iters
    ]
    if packed > 1 and not divides_tile(roles, roles.reduce[0], least):
        raise ScheduleError(f"{s.func.name}: bytes that pack several steps are not padded")
    # `pad` adds a block for each padded operand, which becomes its staging copy, and one that copies the sums back,
    # which is inlined below
    new = set(s.pad(block=main, factors=factors))
    staged: list[StagedOperand] = []
    for x in dict.fromkeys(block_loads(find_block(s.func, main))):
        copy_block = next((b for b in blocks(s.func.body) if b.body.buffer is x.buffer and b.name in new), None)
        step = [d for d, e in enumerate(x.indices) if _is_step(e, roles)]
        place = [d for d, e in enumerate(x.indices) if e in (roles.row, roles.column)]
        if len(step) != 1 or len(place) != 1:
            if copy_block is not None:
                s.compute_inline(copy_block.name)
            continue
        source = x.buffer if copy_block is None else block_loads(copy_block)[0].buffer
        if copy_block is None:
            (copy,) = s.cache_read(block=main, buffer=x.buffer.name, scope="shared")
            new.add(copy)
        else:
            copy = copy_block.name
            s.set_scope(buffer=x.buffer.name, scope="shared")
        # rows of unknown length start at any element, so their accesses are of one element
        has_rows, multiple = x.indices[place[0]] is roles.row, as_int(source.shape[-1]) or 1
        staged.append(StagedOperand(copy, step[0], place[0], has_rows, multiple))
    sums = s.buffer_of(main)
    for b in blocks(s.func.body):
        if b.name in new and b.body.buffer not in s.func.output_buffers and block_loads(b)[0].buffer is sums:
            s.compute_inline(b.name)  # the epilogue reads the padded sums directly
    if len(staged) < 2:
        raise ScheduleError(f"{s.func.name}: expected two operands with steps, got {len(staged)}")
    return staged


def _is_step(e: Expr, roles: Contraction) -> bool:
    """Return whether an index is the reduction step plus an offset, or the number of a pair of steps."""
    (step,) = roles.reduce
    if e.op == "floordiv":
        return e.args[0] is step and as_int(e.args[1]) == 2
    parts = linear(e, (step,))
    return parts is not None and parts[0].get(step) is const(1)
