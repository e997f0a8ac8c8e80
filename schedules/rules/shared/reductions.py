"""Parts of the rules for reductions: the axis that a block reduces along, and reductions in two passes.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Var, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.deduce.pattern_kinds import starts_neutral
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.blocks import separate_nest
from relax_tune.schedules.schedule import Schedule


def require_rowwise(block: Block) -> None:
    """Raise ScheduleError unless the block reduces along memory, one row at a time.

    Vectors along another dimension would gather. Overlapping windows are not rows.
    """
    steps = [i.var for i in block.iters if i.kind == "reduce"]
    reads = [x for x in block_loads(block) if set(steps) & set(free_vars(*x.indices))]
    rows = [set(free_vars(*x.indices)) - set(steps) for x in reads]
    # Operands of one row depend on nested sets of rows, as a bias does; a product of matrices has rows of both
    # operands.
    if any(not (a <= b or b <= a) for a in rows for b in rows):
        raise ScheduleError(f"block {block.name!r} combines different rows: a contraction")
    for access in reads:
        if steps[-1] in free_vars(*access.indices[:-1]) or any(
            set(steps) & set(free_vars(e)) and e not in steps for e in access.indices
        ):
            raise ScheduleError(f"block {block.name!r} does not reduce along the rows of {access.buffer.name!r}")


def stages_across(func: PrimFunc) -> tuple[list[Block], set[str]]:
    """Return the blocks before the last one, and the names of those blocks that reduce across columns.

    Raises:
        ScheduleError: Unless one block does, and all others reduce along rows.
    """
    last = final_block(func)
    stages = [b for b in blocks(func.body) if b.name != last.name]
    across = {b.name for b in stages if b.is_reduction and steps_across(b)}
    if not across or any(not b.is_reduction or not (b.name in across or steps_along(b)) for b in stages):
        raise ScheduleError(f"{func.name}: not every stage reduces across columns")
    return stages, across


def steps_across(block: Block) -> bool:
    """Return True if the block reduces over a leading dimension while the last output dimension stays innermost.

    Each reduction iterator must be an index by itself, and a row must not be combined with other rows.
    """
    steps = {i.var for i in block.iters if i.kind == "reduce"}
    fast = block.body.indices[-1] if block.body.indices else None
    reads = [x for x in block_loads(block) if steps & set(free_vars(*x.indices))]
    rows = [set(free_vars(*x.indices)) - steps for x in reads]
    if any(not (a <= b or b <= a) for a in rows for b in rows) or not isinstance(fast, Var):
        return False
    with_column = [x for x in block_loads(block) if fast in free_vars(*x.indices)]
    plain = all(e in steps or not steps & set(free_vars(e)) for x in reads for e in x.indices)
    return plain and any(x in reads for x in with_column) and all(x.indices[-1] is fast for x in with_column)


def steps_along(block: Block) -> bool:
    """Return True if the innermost reduction iterator appears only as the last index of every operand."""
    step = next(i.var for i in reversed(block.iters) if i.kind == "reduce")
    return all(step not in free_vars(*x.indices[:-1]) for x in block_loads(block))


def reduce_in_chunks(s: Schedule, block: str, chunk: str, outer: int) -> str:
    """Compute one partial result for each iteration of `chunk`, and combine the partial results in a later nest.

    An initial value that may be combined only once gets its own nest, too. Returns the block of the partial results.

    Args:
        outer: The number of loops around `chunk`.
    """
    # A start other than the neutral element must enter the result once, not once for each partial result.
    unique = not starts_neutral(find_block(s.func, block))
    if unique:
        start = s.decompose_reduction(block=block, loop=chunk)[0]
        separate_nest(s, start, outer)
    part = next(n for n in s.rfactor(block=block, loop=chunk, scope="global") if not n.endswith("_init"))
    separate_nest(s, part, outer)
    if not unique:
        s.decompose_reduction(block=block, loop=s.loops_of(block)[outer])
    return part
