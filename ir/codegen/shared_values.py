"""Common subexpressions of a store's value, which are computed once.

Tests: `tests/ir/codegen/test_repeated_operands.py`, `tests/ir/codegen/test_integers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Const, Expr, Load, Var, postorder
from relax_tune.ir.core.scalar_ops import DIVISIONS


def shared_values(
    e: Expr, is_data: Callable[[Expr], bool], registers: Collection[Buffer]
) -> tuple[tuple[Expr, ...], frozenset[Expr]]:
    """Return the value nodes under `e`, operands first, and the nodes that are computed once in a temporary.

    Indices that are not computed from data are not value nodes: the algebra prints them together with their load.

    Args:
        is_data: Whether an integer is computed from elements of tensors.
        registers: Buffers whose elements are registers already.
    """
    uses: dict[Expr, int] = {}
    order: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(e, False)]
    visited: set[Expr] = set()
    while stack:
        n, ready = stack.pop()
        if ready:
            order.append(n)
            continue
        if n in visited:
            continue
        visited.add(n)
        stack.append((n, True))
        if isinstance(n, Load) or n.dtype is not i64 or (n.op and is_data(n)):
            for c in [i for i in n.indices if is_data(i)] if isinstance(n, Load) else n.args:
                uses[c] = uses.get(c, 0) + 1
                stack.append((c, False))
    trapping = conditional_traps(e)
    shared = frozenset(n for n in order if uses.get(n, 0) > 1 and not isinstance(n, (Const, Var)))
    shared = frozenset(
        n
        for n in shared
        if not (isinstance(n, Load) and n.buffer in registers)
        and (n.dtype is not i64 or (n.op and is_data(n)))
        and n not in trapping
    )
    return tuple(order), shared


def conditional_traps(e: Expr) -> frozenset[Expr]:
    """Return the nodes under `e` that may divide by zero and are evaluated only under a condition.

    They cannot become temporaries, since a temporary is computed unconditionally and x86 traps on a division by zero.
    """
    nodes = postorder((e,))
    trapping: set[Expr] = set()
    for n in nodes:
        if any(a in trapping for a in n.args) or (n.op in DIVISIONS and n.dtype.is_int and not _is_divisor(n.args[1])):
            trapping.add(n)
    if not trapping:
        return frozenset()
    certain, stack = {e}, [e]
    while stack:
        n = stack.pop()
        always = n.args[:1] if n.op in ("select", "and", "or") else n.args
        stack += [c for c in always if c not in certain]
        certain.update(always)
    return frozenset(trapping - certain)


def _is_divisor(e: Expr) -> bool:
    """Return whether an integer is known to be nonzero: a nonzero number, or `select(x == 0 or ..., c, x)` with nonzero c."""
    if e.value is not None:
        return e.value != 0
    if e.op != "select":
        return False
    cases, stack = [], [e.args[0]]
    while stack:
        c = stack.pop()
        stack += c.args if c.op == "or" else ()
        cases += [c.args[0]] if c.op == "eq" and c.args[1].value == 0 else []
    return e.args[2] in cases and _is_divisor(e.args[1])
