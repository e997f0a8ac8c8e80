"""GPU rule for products of 16-bit floats on tensor cores, with `wgmma` of a warpgroup (`relax_tune.ir.hardware.wgmma`).

The tiling is the same as for `mma`, but `wgmma` reads its operands from shared memory, as 8 x 16-byte core matrices that are
contiguous (PTX ISA, wgmma, layouts without swizzling). Eight consecutive threads write one core matrix, which uses every bank once. A
warpgroup has its own rows and all columns; each warp has 16 of the 64 rows of an instruction tile.

Only devices with `HardwareInfo.has_wgmma` get sketches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, const, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.hardware.wgmma import CORE, WARPS
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import find_alloc
from relax_tune.schedules.rules.shared.contraction import is_product, isolate_contraction, matrix_roles
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.rules.shared.mma_tiles import (
    EACH,
    HIGH,
    MOST_SUMS,
    PAIR,
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
    copy_strategies,
    divides_tile,
    is_copy,
    pipeline_stages,
    row_and_column_loops,
    stage_operands,
    stage_tile,
)
from relax_tune.schedules.rules.shared.stream_k import bind_grid
from relax_tune.schedules.rules.shared.threads import limit_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

GROUPS = (1, 2)
"""Warpgroups of a thread block."""
TILES = (1, 2)
"""Instruction tiles of 64 rows of a warpgroup."""
COLUMN_TILES = (4, 8, 16, 32)
"""Units of eight columns of one instruction; at least four, since threads copy four consecutive vectors."""
PAIRS = (1, 2, 4)
"""Steps of a slice, in units of PAIR."""
ROWS_OF_WARP = 16


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketch of a product of 16-bit floats; none for other functions, and on devices without `wgmma`."""
    if not hardware.has_wgmma or not is_product(func):
        return
    # threads wait for their copies where these cannot be asynchronous
    yield from first_applicable(
        func, "wgmma", (partial(build, func, hardware, asynchronous) for asynchronous in copy_strategies(hardware))
    )


def build(func: PrimFunc, hardware: HardwareInfo, asynchronous: bool = True) -> Schedule:
    """Schedule a product on tensor cores.

    Args:
        asynchronous: Copy slices ahead of their use with `cp.async`.

    Raises:
        ScheduleError: Where the function is no such product.
    """
    s = Schedule(func)
    main = isolate_contraction(s)
    last = final_block(s.func)
    roles, row = matrix_roles(s, main, last)
    dtype = operand_dtype(s, roles)
    groups = s.tunable("WG", GROUPS)
    # The warpgroups are stacked along the rows only: one instruction is wide enough for up to 256 columns.
    tile = WarpTile(mul(groups, WARPS), const(1), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES), WARPS)
    limit_threads(s, hardware, mul(tile.warps, HIGH * WIDE))
    s.require(le(mul(tile.high, tile.wide) * (ROWS_OF_WARP // HIGH * EACH), const(MOST_SUMS)))
    pairs = s.tunable("KS", PAIRS)
    steps = mul(pairs, PAIR)
    operands = stage_operands(s, roles, tile.rows, tile.columns, steps, least=PAIR)
    convert_to(s, operands, dtype)

    nest = s.iter_loops(main)
    by_rows, by_columns, by_steps = (divides_warp_tile(roles, which) for which in range(3))
    rows = [None, tile.down, tile.high, ROWS_OF_WARP // HIGH, HIGH]
    i_0, i_w, i_m, i_r, i_y = s.split(nest[row], rows, divides=by_rows)
    j_0, j_n, j_x, j_c = s.split(nest[roles.column], [None, tile.wide, WIDE, EACH], divides=by_columns)
    k_0, *k_1 = s.split(nest[roles.reduce[0]], [None, mul(pairs, 2), 2, CORE], divides=by_steps)
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, i_y, j_x, i_m, i_r, j_n, j_c, *k_1])
    stages = pipeline_stages(s, roles, k_0, PAIR) if asynchronous else None
    for x in operands:
        _stage(s, x, k_0, tile, groups, steps, stages)
    epilogue_loops = s.reverse_compute_at(last.name, j_0)
    epilogue_on_warp_tiles(s, epilogue_loops, tile, divides_tile(roles, roles.column))
    s.decompose_reduction(block=main, loop=k_0)
    bind_warps(s, [i_w], i_y, j_x, WARPS)
    initialise_fragments(s, main, j_0, WARPS)
    intrinsic = f"wgmma_{dtype}_{operand_layouts(operands)}"
    s.tensorize(loop=s.inner_loops(main, k_0)[1], intrinsic=intrinsic)
    accumulators_in_registers(s, main, roles)
    bind_grid(s, j_0, [i_0], batch)
    s.guess(
        *(
            {"WG": g, "MT": h, "NT": w, "KS": k, **more}
            for more in ([{"STAGES": 3}, {"STAGES": 2}] if asynchronous else [{}])
            for g, h, w, k in ((2, 2, 16, 2), (2, 1, 32, 2), (1, 2, 16, 2), (2, 1, 8, 2), (1, 1, 8, 2), (1, 1, 4, 1))
        )
    )
    return s


def _stage(
    s: Schedule,
    x: StagedOperand,
    k_0: str,
    tile: WarpTile,
    groups: Tunable,
    steps: Expr,
    stages: Tunable | None,
) -> None:
    """Stage a slice of an operand as core matrices: eight consecutive threads copy one, a warp four along the operand's rows."""
    s.compute_at(x.block, k_0)
    buffer = s.buffer_of(x.block)
    rows, columns = sorted((x.step, x.place))
    lanes = x.width(CORE) if columns == len(buffer.shape) - 1 else 1
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, columns)]
    s.permute_layout(buffer=buffer.name, order=[*rest, rows, columns])
    # As in the rule for `mma`, where the sizes are listed that `cp.async` takes.
    if stages is not None and lanes == 1:
        raise ScheduleError(f"{s.func.name}: single elements of 16 bits are not copied asynchronously")
    ring = None if stages is None else PipelineRing(stages, len(rest) + x.k_major, steps, len(rest))
    plan = CopyPlan((groups, WARPS, HIGH, WIDE), lanes, pipeline=ring, asynchronous=ring is not None)

    def spread(name: str, copy_loops: list[str]) -> None:
        slow, fast = row_and_column_loops(s, name, copy_loops, rows, columns)
        if x.k_major:  # the warpgroups share the dimension that is not the steps
            rounds, g, z, high, low = s.split(slow, [None, groups, WARPS, CORE // WIDE, WIDE], divides=True)
            others, vectors, pieces, lane = s.split(fast, [None, WIDE, CORE // lanes, lanes])
        else:
            rounds, z, high, low = s.split(slow, [None, WARPS, CORE // WIDE, WIDE])
            others, g, vectors, pieces, lane = s.split(fast, [None, groups, WIDE, CORE // lanes, lanes], divides=True)
        s.reorder([g, z, vectors, high, low, rounds, others, pieces, lane])
        s.vectorize(lane)
        for axis, loop in enumerate((low, s.fuse([vectors, high]), z, g)):
            s.bind(loop, "item", axis)
        if plan.asynchronous and is_copy(s, name):
            s.copy_async(loop=lane)

    # The slots of a ring are a dimension in front of the operand's own.
    first = len(rest) + (ring is not None)
    stage_tile(s, x.block, k_0, plan, lambda: _core_matrices(s, x, buffer.name, first, tile), spread)


def _core_matrices(s: Schedule, x: StagedOperand, buffer: str, first: int, tile: WarpTile) -> None:
    """Lay a staged operand out as contiguous core matrices.

    Args:
        first: The first of its two dimensions.
    """
    dims = [first, first + 1]
    if x.has_rows:  # the rows of a warp in an instruction tile follow the rows of the warp before it
        at = dims[x.place > x.step]
        _split_dim(s, buffer, at, mul(tile.high, WARPS * ROWS_OF_WARP), at, at + 1)
        _split_dim(s, buffer, at + 1, mul(tile.high, ROWS_OF_WARP), at + 1, at + 2)
        _split_dim(s, buffer, at + 2, const(ROWS_OF_WARP), at + 1, at + 3)
        dims = [d + 3 * (d >= at) for d in dims]
    _split_dim(s, buffer, dims[1], const(CORE), dims[1], dims[1] + 1)
    _split_dim(s, buffer, dims[0], const(CORE), dims[0], dims[1] + 1)


def _split_dim(s: Schedule, name: str, dim: int, factor: Expr, outer: int, inner: int) -> None:
    """Split a dimension of a buffer into quotient and remainder, which become the dimensions `outer` and `inner`."""
    order = [d for d in range(len(find_alloc(s.func, name).shape) + 1) if d not in (dim, dim + 1)]
    for place, d in ((outer, dim), (inner, dim + 1)):
        order.insert(place, d)
    s.tile_layout(buffer=name, dim=dim, factor=factor, order=order)
