"""Liveness of bindings, walked from the last to the first, and dead-code elimination over it.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from relax_tune.ir.core.graph import AnyBinding, AnyBlock, Body, GVar, If, MatchCast, Value
from relax_tune.ir.core.graph_walk import is_impure, used_vars
from relax_tune.ir.core.names import same_objects


@dataclass(slots=True)
class Liveness:
    """The variables that are read after a point of a region."""

    read: set[GVar] = field(default_factory=set)

    def is_read(self, b: AnyBinding) -> bool:
        """Return whether a later binding or the result reads the variable of `b`."""
        return b.var in self.read

    def needs(self, b: AnyBinding) -> bool:
        """Return whether `b` must stay: it is read, it asserts, or it has side effects."""
        return self.is_read(b) or isinstance(b, MatchCast) or is_impure(b.value)

    def reads(self, *values: Value) -> None:
        """Record that `values` are computed at this point."""
        for value in values:
            self.read.update(used_vars(value))


def without_dead_code(blocks: tuple[AnyBlock, ...], ret: Value) -> tuple[AnyBlock, ...]:
    """Return the blocks of a region that returns `ret`, without dead bindings, also inside branches.

    Returns the same objects if nothing is removed.
    """
    live = Liveness()
    live.reads(ret)
    live_blocks: list[AnyBlock] = []
    for block in reversed(blocks):
        live_bindings: list[AnyBinding] = []
        for b in reversed(block.bindings):
            if live.needs(b):
                # Only now: a branch that nobody reads is dropped as a whole, without a look inside.
                if isinstance(b.value, If):
                    value = b.value.with_bodies([_side(side) for side in b.value.bodies])
                    b = b if value is b.value else replace(b, value=value)
                live_bindings.append(b)
                live.reads(b.value)
        live_bindings.reverse()
        live_blocks.append(
            block if same_objects(live_bindings, block.bindings) else replace(block, bindings=tuple(live_bindings))
        )
    live_blocks.reverse()
    return blocks if same_objects(live_blocks, blocks) else tuple(live_blocks)


def _side(side: Body) -> Body:
    blocks = without_dead_code(side.blocks, side.ret)
    return side if blocks is side.blocks else replace(side, blocks=blocks)
