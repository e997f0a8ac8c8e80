"""An estimate of a loop nest's work as C text, which decides at run time whether a parallel region pays."""

from __future__ import annotations

from collections.abc import Callable

from relax_tune.ir.core.expr import Expr, Var, as_int, free_vars, loads, postorder
from relax_tune.ir.core.scalar_ops import MATH
from relax_tune.ir.core.stmt import BufferStore, For, Stmt

Term = tuple[float, tuple[str, ...]]
"""A number times the values of C expressions."""
FEW = 2048
"""Steps of about a nanosecond that take less time than starting the threads of a parallel region."""
MOST_TERMS = 6
FUNCTION, DIVISION = 16, 4
"""Steps of a transcendental function and of a division."""


def steps(s: Stmt, text: Callable[[Expr], str], lanes: int, bound: frozenset[Var] = frozenset()) -> list[Term] | None:
    """Return the steps of a statement, as a sum of products; None where an extent is not known before it runs.

    text: from an extent to C. A store is a step; functions and divisions in its value are several. A vectorised loop counts once for
    each vector of `lanes` elements.
    """
    if isinstance(s, BufferStore):
        costs = (FUNCTION if n.op in MATH else DIVISION if n.op == "div" else 0 for n in postorder((s.value,)))
        return [(1.0 + sum(costs), ())]
    inner = bound.union(s.bound_vars)
    sums: dict[tuple[str, ...], float] = {}
    for child in s.children:
        more = steps(child, text, lanes, inner)
        if more is None:
            return None
        for number, names in more:
            sums[names] = sums.get(names, 0.0) + number
    found = [(number, names) for names, number in sums.items()]
    if not isinstance(s, For):
        return found if len(found) <= MOST_TERMS else None
    size = as_int(s.extent)
    if size is not None:
        by = -(-size // lanes) if s.kind == "vectorized" else size
        return [(number * by, names) for number, names in found] if by > 0 else []
    if loads(s.extent) or not bound.isdisjoint(free_vars(s.extent)):
        return None
    return [(number, (*names, text(s.extent))) for number, names in found]


def at_least(found: list[Term] | None, least: int) -> str | bool:
    """Return a condition in C that a sum is at least a number; True or False where numbers decide, True for an unknown sum."""
    if found is None:
        return True
    if not any(names for _, names in found):
        return sum(number for number, _ in found) >= least
    # in floating point, which no product of sizes leaves
    terms = (" * ".join([f"{number:.1f}", *(f"(double)({n})" for n in names)]) for number, names in found)
    return f"{' + '.join(terms)} >= {least:.1f}"
