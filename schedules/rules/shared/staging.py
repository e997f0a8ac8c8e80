"""Parts of the GPU rules: staging of operands in shared memory.

The threads of a thread block copy a tile of an operand to shared memory together, in vectors along its rows, so that global reads are
coalesced. Asynchronous copies (`cp.async`, PTX ISA) fill a circular buffer while earlier slots are multiplied.
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

    block: the block that copies it.
    step: the dimension of the reduction steps.
    place: the dimension of the rows or columns.
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

    stages: the number of slots.
    dim: the dimension of the buffer that iterations advance along.
    extent: the elements of a slot along `dim`.
    outer: the number of dimensions in front of that of the slots.
    """

    stages: Tunable
    dim: int
    extent: Expr
    outer: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The distribution of a copy to shared memory over the threads of a thread block.

    threads: the extents of the thread axes, axis 0 last.
    vector: the elements of one access.
    whole: the threads must divide the accesses of a tile.
    pipeline: the circular buffer of an asynchronous copy; None for a copy that threads wait for.
    asynchronous: use `cp.async` where the copy changes no bits.
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

    plan: the threads and vectors of the copy, and its pipeline, if any.
    layout: changes the layout of the staged buffer, after the pipeline has added its slots.
    spread: divides a block with the given loops among threads; by default `copy_rows` along the innermost loop.
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
        own = s.loops_of(name)[depth:]
        if spread is not None:
            spread(name, own)
        else:
            copy_rows(s, name, own[:-1], own[-1], plan)


def add_pipeline(s: Schedule, block: str, loop: str, ring: PipelineRing) -> tuple[str, ...]:
    """Copy iterations ahead of their use into a circular buffer whose slots are contiguous; return the blocks of the prologue."""
    buffer = find_block(s.func, block).body.buffer
    made = s.apply("software_pipeline", block=block, loop=loop, stages=ring.stages)
    rest = [d for d in range(ring.outer, len(buffer.shape) + 1) if d != ring.dim]
    order = [*range(ring.outer), ring.dim, *rest]
    s.apply("tile_layout", buffer=buffer.name, dim=ring.dim, factor=ring.extent, order=order)
    return made


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
        s.apply("copy_async", loop=vector)


def row_and_column_loops(s: Schedule, block: str, own: Sequence[str], rows: int, columns: int) -> tuple[str, str]:
    """Return the loops of a copy along two dimensions. Raises ScheduleError unless it has exactly these two loops."""
    bindings = find_block(s.func, block).bindings
    along = [[n for n in own if n in {v.name for v in free_vars(bindings[d])}] for d in (rows, columns)]
    if any(len(found) != 1 for found in along) or len(own) != 2:
        raise ScheduleError(f"{s.func.name}: {block!r} is fetched in no rows")
    return along[0][0], along[1][0]


def is_copy(s: Schedule, block: str) -> bool:
    """Return whether a block that stages an operand leaves its bits as they are."""
    node = find_block(s.func, block)
    return all(x.buffer.dtype is node.body.buffer.dtype for x in block_loads(node))


def copy_strategies(machine: HardwareInfo) -> tuple[bool, ...]:
    """Return whether to copy asynchronously, the better choice first."""
    return (True, False) if machine.has_cp_async else (False,)


def pipeline_stages(s: Schedule, roles: Contraction, slices: str, least: int) -> Tunable:
    """Declare the slots of the circular buffers, at most the number of slices.

    slices: the loop over slices.
    least: the steps of the shortest slice. Raises ScheduleError when one slice has all steps.
    """
    known = next(as_int(i.extent) for i in roles.block.iters if i.var in roles.reduce)
    if known is not None and known <= least:
        raise ScheduleError(f"{s.func.name}: one slice has all steps, which none can be ahead of")
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
    found = [
        as_int(n.args[1]) or 1
        for x in block_loads(roles.block)
        if x.buffer.dtype.is_int
        for n in x.indices
        if n.op == "floordiv" and n.args[0] is roles.reduce[0]
    ]
    return max(found, default=1)


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
    rows, columns, steps: the extents of a tile. packed: the steps that share one byte. least: the steps of the shortest slice.
    """
    main = roles.block.name
    whole = {roles.row: rows, roles.column: columns, roles.reduce[0]: steps}
    factors = [
        None if i.var not in whole or divides_tile(roles, i.var, least) else whole[i.var] for i in roles.block.iters
    ]
    if packed > 1 and not divides_tile(roles, roles.reduce[0], least):
        raise ScheduleError(f"{s.func.name}: bytes of several steps are not padded")
    new = set(s.apply("pad", block=main, factors=factors))
    found: list[StagedOperand] = []
    for x in dict.fromkeys(block_loads(find_block(s.func, main))):
        made = next((b for b in blocks(s.func.body) if b.body.buffer is x.buffer and b.name in new), None)
        step = [d for d, e in enumerate(x.indices) if _is_step(e, roles)]
        place = [d for d, e in enumerate(x.indices) if e in (roles.row, roles.column)]
        if len(step) != 1 or len(place) != 1:
            if made is not None:
                s.compute_inline(made.name)
            continue
        source = x.buffer if made is None else block_loads(made)[0].buffer
        if made is None:
            (copy,) = s.apply("cache_read", block=main, buffer=x.buffer.name, scope="shared")
            new.add(copy)
        else:
            copy = made.name
            s.apply("set_scope", buffer=x.buffer.name, scope="shared")
        has_rows, multiple = x.indices[place[0]] is roles.row, as_int(source.shape[-1]) or 1
        found.append(StagedOperand(copy, step[0], place[0], has_rows, multiple))
    sums = find_block(s.func, main).body.buffer
    for b in blocks(s.func.body):
        if b.name in new and b.body.buffer not in s.func.output_buffers and block_loads(b)[0].buffer is sums:
            s.compute_inline(b.name)  # the epilogue reads the padded sums directly
    if len(found) < 2:
        raise ScheduleError(f"{s.func.name}: wanted two operands with steps, found {len(found)}")
    return found


def _is_step(e: Expr, roles: Contraction) -> bool:
    """Return whether an index is the reduction step plus an offset, or the number of a pair of steps."""
    (step,) = roles.reduce
    if e.op == "floordiv":
        return e.args[0] is step and as_int(e.args[1]) == 2
    parts = linear(e, (step,))
    return parts is not None and parts[0].get(step) is const(1)
