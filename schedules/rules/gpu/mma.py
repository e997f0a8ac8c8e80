"""GPU rule for products of 16-bit floats on tensor cores, with `mma` of a warp (`relax_tune.ir.hardware.mma`).

A thread block computes a tile of the output, its warps tiles of 16 x 8 with the sums in registers. Slices of both operands are staged in
shared memory in the layout they have in global memory. Rows in shared memory are swizzled (XOR, as in CUTLASS), so that `ldmatrix` reads
eight of them without bank conflicts and without padding. Tiles are padded, and 8-bit integers converted, while they are staged; only a
copy that changes no bits is asynchronous. The epilogue runs on the fragments in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, Var, const, le, mul
from relax_tune.ir.core.function import PrimFunc
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
    initialise_fragments,
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
    TileLoops,
    accumulate_tiles,
    decompose_work,
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
    """The loops of the product inside a slice.

    Attributes:
        instructions: Loop over the instructions of a slice.
        warps: Loops over warps along rows and columns.
        thread: Loops over the threads of a warp along rows and columns.
    """

    instructions: str
    warps: list[str]
    thread: tuple[str, str]


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield a sketch for each decomposition of a product of 16-bit floats.

    One operand may hold 8-bit integers. Yields none for other functions, and on devices without `mma.m16n8k16`.
    """
    if hardware.capability < MMA_CAPABILITY or not is_product(func):
        return
    for form in DECOMPOSITIONS:
        # threads wait for their copies where these cannot be asynchronous
        options = (partial(build, func, hardware, form, asynchronous) for asynchronous in copy_strategies(hardware))
        yield from first_applicable(func, f"mma.{form}", options)


def build(
    func: PrimFunc, hardware: HardwareInfo, form: Decomposition = "data_parallel", asynchronous: bool = True
) -> Schedule:
    """Schedule a product on tensor cores.

    Args:
        asynchronous: Copy slices ahead of their use with `cp.async`.

    Raises:
        ScheduleError: Where the function is no such product.
    """
    s = Schedule(func)
    main = isolate_contraction(s)
    pairs = s.tunable("KS", PAIRS)
    steps = mul(pairs, PAIR)
    main, last = decompose_work(s, main, hardware, form, steps)
    roles, row = matrix_roles(s, main, last)
    dtype = operand_dtype(s, roles)
    tile = WarpTile(
        s.tunable("WM", WARPS), s.tunable("WN", WARPS), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES)
    )
    limit_threads(s, hardware, mul(tile.warps, HIGH * WIDE))
    # An instruction of 16 x 8 leaves 128 sums in 32 threads, four in each: ROWS // HIGH rows of EACH columns.
    s.require(le(mul(tile.high, tile.wide) * (ROWS // HIGH * EACH), const(MOST_SUMS)))
    operands = stage_operands(s, roles, tile.rows, tile.columns, steps, least=PAIR)
    convert_to(s, operands, dtype)
    loops, inner = _split_tiles(s, roles, row, tile, pairs)
    stages = pipeline_stages(s, roles, loops.slices, PAIR) if asynchronous else None

    def stage(slices: str) -> None:
        for x in operands:
            _stage(s, x, slices, tile, steps, stages)

    def epilogue(epilogue_loops: list[str], whole: bool) -> None:
        epilogue_on_warp_tiles(s, epilogue_loops, tile, whole)

    copies, whole = [x.block for x in operands], divides_tile(roles, roles.column)
    loops = accumulate_tiles(s, roles, last, form, loops, copies, hardware, stage, epilogue, whole)
    bind_warps(s, inner.warps, *inner.thread)
    initialise_fragments(s, main, loops.column)
    intrinsic = f"mma_{dtype}_{operand_layouts(operands)}"
    s.tensorize(loop=s.inner_loops(main, inner.instructions)[0], intrinsic=intrinsic)
    accumulators_in_registers(s, main, roles)
    loops.bind(s)
    _guess(s, roles, form, asynchronous)
    return s


def _split_tiles(
    s: Schedule, roles: Contraction, row: Var, tile: WarpTile, pairs: Tunable
) -> tuple[TileLoops, _WarpLoops]:
    """Split the product's loops into tiles, slices, warps, instructions and threads."""
    block = find_block(s.func, roles.block.name)
    nest = s.iter_loops(block.name)
    rows, columns, steps = (divides_warp_tile(roles, which) for which in range(3))
    # The order of the factors is the fragment of `mma`: thread 4 y + x holds rows y and y + 8, and columns 2 x and 2
    # x + 1.
    i_0, i_w, i_m, i_r, i_y = s.split(nest[row], [None, tile.down, tile.high, ROWS // HIGH, HIGH], divides=rows)
    j_0, j_w, j_n, j_x, j_c = s.split(nest[roles.column], [None, tile.across, tile.wide, WIDE, EACH], divides=columns)
    k_0, k_1, k_2 = s.split(nest[roles.reduce[0]], [None, mul(pairs, 2), STEPS], divides=steps)
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, j_w, k_1, i_y, j_x, i_m, i_r, j_n, j_c, k_2])
    return TileLoops(batch, i_0, j_0, k_0), _WarpLoops(k_1, [i_w, j_w], (i_y, j_x))


def _guess(s: Schedule, roles: Contraction, form: Decomposition, asynchronous: bool) -> None:
    shares: dict[str, int] = {}
    if form == "split_k":
        shares = {"SS": s.tunables["SS"].domain[-2:][0]}
    elif form == "stream_k":
        shares = dict(FIRST_WAVES)
    known = roles.known_extent(roles.row)
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
    buffer = s.buffer_of(x.block)
    rows, columns = sorted((x.step, x.place))
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, columns)]
    s.permute_layout(buffer=buffer.name, order=[*rest, rows, columns])
    # `cp.async` copies 4, 8 or 16 bytes (PTX ISA, cp.async).
    if stages is not None and x.width(VECTOR) == 1:
        raise ScheduleError(f"{s.func.name}: single elements of 16 bits are not copied asynchronously")
    ring = None if stages is None else PipelineRing(stages, len(rest) + x.k_major, steps)
    # Vectors run along the last dimension of global memory only.
    lanes = x.width(VECTOR) if columns == len(buffer.shape) - 1 else 1
    plan = CopyPlan((tile.warps, HIGH, WIDE), lanes, pipeline=ring, asynchronous=ring is not None)

    def spread(name: str, copy_loops: list[str]) -> None:
        row, column = row_and_column_loops(s, name, copy_loops, rows, columns)
        copy_rows(s, name, [row], column, plan)

    # Swizzled after the ring has added its dimension, since the pattern depends on the final layout of rows.
    def swizzle() -> None:
        s.swizzle(buffer=buffer.name, vector=VECTOR)

    stage_tile(s, x.block, k_0, plan, swizzle, spread)
