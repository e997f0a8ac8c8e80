"""Products of 16-bit floats on GPUs whose warps multiply tiles at once (`relax_tune.ir.hardware.mma`), with whatever is fused around.

A group makes a tile of the output, its warps tiles of that, 16 rows by 8 columns at a time, the sums in registers. Slices of both
operands pass through shared memory as they lie, neighbouring items copying neighbouring vectors. Rows there are swizzled, so that the
eight rows of a matrix which a warp fetches at once do not get in each other's way: tiles make them powers of two of vectors, for which
this is free of conflicts as padding is, without its bytes. Tiles are padded on the way into shared memory, and whole numbers of 8 bits
become floats of 16 there, which hold each of them; only what stays as it is may be copied asynchronously. The epilogue is computed on the
registers: each item has two neighbouring columns of two rows in every tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType, f32, i8, u8
from relax_tune.ir.core.expr import Expr, Load, Op, Tunable, as_int, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.hardware.mma import COLUMNS, ROWS, STEPS
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.gpu.matmul import Slice, is_even, share_steps, stages_ahead, take_slices, ways
from relax_tune.schedules.rules.gpu.stream_k import FIRST_WAVES, FORMS, Form, stored_apart, stretches
from relax_tune.schedules.rules.gpu.threads import Parts, limit_items, own_parts
from relax_tune.schedules.rules.shared.contraction import Contraction, is_product, isolate_contraction, matrix_roles
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# The first generation whose warps multiply tiles of this form.
CAPABILITY = 80
WARPS = (1, 2, 4)
TILES = (1, 2, 4)
COLUMN_TILES = (2, 4, 8)
# Steps of a slice, in pairs of what the machine does at once: items of a warp fetch four vectors beside one another.
PAIRS = (1, 2)
PAIR = 2 * STEPS
# Items of a warp by the rows and columns of a tile, and the columns each has.
HIGH, WIDE = 8, 4
EACH = COLUMNS // WIDE
# Sums an item can have in registers.
MOST_SUMS = 128
# 16 bytes, what one instruction fetches, of 16-bit floats.
VECTOR = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Counts: of warps along rows and columns, and of each one's tiles of the machine. together: of warps that are a group of their own
    among them, one after the other along the fourth axis of items."""

    down: Expr
    across: Expr
    high: Expr
    wide: Expr
    together: int = 0

    @property
    def rows(self) -> Expr:
        return mul(mul(self.down, self.high), ROWS)

    @property
    def columns(self) -> Expr:
        return mul(mul(self.across, self.wide), COLUMNS)

    @property
    def warps(self) -> Expr:
        return mul(self.down, self.across)


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a product of 16-bit floats, or of such and whole numbers of 8 bits; nothing for other functions, and on machines
    that do not multiply tiles."""
    if machine.capability < CAPABILITY or not is_product(func):
        return
    for form in FORMS:
        # slices wait for their copies where these cannot be asynchronous
        yield from first_applicable(
            f"tensor.{form}", (partial(build, func, machine, form, way) for way in ways(machine))
        )


def build(func: PrimFunc, machine: HardwareInfo, form: Form = "tiles", ahead: bool = True) -> Schedule:
    """Raises ScheduleError where the function is no such product. ahead: slices are copied asynchronously, before they are needed."""
    s = Schedule(func)
    main = isolate_contraction(s)
    last = final_block(s.func)
    pairs = s.tunable("KS", PAIRS)
    if form == "split":
        main, last = share_steps(s, main, machine, mul(pairs, PAIR))
    elif form == "stream":
        last = stored_apart(s, main)
    roles, row = matrix_roles(s, main, last)
    dtype = multiplied(s, roles)
    tile = Tile(s.tunable("WM", WARPS), s.tunable("WN", WARPS), s.tunable("MT", TILES), s.tunable("NT", COLUMN_TILES))
    limit_items(s, machine, mul(tile.warps, HIGH * WIDE))
    s.require(le(mul(tile.high, tile.wide) * (ROWS // HIGH * EACH), const(MOST_SUMS)))
    slices = take_slices(s, roles, tile.rows, tile.columns, mul(pairs, PAIR), least=PAIR)
    hold_as(s, slices, dtype)

    block = find_block(s.func, main)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    i_0, *rows = s.split(nest[row], [None, tile.down, tile.high, ROWS // HIGH, HIGH], divides=even(roles, 0))
    j_0, *columns = s.split(nest[roles.column], [None, tile.across, tile.wide, WIDE, EACH], divides=even(roles, 1))
    k_0, k_1, k_2 = s.split(nest[roles.reduce[0]], [None, mul(pairs, 2), STEPS], divides=even(roles, 2))
    (i_w, i_m, i_r, i_y), (j_w, j_n, j_x, j_c) = rows, columns
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_w, j_w, k_1, i_y, j_x, i_m, i_r, j_n, j_c, k_2])
    stages = stages_ahead(s, roles, k_0, PAIR) if ahead else None
    if form == "stream":
        own, group, j_0, k_0 = stretches(s, roles, last.name, [x.block for x in slices], [i_0, j_0, k_0], machine)
    for x in slices:
        _fetch(s, x, k_0, tile, mul(pairs, PAIR), stages)
    if form == "stream":
        by_items(s, last.name, own, tile, True)
    else:
        by_items(s, last.name, s.reverse_compute_at(last.name, j_0), tile, is_even(roles, roles.column))
        s.apply("decompose_reduction", block=main, loop=k_0)
    bind_warps(s, [i_w, j_w], i_y, j_x)
    i_w, j_w, i_y, j_x, i_m, i_r, j_n, j_c = s.inner_loops(f"{main}_init", j_0)
    bind_warps(s, [i_w, j_w], i_y, j_x)
    for loop in (i_m, i_r, j_n):
        s.unroll(loop)
    s.vectorize(j_c)
    s.apply("tensorize", loop=s.inner_loops(main, k_1)[0], intrinsic=f"mma_{dtype}_{form_of(slices)}")
    own_sums(s, main, roles)
    if form == "stream":
        s.bind(group, "group", 0)
    else:
        s.bind(j_0, "group", 0)
        s.bind(i_0, "group", 1)
        if batch:
            s.bind(s.fuse(batch), "group", 2)
    shares = {"SS": s.tunables["SS"].domain[-2:][0]} if form == "split" else FIRST_WAVES if form == "stream" else {}
    known = next(as_int(i.extent) for i in roles.block.iters if i.var is row)
    highest = max(TILES) * max(WARPS) if known is None else max(1, -(-known // ROWS))  # more tiles would be padding
    s.guess(
        *(
            {"WM": a, "WN": b, "MT": h, "NT": w, "KS": k, **shares, **more}
            for more in ([{"STAGES": 3}, {"STAGES": 2}] if ahead else [{}])
            for a, b, h, w, k in ((2, 2, 4, 8, 1), (2, 2, 2, 4, 1), (1, 4, 1, 4, 2), (1, 4, 1, 4, 1), (1, 1, 1, 2, 1))
            if a * h <= highest
        )
    )
    return s


def multiplied(s: Schedule, roles: Contraction) -> DType:
    """The type that both operands of a sum which only multiplies them have in shared memory: whole numbers of 8 bits that of the
    other."""
    value = roles.block.body.value
    terms = value.args[1].args if isinstance(value, Op) and isinstance(value.args[1], Op) else ()
    loads = [e.args[0] for e in terms if isinstance(e, Op) and e.op == "cast" and e.dtype is f32]
    types = {x.buffer.dtype for x in loads if isinstance(x, Load)}
    halves = [d for d in types if d.is_half]
    if len(loads) != 2 or len(halves) != 1 or not types <= {*halves, i8, u8}:
        raise ScheduleError(f"{s.func.name}: wanted products of 16-bit floats, found {value!r}")
    return halves[0]


def form_of(slices: Sequence[Slice]) -> str:
    """`n` or `t` for the operand with rows, then for the other one: as it is multiplied, or turned."""
    return "".join("nt"[(x.step < x.place) == x.has_rows] for x in sorted(slices, key=lambda x: not x.has_rows))


def even(roles: Contraction, which: int) -> bool:
    """Whether rows, columns or steps are cut by divisors."""
    assert roles.row is not None
    return is_even(roles, (roles.row, roles.column, roles.reduce[0])[which], PAIR)


def bind_warps(s: Schedule, warps: Sequence[str], high: str, wide: str, together: int = 0) -> None:
    """The items of a warp along the first axes, the warps along the third, groups of so many of them along the fourth."""
    loops = [wide, high, s.fuse(warps)]
    if together:
        loops[2:] = reversed(s.split(loops[2], [None, together]))
    for axis, loop in enumerate(loops):
        s.bind(loop, "item", axis)


def _fetch(s: Schedule, x: Slice, k_0: str, tile: Tile, steps: Expr, ahead: Tunable | None) -> None:
    """All items fetch a slice together, as it lies: neighbours take neighbouring vectors of its rows, row after row.
    ahead: while they multiply one slice as many less one are on their way."""
    if k_0 not in s.loops_of(x.block):
        s.compute_at(x.block, k_0)
    buffer = find_block(s.func, x.block).body.buffer
    rows, beside = sorted((x.step, x.place))
    rest = [d for d in range(len(buffer.shape)) if d not in (rows, beside)]
    s.apply("permute_layout", buffer=buffer.name, order=[*rest, rows, beside])
    blocks = [x.block]
    if ahead is not None:
        if x.width(VECTOR) == 1:
            raise ScheduleError(f"{s.func.name}: single elements of 16 bits are not copied asynchronously")
        blocks += s.apply("software_pipeline", block=x.block, loop=k_0, stages=ahead)
        slot = len(rest) + (x.step > x.place)
        order = [slot, *(d for d in range(len(buffer.shape) + 1) if d != slot)]
        s.apply("tile_layout", buffer=buffer.name, dim=slot, factor=steps, order=order)
    s.apply("swizzle", buffer=buffer.name, vector=VECTOR)
    depth = s.loops_of(x.block).index(k_0) + 1
    for name in blocks:
        own = s.loops_of(name)[depth:]
        bindings = find_block(s.func, name).bindings
        along = [[n for n in own if n in {v.name for v in free_vars(bindings[d])}] for d in (rows, beside)]
        if any(len(found) != 1 for found in along) or len(own) != 2:
            raise ScheduleError(f"{s.func.name}: {name!r} is fetched in no rows")
        (slow,), (fast,) = along
        lanes = x.width(VECTOR) if beside == len(buffer.shape) - 1 else 1
        vectors, vector = s.split(fast, [None, lanes], divides=True)
        rounds, z, y, w = s.split(s.fuse([slow, vectors]), [None, tile.warps, HIGH, WIDE])
        s.reorder([z, y, w, rounds, vector])
        s.vectorize(vector)
        bind_warps(s, [z], y, w)
        if ahead is not None and is_copy(s, name):
            s.apply("copy_async", loop=vector)


def hold_as(s: Schedule, slices: Sequence[Slice], dtype: DType) -> None:
    """Slices of operands of another type become of this one on the way into shared memory."""
    for x in slices:
        held = find_block(s.func, x.block).body.buffer
        if held.dtype is not dtype:
            s.apply("store_as", buffer=held.name, dtype=dtype.short)


def is_copy(s: Schedule, block: str) -> bool:
    """Whether a block that fetches a slice leaves the bits as they are."""
    node = find_block(s.func, block)
    return all(x.buffer.dtype is node.body.buffer.dtype for x in block_loads(node))


def by_items(s: Schedule, block: str, own: Sequence[str], tile: Tile, whole: bool) -> None:
    """The epilogue on what each item has of the sums. whole: no vector of it is cut off."""
    warps: Parts = ((None, "group"), (tile.together, "warp")) if tile.together else ((None, "warp"),)
    rows: Parts = (*warps, (tile.high, "each"), (ROWS // HIGH, "each"), (HIGH, "item"))
    columns: Parts = ((None, "warp"), (tile.wide, "each"), (WIDE, "item"), (EACH, "lane"))
    own_parts(s, block, own, rows, columns, whole)


def own_sums(s: Schedule, main: str, roles: Contraction) -> None:
    """The sums in registers, by tiles and the places that items have in them."""
    sums = find_block(s.func, main).body
    name, rank = sums.buffer.name, len(sums.indices)
    row, column = (next(d for d, e in enumerate(sums.indices) if e is v) for v in (roles.row, roles.column))
    for dim, factors in sorted(((row, (HIGH,)), (column, (COLUMNS, EACH))), reverse=True):
        for at, factor in enumerate(factors):
            s.apply("tile_layout", buffer=name, dim=dim + at, factor=factor, order=[*range(rank + 1)])
            rank += 1
    s.apply("set_scope", buffer=name, scope="local")
