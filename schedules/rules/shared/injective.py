"""Parts of the rules for functions without reductions.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Load, Var
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.schedule import Schedule


def inline_into_outputs(s: Schedule) -> tuple[Block, ...]:
    """Inline every intermediate into the blocks that write outputs, and return these blocks."""
    for block in blocks(s.func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    left = blocks(s.func.body)
    if not all(b.body.buffer in s.func.output_buffers and s.loops_of(b.name) for b in left):
        raise ScheduleError(f"{s.func.name}: expected spatial blocks that write outputs, after inlining")
    return left


def transposed_reads(block: Block, column: Var) -> tuple[Load, ...]:
    """Return the loads whose last index is another iterator than the block's output has last.

    Raises:
        ScheduleError: When there is no such load, or their last iterators differ.
    """
    accesses = []
    for access in block_loads(block):
        if not access.indices:
            continue
        *front, last = access.indices
        if isinstance(last, Var) and last is not column and sum(column is e for e in front) == 1:
            accesses.append(access)
    buffers = [x.buffer for x in block_loads(block)]
    if (
        not accesses
        or len({x.indices[-1] for x in accesses}) != 1
        or any(buffers.count(x.buffer) != 1 for x in accesses)
    ):
        raise ScheduleError(f"block {block.name!r} does not read arrays along one other iterator")
    return tuple(accesses)
