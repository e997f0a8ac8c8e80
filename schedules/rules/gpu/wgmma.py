"""Products of 16-bit floats by four warps at a time, which multiply tiles together (`relax_tune.ir.hardware.wgmma`).

As `relax_tune.schedules.rules.gpu.mma` in all but what the machine wants of operands: it reads them from shared memory by itself, in
matrices of eight rows of 16 bytes that lie side by side, so slices are stored in such matrices, and eight neighbouring items write one,
which uses every bank once. Four warps have rows of their own and all columns; each warp has sixteen of the 64 rows of a machine's tile.

No kernel of these has run on a GPU: only where `HardwareInfo.warpgroups` says so are there any, and no device does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.hardware.wgmma import CORE, WARPS
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import find_alloc, find_block
from relax_tune.schedules.rules.gpu.matmul import Slice, is_even, stages_ahead, take_slices, ways
from relax_tune.schedules.rules.gpu.mma import (
    EACH,
    HIGH,
    MOST_SUMS,
    PAIR,
    WIDE,
    Tile,
    bind_warps,
    by_items,
    even,
    form_of,
    hold_as,
    is_copy,
    multiplied,
    own_sums,
)
from relax_tune.schedules.rules.gpu.threads import limit_items
from relax_tune.schedules.rules.shared.contraction import is_product, isolate_contraction, matrix_roles
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# Groups of four warps, the tiles of 64 rows that each has, and the tiles of eight columns that all have, which one instruction takes.
# Columns are fetched by four vectors at least.
GROUPS = (1, 2)
TILES = (1, 2)
COLUMN_TILES = (4, 8, 16, 32)
# Steps of a slice, in pairs of what an instruction has.
PAIRS = (1, 2, 4)
ROWS_OF_WARP = 16


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """The sketch of a product of 16-bit floats; nothing for other functions, and on machines without such groups of warps."""
    if not machine.has_wgmma or not is_product(func):
        return
    # slices wait for their copies where these cannot be asynchronous
    yield from first_applicable("tensor.warpgroup", (partial(build, func, machine, way) for way in ways(machine)))


def build(func: PrimFunc, machine: HardwareInfo, ahead: bool = True) -> Schedule:
    """Raises ScheduleError where the function is no such product. ahead: slices are copied asynchronously, before they are needed."""
    s = Schedule(func)
    main = isolate_contraction(s)
    last = final_block(s.func)
    roles, row = matrix_roles(s, main, last)
    dtype = multiplied(s, roles)
    groups = s.tunable("WG", GROUPS)
    tile = Tile(mul(groups, WARPS), const(1), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES), WARPS)
    limit_items(s, machine, mul(tile.warps, HIGH * WIDE))
    s.require(le(mul(tile.high, tile.wide) * (ROWS_OF_WARP // HIGH * EACH), const(MOST_SUMS)))
    pairs = s.tunable("KS", PAIRS)
    steps = mul(pairs, PAIR)
    slices = take_slices(s, roles, tile.rows, tile.columns, steps, least=PAIR)
    hold_as(s, slices, dtype)

    block = find_block(s.func, main)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    i_0, *rows = s.split(nest[row], [None, tile.down, tile.high, ROWS_OF_WARP // HIGH, HIGH], divides=even(roles, 0))
    j_0, *columns = s.split(nest[roles.column], [None, tile.wide, WIDE, EACH], divides=even(roles, 1))
    k_0, *k_1 = s.split(nest[roles.reduce[0]], [None, mul(pairs, 2), 2, CORE], divides=even(roles, 2))
    (i_w, i_m, i_r, i_y), (j_n, j_x, j_c) = rows, columns
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, i_y, j_x, i_m, i_r, j_n, j_c, *k_1])
    stages = stages_ahead(s, roles, k_0, PAIR) if ahead else None
    for x in slices:
        _fetch(s, x, k_0, tile, groups, steps, stages)
    by_items(s, last.name, s.reverse_compute_at(last.name, j_0), tile, is_even(roles, roles.column))
    s.apply("decompose_reduction", block=main, loop=k_0)
    bind_warps(s, [i_w], i_y, j_x, WARPS)
    i_w, i_y, j_x, i_m, i_r, j_n, j_c = s.inner_loops(f"{main}_init", j_0)
    bind_warps(s, [i_w], i_y, j_x, WARPS)
    for loop in (i_m, i_r, j_n):
        s.unroll(loop)
    s.vectorize(j_c)
    s.apply("tensorize", loop=s.inner_loops(main, k_0)[1], intrinsic=f"wgmma_{dtype}_{form_of(slices)}")
    own_sums(s, main, roles)
    s.bind(j_0, "group", 0)
    s.bind(i_0, "group", 1)
    if batch:
        s.bind(s.fuse(batch), "group", 2)
    s.guess(
        *(
            {"WG": g, "MT": h, "NT": w, "KS": k, **more}
            for more in ([{"STAGES": 3}, {"STAGES": 2}] if ahead else [{}])
            for g, h, w, k in ((2, 2, 16, 2), (2, 1, 32, 2), (1, 2, 16, 2), (2, 1, 8, 2), (1, 1, 8, 2), (1, 1, 4, 1))
        )
    )
    return s


def _fetch(s: Schedule, x: Slice, k_0: str, tile: Tile, groups: Tunable, steps: Expr, ahead: Tunable | None) -> None:
    """All items fetch a slice together: eight neighbours what lies in one matrix, a warp four of these beside one another in the
    operand's rows. ahead: while they multiply one slice as many less one are on their way."""
    s.compute_at(x.block, k_0)
    buffer = find_block(s.func, x.block).body.buffer
    name, rows, beside = buffer.name, *sorted((x.step, x.place))
    lanes = x.width(CORE) if beside == len(buffer.shape) - 1 else 1
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, beside)]
    s.apply("permute_layout", buffer=name, order=[*rest, rows, beside])
    first, blocks = len(rest), [x.block]
    if ahead is not None:
        if lanes == 1:
            raise ScheduleError(f"{s.func.name}: single elements of 16 bits are not copied asynchronously")
        blocks += s.apply("software_pipeline", block=x.block, loop=k_0, stages=ahead)
        at = first + (x.step > x.place)
        _cut(s, name, at, steps, first, at + 1)
        first += 1
    dims = [first, first + 1]
    if x.has_rows:  # a warp's rows of a machine's tile follow those of the warp before it
        at = dims[x.place > x.step]
        _cut(s, name, at, mul(tile.high, WARPS * ROWS_OF_WARP), at, at + 1)
        _cut(s, name, at + 1, mul(tile.high, ROWS_OF_WARP), at + 1, at + 2)
        _cut(s, name, at + 2, const(ROWS_OF_WARP), at + 1, at + 3)
        dims = [d + 3 * (d >= at) for d in dims]
    _cut(s, name, dims[1], const(CORE), dims[1], dims[1] + 1)
    _cut(s, name, dims[0], const(CORE), dims[0], dims[1] + 1)
    depth = s.loops_of(x.block).index(k_0) + 1
    for block in blocks:
        own = s.loops_of(block)[depth:]
        bindings = find_block(s.func, block).bindings
        along = [[n for n in own if n in {v.name for v in free_vars(bindings[d])}] for d in (rows, beside)]
        if any(len(found) != 1 for found in along) or len(own) != 2:
            raise ScheduleError(f"{s.func.name}: {block!r} is fetched in no rows")
        (slow,), (fast,) = along
        if x.place < x.step:  # the groups share out what is no step
            rounds, g, z, high, low = s.split(slow, [None, groups, WARPS, CORE // WIDE, WIDE], divides=True)
            others, vectors, pieces, lane = s.split(fast, [None, WIDE, CORE // lanes, lanes])
        else:
            rounds, z, high, low = s.split(slow, [None, WARPS, CORE // WIDE, WIDE])
            others, g, vectors, pieces, lane = s.split(fast, [None, groups, WIDE, CORE // lanes, lanes], divides=True)
        s.reorder([g, z, vectors, high, low, rounds, others, pieces, lane])
        s.vectorize(lane)
        for axis, loop in enumerate((low, s.fuse([vectors, high]), z, g)):
            s.bind(loop, "item", axis)
        if ahead is not None and is_copy(s, block):
            s.apply("copy_async", loop=lane)


def _cut(s: Schedule, name: str, dim: int, factor: Expr, outer: int, inner: int) -> None:
    """A dimension of a buffer as quotient and remainder, which are then the dimensions `outer` and `inner`."""
    order = [d for d in range(len(find_alloc(s.func, name).shape) + 1) if d not in (dim, dim + 1)]
    for place, d in ((outer, dim), (inner, dim + 1)):
        order.insert(place, d)
    s.apply("tile_layout", buffer=name, dim=dim, factor=factor, order=order)
