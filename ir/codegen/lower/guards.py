"""Conditions around statements, and the room that a bound leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Poly, constant, plus
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Load, Var, and_, conjuncts, const, loads
from relax_tune.ir.core.stmt import For, IfThenElse, Stmt, rewrite, when


def room_below(c: Expr, poly: Callable[[Expr], Poly]) -> Poly | None:
    """Return `bound - x` of a condition on indices `x < bound`, one more of `x <= bound`; None for other conditions.

    The condition holds where the room is positive. poly: the polynomial of an expression.
    """
    if c.op not in ("lt", "le") or c.args[0].dtype is not i64:
        return None
    room = plus(poly(c.args[1]), poly(c.args[0]), -1)
    return plus(room, constant(1)) if c.op == "le" else room


def map_conjuncts(s: Stmt, change: Callable[[Expr], Expr | None]) -> Stmt:
    """Apply `change` to every conjunct of the conditions of a tree; None drops it."""

    def visit(m: Stmt) -> Stmt:
        if not isinstance(m, IfThenElse):
            return m
        old = conjuncts(m.cond)
        new = tuple(c for c in map(change, old) if c is not None)
        return m if new == old else when(and_(*new), m.then, m.orelse)

    return rewrite(s, visit)


def with_extent(s: Stmt, variables: Collection[Var], extent: int) -> Stmt:
    """Return the tree with another extent of the loops over these variables."""

    def visit(m: Stmt) -> Stmt:
        return replace(m, extent=const(extent)) if isinstance(m, For) and m.var in variables else m

    return rewrite(s, visit)


def split_conditions(s: Stmt) -> tuple[tuple[Expr, ...], Stmt]:
    """Return the conditions around a statement, outermost first, and the statement below them."""
    conditions = []
    while isinstance(s, IfThenElse) and s.orelse is None:
        conditions.append(s.cond)
        s = s.then
    return tuple(conditions), s


def maybe_read(roots: Sequence[Expr]) -> frozenset[Load]:
    """Return the reads that are only in an arm of a select or on the right of `and` or `or`."""
    stack, sure, maybe = list(roots), set[Expr](), set[Load]()
    while stack:
        e = stack.pop()
        if e in sure:
            continue
        sure.add(e)
        if e.op in ("select", "and", "or"):
            maybe.update(loads(*e.args[1:]))
            stack.append(e.args[0])
        else:
            stack.extend(e.children)
    return frozenset(maybe - sure)


def conditional_groups(s: Stmt, is_short: Callable[[For], bool]) -> bool:
    """Return whether a loop body reads a buffer behind several conditions, once its short inner loops are unrolled.

    A read counts for the innermost loop around it.
    """
    seen: set[tuple[For | None, Buffer]] = set()
    stack: list[tuple[Stmt, For | None, bool]] = [(s, None, False)]
    while stack:
        m, near, guarded = stack.pop()
        for r in loads(*m.own_exprs) if guarded else maybe_read(m.own_exprs):
            if (near, r.buffer) in seen or (near is not None and is_short(near)):
                return True
            seen.add((near, r.buffer))
        near = m if isinstance(m, For) else near
        guarded = guarded or isinstance(m, IfThenElse)
        stack += [(child, near, guarded) for child in m.children]
    return False
