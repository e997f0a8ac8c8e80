"""The size of a merged function in the text form, which writes an expression that is read several times each time.

A chain of operators that read their argument more than once (an integer quotient reads it three times) has a text that grows
exponentially with its length, although its expression is a small graph. The text is the key of a task.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.core.expr import Load, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.plain_loops import plain_blocks
from relax_tune.ir.passes.fusion.fuse_tensor import FusionStage


def tree_size(stages: Sequence[FusionStage]) -> int:
    """Return the number of nodes of the largest expression of merged stages, counted each time that it is written."""
    sizes: dict[GVar, int] = {}
    for stage in stages:
        inner = [sizes.get(arg, 1) if isinstance(arg, GVar) else 1 for arg in stage.call.args]
        sizes[stage.out] = _written(stage.func, inner)
    return max(sizes.values())


def _written(func: PrimFunc, inner: Sequence[int]) -> int:
    """Return the nodes of the largest expression of a function. inner: sizes of its arguments."""
    arguments = dict(zip(func.input_buffers, inner, strict=False))
    counts: dict[object, int] = {}
    most = 1
    for block in plain_blocks(func) or ():
        for e in postorder((block.body.value,)):
            own = arguments.get(e.buffer, 1) if isinstance(e, Load) else 1
            # Counted per occurrence and not per node: the text has no names for shared parts.
            counts[e] = own + sum(counts[c] for c in e.children)
        most = max(most, counts[block.body.value])
    return most
