"""Parts of the rules for sums of products: the roles of iterators, and the block with one epilogue."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Load, Op, Var, as_int, free_vars, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import depends_on, final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.primitives.reductions import combiner
from relax_tune.schedules.schedule import Schedule

FEW_ROWS = 16
"""With more rows than this, arithmetic bounds a product rather than the bytes of its weights."""


def multiplies(block: Block) -> bool:
    """Whether the block combines what it reads in several places: a reduction of single elements is no product."""
    return len(block_loads(block)) > 1


def is_product(func: PrimFunc) -> bool:
    """Whether the only reduction of a function is a sum of products, from an initial value."""
    found = reductions(func)
    return len(found) == 1 and found[0].init is not None and multiplies(found[0])


@dataclass(frozen=True)
class Contraction:
    """The roles of a matmul-like block's iterators and operands.

    column: the spatial iterator that is contiguous in the output (vectorised); row: one that an operand indexed by
    `column` does not have (register tile), if any; batch: the other spatial ones. `operand` is the load with `column`.
    """

    block: Block
    column: Var
    row: Var | None
    batch: tuple[Var, ...]
    reduce: tuple[Var, ...]
    operand: Load


def find_contraction(block: Block, column: Var) -> Contraction:
    """Classify a sum of products. Raises ScheduleError when the block is none, or the column has no operand."""
    operation, _ = combiner(block)
    if operation != "add":
        raise ScheduleError(f"block {block.name!r} combines with {operation!r}; a matmul-like block adds")
    loads = block_loads(block)
    with_column = [x for x in loads if column in free_vars(*x.indices)]
    if not with_column:
        raise ScheduleError(f"block {block.name!r}: no operand is indexed by {column.name!r}")
    spatial = [i for i in block.iters if i.kind == "spatial" and i.var is not column]
    reduce = tuple(i.var for i in block.iters if i.kind == "reduce")
    operand = max(with_column, key=lambda x: len(set(free_vars(*x.indices)) & set(reduce)))
    free_rows = [i for i in spatial if not any(i.var in free_vars(*x.indices) for x in with_column)]
    used = [i for i in free_rows if any(i.var in free_vars(*x.indices) for x in loads)]
    row = used[-1].var if used else None
    batch = tuple(i.var for i in spatial if i.var is not row)
    return Contraction(block, column, row, batch, reduce, operand)


def inline_around(s: Schedule, main: str) -> None:
    """Fold spatial producers into the contraction and the chain after it into its last block."""
    for b in blocks(s.func.body):
        if b.name != main and inlinable(s.func, b):
            s.compute_inline(b.name)
    last = final_block(s.func)
    rest = [b for b in blocks(s.func.body) if b.name not in (main, last.name)]
    if rest or (last.name != main and not depends_on(s.func, last, find_block(s.func, main))):
        raise ScheduleError(f"{s.func.name}: more than a contraction and its epilogue")


def isolate_contraction(s: Schedule) -> str:
    """The block of a product that has everything before it folded in and one block after it, in an intermediate; what is the same all
    along is multiplied at the end."""
    main = reductions(s.func)[0].name
    inline_around(s, main)
    if find_block(s.func, main).body.buffer in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="global")
    with suppress(ScheduleError):  # nothing may be the same all along
        s.apply("hoist_factors", block=main)
    return main


def matrix_roles(s: Schedule, main: str, last: Block) -> tuple[Contraction, Var]:
    """The roles of a product's iterators, and the one of them over rows. Raises ScheduleError without rows, and with several dimensions to
    sum over."""
    roles = find_contraction(find_block(s.func, main), output_column(s, main, last))
    if roles.row is None or len(roles.reduce) != 1:
        raise ScheduleError(f"{s.func.name}: wanted rows and one dimension to sum over, found {roles!r}")
    return roles, roles.row


def output_column(s: Schedule, main: str, epilogue: Block) -> Var:
    """The contraction's iterator that is contiguous in the output, of several that were joined the one."""
    block, last = find_block(s.func, main), epilogue
    fast, made = last.body.indices[-1], block.body.indices
    if isinstance(fast, Op) and fast.op == "floormod":
        fast = fast.args[0]
    read = next((x.indices for x in block_loads(last) if x.buffer is block.body.buffer), made)
    for e, out in zip(made if last.name == main else read, made, strict=True):
        if e is fast and isinstance(out, Var):
            return out
    raise ScheduleError(f"{s.func.name}: the fast output dimension is not one of the contraction's")


def packed_steps(block: Block, roles: Contraction) -> tuple[int, int | None]:
    """How many steps share what is read for one of them (numbers in one byte), and how many a float factor."""
    halves, group = 1, None
    for access in block_loads(block):
        for n in postorder(access.indices):
            size = as_int(n.args[1]) if isinstance(n, Op) and n.op == "floordiv" else None
            if size is None or size < 2 or not isinstance(n, Op) or n.args[0] not in roles.reduce:
                continue
            if access.buffer.dtype.is_float:
                group = size if group is None else min(group, size)
            elif size <= 8:
                halves = max(halves, size)
    return halves, group if group is not None and group % halves == 0 and group > halves else None
