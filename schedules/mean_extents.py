"""Mean extents of loops whose extent depends on outer loops, for counting in cost features.

Tests: `tests/schedules/primitives/reduction/test_stream_k.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, const, floordiv, free_vars, maximum, replaced, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.names import same_objects
from relax_tune.ir.core.stmt import Block, For, Seq, Stmt, blocks
from relax_tune.schedules.loop_tree import enclosing

# Operations that are not linear in loop variables.
NONLINEAR = frozenset({"floordiv", "floormod", "min", "max", "select"})


def with_mean_extents(func: PrimFunc) -> PrimFunc:
    """Replace loop extents that depend on outer loop variables by their mean over the first and last outer iteration.

    Exact for triangular (causal) loops and for Stream-K ranges. Used only to count, never to generate code. Below such loops, a
    quotient or remainder of a group index and a serial loop's variable moves with the innermost of them.
    """
    body = _with_mean_extents(func.body, {}, (), False)
    return func if body is func.body else replace(func, body=body)


def _with_mean_extents(s: Stmt, last: Mapping[Var, Expr], path: tuple[For, ...], uneven: bool) -> Stmt:
    if isinstance(s, Seq):
        parts = tuple(_with_mean_extents(c, last, path, uneven) for c in s.stmts)
        return s if same_objects(parts, s.stmts) else Seq(parts)
    if isinstance(s, Block) and uneven:
        return replace(s, bindings=tuple(_without_digits(e, path) for e in s.bindings))
    if not isinstance(s, For):
        return s
    extent = s.extent
    if not last.keys().isdisjoint(free_vars(extent)):
        ends = (substitute(extent, {v: const(0) for v in last}), substitute(extent, last))
        # Extents are linear in outer loops, as below a diagonal, so the mean of the ends is the mean of all. It is
        # rounded up, so that a loop that runs at times is not counted as empty.
        extent = simplify(floordiv(maximum(ends[0], 0) + maximum(ends[1], 0) + 1, const(2)))
    body = _with_mean_extents(s.body, {**last, s.var: extent - 1}, (*path, s), uneven or extent is not s.extent)
    return s if body is s.body and extent is s.extent else replace(s, extent=extent, body=body)


def _without_digits(e: Expr, path: Sequence[For]) -> Expr:
    def innermost(n: Expr) -> Expr | None:
        if n.op not in NONLINEAR:
            return None
        feeding = [p for p in path if p.var in free_vars(n)]
        return feeding[-1].var if {p.kind for p in feeding} == {"group", "serial"} else None

    return replaced(e, innermost)


def uneven_blocks(func: PrimFunc) -> frozenset[str]:
    """Return the blocks whose number of executions depends on such loops, rather than on their iterators."""
    return frozenset(b.name for b in blocks(func.body) if _is_uneven(func, b))


def _is_uneven(func: PrimFunc, block: Block) -> bool:
    path = enclosing(func, block)
    return any(not {q.var for q in path}.isdisjoint(free_vars(p.extent)) for p in path)
