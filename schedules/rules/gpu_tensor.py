"""Products of 16-bit floats on GPUs whose warps multiply tiles at once (`relax_tune.ir.warp_products`), with whatever is fused around.

A group makes a tile of the output, its warps tiles of that, 16 rows by 8 columns at a time, the sums in registers. Slices of both
operands pass through shared memory as they lie, in rows that begin in different banks, so that the eight rows of a matrix which a warp
fetches at once do not get in each other's way. Tiles are padded on the way into shared memory. The epilogue is computed on the
registers: each item has two neighbouring columns of two rows in every tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.dtype import DType, f32
from relax_tune.ir.expr import Expr, Load, Op, Tunable, const, free_vars, le, mul
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.warp_products import COLUMNS, ROWS, STEPS
from relax_tune.schedules.analysis import Contraction, contraction, final_block, multiplies, reductions
from relax_tune.schedules.nest import find_block
from relax_tune.schedules.rules.forms import fitting
from relax_tune.schedules.rules.gpu_items import limit_items
from relax_tune.schedules.rules.gpu_matmul import Slice, is_even, share_steps, take_slices
from relax_tune.schedules.rules.matmul import inline_around, output_column
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import Machine

# The first generation whose warps multiply tiles of this form.
CAPABILITY = 80
WARPS = (1, 2, 4)
TILES = (1, 2, 4)
COLUMN_TILES = (2, 4, 8)
SLICES = (1, 2, 4)
# Items of a warp by the rows and columns of a tile, and the columns each has.
HIGH, WIDE = 8, 4
EACH = COLUMNS // WIDE
# Sums an item can have in registers.
MOST_SUMS = 128
# 16 bytes, what one instruction fetches, of 16-bit floats; rows of an odd number of these begin in banks that differ.
VECTOR = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Counts: of warps along rows and columns, and of each one's tiles of the machine."""

    down: Tunable
    across: Tunable
    high: Tunable
    wide: Tunable

    @property
    def rows(self) -> Expr:
        return mul(mul(self.down, self.high), ROWS)

    @property
    def columns(self) -> Expr:
        return mul(mul(self.across, self.wide), COLUMNS)

    @property
    def warps(self) -> Expr:
        return mul(self.down, self.across)


def sketches(func: PrimFunc, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a product of 16-bit floats; nothing for other functions, and on machines that do not multiply tiles."""
    found = reductions(func)
    if machine.capability < CAPABILITY or len(found) != 1 or found[0].init is None or not multiplies(found[0]):
        return
    forms = (("tiles", False), ("split", True))
    yield from fitting((f"tensor.{name}", partial(build, func, machine, split)) for name, split in forms)


def build(func: PrimFunc, machine: Machine, split: bool = False) -> Schedule:
    """Raises ScheduleError where the function is no such product. split: groups share out the steps too."""
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    if find_block(s.func, main).body.buffer in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="global")
    with suppress(ScheduleError):  # nothing may be the same all along
        s.apply("hoist_factors", block=main)
    last = final_block(s.func)
    if split:
        main, last = share_steps(s, main, machine)
    roles = contraction(find_block(s.func, main), output_column(s, main, last))
    if roles.row is None or len(roles.reduce) != 1:
        raise ScheduleError(f"{func.name}: wanted rows and one dimension to sum over, found {roles!r}")
    dtype = _multiplied(s, roles)
    tile = Tile(s.tunable("WM", WARPS), s.tunable("WN", WARPS), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES))
    limit_items(s, machine, mul(tile.warps, HIGH * WIDE))
    s.require(le(mul(tile.high, tile.wide) * (ROWS // HIGH * EACH), const(MOST_SUMS)))
    parts = s.tunable("KS", SLICES)
    slices = take_slices(s, roles, tile.rows, tile.columns, mul(parts, STEPS), least=STEPS)

    block = find_block(s.func, main)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    i_0, *rows = s.split(nest[roles.row], [None, tile.down, tile.high, ROWS // HIGH, HIGH], divides=_even(roles, 0))
    j_0, *columns = s.split(nest[roles.column], [None, tile.across, tile.wide, WIDE, EACH], divides=_even(roles, 1))
    k_0, k_1, k_2 = s.split(nest[roles.reduce[0]], [None, parts, STEPS], divides=_even(roles, 2))
    (i_w, i_m, i_r, i_y), (j_w, j_n, j_x, j_c) = rows, columns
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, j_w, k_1, i_y, j_x, i_m, i_r, j_n, j_c, k_2])
    for x in slices:
        _fetch(s, x, k_0, tile)
    _by_items(s, last.name, s.reverse_compute_at(last.name, j_0), roles, tile)
    s.apply("decompose_reduction", block=main, loop=k_0)
    _bind(s, [i_w, j_w], i_y, j_x)
    i_w, j_w, i_y, j_x, i_m, i_r, j_n, j_c = s.inner_loops(f"{main}_init", j_0)
    _bind(s, [i_w, j_w], i_y, j_x)
    for loop in (i_m, i_r, j_n):
        s.unroll(loop)
    s.vectorize(j_c)
    form = "".join("nt"[(x.step < x.place) == x.has_rows] for x in sorted(slices, key=lambda x: not x.has_rows))
    s.apply("tensorize", loop=s.inner_loops(main, k_1)[0], intrinsic=f"mma_{dtype}_{form}")
    _own_sums(s, main, roles)
    s.bind(j_0, "group", 0)
    s.bind(i_0, "group", 1)
    if batch:
        s.bind(s.fuse(batch), "group", 2)
    shares = {"SK": 4} if split else {}
    s.guess(
        *(
            {"WM": a, "WN": b, "MT": h, "NT": w, "KS": k, **shares}
            for a, b, h, w, k in ((2, 2, 4, 8, 2), (2, 2, 2, 4, 2), (1, 4, 1, 4, 2), (1, 1, 1, 2, 2), (1, 1, 1, 2, 1))
        )
    )
    return s


def _multiplied(s: Schedule, roles: Contraction) -> DType:
    """The type of both operands of a sum that only multiplies them."""
    value = roles.block.body.value
    terms = value.args[1].args if isinstance(value, Op) and isinstance(value.args[1], Op) else ()
    loads = [e.args[0] for e in terms if isinstance(e, Op) and e.op == "cast" and e.dtype is f32]
    types = {x.buffer.dtype for x in loads if isinstance(x, Load)}
    if len(loads) != 2 or len(types) != 1 or not (dtype := types.pop()).is_half:
        raise ScheduleError(f"{s.func.name}: wanted products of 16-bit floats, found {value!r}")
    return dtype


def _even(roles: Contraction, which: int) -> bool:
    assert roles.row is not None
    return is_even(roles, (roles.row, roles.column, roles.reduce[0])[which], STEPS)


def _bind(s: Schedule, warps: Sequence[str], high: str, wide: str) -> None:
    """The items of a warp along the first axes, the warps along the third."""
    for axis, loop in enumerate((wide, high, s.fuse(warps))):
        s.bind(loop, "item", axis)


def _fetch(s: Schedule, x: Slice, k_0: str, tile: Tile) -> None:
    """All items fetch a slice together, as it lies: neighbours take neighbouring vectors of the operand's rows."""
    own = s.compute_at(x.block, k_0)
    node = find_block(s.func, x.block)
    buffer = node.body.buffer
    rows, beside = sorted((x.step, x.place))
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, beside)]
    along = {n for n in own if n in {v.name for v in free_vars(node.bindings[beside])}}
    if len(along) != 1:
        raise ScheduleError(f"{s.func.name}: {x.block!r} is fetched in no rows")
    (fast,) = along
    s.reorder([*(n for n in own if n != fast), fast])
    contiguous = beside == len(buffer.shape) - 1
    vectors, lanes = s.split(fast, [None, x.width(VECTOR) if contiguous else 1], divides=True)
    rounds, z, y, w = s.split(
        s.fuse([*(n for n in own if n != fast), vectors]), [None, tile.warps, HIGH, WIDE], divides=True
    )
    s.reorder([z, y, w, rounds, lanes])
    s.vectorize(lanes)
    _bind(s, [z], y, w)
    s.apply("permute_layout", buffer=buffer.name, order=[*rest, rows, beside])
    s.apply("storage_align", buffer=buffer.name, factor=2 * VECTOR, offset=VECTOR)


def _by_items(s: Schedule, block: str, own: Sequence[str], roles: Contraction, tile: Tile) -> None:
    """The epilogue on what each item has of the sums."""
    *rows, columns = own
    if len(rows) != 1:
        raise ScheduleError(f"{s.func.name}: the epilogue has other rows than the product")
    i_w, i_m, i_r, i_y = s.split(rows[0], [None, tile.high, ROWS // HIGH, HIGH])
    j_w, j_n, j_x, j_c = s.split(columns, [None, tile.wide, WIDE, EACH])
    s.reorder([i_w, j_w, i_y, j_x, i_m, i_r, j_n, j_c])
    if is_even(roles, roles.column):
        s.vectorize(j_c)
    else:
        s.unroll(j_c)
    for loop in (i_m, i_r, j_n):
        s.unroll(loop)
    _bind(s, [i_w, j_w], i_y, j_x)


def _own_sums(s: Schedule, main: str, roles: Contraction) -> None:
    """The sums in registers, by tiles and the places that items have in them."""
    sums = find_block(s.func, main).body
    name, rank = sums.buffer.name, len(sums.indices)
    row, column = (next(d for d, e in enumerate(sums.indices) if e is v) for v in (roles.row, roles.column))
    for dim, factors in sorted(((row, (HIGH,)), (column, (COLUMNS, EACH))), reverse=True):
        for at, factor in enumerate(factors):
            s.apply("tile_layout", buffer=name, dim=dim + at, factor=factor, order=[*range(rank + 1)])
            rank += 1
    s.apply("set_scope", buffer=name, scope="local")
