"""Parts of the GPU rules for products and convolutions: matrix products on scalar arithmetic (FMA).

A thread block computes a tile of the output, each thread a register tile of it. Slices of both operands are staged in shared memory with
the steps leading, so that the elements a thread reads in one step are contiguous. Tiles are padded while they are staged, so that the
main loop has no conditions. The epilogue runs on the registers.

With asynchronous copies, operands whose rows or columns are contiguous are copied with 16-byte `cp.async`; k-major ones with 4-byte
`cp.async`, each warp covering an 8 x 4 patch, so that global reads fill 32-byte sectors and writes to shared memory have no bank
conflicts. Rows are padded rather than swizzled: a padded address is a base plus a constant.

Tests: `tests/schedules/rules/test_pipelined_copies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, const, eq, floormod, free_vars, le, mul
from relax_tune.ir.hardware.swizzle import ACCESS_BYTES
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.contraction import Contraction, matrix_roles
from relax_tune.schedules.rules.shared.staging import (
    CopyPlan,
    PipelineRing,
    StagedOperand,
    divides_tile,
    pipeline_stages,
    stage_operands,
    stage_tile,
    values_per_byte,
)
from relax_tune.schedules.rules.shared.stream_k import (
    FIRST_WAVES,
    SLICE_STEPS,
    Decomposition,
    TileLoops,
    accumulate_tiles,
    decompose_work,
)
from relax_tune.schedules.rules.shared.threads import Parts, epilogue_on_fragments, limit_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

THREADS = (4, 8, 16, 32)
HEIGHTS = (1, 2, 4, 8)
VECTORS = (1, 2, 4)
MOST_SUMS = 64
"""Sums that a thread may hold in registers."""


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """The tile of a thread block, by threads and by what each thread computes.

    Attributes:
        tx, ty: Threads along columns and rows.
        height: Rows of a thread.
        vectors: Vectors of columns of a thread.
        width: Columns of a vector.
    """

    tx: Tunable
    ty: Tunable
    height: Tunable
    vectors: Tunable
    width: int

    @property
    def rows(self) -> Expr:
        return mul(self.ty, self.height)

    @property
    def columns(self) -> Expr:
        return mul(mul(self.vectors, self.tx), self.width)


def tile_product(
    s: Schedule,
    main: str,
    hardware: HardwareInfo,
    form: Decomposition,
    asynchronous: bool = False,
    im2col_operands: Sequence[str] = (),
) -> None:
    """Tile a product for thread blocks and threads, with operands staged in shared memory.

    Args:
        asynchronous: Copy slices ahead of their use with `cp.async`.
        im2col_operands: Blocks that build operands in im2col order. No memory holds these operands: each slice is built while it is staged.
    """
    # multiples of eight by their factor prove that eight divides a slice
    eights = (
        mul(s.tunable("KE", [n // min(SLICE_STEPS) for n in SLICE_STEPS]), min(SLICE_STEPS)) if asynchronous else None
    )
    main, last = decompose_work(s, main, hardware, form, eights)
    roles, _ = matrix_roles(s, main, last)
    tile = _declare_tile(s, hardware)
    packed = values_per_byte(roles)
    steps = s.tunable("KT", SLICE_STEPS) if eights is None else eights
    if asynchronous and packed > 1:
        raise ScheduleError(f"{s.func.name}: bytes that pack several steps are not copied asynchronously")
    operands = stage_operands(s, roles, tile.rows, tile.columns, mul(steps, packed), packed)
    if asynchronous and im2col_operands:  # neighbours in im2col order are no neighbours in memory
        operands = [replace(x, multiple=1) for x in operands]
    for name in im2col_operands:
        s.compute_inline(name)
    loops, inner_steps = _split_tiles(s, roles, tile, steps, packed)
    stages = pipeline_stages(s, roles, loops.slices, min(SLICE_STEPS)) if asynchronous else None

    def stage(slices: str) -> None:
        if not any([_stage(s, x, slices, tile, steps, stages) for x in operands]) and asynchronous:
            raise ScheduleError(f"{s.func.name}: neither operand is copied without conversion")

    def epilogue(epilogue_loops: list[str], whole: bool) -> None:
        _epilogue_on_register_tiles(s, epilogue_loops, tile, whole)

    copies, whole = [x.block for x in operands], divides_tile(roles, roles.column)
    loops = accumulate_tiles(s, roles, last, form, loops, copies, hardware, stage, epilogue, whole)
    _distribute_tile(s, main, loops, inner_steps)
    _sums_in_registers(s, roles, tile)
    loops.bind(s)
    _guess(s, form, asynchronous)


def _declare_tile(s: Schedule, hardware: HardwareInfo) -> RegisterTile:
    tx, ty = s.tunable("TX", THREADS), s.tunable("TY", THREADS)
    tile = RegisterTile(tx, ty, s.tunable("MR", HEIGHTS), s.tunable("NV", VECTORS), min(4, hardware.lanes))
    limit_threads(s, hardware, mul(tile.tx, tile.ty))
    s.require(le(mul(tile.height, tile.vectors) * tile.width, const(MOST_SUMS)))
    return tile


def _split_tiles(
    s: Schedule, roles: Contraction, tile: RegisterTile, steps: Expr, packed: int
) -> tuple[TileLoops, list[str]]:
    """Split the product's loops into tiles, slices, threads and register tiles. Returns the outer loops, and the loops over steps."""
    assert roles.row is not None
    column, reduce = roles.column, roles.reduce[0]
    block = find_block(s.func, roles.block.name)
    nest = s.iter_loops(block.name)
    i_0, i_t, i_1 = s.split(nest[roles.row], [None, tile.ty, tile.height])
    factors = [None, tile.vectors, tile.tx, tile.width]
    j_0, j_1, j_t, j_2 = s.split(nest[column], factors, divides=divides_tile(roles, column))
    inner = [None, steps, packed] if packed > 1 else [None, steps]
    k_0, *k_1 = s.split(nest[reduce], inner, divides=divides_tile(roles, reduce))
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_t, j_t, *k_1, i_1, j_1, j_2])
    return TileLoops(batch, i_0, j_0, k_0), k_1


def _distribute_tile(s: Schedule, main: str, loops: TileLoops, steps: Sequence[str]) -> None:
    """Bind the threads of a tile, and unroll and vectorise what each computes."""
    for name in (main, f"{main}_init"):
        inner = s.inner_loops(name, loops.column)
        *_, i_t, j_t, i_1, j_1, j_2 = [n for n in inner if n not in (loops.slices, *steps)]
        s.bind(i_t, "item", 1)
        s.bind(j_t, "item", 0)
        s.unroll(i_1, j_1)
        s.vectorize(j_2)


def _sums_in_registers(s: Schedule, roles: Contraction, tile: RegisterTile) -> None:
    """Lay the sums out so that each thread's are contiguous, and keep them in registers."""
    sums = find_block(s.func, roles.block.name).body
    dim = next(d for d, e in enumerate(sums.indices) if e is roles.column)
    rank = len(sums.indices)
    for at, factor in ((dim, tile.columns), (dim + 1, tile.width), (dim + 1, tile.tx)):
        s.tile_layout(buffer=sums.buffer.name, dim=at, factor=factor, order=[*range(rank + 1)])
        rank += 1
    s.set_scope(buffer=sums.buffer.name, scope="local")


def _guess(s: Schedule, form: Decomposition, asynchronous: bool) -> None:
    shares = {"SS": s.tunables["SS"].domain[-3:][0]} if "SS" in s.tunables else {"SK": 4}
    decomposed = {"data_parallel": {}, "split_k": shares, "stream_k": FIRST_WAVES}[form]
    s.guess(
        *(
            {"TX": x, "TY": y, "MR": h, "NV": v, **more, **decomposed}
            for more in ([{"KE": 2, "STAGES": 3}, {"KE": 2, "STAGES": 2}] if asynchronous else [{"KT": 16}])
            for x, y, h, v in ((16, 16, 4, 1), (16, 8, 8, 2), (8, 4, 1, 1))
        )
    )


def _stage(s: Schedule, x: StagedOperand, k_0: str, tile: RegisterTile, steps: Expr, stages: Tunable | None) -> bool:
    """Stage a slice of an operand with the steps leading; return whether its copy is asynchronous."""
    if k_0 not in s.loops_of(x.block):
        s.compute_at(x.block, k_0)
    buffer = s.buffer_of(x.block)
    last, size = len(buffer.shape) - 1, buffer.dtype.bytes
    # Operands with steps last are transposed on their way to shared memory. `cp.async` can do this for single
    # elements only, since the bytes of one copy are contiguous on both sides.
    single = stages is not None and x.k_major and size in ACCESS_BYTES
    width = 4 if x.width(4) == 4 and not single else 1
    ring = None if stages is None else PipelineRing(stages, x.step, steps)
    plan = CopyPlan((tile.ty, tile.tx), width, whole=stages is None, pipeline=ring, asynchronous=stages is not None)
    bypasses_registers = False

    def spread(name: str, copy_loops: list[str]) -> None:
        nonlocal bypasses_registers
        along = [n for n in copy_loops if n in {v.name for v in free_vars(find_block(s.func, name).bindings[last])}]
        if len(along) != 1:
            raise ScheduleError(f"{s.func.name}: {name!r} does not copy contiguous rows")
        others = [n for n in copy_loops if n not in along]
        s.reorder([*others, *along])
        more: list[str] = []
        if single:  # a warp copies patches of eight steps by four rows
            *more, vectors, lanes = s.split(along[0], [None, min(SLICE_STEPS), width], divides=True)
            s.reorder([*more, *others, vectors, lanes])
        else:
            vectors, lanes = s.split(along[0], [None, width], divides=True)
        accesses = s.fuse([*others, vectors])
        if not plan.whole:  # proves that different threads fill different slots
            s.require(eq(floormod(s.extent(accesses), mul(tile.ty, tile.tx)), 0))
        rounds, ty, tx = s.split(accesses, [None, *plan.threads], divides=plan.whole)
        s.reorder([ty, tx, *more, rounds, lanes])
        s.vectorize(lanes)
        if plan.asynchronous and width * size in ACCESS_BYTES and single == x.k_major:
            with suppress(ScheduleError):  # a copy that computes goes through registers
                s.copy_async(loop=lanes)
                bypasses_registers = True
        s.bind(ty, "item", 1)
        s.bind(tx, "item", 0)

    stage_tile(s, x.block, k_0, plan, spread=spread)
    order = [*(d for d in range(last + 1) if d not in (x.step, x.place)), x.step, x.place]
    s.permute_layout(buffer=buffer.name, order=order if stages is None else [0, *(d + 1 for d in order)])
    # Threads write a transposed operand across its rows; padding moves the starts of rows to different banks.
    if x.k_major:
        s.storage_align(buffer=buffer.name, factor=4, offset=4)
    return bypasses_registers


def _epilogue_on_register_tiles(s: Schedule, epilogue_loops: Sequence[str], tile: RegisterTile, whole: bool) -> None:
    """Compute the epilogue on the register tile of each thread.

    Args:
        whole: Every vector is complete.
    """
    rows: Parts = ((None, "item"), (tile.height, "each"))
    columns: Parts = ((None, "each"), (tile.tx, "item"), (tile.width, "lane"))
    epilogue_on_fragments(s, epilogue_loops, rows, columns, whole)
