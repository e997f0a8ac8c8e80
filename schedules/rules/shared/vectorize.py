"""Vectorise loops, with one accumulator for each lane of a reduction.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int, free_vars
from relax_tune.ir.core.stmt import IterVar, LoopKind, loops
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def in_vectors(s: Schedule, block: str, column: str, width: Expr | int, divides: bool = False) -> str:
    """Split a loop of a block into vectors, and return the loop over them. A reduction gets one accumulator per lane."""
    c_0, c_1 = s.split(column, [None, width], divides)
    s.set_tail(c_0, "peel")
    if find_block(s.func, block).is_reduction:
        accumulate(s, block, c_1)
    s.vectorize(c_1)
    return c_0


def accumulate(s: Schedule, block: str, loop: str) -> None:
    """Give a reduction one accumulator per iteration of `loop`, and vectorise the accumulators' initialisation."""
    for new in s.rfactor(block=block, loop=loop):
        if new.endswith("_init"):
            s.vectorize(s.loops_of(new)[-1])


def set_kind_of_copies(s: Schedule, kinds: Mapping[str, LoopKind]) -> None:
    """Set the kind of serial loops, and of the copies of them that later primitives named `LOOP_...`."""
    for p in loops(s.func.body):
        for name, kind in kinds.items():
            if p.kind == "serial" and (p.var.name == name or p.var.name.startswith(f"{name}_")):
                s.set_kind(p.var.name, kind)


def decompose(s: Schedule, block: str, inside: list[str]) -> tuple[str, ...]:
    """Separate the initial value at the first loop of `inside` that the reduction uses, and return the new blocks.

    Args:
        inside: The block's loops that may be part of the reduction, outermost first.
    """
    node = find_block(s.func, block)
    reducing = {v.name for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    first = next((n for n in inside if n in reducing), None)
    if node.init is None or first is None:
        return ()
    return s.decompose_reduction(block=block, loop=first)


def hoist_reciprocal(s: Schedule, block: str) -> None:
    """Multiply by a reciprocal where the block divides by a value that its innermost loop does not change."""
    try:
        s.multiply_by_reciprocal(block=block)
    except ScheduleError:
        return  # it divides by no such value


def strip_widths(column: IterVar, hardware: HardwareInfo) -> Sequence[int]:
    """Return strip widths of one to eight vectors; for a constant number of columns prefer the widths that divide it."""
    extent = as_int(column.extent)
    options = [hardware.lanes * v for v in (1, 2, 3, 4, 6, 8)]
    if extent is None:
        return options
    exact = [w for w in options if extent % w == 0]
    return exact or [w for w in options if w < extent + hardware.lanes] or options[:1]
