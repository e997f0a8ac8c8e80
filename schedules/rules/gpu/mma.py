"""GPU rule for products of 16-bit floats on tensor cores, with `mma` of a warp (`relax_tune.ir.hardware.mma`).

A thread block computes a tile of the output, its warps tiles of 16 x 8 with the sums in registers. Slices of both operands are staged in
shared memory in the layout they have in global memory. Rows in shared memory are swizzled (XOR, as in CUTLASS), so that `ldmatrix` reads
eight of them without bank conflicts and without padding. Tiles are padded, and 8-bit integers converted, while they are staged; only a
copy that changes no bits is asynchronous. The epilogue runs on the fragments in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, const, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.hardware.mma import ROWS, STEPS
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.contraction import Contraction, is_product, isolate_contraction, matrix_roles
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.rules.shared.mma_tiles import (
    EACH,
    HIGH,
    MMA_CAPABILITY,
    MOST_SUMS,
    PAIR,
    VECTOR,
    WIDE,
    WarpTile,
    accumulators_in_registers,
    bind_warps,
    convert_to,
    divides_warp_tile,
    epilogue_on_warp_tiles,
    operand_dtype,
    operand_layouts,
)
from relax_tune.schedules.rules.shared.staging import (
    CopyPlan,
    PipelineRing,
    StagedOperand,
    copy_rows,
    copy_strategies,
    divides_tile,
    pipeline_stages,
    row_and_column_loops,
    stage_operands,
    stage_tile,
)
from relax_tune.schedules.rules.shared.stream_k import (
    DECOMPOSITIONS,
    FIRST_WAVES,
    Decomposition,
    bind_grid,
    decompose_work,
    stream_k_loops,
)
from relax_tune.schedules.rules.shared.threads import limit_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

WARPS = (1, 2, 4)
TILES = (1, 2, 4)
COLUMN_TILES = (2, 4, 8)
PAIRS = (1, 2)
"""Steps of a slice, in units of PAIR."""


@dataclass(frozen=True, slots=True)
class _WarpLoops:
    """The loops of the product.

    batch, row, column: loops over tiles. slices: over the slices of a tile. instructions: over the instructions of a slice.
    warps: over warps along rows and columns. thread: over the threads of a warp along rows and columns.
    """

    batch: list[str]
    row: str
    column: str
    slices: str
    instructions: str
    warps: list[str]
    thread: list[str]


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield a sketch for each decomposition of a product of 16-bit floats.

    One operand may hold 8-bit integers. Yields none for other functions, and on devices without `mma.m16n8k16`.
    """
    if machine.capability < MMA_CAPABILITY or not is_product(func):
        return
    for form in DECOMPOSITIONS:
        # threads wait for their copies where these cannot be asynchronous
        options = (partial(build, func, machine, form, way) for way in copy_strategies(machine))
        yield from first_applicable(f"mma.{form}", options)


def build(
    func: PrimFunc, machine: HardwareInfo, form: Decomposition = "data_parallel", asynchronous: bool = True
) -> Schedule:
    """Schedule a product on tensor cores. asynchronous: copy slices ahead of their use with `cp.async`.

    Raises ScheduleError where the function is no such product.
    """
    s = Schedule(func)
    main = isolate_contraction(s)
    pairs = s.tunable("KS", PAIRS)
    steps = mul(pairs, PAIR)
    main, last = decompose_work(s, main, machine, form, steps)
    roles, row = matrix_roles(s, main, last)
    dtype = operand_dtype(s, roles)
    tile = WarpTile(
        s.tunable("WM", WARPS), s.tunable("WN", WARPS), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES)
    )
    limit_threads(s, machine, mul(tile.warps, HIGH * WIDE))
    s.require(le(mul(tile.high, tile.wide) * (ROWS // HIGH * EACH), const(MOST_SUMS)))
    operands = stage_operands(s, roles, tile.rows, tile.columns, steps, least=PAIR)
    convert_to(s, operands, dtype)
    loops = _split_tiles(s, roles, row, tile, pairs)
    stages = pipeline_stages(s, roles, loops.slices, PAIR) if asynchronous else None
    group, j_0 = _main_and_epilogue(s, roles, last, form, tile, steps, operands, loops, stages, machine)
    s.apply(
        "tensorize",
        loop=s.inner_loops(main, loops.instructions)[0],
        intrinsic=f"mma_{dtype}_{operand_layouts(operands)}",
    )
    accumulators_in_registers(s, main, roles)
    if form == "stream_k":
        s.bind(group, "group", 0)
    else:
        bind_grid(s, j_0, [loops.row], loops.batch)
    _guess(s, roles, form, asynchronous)
    return s


def _split_tiles(s: Schedule, roles: Contraction, row: Var, tile: WarpTile, pairs: Tunable) -> _WarpLoops:
    """Split the product's loops into tiles, slices, warps, instructions and threads."""
    block = find_block(s.func, roles.block.name)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(block.name), strict=True))
    rows, columns, steps = (divides_warp_tile(roles, which) for which in range(3))
    i_0, i_w, i_m, i_r, i_y = s.split(nest[row], [None, tile.down, tile.high, ROWS // HIGH, HIGH], divides=rows)
    j_0, j_w, j_n, j_x, j_c = s.split(nest[roles.column], [None, tile.across, tile.wide, WIDE, EACH], divides=columns)
    k_0, k_1, k_2 = s.split(nest[roles.reduce[0]], [None, mul(pairs, 2), STEPS], divides=steps)
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, j_w, k_1, i_y, j_x, i_m, i_r, j_n, j_c, k_2])
    return _WarpLoops(batch, i_0, j_0, k_0, k_1, [i_w, j_w], [i_y, j_x])


def _main_and_epilogue(
    s: Schedule,
    roles: Contraction,
    last: Block,
    form: Decomposition,
    tile: WarpTile,
    steps: Expr,
    operands: Sequence[StagedOperand],
    loops: _WarpLoops,
    stages: Tunable | None,
    machine: HardwareInfo,
) -> tuple[str, str]:
    """Stage the operands, run the epilogue on fragments and bind warps; return the loops over thread blocks and over columns of tiles."""
    main, group, j_0, k_0 = roles.block.name, "", loops.column, loops.slices
    own: list[str] = []
    if form == "stream_k":
        copies = [x.block for x in operands]
        own, group, j_0, k_0 = stream_k_loops(s, roles, last.name, copies, [loops.row, j_0, k_0], machine)
    for x in operands:
        _stage(s, x, k_0, tile, steps, stages)
    if form == "stream_k":
        epilogue_on_warp_tiles(s, own, tile, True)
    else:
        own = s.reverse_compute_at(last.name, j_0)
        epilogue_on_warp_tiles(s, own, tile, divides_tile(roles, roles.column))
        s.apply("decompose_reduction", block=main, loop=k_0)
    bind_warps(s, loops.warps, loops.thread[0], loops.thread[1])
    i_w, j_w, i_y, j_x, *unrolled, j_c = s.inner_loops(f"{main}_init", j_0)
    bind_warps(s, [i_w, j_w], i_y, j_x)
    for loop in unrolled:
        s.unroll(loop)
    s.vectorize(j_c)
    return group, j_0


def _guess(s: Schedule, roles: Contraction, form: Decomposition, asynchronous: bool) -> None:
    shares: dict[str, int] = {}
    if form == "split_k":
        shares = {"SS": s.tunables["SS"].domain[-2:][0]}
    elif form == "stream_k":
        shares = dict(FIRST_WAVES)
    known = next(as_int(i.extent) for i in roles.block.iters if i.var is roles.row)
    highest = max(TILES) * max(WARPS) if known is None else max(1, -(-known // ROWS))  # more tiles would be padding
    s.guess(
        *(
            {"WM": a, "WN": b, "MT": h, "NT": w, "KS": k, **shares, **more}
            for more in ([{"STAGES": 3}, {"STAGES": 2}] if asynchronous else [{}])
            for a, b, h, w, k in ((2, 2, 4, 8, 1), (2, 2, 2, 4, 1), (1, 4, 1, 4, 2), (1, 4, 1, 4, 1), (1, 1, 1, 2, 1))
            if a * h <= highest
        )
    )


def _stage(s: Schedule, x: StagedOperand, k_0: str, tile: WarpTile, steps: Expr, stages: Tunable | None) -> None:
    """Stage a slice of an operand in swizzled rows, in the layout of global memory."""
    if k_0 not in s.loops_of(x.block):
        s.compute_at(x.block, k_0)
    buffer = find_block(s.func, x.block).body.buffer
    rows, columns = sorted((x.step, x.place))
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, columns)]
    s.apply("permute_layout", buffer=buffer.name, order=[*rest, rows, columns])
    if stages is not None and x.width(VECTOR) == 1:
        raise ScheduleError(f"{s.func.name}: single elements of 16 bits are not copied asynchronously")
    ring = None if stages is None else PipelineRing(stages, len(rest) + x.k_major, steps)
    lanes = x.width(VECTOR) if columns == len(buffer.shape) - 1 else 1
    plan = CopyPlan((tile.warps, HIGH, WIDE), lanes, pipeline=ring, asynchronous=ring is not None)

    def spread(name: str, own: list[str]) -> None:
        row, column = row_and_column_loops(s, name, own, rows, columns)
        copy_rows(s, name, [row], column, plan)

    def swizzle() -> None:
        s.apply("swizzle", buffer=buffer.name, vector=VECTOR)

    stage_tile(s, x.block, k_0, plan, swizzle, spread)
