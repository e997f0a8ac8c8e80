"""Find the blocks that write buffers and the loops that feed their iterators; inline blocks; separate their nests.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.expr import free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule


def writer_of(s: Schedule, buffer: str) -> str:
    """Return the name of the first block that writes a buffer."""
    return next(b.name for b in blocks(s.func.body) if b.body.buffer.name == buffer)


def inline_except(func: PrimFunc, exception: Block) -> Schedule:
    """Inline every block that can be inlined, except one, and return the schedule."""
    s = Schedule(func)
    for block in blocks(func.body):
        if block is not exception and inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    return s


def loops_of_iter(s: Schedule, block: str, loop: str, iterator: str) -> list[str]:
    """Return the loops of a block inside `loop` whose variables an iterator's binding uses, outermost first."""
    node = find_block(s.func, block)
    feeding = {v.name for i, b in zip(node.iters, node.bindings) if i.var.name == iterator for v in free_vars(b)}
    return [n for n in s.inner_loops(block, loop) if n in feeding]


def separate_nest(s: Schedule, block: str, outer: int) -> None:
    """Split the `outer` loops around a block after its statement, so that what follows gets its own nest."""
    for depth in reversed(range(outer)):
        s.fission(loop=s.loops_of(block)[depth], block=block)
