"""Matmuls with fused producers and epilogues: packed panels and a register-tile micro-kernel (Goto and van de Geijn 2008).

Register tiles of MR rows by NR vectorised columns accumulate over the whole reduction. The operand indexed by columns
is packed into panels of NR columns, padded with zeros. A constant operand is packed once; any other in the call, panel
by panel or all of it first. The epilogue is computed on the tile while it is in registers. Leftover rows are computed
in powers of two, leftover columns in whole vectors. Of few rows, panels that instructions multiply may be prefetched.

Tests: `tests/schedules/rules/test_processors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType, bf16, f32, i8, i16, i32, u8
from relax_tune.ir.core.expr import Expr, Var, add, as_int, ceildiv, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block
from relax_tune.schedules.rules.shared.contraction import (
    FEW_ROWS,
    Contraction,
    contraction_roles,
    fits_worker_cache,
    inline_around,
    is_product,
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

    Attributes:
        name: Name of the form.
        intrinsic: Name of the instruction, without the number of lanes.
        steps: Products in a sum.
        rows, right: Types of rows and columns as they are stored.
        left, total: Types of rows as the instruction reads them, and of the sums.
        tiled: Whether the intrinsic takes a tile of rows and vectors.
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

    Attributes:
        order: How tiles are spread over workers (see `Order`).
        packed: Whether the operand with columns is packed.
        dots: How an instruction multiplies several steps at a time; None if none does.
        prefetch: Whether panels are prefetched.
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

    Attributes:
        buffer: The copy's buffer.
        block: The block that fills it.
        dim: Its dimension of columns.
        batch: The number of leading batch dimensions.
        constant: Whether the operand is a constant.
        contiguous: Whether columns are the last dimension of the operand.
    """

    buffer: str
    block: str
    dim: int
    batch: int
    constant: bool
    contiguous: bool


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield every sketch of a matmul; none for other functions."""
    if not is_product(func) or searches(func):
        return
    dots = [
        MatmulChoice(order, True, form, prefetch)
        for form in _dots_of(hardware)
        for order in ORDERS
        for prefetch in (False, True)
    ]
    choices = (*dots, *(MatmulChoice(order, packed) for order in ORDERS for packed in (True, False)))
    tiles = [MatmulChoice("panels", True, form) for form in TILES] if hardware.has_tile_products else []
    yield from try_forms(func, ((choice.name, partial(build_tiles, func, hardware, choice)) for choice in tiles))
    yield from try_forms(func, ((choice.name, partial(build, func, hardware, choice)) for choice in choices))


def _dots_of(hardware: HardwareInfo) -> Iterator[Dots]:
    """Yield the dot products that are worth a sketch on the hardware, the likeliest first."""
    # Four products of bytes in one instruction before two of 16-bit integers: half as many instructions, and rows
    # need no widened copy.
    if hardware.has_byte_dots:
        yield QUADS
    yield PAIRS
    if hardware.language == "c":
        yield BF16_PAIRS if hardware.has_bf16_dots else WIDE_BF16_PAIRS
        yield BF16_COLUMNS


def build(func: PrimFunc, hardware: HardwareInfo, choice: MatmulChoice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError if it does not fit the function."""
    if choice.order == "serial" and "serial" not in hardware.orders:
        raise ScheduleError("the device has no serial launches")
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    roles = contraction_roles(s, main)
    widths = _panel_widths(roles, hardware, choice)
    width: Expr = s.tunable("NR", widths) if not choice.dots else _vectors(s, widths, hardware)
    copies = _pad_operands(s, roles, width) if choice.packed else ()
    in_call = any(not c.constant for c in copies)
    # A constant operand is packed before any call, so that packing everything first is the same as `panels`.
    if choice.order == "blocks" and not in_call:
        raise ScheduleError(f"{func.name}: no operand is packed in the call")
    widened = _prepare_rows(s, roles, choice.dots) if choice.dots else None
    if not choice.packed:
        _require_contiguous(s, roles)
    epilogue = _keep_sums(s, main, choice)

    nest = s.iter_loops(main)
    # Packed panels are padded to whole widths in any case. Unpacked columns need a tail unless each width divides them.
    divides = not choice.packed and _always_divides(roles, widths)
    wide = [s.tunables["V"], hardware.lanes] if choice.dots else [width]
    j_0, *columns = s.split(nest[roles.column], [None, *wide], divides=divides)
    batch = [nest[v] for v in roles.batch]
    reduce, pair = [nest[v] for v in roles.reduce], list[str]()
    if choice.dots:
        outer, inner = s.split(reduce[0], [None, choice.dots.steps], divides=True)
        reduce, pair = [outer], [inner]
    group, rows = _split_rows(s, roles, nest, choice, in_call)
    if rows:
        _require_registers(s, hardware, choice, width)
    # a panel stays in cache while the tiles of rows pass over it; the reduction is outside of a tile, whose sums stay in registers
    s.reorder([*batch, j_0, *group, *rows[:1], *reduce, *rows[1:], *columns, *pair])
    for copy in copies:
        _place_copy(s, copy, choice, hardware, width, j_0)
    tile = rows[0] if rows else [*group, j_0][0]
    if widened is not None:
        s.compute_at(widened, tile)
    # The epilogue reads the sums while they are in registers.
    e_loops = s.reverse_compute_at(epilogue.name, tile)
    s.vectorize(e_loops[-1])
    # An instruction that takes a tile contains the loop over its rows.
    s.unroll(*e_loops[:-1], *([] if choice.dots and choice.dots.tiled else rows[1:]))
    s.vectorize(*([] if choice.dots else columns))
    s.decompose_reduction(block=main, loop=reduce[0])
    # Only now: the layout changes the indices of the copy, where the steps above look for the dimension of columns.
    for copy in copies:
        _store_in_panels(s, copy, width)
    if choice.dots:
        _multiply_at_once(s, main, choice.dots, copies[0], [*rows[1:], *columns], hardware)
    if choice.prefetch:
        _prefetch(s, roles, hardware, choice, reduce[0])
    panel = _bind_tiles(s, hardware, choice.order, batch, j_0, group)
    if not divides:
        # The last panel is computed in as many whole vectors as its columns need; its padding holds zeros.
        s.set_tail(panel, "narrow")
    s.guess(*_guesses(s, roles, hardware, choice.dots))
    return s


def _keep_sums(s: Schedule, main: str, choice: MatmulChoice) -> Block:
    """Put the sums of the product in registers. Returns the block that writes the output."""
    if not choice.packed and s.buffer_of(main) in s.func.output_buffers:
        s.cache_write(block=main, scope="local")
    else:
        s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    return final_block(s.func)


def build_tiles(func: PrimFunc, hardware: HardwareInfo, choice: MatmulChoice) -> Schedule:
    """Apply the form whose tiles AMX computes over all steps at once. Raises ScheduleError if it does not fit the function."""
    dots = choice.dots
    assert dots is not None
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    roles = contraction_roles(s, main)
    if roles.row is None:
        raise ScheduleError(f"{func.name}: tiles need rows")
    width = mul(s.tunable("V", VECTORS), TILE)
    copies = _pad_operands(s, roles, width)
    if [c.constant for c in copies] != [True]:
        raise ScheduleError(f"{func.name}: tiles need one constant operand with columns")
    # AMX reads rows of 64 bytes, so the number of steps must be a multiple of what such a row holds.
    _prepare_rows(s, roles, replace(dots, steps=TILE * dots.steps))
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    epilogue = final_block(s.func)
    nest = s.iter_loops(main)
    j_0, *columns = s.split(nest[roles.column], [None, s.tunables["V"], TILE])
    batch = [nest[v] for v in roles.batch]
    reduce = s.split(nest[roles.reduce[0]], [None, TILE, dots.steps], divides=True)
    group, rows = _split_rows(s, roles, nest, replace(choice, dots=None), False, (TILE,))
    s.reorder([*batch, j_0, *group, rows[0], columns[0], rows[1], columns[1], *reduce])
    _place_copy(s, copies[0], choice, hardware, width, j_0)
    e_loops = s.reverse_compute_at(epilogue.name, rows[0])
    s.vectorize(e_loops[-1])
    # The initial values are stored for the whole tile before its instruction, which runs over all steps.
    s.decompose_reduction(block=main, loop=rows[1])
    s.vectorize(s.loops_of(f"{main}_init")[-1])
    _store_in_panels(s, copies[0], width)
    _store_steps_together(s, dots, copies[0])
    s.tensorize(loop=rows[1], intrinsic=f"{dots.intrinsic}_16x16")
    _bind_tiles(s, hardware, choice.order, batch, j_0, group)
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

    Args:
        in_call: Whether something is packed in the call, and so once for all rows of a panel.
        heights: Options for the height of a tile.
    """
    if roles.row is None:
        if choice.order == "blocks":
            raise ScheduleError(f"{s.func.name}: packing everything first needs rows")
        return [], []
    most = roles.known_extent(roles.row) or GROUPS[-1]
    # an instruction needs loops of a tile that move its operands, or have one iteration; that is unknown for a tunable
    single = most == 1 and choice.dots is not None and choice.dots.tiled
    height = const(1) if single else s.tunable("MR", [h for h in heights if h <= most])
    if choice.dots and choice.dots.widened:
        if choice.order == "serial" and roles.known_extent(roles.row) is None:  # the copy would outlive its panel
            raise ScheduleError(f"{s.func.name}: an unknown number of widened rows needs workers")
        depth = roles.known_extent(roles.reduce[0]) or 0
        s.require(le(mul(height, choice.dots.left.bytes * depth), STACK_BYTES))
    group: list[str] = []
    # Groups of rows share the work of one panel. With panels that are packed in the call, each group would pack its
    # panel again.
    if choice.order == "blocks" or (choice.order == "panels" and not in_call):
        groups = s.tunable("RG", [g for g in GROUPS if g <= most])
        i_g, *rows = s.split(nest[roles.row], [groups, None, height])
        group = [i_g]
    else:
        rows = list(s.split(nest[roles.row], [None, height]))
    s.set_tail(rows[0], "pow2")  # each size of tile is code without conditions on rows
    return group, rows


def _vectors(s: Schedule, widths: Sequence[int], hardware: HardwareInfo) -> Expr:
    """Return panel widths as a tunable number of vectors."""
    return mul(s.tunable("V", [w // hardware.lanes for w in widths]), hardware.lanes)


def _prepare_rows(s: Schedule, roles: Contraction, dots: Dots) -> str | None:
    """Let the contraction read rows in the layout of an instruction. Returns the block of the widened copy, if there is one.

    Raises:
        ScheduleError: For other operands, several reduced dims, or one whose extent is not a constant multiple of the steps.
    """
    name, main = s.func.name, roles.block
    depth = [as_int(i.extent) for i in main.iters if i.var in roles.reduce]
    # An instruction multiplies all of its steps. Padding the depth would cost another copy of the rows.
    if len(depth) != 1 or depth[0] is None or depth[0] % dots.steps:
        raise ScheduleError(f"{name}: expected one constant number of steps, a multiple of {dots.steps}, got {depth}")
    operands = [x for x in block_loads(main) if x.buffer is not main.body.buffer]
    left = [x for x in operands if roles.column not in free_vars(*x.indices)]
    right = [x for x in operands if roles.column in free_vars(*x.indices)]
    fits = len(left) == len(right) == 1 and left[0].buffer.dtype in dots.rows and right[0].buffer.dtype is dots.right
    if main.body.buffer.dtype is not dots.total or not fits:
        raise ScheduleError(f"{name}: expected one product for {dots.intrinsic}, got other operands")
    if not dots.widened:
        return None
    (copy,) = s.cache_read(block=main.name, buffer=left[0].buffer.name, scope="local")
    s.store_as(buffer=f"{left[0].buffer.name}_cache", dtype=dots.left.short)
    return copy


def _multiply_at_once(
    s: Schedule, main: str, dots: Dots, copy: PaddedOperand, tile: Sequence[str], hardware: HardwareInfo
) -> None:
    """Let an instruction multiply its steps for a vector of columns, or a tile of rows and vectors."""
    _store_steps_together(s, dots, copy)
    if dots.tiled:
        *outer, vector = s.loops_of(f"{main}_init")[-len(tile) :]
        s.vectorize(vector)
        s.unroll(*outer)
    else:
        s.unroll(tile[-2])
    s.tensorize(loop=tile[0 if dots.tiled else -1], intrinsic=f"{dots.intrinsic}_x{hardware.lanes}")


def _store_steps_together(s: Schedule, dots: Dots, copy: PaddedOperand) -> None:
    """Store the steps that an instruction multiplies at once next to each other in the panels."""
    # The panels are (batch..., panel, depth, column); the depth is split, and its inner part becomes the last dim.
    rank, steps = len(find_alloc(s.func, copy.buffer).shape), copy.batch + 1
    order = [*range(steps + 1), *range(steps + 2, rank + 1), steps + 1]
    s.tile_layout(buffer=copy.buffer, dim=steps, factor=dots.steps, order=order)


def _require_reading(s: Schedule, roles: Contraction, hardware: HardwareInfo, choice: MatmulChoice) -> None:
    """Raise ScheduleError unless a product may take the time of reading its panels from memory, or from the last cache."""
    rows = 1 if roles.row is None else roles.known_extent(roles.row)
    if hardware.language != "c" or choice.order != "panels" or fits_worker_cache(roles.operand.buffer, hardware):
        raise ScheduleError(f"{s.func.name}: prefetches need C, and panels larger than the workers' caches")
    if rows is not None and rows > FEW_ROWS:
        raise ScheduleError(f"{s.func.name}: {rows} rows are too many")


def _require_registers(s: Schedule, hardware: HardwareInfo, choice: MatmulChoice, width: Expr) -> None:
    """Allow tiles whose sums and operands the processor's vector registers hold."""
    vectors = ceildiv(width, hardware.lanes)
    sums = mul(s.tunables.get("MR", const(1)), vectors)
    # Besides the sums: a vector of the panel for each column vector, and one broadcast element of a row (two with dot products).
    s.require(le(add(add(sums, vectors), 2 if choice.dots else 1), hardware.registers))


def _prefetch(s: Schedule, roles: Contraction, hardware: HardwareInfo, choice: MatmulChoice, steps: str) -> None:
    """Prefetch what an instruction multiplies some iterations of the loop over steps later.

    Raises:
        ScheduleError: Unless a product may take the time of reading its panels from memory, or from the last cache.
    """
    _require_reading(s, roles, hardware, choice)
    assert choice.dots is not None
    each = choice.dots.steps * choice.dots.right.bytes * hardware.lanes
    s.prefetch(loop=steps, iterations=PREFETCH_BYTES // each)


def _require_contiguous(s: Schedule, roles: Contraction) -> None:
    operand = roles.operand
    if [d for d, e in enumerate(operand.indices) if e is roles.column] != [len(operand.indices) - 1]:
        raise ScheduleError(
            f"{s.func.name}: {operand.buffer.name!r} is read without packing only if its columns are contiguous"
        )


def _pad_operands(s: Schedule, roles: Contraction, width: Expr) -> tuple[PaddedOperand, ...]:
    """Let the contraction read padded copies of the operands with columns, and compute whole panels."""
    main = roles.block.name
    names = s.pad(block=main, factors=[width if i.var is roles.column else None for i in roles.block.iters])
    padded = [find_block(s.func, n) for n in names]
    accesses = {x.buffer: x.indices for x in block_loads(find_block(s.func, main))}
    copies: list[PaddedOperand] = []
    for b in padded:
        if b.body.buffer not in accesses:
            if b.body.buffer not in s.func.output_buffers:
                s.compute_inline(b.name)  # the copy of the unpadded elements, into the epilogue
            continue
        indices = accesses[b.body.buffer]
        dims = [d for d, e in enumerate(indices) if e is roles.column]
        lead = next(d for d, e in enumerate(indices) if e not in roles.batch)
        if len(dims) != 1:
            raise ScheduleError(f"{s.func.name}: {b.body.buffer.name!r} does not have exactly one dimension of columns")
        constant = block_loads(b)[0].buffer in s.func.consts
        copies.append(PaddedOperand(b.body.buffer.name, b.name, dims[0], lead, constant, dims[0] == len(indices) - 1))
    return tuple(copies)


def _place_copy(
    s: Schedule, copy: PaddedOperand, choice: MatmulChoice, hardware: HardwareInfo, width: Expr, j_0: str
) -> None:
    """Choose the place and loops of an operand's copy.

    A constant is copied before any call. Otherwise each panel is copied where it is used, or, for `blocks`, all panels
    first.
    """
    if copy.constant:
        s.mark_prepack(block=copy.block)
        return
    spread: list[str] = []
    if choice.order == "blocks":
        copy_loops = s.loops_of(copy.block)
        c_0, c_1 = s.split(copy_loops[copy.dim], [None, width])
        spread = [*copy_loops[: copy.batch], c_0]
        depth = [n for n in copy_loops[copy.batch :] if n != copy_loops[copy.dim]]
    else:
        depth = s.compute_at(copy.block, j_0)
        where = find_block(s.func, copy.block).bindings[copy.dim]
        c_1 = next(n for n in depth if n in {v.name for v in free_vars(where)})
        depth.remove(c_1)
    if copy.contiguous or not depth:
        s.reorder([*spread, *depth, c_1])
    else:  # square tiles, transposed in registers
        d_0, d_1 = s.split(depth[-1], [None, hardware.lanes])
        s.reorder([*spread, *depth[:-1], d_0, d_1, c_1])
        s.vectorize(d_1)
    s.vectorize(c_1)
    if spread:
        s.set_kind(s.fuse(spread), "group" if hardware.has_grid else "parallel")


def _store_in_panels(s: Schedule, copy: PaddedOperand, width: Expr) -> None:
    """Store the columns of a panel next to each other, and one panel after the other."""
    rank, dim = len(find_alloc(s.func, copy.buffer).shape), copy.dim
    rest = [d for d in range(copy.batch, rank + 1) if d not in (dim, dim + 1)]
    order = [*range(copy.batch), dim, *rest, dim + 1]
    s.tile_layout(buffer=copy.buffer, dim=dim, factor=width, order=order)


def _bind_tiles(s: Schedule, hardware: HardwareInfo, order: Order, batch: list[str], j_0: str, group: list[str]) -> str:
    """Spread tiles over threads (C) or work-groups (OpenCL). Returns the loop over panels."""
    if order == "serial":
        return j_0
    if hardware.has_grid:
        axes = [j_0, *group, *([s.fuse(batch)] if batch else [])]
        for axis, name in enumerate(axes):
            s.bind(name, "group", axis)
        return j_0
    fused = s.fuse([*batch, j_0, *group])
    s.parallel(fused)
    return fused


def _panel_widths(roles: Contraction, hardware: HardwareInfo, choice: MatmulChoice) -> Sequence[int]:
    """Return panel widths of one to four vectors. Without packing, prefer the widths that divide a constant number of
    columns.
    """
    extent = roles.known_extent(roles.column)
    options = [hardware.lanes * v for v in VECTORS]
    if extent is None:
        return options
    fitting = [w for w in options if w < extent + hardware.lanes]
    if choice.packed:
        return fitting
    exact = [w for w in options if extent % w == 0]
    # A vector that is narrower than a register wastes lanes, but needs no tail for the columns.
    narrow = [w for w in (2, 4, 8, hardware.lanes) if w <= hardware.lanes and extent % w == 0]
    return exact or narrow or fitting


def _always_divides(roles: Contraction, widths: Sequence[int]) -> bool:
    extent = roles.known_extent(roles.column)
    return extent is not None and all(extent % w == 0 for w in widths)


def _guesses(s: Schedule, roles: Contraction, hardware: HardwareInfo, dots: Dots | None) -> list[Mapping[str, int]]:
    """Return the two tiles with the fewest loads per product, counting the waste at constant extents.

    The number of row groups is the first that gives every worker the same number of tiles. Where operands are widened next to the
    sums, fewer registers are left for these; with both halves of each vector at once, none where there are more than two vectors.
    """
    guesses: list[Mapping[str, int]] = []
    columns, rows = roles.known_extent(roles.column), roles.known_extent(roles.row)
    heights = s.tunables["MR"].domain if "MR" in s.tunables else (1,)
    by_vectors = "V" in s.tunables
    widths = [v * hardware.lanes for v in s.tunables["V"].domain] if by_vectors else s.tunables["NR"].domain
    if dots is not None and (dots.widened or dots.tiled):
        widths = [w for w in widths if dots.tiled or w <= 2 * hardware.lanes]
        hardware = replace(hardware, registers=hardware.registers - 3)
    for _, height, width in register_tiles(heights, widths, hardware, rows, columns)[:2]:
        values = {"NR": width, "V": width // hardware.lanes, "MR": height}
        panels = 1 if columns is None else -(-columns // width)
        if "RG" in s.tunables:
            groups = s.tunables["RG"].domain
            # With eight tiles per worker the uneven rest is at most an eighth of the time.
            shared = (g for g in groups if panels * g % hardware.workers == 0 or panels * g >= 8 * hardware.workers)
            values["RG"] = next(shared, groups[-1])
        guesses.append({n: v for n, v in values.items() if n in s.tunables})
    return guesses
