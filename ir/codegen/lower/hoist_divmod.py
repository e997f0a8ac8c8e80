"""Hoist quotients and remainders of parallel loop variables, as fused loops make them, to where the variables are bound."""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Load, Var, free_vars, postorder, transform
from relax_tune.ir.core.stmt import For, Let, Stmt, bound_vars, map_exprs, stores, walk

DIVIDING = frozenset({"floordiv", "floormod"})


def hoist_divmod(n: Stmt) -> Stmt:
    """Bind quotients and remainders of parallel loop variables to variables at the loop's start, if no inner loop moves them.

    Those are indices: values of other types wrap, and elements that the loop writes are not there yet."""
    if not isinstance(n, For) or n.kind != "parallel":
        return n.with_children(tuple(hoist_divmod(c) for c in n.children))
    inner = bound_vars(n.body)
    written = {s.buffer for s in stores(n.body)}
    found: dict[Expr, Var] = {}

    def replace_found(e: Expr) -> Expr:
        return transform(e, lambda x: found.get(x))

    def moved(e: Expr) -> bool:
        return any(isinstance(x, Load) and x.buffer in written for x in postorder((e,)))

    bound: list[tuple[Var, Expr]] = []
    for m in walk(n.body):
        for e in postorder(m.own_exprs):
            if e.op in DIVIDING and e.dtype is i64 and n.var in (used := set(free_vars(e))):
                short = replace_found(e)
                if inner.isdisjoint(used) and short.op and not moved(e):
                    found[short] = Var(f"{n.var.name}_{'q' if e.op == 'floordiv' else 'r'}")
                    bound.append((found[short], short))
    body = map_exprs(n.body, replace_found) if found else n.body
    for v, e in reversed(bound):
        body = Let(v, e, body)
    return replace(n, body=body)
