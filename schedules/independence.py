"""Dependence tests between blocks: may a block move, and does it write all of its buffer?"""

from __future__ import annotations

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Var, maximum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import block_loads
from relax_tune.schedules.symbols import are_variables


def overwritten_later(func: PrimFunc, block: Block) -> Buffer | None:
    """Return a buffer that the block reads and a later block writes again; None without one.

    An output that also holds an intermediate is such a buffer.
    """
    order = blocks(func.body)
    later = {b.body.buffer for b in order[order.index(block) + 1 :]}
    return next((x.buffer for x in block_loads(block) if x.buffer in later and x.buffer is not block.body.buffer), None)


def writers(func: PrimFunc, buffer: Buffer) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.body.buffer is buffer)


def updates_in_place(block: Block) -> bool:
    """Return whether the block reads elements of its own buffer that another block wrote."""
    return any(x.buffer is block.body.buffer for x in block_loads(block))


def writes_everything(block: Block) -> bool:
    """Return whether the block by itself writes each element of its buffer.

    It does with plain distinct spatial iterators over the buffer's dimensions, and no condition but guards of split loops.
    """
    if block.predicate is not TRUE and are_variables(block.bindings):
        return False
    extents = {i.var: i.extent for i in block.iters if i.kind == "spatial"}
    where = block.body.indices
    return len(set(where)) == len(where) and all(
        isinstance(e, Var) and e in extents and simplify(d) in (simplify(extents[e]), simplify(maximum(extents[e], 0)))
        for e, d in zip(where, block.body.buffer.shape, strict=True)
    )
