"""Parts of the rules for tensor cores: tiles of warps, fragments in registers, and the operands of `mma` and `wgmma`.

A fragment is the part of a tile that one thread holds, in the layout that the instruction fixes (PTX ISA, mma.m16n8k16): two
consecutive columns of rows `y` and `y + 8`, by thread `4 * y + x` of the warp.

Tests: `tests/schedules/rules/gpu/test_mma.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType, f32, i8, u8
from relax_tune.ir.core.expr import Expr, Load, mul
from relax_tune.ir.hardware.mma import COLUMNS, ROWS, STEPS
from relax_tune.schedules.loop_tree import find_alloc, find_block
from relax_tune.schedules.rules.shared.contraction import Contraction
from relax_tune.schedules.rules.shared.staging import StagedOperand, divides_tile
from relax_tune.schedules.rules.shared.threads import Parts, epilogue_on_fragments
from relax_tune.schedules.schedule import Schedule

MMA_CAPABILITY = 80
"""The first compute capability with `mma.m16n8k16`."""
HIGH, WIDE = 8, 4
"""Threads of a warp along the rows and columns of a fragment."""
EACH = COLUMNS // WIDE
"""Consecutive columns of a fragment that a thread holds."""
PAIR = 2 * STEPS
"""Steps of the shortest slice: two instructions, so that the threads of a warp copy four consecutive vectors."""
MOST_SUMS = 128
"""Sums that a thread may hold in registers."""
VECTOR = 8
"""Elements of 16 bits in a 16-byte access."""


@dataclass(frozen=True, slots=True)
class WarpTile:
    """The tile of a thread block, by warps and by instructions.

    Attributes:
        down, across: Warps along rows and columns.
        high, wide: Instruction tiles of a warp along rows and columns.
        warpgroup: Warps of a warpgroup, which are consecutive on axis 2 with the warpgroups on axis 3; 0 without warpgroups.
    """

    down: Expr
    across: Expr
    high: Expr
    wide: Expr
    warpgroup: int = 0

    @property
    def rows(self) -> Expr:
        return mul(mul(self.down, self.high), ROWS)

    @property
    def columns(self) -> Expr:
        return mul(mul(self.across, self.wide), COLUMNS)

    @property
    def warps(self) -> Expr:
        return mul(self.down, self.across)


def operand_dtype(s: Schedule, roles: Contraction) -> DType:
    """Return the 16-bit float that both operands have in shared memory; 8-bit integers are converted to it.

    Raises:
        ScheduleError: Unless the block sums plain products in f32 of such operands.
    """
    value = roles.block.body.value
    # The value is the sum so far plus a product of two casts.
    terms = value.args[1].args if value.op else ()
    loads = [e.args[0] for e in terms if e.op == "cast" and e.dtype is f32]
    types = {x.buffer.dtype for x in loads if isinstance(x, Load)}
    halves = [d for d in types if d.is_half]
    if len(loads) != 2 or len(halves) != 1 or not types <= {*halves, i8, u8}:
        raise ScheduleError(f"{s.func.name}: expected products of 16-bit floats, got {value!r}")
    return halves[0]


def operand_layouts(operands: Sequence[StagedOperand]) -> str:
    """Return `n` (as the product reads it) or `t` (transposed) for the operand with rows, then for the other one."""
    return "".join("nt"[(x.step < x.place) == x.has_rows] for x in sorted(operands, key=lambda x: not x.has_rows))


def divides_warp_tile(roles: Contraction, which: int) -> bool:
    """Return whether tiles divide the rows (0), columns (1) or steps (2)."""
    assert roles.row is not None
    return divides_tile(roles, (roles.row, roles.column, roles.reduce[0])[which], PAIR)


def convert_to(s: Schedule, operands: Sequence[StagedOperand], dtype: DType) -> None:
    """Convert staged operands of another type to `dtype` while they are staged."""
    for x in operands:
        staged = s.buffer_of(x.block)
        if staged.dtype is not dtype:
            s.store_as(buffer=staged.name, dtype=dtype.short)


def bind_warps(s: Schedule, warps: Sequence[str], high: str, wide: str, warpgroup: int = 0) -> None:
    """Bind the threads of a warp to axes 0 and 1, and warps to axis 2.

    Args:
        warpgroup: The warps of a warpgroup; warpgroups are bound to axis 3. 0 without warpgroups.
    """
    loops = [wide, high, s.fuse(warps)]
    if warpgroup:
        loops[2:] = reversed(s.split(loops[2], [None, warpgroup]))
    for axis, loop in enumerate(loops):
        s.bind(loop, "item", axis)


def initialise_fragments(s: Schedule, main: str, column: str, warpgroup: int = 0) -> None:
    """Store the initial sums of a tile by the threads that add to them.

    Args:
        column: The innermost loop over tiles.
        warpgroup: As for `bind_warps`.
    """
    *warps, i_y, j_x, i_m, i_r, j_n, j_c = s.inner_loops(f"{main}_init", column)
    bind_warps(s, warps, i_y, j_x, warpgroup)
    s.unroll(i_m, i_r, j_n)
    s.vectorize(j_c)


def epilogue_on_warp_tiles(s: Schedule, epilogue_loops: Sequence[str], tile: WarpTile, whole: bool) -> None:
    """Compute the epilogue on the fragments of each thread.

    Args:
        whole: Every vector is complete.
    """
    warps: Parts = ((None, "group"), (tile.warpgroup, "warp")) if tile.warpgroup else ((None, "warp"),)
    rows: Parts = (*warps, (tile.high, "each"), (ROWS // HIGH, "each"), (HIGH, "item"))
    columns: Parts = ((None, "warp"), (tile.wide, "each"), (WIDE, "item"), (EACH, "lane"))
    epilogue_on_fragments(s, epilogue_loops, rows, columns, whole)


def accumulators_in_registers(s: Schedule, main: str, roles: Contraction) -> None:
    """Lay the sums out as fragments, and keep them in registers."""
    sums = find_block(s.func, main).body
    row, column = (next(d for d, e in enumerate(sums.indices) if e is v) for v in (roles.row, roles.column))
    fragment_layout(s, sums.buffer.name, row, column)
    s.set_scope(buffer=sums.buffer.name, scope="local")


def fragment_layout(s: Schedule, buffer: str, row: int, column: int | None) -> None:
    """Lay a buffer out as fragments along its dimensions of rows and columns; `column` may be missing."""
    rank = len(find_alloc(s.func, buffer).shape)
    dims = [(row, (HIGH,)), *([] if column is None else [(column, (COLUMNS, EACH))])]
    # From the last dimension on: a split moves the numbers of all later dimensions.
    for dim, factors in sorted(dims, reverse=True):
        for at, factor in enumerate(factors):
            s.tile_layout(buffer=buffer, dim=dim + at, factor=factor, order=[*range(rank + 1)])
            rank += 1
