"""Loops whose length depends on loops around them, for counting: as long as they are on average between the ends of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Op, Var, const, floordiv, free_vars, maximum, replaced, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, Seq, Stmt, blocks
from relax_tune.schedules.loop_tree import enclosing

# What is no sum of multiples of loops' variables.
NONLINEAR = frozenset({"floordiv", "floormod", "min", "max", "select"})


def with_mean_extents(func: PrimFunc) -> PrimFunc:
    """The function with no extent that mentions a loop's variable: half of what it is in the first iteration of all loops around and
    in the last. Of what grows or shrinks in proportion that is the mean, as it is of two pieces that make up a stretch. Where blocks
    inside are, as far as it is a number that a group and a loop of its items make together, moves with the innermost such loop."""
    body = _with_mean_extents(func.body, {}, (), False)
    return func if body is func.body else replace(func, body=body)


def _with_mean_extents(s: Stmt, last: Mapping[Var, Expr], path: tuple[For, ...], uneven: bool) -> Stmt:
    if isinstance(s, Seq):
        parts = tuple(_with_mean_extents(c, last, path, uneven) for c in s.stmts)
        return s if all(a is b for a, b in zip(parts, s.stmts)) else Seq(parts)
    if isinstance(s, Block) and uneven:
        return replace(s, bindings=tuple(_without_digits(e, path) for e in s.bindings))
    if not isinstance(s, For):
        return s
    extent = s.extent
    if not last.keys().isdisjoint(free_vars(extent)):
        ends = (substitute(extent, {v: const(0) for v in last}), substitute(extent, last))
        extent = simplify(floordiv(maximum(ends[0], 0) + maximum(ends[1], 0) + 1, const(2)))
    body = _with_mean_extents(s.body, {**last, s.var: extent - 1}, (*path, s), uneven or extent is not s.extent)
    return s if body is s.body and extent is s.extent else replace(s, extent=extent, body=body)


def _without_digits(e: Expr, path: Sequence[For]) -> Expr:
    def innermost(n: Expr) -> Expr | None:
        if not isinstance(n, Op) or n.op not in NONLINEAR:
            return None
        found = [p for p in path if p.var in free_vars(n)]
        return found[-1].var if {p.kind for p in found} == {"group", "serial"} else None

    return replaced(e, innermost)


def uneven_blocks(func: PrimFunc) -> frozenset[str]:
    """The blocks that run a number of times which loops of such lengths say, rather than their iterators."""
    return frozenset(b.name for b in blocks(func.body) if _is_uneven(func, b))


def _is_uneven(func: PrimFunc, block: Block) -> bool:
    path = enclosing(func, block)
    return any(not {q.var for q in path}.isdisjoint(free_vars(p.extent)) for p in path)
