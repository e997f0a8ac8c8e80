"""Parts of the rules for contractions (sums of products): the roles of iterators, and one contraction with one epilogue.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Load, Var, as_int, free_vars, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import depends_on, final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.primitives.reduction.reductions import combiner
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

FEW_ROWS = 16
"""With more rows than this, arithmetic bounds a product rather than the bytes of its weights."""


def multiplies(block: Block) -> bool:
    """Return True if the block reads more than one element per step, as a product does."""
    return len(block_loads(block)) > 1


def register_tiles(
    heights: Sequence[int],
    widths: Sequence[int],
    hardware: HardwareInfo,
    rows: int | None,
    columns: int | None,
    vector_cost: float = 1.0,
) -> list[tuple[float, int, int]]:
    """Return (loads per product, height, width) of tiles that the registers hold, fewest loads first.

    Waste at constant extents counts, and `vector_cost` is the cost of loading a vector relative to an element of a row. Of each width
    there is the highest tile, and the highest below by a power of two.
    """
    tiles = []
    for width in widths:
        vectors = -(-width // hardware.lanes)
        # Registers for the accumulators, one row of the second operand, and the broadcast element of the first (Goto
        # and van de Geijn, 2008).
        most = max((h for h in heights if h * vectors + vectors + 1 <= hardware.registers), default=0)
        # Also the largest power of two: it divides the usual numbers of rows, for which the highest tile wastes some.
        for height in {most, 1 << most.bit_length() - 1} & set(heights) if most else ():
            waste = 1.0
            for extent, tile in ((columns, width), (rows, height)):
                waste *= -(-extent // tile) * tile / extent if extent else 1.0
            # Loads for each multiplication, times the share of the tiles that lies outside of the result.
            tiles.append(((height + vector_cost * vectors) / (height * vectors) * waste, height, width))
    return sorted(tiles)


def is_product(func: PrimFunc) -> bool:
    """Return True if the function's only reduction is a sum of products with an initial value."""
    nodes = reductions(func)
    return len(nodes) == 1 and nodes[0].init is not None and multiplies(nodes[0])


@dataclass(frozen=True)
class Contraction:
    """The roles of a contraction's iterators and operands.

    Attributes:
        block: The block of the contraction.
        column: The spatial iterator that is contiguous in the output; it is vectorised.
        row: The last spatial iterator that no operand with `column` has, if any; register tiles span it.
        batch: The other spatial iterators.
        reduce: The reduction iterators.
        operand: The load with `column` that uses the most reduction iterators.
    """

    block: Block
    column: Var
    row: Var | None
    batch: tuple[Var, ...]
    reduce: tuple[Var, ...]
    operand: Load

    def known_extent(self, var: Var | None) -> int | None:
        """Return the extent of an iterator; None if it is not constant, or without an iterator."""
        return next((as_int(i.extent) for i in self.block.iters if i.var is var), None)


def find_contraction(block: Block, column: Var) -> Contraction:
    """Classify the iterators of a sum of products.

    Raises:
        ScheduleError: Unless the block adds and an operand has the column.
    """
    operation, _ = combiner(block)
    if operation != "add":
        raise ScheduleError(f"block {block.name!r} combines with {operation!r}; a matmul-like block adds")
    loads = block_loads(block)
    with_column = [x for x in loads if column in free_vars(*x.indices)]
    if not with_column:
        raise ScheduleError(f"block {block.name!r}: no operand is indexed by {column.name!r}")
    spatial = [i for i in block.iters if i.kind == "spatial" and i.var is not column]
    reduce = tuple(i.var for i in block.iters if i.kind == "reduce")
    # A bias or a scale may depend on the column too; the matrix is what depends on most of the summed iterators.
    operand = max(with_column, key=lambda x: len(set(free_vars(*x.indices)) & set(reduce)))
    free_rows = [i for i in spatial if not any(i.var in free_vars(*x.indices) for x in with_column)]
    used = [i for i in free_rows if any(i.var in free_vars(*x.indices) for x in loads)]
    # The innermost iterator that the matrix does not depend on; further ones repeat the product as a batch.
    row = used[-1].var if used else None
    batch = tuple(i.var for i in spatial if i.var is not row)
    return Contraction(block, column, row, batch, reduce, operand)


def inline_around(s: Schedule, main: str) -> None:
    """Inline the producers of a contraction, and the blocks after it into the last one.

    Raises:
        ScheduleError: When blocks other than the contraction and one epilogue remain.
    """
    for b in blocks(s.func.body):
        if b.name != main and inlinable(s.func, b):
            s.compute_inline(b.name)
    last = final_block(s.func)
    rest = [b for b in blocks(s.func.body) if b.name not in (main, last.name)]
    if rest or (last.name != main and not depends_on(s.func, last, find_block(s.func, main))):
        raise ScheduleError(f"{s.func.name}: expected a contraction and one epilogue")


def isolate_contraction(s: Schedule) -> str:
    """Bring a function into the form contraction, then epilogue, and return the contraction's block.

    Producers are inlined, the sum goes to an intermediate, and factors that do not depend on the reduction move to the
    epilogue.
    """
    main = reductions(s.func)[0].name
    inline_around(s, main)
    if s.buffer_of(main) in s.func.output_buffers:
        s.cache_write(block=main, scope="global")
    with suppress(ScheduleError):  # no factor may be independent of the reduction
        s.hoist_factors(block=main)
    return main


def fits_worker_cache(buffer: Buffer, hardware: HardwareInfo) -> bool:
    """Return True if a buffer of constant size stays in a worker's share of the second-level cache, so that prefetches gain nothing."""
    sizes = [as_int(d) for d in buffer.shape]
    return None not in sizes and prod(n or 0 for n in sizes) * buffer.dtype.bytes <= hardware.l2_bytes // 4


def contraction_roles(s: Schedule, main: str, last: Block | None = None) -> Contraction:
    """Return the roles of a contraction whose results the block `last` stores; by default the last block."""
    return find_contraction(find_block(s.func, main), output_column(s, main, last or final_block(s.func)))


def matrix_roles(s: Schedule, main: str, last: Block) -> tuple[Contraction, Var]:
    """Return the roles of a matmul's iterators, and its row iterator.

    Raises:
        ScheduleError: Without rows, and with several reduction dimensions.
    """
    roles = contraction_roles(s, main, last)
    if roles.row is None or len(roles.reduce) != 1:
        raise ScheduleError(f"{s.func.name}: expected rows and one dimension to sum over, got {roles!r}")
    return roles, roles.row


def output_column(s: Schedule, main: str, epilogue: Block) -> Var:
    """Return the contraction's iterator that is contiguous in the output.

    Where the epilogue fused several dimensions, the innermost of them counts.
    """
    block, last = find_block(s.func, main), epilogue
    if not last.body.indices or not block.body.indices:
        raise ScheduleError(f"{s.func.name}: expected an output with columns, got a scalar")
    fast, stored = last.body.indices[-1], block.body.indices
    # The column may be stored in two dimensions, as the heads of an attention are: the last one is its remainder.
    if fast.op == "floormod":
        fast = fast.args[0]
    read = next((x.indices for x in block_loads(last) if x.buffer is block.body.buffer), stored)
    for e, out in zip(stored if last.name == main else read, stored, strict=True):
        if e is fast and isinstance(out, Var):
            return out
    raise ScheduleError(f"{s.func.name}: the contiguous output dimension is not an iterator of the contraction")


def packed_steps(block: Block, roles: Contraction) -> tuple[int, int | None]:
    """Return the number of steps whose values share a byte, and the number that share a float scale (None without one).

    Both are read off divisions of reduction iterators in the indices of quantised operands and their scales.
    """
    halves, group = 1, None
    for access in block_loads(block):
        for n in postorder(access.indices):
            size = as_int(n.args[1]) if n.op == "floordiv" else None
            if size is None or size < 2 or n.args[0] not in roles.reduce:
                continue
            if access.buffer.dtype.is_float:
                group = size if group is None else min(group, size)
            elif size <= 8:
                halves = max(halves, size)
    # A group consists of whole bytes, and of more than one, so that a scale for it can be taken out of its sum.
    return halves, group if group is not None and group % halves == 0 and group > halves else None
