"""What rules ask about a tensor function before scheduling it."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Load, Op, Var, free_vars, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import block_loads, writer
from relax_tune.schedules.primitives.reductions import combiner

EXPENSIVE = frozenset({"exp", "erf", "tanh", "log", "pow", "sqrt", "rsqrt", "div"})


def is_expensive(block: Block) -> bool:
    """The block computes something worth keeping rather than computing again (a transcendental, a division)."""
    return any(isinstance(n, Op) and n.op in EXPENSIVE and n.dtype.is_float for n in postorder((block.body.value,)))


def reductions(func: PrimFunc) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.is_reduction)


def multiplies(block: Block) -> bool:
    """Whether the block combines what it reads in several places: a reduction of single elements is no product."""
    return len(block_loads(block)) > 1


def is_product(func: PrimFunc) -> bool:
    """Whether the only reduction of a function is a sum of products, from an initial value."""
    found = reductions(func)
    return len(found) == 1 and found[0].init is not None and multiplies(found[0])


def depends_on(func: PrimFunc, block: Block, source: Block) -> bool:
    """Whether `block` reads, directly or through intermediates, what `source` writes."""
    seen: set[Block] = set()
    stack = [block]
    while stack:
        current = stack.pop()
        for x in block_loads(current):
            producer = writer(func, x.buffer)
            if producer is source:
                return True
            if producer is not None and producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return False


def inlinable(func: PrimFunc, block: Block) -> bool:
    """A spatial producer of an intermediate, addressed by distinct iterators."""
    plain = all(isinstance(i, Var) for i in block.body.indices)
    return not block.is_reduction and block.init is None and plain and block.body.buffer in func.allocs


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


def contraction(block: Block, column: Var) -> Contraction:
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


def final_block(func: PrimFunc) -> Block:
    """The one block that writes the one output; ScheduleError when there are several."""
    if len(func.output_buffers) != 1:
        raise ScheduleError(f"{func.name}: wanted one output, found {len(func.output_buffers)}")
    found = writer(func, func.output_buffers[0])
    if found is None:
        raise ScheduleError(f"{func.name}: nothing writes the output")
    return found
