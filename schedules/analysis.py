"""Queries of rules on a tensor function before they schedule it.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import block_loads, writer
from relax_tune.schedules.primitives.blocks.inline import compares_inlined
from relax_tune.schedules.symbols import are_variables

EXPENSIVE = frozenset({"exp", "erf", "tanh", "log", "pow", "sqrt", "rsqrt", "div"})


def is_expensive(block: Block) -> bool:
    """Return whether the block computes a transcendental or a division, so that storing beats recomputing."""
    return any(n.op in EXPENSIVE and n.dtype.is_float for n in postorder((block.body.value,)))


def reductions(func: PrimFunc) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.is_reduction)


def depends_on(func: PrimFunc, block: Block, source: Block) -> bool:
    """Return whether `block` reads, directly or through intermediates, the buffer that `source` writes."""
    visited: set[Block] = set()
    stack = [block]
    while stack:
        current = stack.pop()
        for x in block_loads(current):
            producer = writer(func, x.buffer)
            if producer is source:
                return True
            if producer is not None and producer not in visited:
                visited.add(producer)
                stack.append(producer)
    return False


def inlinable(func: PrimFunc, block: Block) -> bool:
    """Return whether the block is a spatial producer of an intermediate, addressed by plain iterators.

    Copies of it must not be compared with one another where compilers may round them differently."""
    plain = are_variables(block.body.indices)
    if block.is_reduction or block.init is not None or not plain or block.body.buffer not in func.allocs:
        return False
    # Copies of an expression may round differently, so a value that is compared with its copy is computed once.
    return not compares_inlined(func, block)


def final_block(func: PrimFunc) -> Block:
    """Return the block that writes the function's one output.

    Raises:
        ScheduleError: For several outputs, or an output that nothing writes.
    """
    if len(func.output_buffers) != 1:
        raise ScheduleError(f"{func.name}: expected one output, got {len(func.output_buffers)}")
    last = writer(func, func.output_buffers[0])
    if last is None:
        raise ScheduleError(f"{func.name}: nothing writes the output")
    return last
