"""Whether moving a block would let it see other values."""

from __future__ import annotations

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Var, maximum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import block_loads


def overwritten_later(func: PrimFunc, block: Block) -> Buffer | None:
    """A buffer the block reads and a block after it writes again (an output that also holds an intermediate)."""
    order = blocks(func.body)
    later = {b.body.buffer for b in order[order.index(block) + 1 :]}
    return next((x.buffer for x in block_loads(block) if x.buffer in later and x.buffer is not block.body.buffer), None)


def writers(func: PrimFunc, buffer: Buffer) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.body.buffer is buffer)


def updates_in_place(block: Block) -> bool:
    """The block reads elements of what it writes that something else put there (no initial value of its own)."""
    return any(x.buffer is block.body.buffer for x in block_loads(block))


def writes_everything(block: Block) -> bool:
    """The block alone writes each element of its buffer: plain distinct spatial iterators over the buffer's dimensions, and
    no condition but the guards that splitting its loops left."""
    if block.predicate is not TRUE and all(isinstance(b, Var) for b in block.bindings):
        return False
    extents = {i.var: i.extent for i in block.iters if i.kind == "spatial"}
    where = block.body.indices
    return len(set(where)) == len(where) and all(
        isinstance(e, Var) and e in extents and simplify(d) in (simplify(extents[e]), simplify(maximum(extents[e], 0)))
        for e, d in zip(where, block.body.buffer.shape, strict=True)
    )
