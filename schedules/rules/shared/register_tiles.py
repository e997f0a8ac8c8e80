"""Parts of the GPU rules for products and convolutions: matrix products on scalar arithmetic (FMA).

A thread block computes a tile of the output, each thread a register tile of it. Slices of both operands are staged in shared memory with
the steps leading, so that the elements a thread reads in one step are contiguous. Tiles are padded while they are staged, so that the
main loop has no conditions. The epilogue runs on the registers.

With asynchronous copies, operands whose rows or columns are contiguous are copied with 16-byte `cp.async`; k-major ones with 4-byte
`cp.async`, each warp covering an 8 x 4 patch, so that global reads fill 32-byte sectors and writes to shared memory have no bank
conflicts. Rows are padded rather than swizzled: a padded address is a base plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, const, eq, floormod, free_vars, le, mul
from relax_tune.ir.core.stmt import Block
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
    bind_grid,
    decompose_work,
    stream_k_loops,
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

    tx, ty: threads along columns and rows.
    height: rows of a thread.
    vectors: vectors of columns of a thread.
    width: columns of a vector.
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


@dataclass(frozen=True, slots=True)
class _TileLoops:
    """The loops of the product around and inside a slice.

    batch, row, column: loops over tiles. slices: over the slices of a tile. steps: over the steps of a slice.
    """

    batch: list[str]
    row: str
    column: str
    slices: str
    steps: list[str]


def tile_product(
    s: Schedule,
    main: str,
    machine: HardwareInfo,
    form: Decomposition,
    asynchronous: bool = False,
    im2col_operands: Sequence[str] = (),
) -> None:
    """Tile a product for thread blocks and threads, with operands staged in shared memory.

    asynchronous: copy slices ahead of their use with `cp.async`.
    im2col_operands: blocks that build operands in im2col order. No memory holds these operands: each slice is built while it is staged.
    """
    # multiples of eight by their factor prove that eight divides a slice
    eights = (
        mul(s.tunable("KE", [n // min(SLICE_STEPS) for n in SLICE_STEPS]), min(SLICE_STEPS)) if asynchronous else None
    )
    main, last = decompose_work(s, main, machine, form, eights)
    roles, _ = matrix_roles(s, main, last)
    tile = _declare_tile(s, machine)
    packed = values_per_byte(roles)
    steps = s.tunable("KT", SLICE_STEPS) if eights is None else eights
    if asynchronous and packed > 1:
        raise ScheduleError(f"{s.func.name}: bytes of several steps go through registers")
    operands = stage_operands(s, roles, tile.rows, tile.columns, mul(steps, packed), packed)
    if asynchronous and im2col_operands:  # neighbours in im2col order are no neighbours in memory
        operands = [replace(x, multiple=1) for x in operands]
    for name in im2col_operands:
        s.compute_inline(name)
    loops = _split_tiles(s, roles, tile, steps, packed)
    stages = pipeline_stages(s, roles, loops.slices, min(SLICE_STEPS)) if asynchronous else None
    _main_and_epilogue(s, roles, last, form, tile, steps, operands, loops, stages, machine)
    _guess(s, form, asynchronous)


def _declare_tile(s: Schedule, machine: HardwareInfo) -> RegisterTile:
    tx, ty = s.tunable("TX", THREADS), s.tunable("TY", THREADS)
    tile = RegisterTile(tx, ty, s.tunable("MR", HEIGHTS), s.tunable("NV", VECTORS), min(4, machine.lanes))
    limit_threads(s, machine, mul(tile.tx, tile.ty))
    s.require(le(mul(tile.height, tile.vectors) * tile.width, const(MOST_SUMS)))
    return tile


def _split_tiles(s: Schedule, roles: Contraction, tile: RegisterTile, steps: Expr, packed: int) -> _TileLoops:
    """Split the product's loops into tiles, slices, threads and register tiles."""
    assert roles.row is not None
    column, reduce = roles.column, roles.reduce[0]
    block = find_block(s.func, roles.block.name)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(block.name), strict=True))
    i_0, i_t, i_1 = s.split(nest[roles.row], [None, tile.ty, tile.height])
    factors = [None, tile.vectors, tile.tx, tile.width]
    j_0, j_1, j_t, j_2 = s.split(nest[column], factors, divides=divides_tile(roles, column))
    inner = [None, steps, packed] if packed > 1 else [None, steps]
    k_0, *k_1 = s.split(nest[reduce], inner, divides=divides_tile(roles, reduce))
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_t, j_t, *k_1, i_1, j_1, j_2])
    return _TileLoops(batch, i_0, j_0, k_0, k_1)


def _main_and_epilogue(
    s: Schedule,
    roles: Contraction,
    last: Block,
    form: Decomposition,
    tile: RegisterTile,
    steps: Expr,
    operands: Sequence[StagedOperand],
    loops: _TileLoops,
    stages: Tunable | None,
    machine: HardwareInfo,
) -> None:
    """Stage the operands inside the loop over slices, compute register tiles, and run the epilogue on them."""
    main, group, j_0, k_0 = roles.block.name, "", loops.column, loops.slices
    own: list[str] = []
    if form == "stream_k":
        copies = [x.block for x in operands]
        own, group, j_0, k_0 = stream_k_loops(s, roles, last.name, copies, [loops.row, j_0, k_0], machine)
    asynchronous = [_stage(s, x, k_0, tile, steps, stages) for x in operands]
    if stages is not None and not any(asynchronous):
        raise ScheduleError(f"{s.func.name}: neither operand is copied as it is")
    if form == "stream_k":
        _epilogue_on_register_tiles(s, own, tile, True)
    else:
        own = s.reverse_compute_at(last.name, j_0)
        _epilogue_on_register_tiles(s, own, tile, divides_tile(roles, roles.column))
        s.apply("decompose_reduction", block=main, loop=k_0)
    for name in (main, f"{main}_init"):
        *_, i_t, j_t, i_1, j_1, j_2 = [n for n in s.inner_loops(name, j_0) if n not in (k_0, *loops.steps)]
        s.bind(i_t, "item", 1)
        s.bind(j_t, "item", 0)
        for inner in (i_1, j_1):
            s.unroll(inner)
        s.vectorize(j_2)
    _sums_in_registers(s, roles, tile)
    if form == "stream_k":
        s.bind(group, "group", 0)
    else:
        bind_grid(s, j_0, [loops.row], loops.batch)


def _sums_in_registers(s: Schedule, roles: Contraction, tile: RegisterTile) -> None:
    """Lay the sums out so that each thread's are contiguous, and keep them in registers."""
    sums = find_block(s.func, roles.block.name).body
    dim = next(d for d, e in enumerate(sums.indices) if e is roles.column)
    rank = len(sums.indices)
    for at, factor in ((dim, tile.columns), (dim + 1, tile.width), (dim + 1, tile.tx)):
        s.apply("tile_layout", buffer=sums.buffer.name, dim=at, factor=factor, order=[*range(rank + 1)])
        rank += 1
    s.apply("set_scope", buffer=sums.buffer.name, scope="local")


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
    buffer = find_block(s.func, x.block).body.buffer
    last, size = len(buffer.shape) - 1, buffer.dtype.bytes
    single = stages is not None and x.k_major and size in ACCESS_BYTES
    width = 4 if x.width(4) == 4 and not single else 1
    ring = None if stages is None else PipelineRing(stages, x.step, steps)
    plan = CopyPlan((tile.ty, tile.tx), width, whole=stages is None, pipeline=ring, asynchronous=stages is not None)
    bypasses_registers = False

    def spread(name: str, own: list[str]) -> None:
        nonlocal bypasses_registers
        along = [n for n in own if n in {v.name for v in free_vars(find_block(s.func, name).bindings[last])}]
        if len(along) != 1:
            raise ScheduleError(f"{s.func.name}: {name!r} is fetched in no rows")
        others = [n for n in own if n not in along]
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
                s.apply("copy_async", loop=lanes)
                bypasses_registers = True
        s.bind(ty, "item", 1)
        s.bind(tx, "item", 0)

    stage_tile(s, x.block, k_0, plan, spread=spread)
    order = [*(d for d in range(last + 1) if d not in (x.step, x.place)), x.step, x.place]
    s.apply("permute_layout", buffer=buffer.name, order=order if stages is None else [0, *(d + 1 for d in order)])
    if x.k_major:
        s.apply("storage_align", buffer=buffer.name, factor=4, offset=4)
    return bypasses_registers


def _epilogue_on_register_tiles(s: Schedule, own: Sequence[str], tile: RegisterTile, whole: bool) -> None:
    """Compute the epilogue on the register tile of each thread. whole: every vector is complete."""
    rows: Parts = ((None, "item"), (tile.height, "each"))
    columns: Parts = ((None, "each"), (tile.tx, "item"), (tile.width, "lane"))
    epilogue_on_fragments(s, own, rows, columns, whole)
