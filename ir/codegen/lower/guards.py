"""Conditions around statements: their slack, reads that they guard, and loops that data end early.

Tests: `tests/ir/codegen/test_data_ends.py`, `tests/ir/codegen/test_conditional_reads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import reduce

from relax_tune.ir.codegen.lower.affine import Algebra, Poly, constant, plus
from relax_tune.ir.codegen.lower.lowered import note_ranges
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    add,
    and_,
    conjuncts,
    const,
    free_vars,
    load,
    loads,
    lt,
    maximum,
    minimum,
    postorder,
    rebuild,
    replaced,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.stmt import (
    BufferStore,
    For,
    IfThenElse,
    Let,
    Stmt,
    map_exprs,
    rewrite,
    seq,
    stores,
    substitute_stmt,
    when,
)


def slack_below(c: Expr, poly: Callable[[Expr], Poly]) -> Poly | None:
    """Return the slack of a condition on indices: `bound - x` for `x < bound`, one more for `x <= bound`; None for others.

    The condition holds if and only if the slack is positive.

    Args:
        poly: Returns the polynomial of an expression.
    """
    if c.op not in ("lt", "le") or c.args[0].dtype is not i64:
        return None
    slack = plus(poly(c.args[1]), poly(c.args[0]), -1)
    return plus(slack, constant(1)) if c.op == "le" else slack


def map_conjuncts(s: Stmt, change: Callable[[Expr], Expr | None]) -> Stmt:
    """Replace every conjunct of the conditions of a tree by `change(conjunct)`, or drop it if that is None."""

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


def conditional_reads(roots: Sequence[Expr]) -> frozenset[Load]:
    """Return the reads that are evaluated conditionally: in an arm of a select or on the right of `and` or `or`, and nowhere else."""
    stack, unconditional, conditional = list(roots), set[Expr](), set[Load]()
    while stack:
        e = stack.pop()
        if e in unconditional:
            continue
        unconditional.add(e)
        if e.op in ("select", "and", "or"):
            conditional.update(loads(*e.args[1:]))
            stack.append(e.args[0])
        else:
            stack.extend(e.children)
    return frozenset(conditional - unconditional)


def conditional_groups(s: Stmt, is_short: Callable[[For], bool]) -> bool:
    """Return whether a loop body has several conditional reads of one buffer once its short inner loops are unrolled.

    A read belongs to the innermost loop around it.
    """
    reads: set[tuple[For | None, Buffer]] = set()
    stack: list[tuple[Stmt, For | None, bool]] = [(s, None, False)]
    while stack:
        m, innermost, guarded = stack.pop()
        for r in loads(*m.own_exprs) if guarded else conditional_reads(m.own_exprs):
            if (innermost, r.buffer) in reads or (innermost is not None and is_short(innermost)):
                return True
            reads.add((innermost, r.buffer))
        innermost = m if isinstance(m, For) else innermost
        guarded = guarded or isinstance(m, IfThenElse)
        stack += [(child, innermost, guarded) for child in m.children]
    return False


IDEMPOTENT = {"add": 0, "max": None, "min": None, "mul": 1}
"""Operations `op` and values v with op(op(y, v), v) = op(y, v); None: any value."""


def end_loops_at_data(s: Stmt, algebra: Algebra) -> Stmt:
    """End a loop early if a condition on data makes all later iterations combine with a constant, as for the rows of a CSR matrix.

    Before: `for j in range(w): y = y + select(start[i] + j < start[i + 1], v, 0)`
    After: `for j in range(min(w, start[i + 1] - start[i])): y = y + v`, and one `y = y + 0` if iterations were left out, since they would
    have turned -0.0 into 0.0.
    """
    if isinstance(s, For) and s.kind == "vectorized":
        return s
    if isinstance(s, For) and s.kind == "serial":
        ended = _ended(s, algebra)
        if ended is not None:
            note_ranges(algebra, ended)
            return ended
    return s.with_children(tuple([end_loops_at_data(c, algebra) for c in s.children])) if s.children else s


def _ended(f: For, algebra: Algebra) -> Stmt | None:
    """Return a loop over an update that ends early; None if no condition on data ends it."""
    around, store = split_conditions(f.body)
    if not isinstance(store, BufferStore) or f.var in free_vars(*around) or loads(*around):
        return None
    old, value = load(store.buffer, store.indices), store.value
    term = next((a for a in value.children if a.op == "select"), None)
    # All later iterations combine with one constant. Combining it once must be as good as many times.
    if value.op not in IDEMPOTENT or term is None or old not in value.children or f.var in free_vars(*store.indices):
        return None
    cond, chosen, otherwise = term.children
    if otherwise.value is None or IDEMPOTENT[value.op] not in (None, otherwise.value):
        return None
    end_of = {c: end for c in conjuncts(cond) if (end := _end(c, f.var, algebra)) is not None}
    # A loop that stores to what its end is read from would change its own end.
    if not end_of or store.buffer in {r.buffer for r in loads(*end_of.values())}:
        return None
    limit = reduce(minimum, end_of.values(), f.extent)
    rest = and_(*(c for c in conjuncts(cond) if c not in end_of))

    def update(combined: Expr) -> BufferStore:
        operands = tuple(combined if a is term else a for a in value.children)
        return BufferStore(store.buffer, store.indices, rebuild(value, operands))

    end = Var(f"{f.var.name}_end")
    loop = _without_clamps(replace(f, extent=end, body=update(select(rest, chosen, otherwise))), algebra)
    once = when(lt(end, f.extent), update(otherwise))
    # the ends are read under the original conditions: a loop without iterations reads nothing
    return when(and_(lt(const(0), f.extent), *around), Let(end, maximum(limit, const(0)), seq(loop, once)))


def _without_clamps(f: For, algebra: Algebra) -> Stmt:
    """Split a loop into the iterations in which a `min` of an index has no effect, printed without it, and the rest."""
    bounds: dict[Expr, Expr] = {}
    written = {p.buffer for p in stores(f.body)}
    for e in postorder(f.body.own_exprs):
        if e.op == "min" and e.dtype is i64:
            for x, bound in (e.args, e.args[::-1]):
                unclamped = add(sub(bound, substitute(x, {f.var: const(0)})), const(1))
                if f.var in free_vars(bound) or written & {r.buffer for r in loads(unclamped)}:
                    continue
                if _is_step(algebra.poly(x), f.var, 1, algebra):
                    bounds[e] = unclamped
    if not bounds:
        return f
    count, rest = Var(f"{f.var.name}_inside"), Var(f"{f.var.name}_rest")
    plain = {e: next(x for x in e.args if f.var in free_vars(x)) for e in bounds}
    first = replace(f, extent=count, body=map_exprs(f.body, lambda e: replaced(e, plain.get)))
    remaining = substitute_stmt(f.body, {f.var: add(count, rest)})
    last = replace(f, var=rest, extent=maximum(sub(f.extent, count), const(0)), body=remaining)
    return Let(count, maximum(reduce(minimum, bounds.values(), f.extent), const(0)), seq(first, last))


def _is_step(p: Poly, var: Var, step: int, algebra: Algebra) -> bool:
    """Return whether a polynomial is `step * var` plus terms that do not depend on it."""
    return p.get((var,)) == step and not algebra.depends({m: k for m, k in p.items() if m != (var,)}, (var,))


def _end(c: Expr, var: Var, algebra: Algebra) -> Expr | None:
    """Return the first value of a variable from which on a condition on data is false; None for other conditions."""
    slack = slack_below(c, algebra.poly)
    if (
        slack is None
        or slack.get((var,)) != -1
        or algebra.depends({m: k for m, k in slack.items() if m != (var,)}, (var,))
    ):
        return None
    below, bound = c.args
    end = sub(bound, substitute(below, {var: const(0)}))
    return (add(end, const(1)) if c.op == "le" else end) if loads(end) else None
