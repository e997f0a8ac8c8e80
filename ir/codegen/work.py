"""Estimate of a loop nest's work as C text, by which a kernel decides at run time whether to start threads."""

from __future__ import annotations

from collections.abc import Callable

from relax_tune.ir.core.expr import Expr, Var, as_int, free_vars, loads, postorder
from relax_tune.ir.core.scalar_ops import MATH
from relax_tune.ir.core.stmt import BufferStore, For, Stmt

Term = tuple[float, tuple[str, ...]]
"""A product: a number and the texts of C expressions."""
FEW = 2048
"""Steps, of about a nanosecond each, that take less time than starting the threads of a parallel region."""
MOST_TERMS = 6
FUNCTION, DIVISION = 16, 4
"""Steps of a transcendental function and of a division."""


def steps(s: Stmt, text: Callable[[Expr], str], lanes: int, bound: frozenset[Var] = frozenset()) -> list[Term] | None:
    """Return the number of steps of a statement as a sum of products; None if an extent depends on data or on loop variables.

    A store is one step; functions and divisions in its value are several. A vectorised loop counts once per vector.

    Args:
        text: Prints an extent as C.
        lanes: Elements of a vector.
        bound: Variables of the surrounding loops.
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
    terms = [(number, names) for names, number in sums.items()]
    if not isinstance(s, For):
        # a long condition would cost more than it saves
        return terms if len(terms) <= MOST_TERMS else None
    size = as_int(s.extent)
    if size is not None:
        passes = -(-size // lanes) if s.kind == "vectorized" else size
        return [(number * passes, names) for number, names in terms] if passes > 0 else []
    if loads(s.extent) or not bound.isdisjoint(free_vars(s.extent)):
        return None
    return [(number, (*names, text(s.extent))) for number, names in terms]


def at_least(terms: list[Term] | None, least: int) -> str | bool:
    """Return a C condition that a sum is at least `least`, or its value if it is constant; True for an unknown sum."""
    if terms is None:
        return True
    if not any(names for _, names in terms):
        return sum(number for number, _ in terms) >= least
    # in floating point, since products of sizes may overflow int64
    texts = (" * ".join([f"{number:.1f}", *(f"(double)({n})" for n in names)]) for number, names in terms)
    return f"{' + '.join(texts)} >= {least:.1f}"
