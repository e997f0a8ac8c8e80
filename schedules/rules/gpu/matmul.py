"""Matmul-like functions on GPUs: sums of products with whatever is fused around them.

A group makes a tile of the output, its items squares of that in registers. Slices of both operands pass through shared memory: all
items fetch them together, in vectors along the operands' rows, and find them there with the reduction leading, so that what an item
reads for its square lies side by side. Tiles are padded on the way into shared memory, so that nothing in between has conditions.
The epilogue is computed on the registers.

Where a machine copies asynchronously, slices are on their way while others are multiplied: those that lie with the reduction leading in
vectors, others number by number, eight of a row and four rows at a time by the items of a warp, so that each row gives a whole sector
and each number finds a bank of its own. Rows in shared memory are padded where that is needed for it, rather than swizzled: items read
them step after step, and for padded ones that is one address with constants added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.core.expr import Expr, Op, Tunable, Var, as_int, const, eq, floormod, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.hardware.swizzle import ACCESS_BYTES
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.gpu.stream_k import FIRST_WAVES, FORMS, Form, add_up, stored_apart, stretches
from relax_tune.schedules.rules.gpu.threads import Parts, limit_items, own_parts
from relax_tune.schedules.rules.shared.blocks import separate_nest
from relax_tune.schedules.rules.shared.contraction import Contraction, is_product, isolate_contraction, matrix_roles
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ITEMS = (4, 8, 16, 32)
HEIGHTS = (1, 2, 4, 8)
VECTORS = (1, 2, 4)
STEPS = (8, 16, 32)
# Slices in shared memory at once.
STAGES_AHEAD = (2, 3, 4)
SHARES = (2, 4, 8, 16)
# Sums an item can have in registers beside what it multiplies.
MOST_SUMS = 64
# A constant extent that so many elements divide is cut by divisors, others are padded.
EVEN = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """The counts of a group's items, and of rows, vectors of columns, and elements of these that an item has."""

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


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a matmul-like function; nothing when the function is none."""
    if not is_product(func):
        return
    for form in FORMS:
        yield from first_applicable(
            f"matmul.{form}", (partial(build, func, machine, form, way) for way in ways(machine))
        )


def ways(machine: HardwareInfo) -> tuple[bool, ...]:
    """Whether slices are copied ahead: where the machine does not wait for copies that is tried first."""
    return (True, False) if machine.has_cp_async else (False,)


def build(func: PrimFunc, machine: HardwareInfo, form: Form = "tiles", ahead: bool = False) -> Schedule:
    """Raises ScheduleError where the function is no product of operands with rows and columns. ahead: slices are copied
    asynchronously, before they are needed."""
    s = Schedule(func)
    main = isolate_contraction(s)
    product(s, main, machine, form, ahead)
    return s


def product(
    s: Schedule, main: str, machine: HardwareInfo, form: Form, ahead: bool = False, gathered: Sequence[str] = ()
) -> None:
    """The product in groups and items. gathered: operands that blocks put together from what lies apart; no memory holds them whole,
    since each slice is put together where it is fetched."""
    last = final_block(s.func)
    # eights as a number of its own show that they divide a slice
    eights = mul(s.tunable("KE", [n // min(STEPS) for n in STEPS]), min(STEPS)) if ahead else None
    if form == "split":
        main, last = share_steps(s, main, machine, eights)
    elif form == "stream":
        last = stored_apart(s, main)
    roles, row = matrix_roles(s, main, last)
    tile = Tile(
        s.tunable("TX", ITEMS),
        s.tunable("TY", ITEMS),
        s.tunable("MR", HEIGHTS),
        s.tunable("NV", VECTORS),
        min(4, machine.lanes),
    )
    limit_items(s, machine, mul(tile.tx, tile.ty))
    s.require(le(mul(tile.height, tile.vectors) * tile.width, const(MOST_SUMS)))
    halves = _steps_together(roles)
    steps = s.tunable("KT", STEPS) if eights is None else eights
    if ahead and halves > 1:
        raise ScheduleError(f"{s.func.name}: bytes of several steps go through registers")
    slices = take_slices(s, roles, tile.rows, tile.columns, mul(steps, halves), halves)
    if ahead and gathered:  # what lies apart is copied number by number
        slices = [replace(x, multiple=1) for x in slices]
    for name in gathered:
        s.compute_inline(name)

    block = find_block(s.func, main)
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    i_0, i_t, i_1 = s.split(nest[row], [None, tile.ty, tile.height])
    j_0, j_1, j_t, j_2 = s.split(
        nest[roles.column], [None, tile.vectors, tile.tx, tile.width], divides=is_even(roles, roles.column)
    )
    k_0, *k_1 = s.split(
        nest[roles.reduce[0]],
        [None, steps, halves] if halves > 1 else [None, steps],
        divides=is_even(roles, roles.reduce[0]),
    )
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, i_0, j_0, k_0, i_t, j_t, *k_1, i_1, j_1, j_2])
    stages = stages_ahead(s, roles, k_0, min(STEPS)) if ahead else None
    if form == "stream":
        own, group, j_0, k_0 = stretches(s, roles, last.name, [x.block for x in slices], [i_0, j_0, k_0], machine)
    late = [_fetch(s, x, k_0, tile, steps, stages) for x in slices]
    if ahead and not any(late):
        raise ScheduleError(f"{s.func.name}: neither operand is copied as it is")
    if form == "stream":
        _by_squares(s, last.name, own, tile, True)
    else:
        _by_squares(s, last.name, s.reverse_compute_at(last.name, j_0), tile, is_even(roles, roles.column))
        s.apply("decompose_reduction", block=main, loop=k_0)
    for name in (main, f"{main}_init"):
        *_, a, b, c, d, e = [n for n in s.inner_loops(name, j_0) if n not in (k_0, *k_1)]
        s.bind(a, "item", 1)
        s.bind(b, "item", 0)
        for inner in (c, d):
            s.unroll(inner)
        s.vectorize(e)
    sums = find_block(s.func, main).body
    dim = next(d for d, e in enumerate(sums.indices) if e is roles.column)
    rank = len(sums.indices)
    for at, factor in ((dim, tile.columns), (dim + 1, tile.width), (dim + 1, tile.tx)):
        s.apply("tile_layout", buffer=sums.buffer.name, dim=at, factor=factor, order=[*range(rank + 1)])
        rank += 1
    s.apply("set_scope", buffer=sums.buffer.name, scope="local")
    if form == "stream":
        s.bind(group, "group", 0)
    else:
        s.bind(j_0, "group", 0)
        s.bind(i_0, "group", 1)
        if batch:
            s.bind(s.fuse(batch), "group", 2)
    split = {"SS": s.tunables["SS"].domain[-3:][0]} if "SS" in s.tunables else {"SK": 4}
    shares = {"tiles": {}, "split": split, "stream": FIRST_WAVES}[form]
    s.guess(
        *(
            {"TX": x, "TY": y, "MR": h, "NV": v, **more, **shares}
            for more in ([{"KE": 2, "STAGES": 3}, {"KE": 2, "STAGES": 2}] if ahead else [{"KT": 16}])
            for x, y, h, v in ((16, 16, 4, 1), (16, 8, 8, 2), (8, 4, 1, 1))
        )
    )


def share_steps(s: Schedule, main: str, machine: HardwareInfo, slice_steps: Expr | None = None) -> tuple[str, Block]:
    """SK sums of shares of the steps for each element, made by a product like that one; and the element from them, with what follows.
    The block of that product, and the one that stores its results. slice_steps: SS slices of so many steps are a share, however many
    shares there are then; rings of slices need shares to begin with one."""
    epilogue = final_block(s.func).name
    *points, steps = s.loops_of(main)
    known = as_int(s.extent(steps))
    if known is None or known % (min(STEPS) * max(SHARES)):
        raise ScheduleError(f"{s.func.name}: wanted steps that shares divide, found {known}")
    if slice_steps is None:
        share, _ = s.split(steps, [s.tunable("SK", SHARES), None], divides=True)
    else:
        each = mul(s.tunable("SS", slices_of_share(known)), slice_steps)
        share, _ = s.split(steps, [None, each], divides=True)
    (part,) = s.apply("rfactor", block=main, loop=share, scope="global", whole=True)
    separate_nest(s, part, len(points))
    sums = find_block(s.func, part).body.buffer
    rank = len(sums.shape)
    s.apply("permute_layout", buffer=sums.name, order=[rank - 1, *range(rank - 1)])
    (write,) = s.apply("cache_write", block=part, scope="global")
    add_up(s, main, epilogue, machine)
    return part, find_block(s.func, write)


def slices_of_share(steps: int) -> list[int]:
    """How many slices a share of so many steps may have: such as make at least two shares of the longest slices, and not too many."""
    slices = steps // max(STEPS)
    return [n for n in (2, 4, 8, 16, 32, 64) if slices % n == 0 and max(SHARES) * 4 * n >= slices > n] or [1]


def is_even(roles: Contraction, var: Var, least: int = min(STEPS)) -> bool:
    """Whether tiles are divisors of an extent: of a constant one that is no odd number of them (of `least` steps), or of a share of it."""
    extent = next(i.extent for i in roles.block.iters if i.var is var)
    known = as_int(extent)
    if known is None:
        return bool(free_vars(extent)) and all(isinstance(v, Tunable) for v in free_vars(extent))
    return known > 0 and known % (least * _steps_together(roles) if var in roles.reduce else EVEN) == 0


def _steps_together(roles: Contraction) -> int:
    """How many steps share what is read for one of them: numbers of a few bits in one byte."""
    found = [
        as_int(n.args[1]) or 1
        for x in block_loads(roles.block)
        if x.buffer.dtype.is_int
        for n in x.indices
        if isinstance(n, Op) and n.op == "floordiv" and n.args[0] is roles.reduce[0]
    ]
    return max(found, default=1)


@dataclass(frozen=True, slots=True)
class Slice:
    """An operand that goes through shared memory: the block that fetches it, its dims of steps and of rows or columns, whether it has
    rows, and what the length of its rows in memory is certainly a multiple of."""

    block: str
    step: int
    place: int
    has_rows: bool
    multiple: int

    def width(self, most: int) -> int:
        """Elements that may be fetched at once."""
        return gcd(self.multiple, most)


def take_slices(
    s: Schedule, roles: Contraction, rows: Expr, columns: Expr, steps: Expr, halves: int = 1, least: int = min(STEPS)
) -> list[Slice]:
    """Let the product read copies of its operands, padded to whole tiles where these do not divide an extent; what is small beside
    them is read where it is."""
    main = roles.block.name
    whole = {roles.row: rows, roles.column: columns, roles.reduce[0]: steps}
    factors = [None if i.var not in whole or is_even(roles, i.var, least) else whole[i.var] for i in roles.block.iters]
    if halves > 1 and not is_even(roles, roles.reduce[0], least):
        raise ScheduleError(f"{s.func.name}: bytes of several steps are not padded")
    before = {b.name for b in blocks(s.func.body)}
    s.apply("pad", block=main, factors=factors)
    found: list[Slice] = []
    for x in dict.fromkeys(block_loads(find_block(s.func, main))):
        made = next((b for b in blocks(s.func.body) if b.body.buffer is x.buffer and b.name not in before), None)
        step = [d for d, e in enumerate(x.indices) if _is_step(e, roles)]
        place = [d for d, e in enumerate(x.indices) if e in (roles.row, roles.column)]
        if len(step) != 1 or len(place) != 1:
            if made is not None:
                s.compute_inline(made.name)
            continue
        source = x.buffer if made is None else block_loads(made)[0].buffer
        if made is None:
            seen = {b.name for b in blocks(s.func.body)}
            s.apply("cache_read", block=main, buffer=x.buffer.name, scope="shared")
            made = next(b for b in blocks(s.func.body) if b.name not in seen)
        else:
            s.apply("set_scope", buffer=x.buffer.name, scope="shared")
        found.append(
            Slice(made.name, step[0], place[0], x.indices[place[0]] is roles.row, as_int(source.shape[-1]) or 1)
        )
    sums = find_block(s.func, main).body.buffer
    for b in blocks(s.func.body):
        if b.name not in before and b.body.buffer not in s.func.output_buffers and block_loads(b)[0].buffer is sums:
            s.compute_inline(b.name)  # the elements taken from whole tiles, where an epilogue reads them
    if len(found) < 2:
        raise ScheduleError(f"{s.func.name}: wanted two operands with steps, found {len(found)}")
    return found


def _is_step(e: Expr, roles: Contraction) -> bool:
    """The steps of the reduction, from where they begin, or pairs of them."""
    (step,) = roles.reduce
    if isinstance(e, Op) and e.op == "floordiv":
        return e.args[0] is step and as_int(e.args[1]) == 2
    parts = linear(e, (step,))
    return parts is not None and parts[0].get(step) is const(1)


def stages_ahead(s: Schedule, roles: Contraction, k_0: str, least: int) -> Tunable:
    """How many slices are in shared memory at once: no more than there are."""
    known = next(as_int(i.extent) for i in roles.block.iters if i.var in roles.reduce)
    if known is not None and known <= least:
        raise ScheduleError(f"{s.func.name}: one slice has all steps, which none can be ahead of")
    stages, slices = s.tunable("STAGES", STAGES_AHEAD), s.extent(k_0)
    if all(isinstance(v, Tunable) for v in free_vars(slices)):
        s.require(le(stages, slices))
    return stages


def _fetch(s: Schedule, x: Slice, k_0: str, tile: Tile, steps: Expr, ahead: Tunable | None) -> bool:
    """All items fetch a slice together: neighbours take neighbouring vectors of the operand's rows. ahead: while they multiply one slice
    as many less one are on their way, where copies are asynchronous: whether these are."""
    if k_0 not in s.loops_of(x.block):
        s.compute_at(x.block, k_0)
    buffer = find_block(s.func, x.block).body.buffer
    turned, last = x.step > x.place, len(buffer.shape) - 1
    size = buffer.dtype.bytes
    numbers = ahead is not None and turned and size in ACCESS_BYTES
    width = 4 if x.width(4) == 4 and not numbers else 1
    copies = [x.block]
    if ahead is not None:
        copies += s.apply("software_pipeline", block=x.block, loop=k_0, stages=ahead)
        order = [x.step, *(d for d in range(last + 2) if d != x.step)]
        s.apply("tile_layout", buffer=buffer.name, dim=x.step, factor=steps, order=order)
    depth = s.loops_of(x.block).index(k_0) + 1
    late = False
    for name in copies:
        own = s.loops_of(name)[depth:]
        along = [n for n in own if n in {v.name for v in free_vars(find_block(s.func, name).bindings[last])}]
        if len(along) != 1:
            raise ScheduleError(f"{s.func.name}: {name!r} is fetched in no rows")
        others = [n for n in own if n not in along]
        s.reorder([*others, *along])
        more: list[str] = []
        if numbers:  # a warp copies eight steps of four rows
            *more, vectors, lanes = s.split(along[0], [None, min(STEPS), width], divides=True)
            s.reorder([*more, *others, vectors, lanes])
        else:
            vectors, lanes = s.split(along[0], [None, width], divides=True)
        whole = s.fuse([*others, vectors])
        if ahead is not None:  # the condition that this makes true is what shows that items fill different slots
            s.require(eq(floormod(s.extent(whole), mul(tile.ty, tile.tx)), 0))
        rounds, ty, tx = s.split(whole, [None, tile.ty, tile.tx], divides=ahead is None)
        s.reorder([ty, tx, *more, rounds, lanes])
        s.vectorize(lanes)
        if ahead is not None and width * size in ACCESS_BYTES and numbers == turned:
            with suppress(ScheduleError):  # what is computed goes through registers
                s.apply("copy_async", loop=lanes)
                late = True
        s.bind(ty, "item", 1)
        s.bind(tx, "item", 0)
    order = [*(d for d in range(last + 1) if d not in (x.step, x.place)), x.step, x.place]
    s.apply("permute_layout", buffer=buffer.name, order=order if ahead is None else [0, *(d + 1 for d in order)])
    if turned:
        s.apply("storage_align", buffer=buffer.name, factor=4, offset=4)
    return late


def _by_squares(s: Schedule, block: str, own: Sequence[str], tile: Tile, whole: bool) -> None:
    """The epilogue on the square of each item. whole: no vector of it is cut off."""
    rows: Parts = ((None, "item"), (tile.height, "each"))
    columns: Parts = ((None, "each"), (tile.tx, "item"), (tile.width, "lane"))
    own_parts(s, block, own, rows, columns, whole)
