"""Matmuls with whatever is fused around them: packed panels and a register-tile micro-kernel (Goto and van de Geijn 2008).

Register tiles of MR rows by NR vectorised columns accumulate over the whole reduction. The operand indexed by columns
is packed into panels of NR columns, padded with zeros. A constant operand is packed once; any other in the call, panel
by panel or all of it first. The epilogue is computed on the tile while it is in registers. Leftover rows are computed
in powers of two, leftover columns in whole vectors. Of few rows, panels that instructions multiply may be prefetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType, bf16, f32, i8, i16, i32, u8
from relax_tune.ir.core.expr import Expr, Var, add, as_int, ceildiv, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block
from relax_tune.schedules.rules.shared.contraction import (
    FEW_ROWS,
    Contraction,
    find_contraction,
    inline_around,
    is_product,
    output_column,
    register_tiles,
)
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# panels: workers take panels of columns (and groups of rows); blocks: the same after all of the operand is packed; serial: one thread.
Order = Literal["panels", "blocks", "serial"]
ORDERS: tuple[Order, ...] = ("panels", "blocks", "serial")
HEIGHTS = range(1, 15)
VECTORS = (1, 2, 3, 4)
GROUPS = (1, 2, 4, 8, 16, 32, 64)
PREFETCH_BYTES = 4096
"""The distance of a prefetch from its use, in a panel of one vector; wider ones are read further ahead."""
STACK_BYTES = 128 << 10
"""Bytes of widened rows, which lie on the stack of a thread."""


@dataclass(frozen=True, slots=True)
class Dots:
    """Sums of some products at once, by one instruction.

    name: of the form.
    intrinsic: its name, without the number of lanes.
    steps: products in a sum.
    rows, right: types of rows and columns as they are stored.
    left, total: types of rows as the instruction reads them, and of the sums.
    tiled: whether the intrinsic takes a tile of rows and vectors.
    """

    name: str
    intrinsic: str
    steps: int
    rows: tuple[DType, ...]
    left: DType
    right: DType
    total: DType
    tiled: bool = False

    @property
    def widened(self) -> bool:
        """Rows are copied with more bits."""
        return self.left not in self.rows


PAIRS = Dots("dots", "dot2_i16i8", 2, (i8, u8), i16, i8, i32)
QUADS = Dots("quads", "dot4_u8i8", 4, (u8,), u8, i8, i32)
BF16_PAIRS = Dots("bf16_dots", "dot2_bf16", 2, (bf16,), bf16, bf16, f32)
WIDE_BF16_PAIRS = Dots("bf16_pairs", "dot2_f32bf16", 2, (bf16,), f32, bf16, f32, tiled=True)
BF16_COLUMNS = Dots("bf16_columns", "dot2_f32bf16", 2, (f32,), f32, bf16, f32, tiled=True)
TILES = (Dots("tiles", "amx_bf16", 2, (bf16,), bf16, bf16, f32), Dots("tiles", "amx_u8i8", 4, (u8,), u8, i8, i32))
TILE = 16
"""Rows and columns of a tile of AMX, and steps of 4 bytes in a row of it."""


@dataclass(frozen=True, slots=True)
class MatmulChoice:
    """The structural decisions of one sketch.

    order: how tiles are spread over workers (see `Order`).
    packed: whether the operand with columns is packed.
    dots: how an instruction multiplies several steps at a time; None if none does.
    prefetch: whether panels are prefetched.
    """

    order: Order
    packed: bool
    dots: Dots | None = None
    prefetch: bool = False

    @property
    def name(self) -> str:
        form = self.dots.name if self.dots else "packed" if self.packed else "direct"
        return f"matmul.{self.order}.{form}{'.prefetch' if self.prefetch else ''}"


@dataclass(frozen=True, slots=True)
class PaddedOperand:
    """A padded copy of an operand.

    buffer: the copy's buffer.
    block: the block that fills it.
    dim: its dimension of columns.
    batch: the number of leading batch dimensions.
    constant: whether the operand is a constant.
    contiguous: whether columns are the last dimension of the operand.
    """

    buffer: str
    block: str
    dim: int
    batch: int
    constant: bool
    contiguous: bool


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield every sketch of a matmul; none for other functions."""
    if not is_product(func) or searches(func):
        return
    dots = [
        MatmulChoice(order, True, form, prefetch)
        for form in _dots_of(machine)
        for order in ORDERS
        for prefetch in (False, True)
    ]
    choices = (*dots, *(MatmulChoice(order, packed) for order in ORDERS for packed in (True, False)))
    tiles = [MatmulChoice("panels", True, form) for form in TILES] if machine.has_tile_products else []
    yield from try_forms((choice.name, partial(build_tiles, func, machine, choice)) for choice in tiles)
    yield from try_forms((choice.name, partial(build, func, machine, choice)) for choice in choices)


def _dots_of(machine: HardwareInfo) -> Iterator[Dots]:
    """Yield the dot products that are worth a sketch on a machine, the likeliest first."""
    if machine.has_byte_dots:
        yield QUADS
    yield PAIRS
    if machine.language == "c":
        yield BF16_PAIRS if machine.has_bf16_dots else WIDE_BF16_PAIRS
        yield BF16_COLUMNS


def build(func: PrimFunc, machine: HardwareInfo, choice: MatmulChoice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError where it does not fit the function."""
    if choice.order == "serial" and "serial" not in machine.orders:
        raise ScheduleError("the device has no serial form")
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    roles = find_contraction(find_block(s.func, main), output_column(s, main, final_block(s.func)))
    widths = _panel_widths(roles, machine, choice)
    width: Expr = s.tunable("NR", widths) if not choice.dots else _vectors(s, widths, machine)
    copies = _pad_operands(s, roles, width) if choice.packed else ()
    in_call = any(not c.constant for c in copies)
    if choice.order == "blocks" and not in_call:
        raise ScheduleError(f"{func.name}: nothing is packed in the call")
    widened = _prepare_rows(s, roles, choice.dots) if choice.dots else None
    if not choice.packed:
        _require_contiguous(s, roles)
    if not choice.packed and find_block(s.func, main).body.buffer in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="local")
    else:
        s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    epilogue = final_block(s.func)

    nest = dict(zip((i.var for i in find_block(s.func, main).iters), s.loops_of(main), strict=True))
    divides = not choice.packed and _always_divides(roles, widths)
    wide = [s.tunables["V"], machine.lanes] if choice.dots else [width]
    j_0, *columns = s.split(nest[roles.column], [None, *wide], divides=divides)
    batch = [nest[v] for v in roles.batch]
    reduce, pair = [nest[v] for v in roles.reduce], list[str]()
    if choice.dots:
        outer, inner = s.split(reduce[0], [None, choice.dots.steps], divides=True)
        reduce, pair = [outer], [inner]
    group, rows = _split_rows(s, roles, nest, choice, in_call)
    if rows:
        _require_registers(s, machine, choice, width)
    s.reorder([*batch, j_0, *group, *rows[:1], *reduce, *rows[1:], *columns, *pair])
    for copy in copies:
        _place_copy(s, copy, choice, machine, width, j_0)
    tile = rows[0] if rows else [*group, j_0][0]
    if widened is not None:
        s.compute_at(widened, tile)
    e_loops = s.reverse_compute_at(epilogue.name, tile)
    s.set_kind(e_loops[-1], "vectorized")
    tiled = choice.dots is not None and choice.dots.tiled
    for name in [*e_loops[:-1], *([] if tiled else rows[1:])]:
        s.set_kind(name, "unrolled")
    if not choice.dots:
        s.set_kind(columns[0], "vectorized")
    s.apply("decompose_reduction", block=main, loop=reduce[0])
    for copy in copies:
        _store_in_panels(s, copy, width)
    if choice.dots:
        _multiply_at_once(s, main, choice.dots, copies[0], [*rows[1:], *columns], machine)
    if choice.prefetch:
        _prefetch(s, roles, machine, choice, reduce[0])
    panel = _bind_tiles(s, machine, choice.order, batch, j_0, group)
    if not divides:
        s.set_tail(panel, "narrow")
    s.guess(*_guesses(s, roles, machine, choice.dots))
    return s


def build_tiles(func: PrimFunc, machine: HardwareInfo, choice: MatmulChoice) -> Schedule:
    """Apply the form whose tiles AMX computes over all steps at once. Raises ScheduleError where it does not fit the function."""
    dots = choice.dots
    assert dots is not None
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    roles = find_contraction(find_block(s.func, main), output_column(s, main, final_block(s.func)))
    if roles.row is None:
        raise ScheduleError(f"{func.name}: tiles want rows")
    width = mul(s.tunable("V", VECTORS), TILE)
    copies = _pad_operands(s, roles, width)
    if [c.constant for c in copies] != [True]:
        raise ScheduleError(f"{func.name}: tiles want one constant operand with columns")
    _prepare_rows(s, roles, replace(dots, steps=TILE * dots.steps))
    s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    epilogue = final_block(s.func)
    nest = dict(zip((i.var for i in find_block(s.func, main).iters), s.loops_of(main), strict=True))
    j_0, *columns = s.split(nest[roles.column], [None, s.tunables["V"], TILE])
    batch = [nest[v] for v in roles.batch]
    reduce = s.split(nest[roles.reduce[0]], [None, TILE, dots.steps], divides=True)
    group, rows = _split_rows(s, roles, nest, replace(choice, dots=None), False, (TILE,))
    s.reorder([*batch, j_0, *group, rows[0], columns[0], rows[1], columns[1], *reduce])
    _place_copy(s, copies[0], choice, machine, width, j_0)
    e_loops = s.reverse_compute_at(epilogue.name, rows[0])
    s.set_kind(e_loops[-1], "vectorized")
    s.apply("decompose_reduction", block=main, loop=rows[1])
    s.set_kind(s.loops_of(f"{main}_init")[-1], "vectorized")
    _store_in_panels(s, copies[0], width)
    _store_steps_together(s, dots, copies[0])
    s.apply("tensorize", loop=rows[1], intrinsic=f"{dots.intrinsic}_16x16")
    _bind_tiles(s, machine, choice.order, batch, j_0, group)
    return s


def _split_rows(
    s: Schedule,
    roles: Contraction,
    nest: Mapping[Var, str],
    choice: MatmulChoice,
    in_call: bool,
    heights: Sequence[int] = HEIGHTS,
) -> tuple[list[str], list[str]]:
    """Return the loop over groups of rows, if workers share them, and the loops over tiles and their rows; no loops without rows.

    in_call: whether something is packed in the call, and so once for all rows of a panel; heights: of tiles
    """
    if roles.row is None:
        if choice.order == "blocks":
            raise ScheduleError(f"{s.func.name}: without rows there is nothing to pack for")
        return [], []
    most = _extent(roles, roles.row) or GROUPS[-1]
    # the loops of a tile must move its operands, unless they have one iteration, which a tunable does not say
    single = most == 1 and choice.dots is not None and choice.dots.tiled
    height = const(1) if single else s.tunable("MR", [h for h in heights if h <= most])
    if choice.dots and choice.dots.widened:
        if choice.order == "serial" and _extent(roles, roles.row) is None:  # the copy would outlive its panel
            raise ScheduleError(f"{s.func.name}: copied rows of an unknown number want workers")
        depth = _extent(roles, roles.reduce[0]) or 0
        s.require(le(mul(height, choice.dots.left.bytes * depth), STACK_BYTES))
    group: list[str] = []
    if choice.order == "blocks" or (choice.order == "panels" and not in_call):
        groups = s.tunable("RG", [g for g in GROUPS if g <= most])
        i_g, *rows = s.split(nest[roles.row], [groups, None, height])
        group = [i_g]
    else:
        rows = list(s.split(nest[roles.row], [None, height]))
    s.set_tail(rows[0], "pow2")
    return group, rows


def _vectors(s: Schedule, widths: Sequence[int], machine: HardwareInfo) -> Expr:
    """Return panel widths as a tunable number of vectors."""
    return mul(s.tunable("V", [w // machine.lanes for w in widths]), machine.lanes)


def _prepare_rows(s: Schedule, roles: Contraction, dots: Dots) -> str | None:
    """Let the contraction read rows as an instruction wants them. Returns the block of the widened copy, if there is one.

    Raises ScheduleError for other operands, several reduced dims, or one whose extent is not a constant multiple of the steps.
    """
    name, main = s.func.name, roles.block
    depth = [as_int(i.extent) for i in main.iters if i.var in roles.reduce]
    if len(depth) != 1 or depth[0] is None or depth[0] % dots.steps:
        raise ScheduleError(f"{name}: wanted one constant number of steps, a multiple of {dots.steps}, found {depth}")
    found = [x for x in block_loads(main) if x.buffer is not main.body.buffer]
    left = [x for x in found if roles.column not in free_vars(*x.indices)]
    right = [x for x in found if roles.column in free_vars(*x.indices)]
    fits = len(left) == len(right) == 1 and left[0].buffer.dtype in dots.rows and right[0].buffer.dtype is dots.right
    if main.body.buffer.dtype is not dots.total or not fits:
        raise ScheduleError(f"{name}: wanted one product for {dots.intrinsic}, found other operands")
    if not dots.widened:
        return None
    (copy,) = s.apply("cache_read", block=main.name, buffer=left[0].buffer.name, scope="local")
    s.apply("store_as", buffer=f"{left[0].buffer.name}_cache", dtype=dots.left.short)
    return copy


def _multiply_at_once(
    s: Schedule, main: str, dots: Dots, copy: PaddedOperand, tile: Sequence[str], machine: HardwareInfo
) -> None:
    """Let an instruction multiply its steps for a vector of columns, or a tile of rows and vectors."""
    _store_steps_together(s, dots, copy)
    if dots.tiled:
        *outer, vector = s.loops_of(f"{main}_init")[-len(tile) :]
        s.set_kind(vector, "vectorized")
        for name in outer:
            s.set_kind(name, "unrolled")
    else:
        s.set_kind(tile[-2], "unrolled")
    s.apply("tensorize", loop=tile[0 if dots.tiled else -1], intrinsic=f"{dots.intrinsic}_x{machine.lanes}")


def _store_steps_together(s: Schedule, dots: Dots, copy: PaddedOperand) -> None:
    """Store the steps that an instruction multiplies at once next to each other in the panels."""
    rank, steps = len(find_alloc(s.func, copy.buffer).shape), copy.batch + 1
    order = [*range(steps + 1), *range(steps + 2, rank + 1), steps + 1]
    s.apply("tile_layout", buffer=copy.buffer, dim=steps, factor=dots.steps, order=order)


def _require_reading(s: Schedule, roles: Contraction, machine: HardwareInfo, choice: MatmulChoice) -> None:
    """Raise ScheduleError unless a product may take the time of reading its panels from memory, or from the last cache."""
    rows = 1 if roles.row is None else _extent(roles, roles.row)
    held = roles.operand.buffer
    sizes = [as_int(d) for d in held.shape]
    few = None not in sizes and prod(n or 0 for n in sizes) * held.dtype.bytes <= machine.l2_bytes // 4
    if machine.language != "c" or choice.order != "panels" or few:
        raise ScheduleError(f"{s.func.name}: only C prefetches, and only panels too large for its workers' caches")
    if rows is not None and rows > FEW_ROWS:
        raise ScheduleError(f"{s.func.name}: {rows} rows are many")


def _require_registers(s: Schedule, machine: HardwareInfo, choice: MatmulChoice, width: Expr) -> None:
    """Allow tiles whose sums and operands the processor's vector registers hold."""
    vectors = ceildiv(width, machine.lanes)
    sums = mul(s.tunables.get("MR", const(1)), vectors)
    s.require(le(add(add(sums, vectors), 2 if choice.dots else 1), machine.registers))


def _prefetch(s: Schedule, roles: Contraction, machine: HardwareInfo, choice: MatmulChoice, steps: str) -> None:
    """Prefetch what an instruction multiplies some iterations of the loop over steps later.

    Raises ScheduleError unless a product may take the time of reading its panels from memory, or from the last cache.
    """
    _require_reading(s, roles, machine, choice)
    assert choice.dots is not None
    each = choice.dots.steps * choice.dots.right.bytes * machine.lanes
    s.apply("prefetch", loop=steps, iterations=PREFETCH_BYTES // each)


def _require_contiguous(s: Schedule, roles: Contraction) -> None:
    operand = roles.operand
    if [d for d, e in enumerate(operand.indices) if e is roles.column] != [len(operand.indices) - 1]:
        raise ScheduleError(f"{s.func.name}: {operand.buffer.name!r} is used as it is only when columns are contiguous")


def _pad_operands(s: Schedule, roles: Contraction, width: Expr) -> tuple[PaddedOperand, ...]:
    """Let the contraction read padded copies of the operands with columns, and compute whole panels."""
    main = roles.block.name
    names = s.apply("pad", block=main, factors=[width if i.var is roles.column else None for i in roles.block.iters])
    made = [find_block(s.func, n) for n in names]
    accesses = {x.buffer: x.indices for x in block_loads(find_block(s.func, main))}
    copies: list[PaddedOperand] = []
    for b in made:
        if b.body.buffer not in accesses:
            if b.body.buffer not in s.func.output_buffers:
                s.compute_inline(b.name)  # the copy of the unpadded elements, into the epilogue
            continue
        indices = accesses[b.body.buffer]
        dims = [d for d, e in enumerate(indices) if e is roles.column]
        lead = next(d for d, e in enumerate(indices) if e not in roles.batch)
        if len(dims) != 1:
            raise ScheduleError(f"{s.func.name}: {b.body.buffer.name!r} has no one dimension of columns")
        constant = block_loads(b)[0].buffer in s.func.consts
        copies.append(PaddedOperand(b.body.buffer.name, b.name, dims[0], lead, constant, dims[0] == len(indices) - 1))
    return tuple(copies)


def _place_copy(
    s: Schedule, copy: PaddedOperand, choice: MatmulChoice, machine: HardwareInfo, width: Expr, j_0: str
) -> None:
    """Choose the place and loops of an operand's copy.

    A constant is copied before any call. Otherwise each panel is copied where it is used, or, for `blocks`, all panels
    first.
    """
    if copy.constant:
        s.apply("mark_prepack", block=copy.block)
        return
    spread: list[str] = []
    if choice.order == "blocks":
        own = s.loops_of(copy.block)
        c_0, c_1 = s.split(own[copy.dim], [None, width])
        spread = [*own[: copy.batch], c_0]
        depth = [n for n in own[copy.batch :] if n != own[copy.dim]]
    else:
        depth = s.compute_at(copy.block, j_0)
        where = find_block(s.func, copy.block).bindings[copy.dim]
        c_1 = next(n for n in depth if n in {v.name for v in free_vars(where)})
        depth.remove(c_1)
    if copy.contiguous or not depth:
        s.reorder([*spread, *depth, c_1])
    else:  # square tiles, transposed in registers
        d_0, d_1 = s.split(depth[-1], [None, machine.lanes])
        s.reorder([*spread, *depth[:-1], d_0, d_1, c_1])
        s.set_kind(d_1, "vectorized")
    s.set_kind(c_1, "vectorized")
    if spread:
        s.set_kind(s.fuse(spread), "group" if machine.has_grid else "parallel")


def _store_in_panels(s: Schedule, copy: PaddedOperand, width: Expr) -> None:
    """Store the columns of a panel next to each other, and one panel after the other."""
    rank, dim = len(find_alloc(s.func, copy.buffer).shape), copy.dim
    rest = [d for d in range(copy.batch, rank + 1) if d not in (dim, dim + 1)]
    order = [*range(copy.batch), dim, *rest, dim + 1]
    s.apply("tile_layout", buffer=copy.buffer, dim=dim, factor=width, order=order)


def _bind_tiles(s: Schedule, machine: HardwareInfo, order: Order, batch: list[str], j_0: str, group: list[str]) -> str:
    """Spread tiles over threads (C) or work-groups (OpenCL). Returns the loop over panels."""
    if order == "serial":
        return j_0
    if machine.has_grid:
        axes = [j_0, *group, *([s.fuse(batch)] if batch else [])]
        for axis, name in enumerate(axes):
            s.set_kind(name, "group", axis=axis)
        return j_0
    fused = s.fuse([*batch, j_0, *group])
    s.set_kind(fused, "parallel")
    return fused


def _extent(roles: Contraction, var: Var | None) -> int | None:
    return next((as_int(i.extent) for i in roles.block.iters if i.var is var), None)


def _panel_widths(roles: Contraction, machine: HardwareInfo, choice: MatmulChoice) -> Sequence[int]:
    """Return panel widths of one to four vectors. Without packing, prefer the widths that divide a constant number of
    columns.
    """
    extent = _extent(roles, roles.column)
    options = [machine.lanes * v for v in VECTORS]
    if extent is None:
        return options
    fitting = [w for w in options if w < extent + machine.lanes]
    if choice.packed:
        return fitting
    exact = [w for w in options if extent % w == 0]
    narrow = [w for w in (2, 4, 8, machine.lanes) if w <= machine.lanes and extent % w == 0]
    return exact or narrow or fitting


def _always_divides(roles: Contraction, widths: Sequence[int]) -> bool:
    extent = _extent(roles, roles.column)
    return extent is not None and all(extent % w == 0 for w in widths)


def _guesses(s: Schedule, roles: Contraction, machine: HardwareInfo, dots: Dots | None) -> list[Mapping[str, int]]:
    """Return the two tiles with the fewest loads per product, counting the waste at constant extents.

    The number of row groups is the first that gives every worker the same number of tiles. Where operands are widened beside the
    sums, fewer registers are left for these; with both halves of each vector at once, none where there are more than two vectors.
    """
    found: list[Mapping[str, int]] = []
    columns, rows = _extent(roles, roles.column), _extent(roles, roles.row)
    heights = s.tunables["MR"].domain if "MR" in s.tunables else (1,)
    by_vectors = "V" in s.tunables
    widths = [v * machine.lanes for v in s.tunables["V"].domain] if by_vectors else s.tunables["NR"].domain
    if dots is not None and (dots.widened or dots.tiled):
        widths = [w for w in widths if dots.tiled or w <= 2 * machine.lanes]
        machine = replace(machine, registers=machine.registers - 3)
    for _, height, width in register_tiles(heights, widths, machine, rows, columns)[:2]:
        values = {"NR": width, "V": width // machine.lanes, "MR": height}
        panels = 1 if columns is None else -(-columns // width)
        if "RG" in s.tunables:
            groups = s.tunables["RG"].domain
            shared = (g for g in groups if panels * g % machine.workers == 0 or panels * g >= 8 * machine.workers)
            values["RG"] = next(shared, groups[-1])
        found.append({n: v for n, v in values.items() if n in s.tunables})
    return found
