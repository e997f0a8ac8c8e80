"""What rules share of loops inside an element's: vectors with an accumulator for every lane, kinds of copies of loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int, free_vars
from relax_tune.ir.core.stmt import IterVar, LoopKind, blocks, loops
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def in_vectors(s: Schedule, block: str, column: str, width: Expr | int, divides: bool = False) -> str:
    """Cut a loop of a block into vectors; reductions get one accumulator per lane. Returns the loop over vectors."""
    c_0, c_1 = s.split(column, [None, width], divides)
    s.set_tail(c_0, "peel")
    if find_block(s.func, block).is_reduction:
        accumulate(s, block, c_1)
    s.set_kind(c_1, "vectorized")
    return c_0


def accumulate(s: Schedule, block: str, loop: str) -> None:
    """One accumulator per iteration of `loop`, their initial values in vectors too."""
    before = {b.name for b in blocks(s.func.body)}
    s.apply("rfactor", block=block, loop=loop)
    for made in blocks(s.func.body):
        if made.name not in before and made.name.endswith("_init"):
            s.set_kind(s.loops_of(made.name)[-1], "vectorized")


def set_kind_of_copies(s: Schedule, kinds: Mapping[str, LoopKind]) -> None:
    """A kind for loops and for the copies that factoring made of them."""
    for p in loops(s.func.body):
        for name, kind in kinds.items():
            if p.kind == "serial" and (p.var.name == name or p.var.name.startswith(f"{name}_")):
                s.set_kind(p.var.name, kind)


def decompose(s: Schedule, block: str, inside: list[str]) -> None:
    """Separate the initial value where the reduction begins; `inside`: the block's loops that may be part of it."""
    node = find_block(s.func, block)
    fed = {v.name for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    first = next((n for n in inside if n in fed), None)
    if node.init is not None and first is not None:
        s.apply("decompose_reduction", block=block, loop=first)


def hoist_reciprocal(s: Schedule, block: str) -> None:
    """Multiply by a reciprocal where the block divides by what its innermost loop leaves alone."""
    try:
        s.apply("multiply_by_reciprocal", block=block)
    except ScheduleError:
        return  # it divides by nothing of that kind


def strip_widths(column: IterVar, machine: HardwareInfo) -> Sequence[int]:
    """Strips of one to eight vectors; for a constant number of columns those that divide it, when any does."""
    extent = as_int(column.extent)
    options = [machine.lanes * v for v in (1, 2, 3, 4, 6, 8)]
    if extent is None:
        return options
    exact = [w for w in options if extent % w == 0]
    return exact or [w for w in options if w < extent + machine.lanes] or options[:1]
