"""Polynomials back to compact expressions: remainders recognised, common factors pulled out.

Tests: `tests/ir/arith/test_random_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.normal import Normalizer
from relax_tune.ir.arith.poly import Mono, Poly
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import (
    Expr,
    add,
    cast,
    const,
    floordiv,
    floormod,
    maximum,
    minimum,
    mul,
    postorder,
    sub,
)

# Cost of an operation when two forms of one value are compared; every other operation costs 1.
_COST = {"floordiv": 4, "floormod": 4}


def cost(e: Expr) -> int:
    """Return the work of evaluating `e` with shared parts evaluated once."""
    return sum(_COST.get(n.op, 1) for n in postorder((e,)) if n.op)


class Renderer:
    """Prints normal forms of one question. `written` maps simplified source nodes to their expressions."""

    def __init__(self, ctx: Normalizer, written: Mapping[Expr, Expr]) -> None:
        self.ctx = ctx
        self.written = written
        self._atoms: dict[tuple[int, DType], Expr] = {}

    def render(self, p: Poly, dtype: DType) -> Expr:
        return self._sum(self._without_negatives(self._with_remainders(p)), dtype)

    # -- x - c * (x // c) == x % c

    def _with_remainders(self, p: Poly) -> Poly:
        ctx = self.ctx
        for a in sorted({a for m in p for a in m if ctx.atoms[a].kind == "div"}):
            x, c = ctx.atoms[a].args
            if not c:
                continue
            factor, rest = P.extract(p, (a,))
            whole = P.divide_exactly(P.scaled(factor, -1), c)
            if not whole:
                continue
            left = P.plus(rest, P.product(whole, x), -1)
            mod = ctx.atom("mod", (x, c), None)
            shorter = P.plus(left, P.times_mono(whole, (mod,)))
            # Other terms may need the quotient anyway, so a remainder is written only where it makes the sum shorter.
            if len(shorter) < len(p):
                p = shorter
        return p

    # -- x // c + 1 == (x + c) // c, where that makes the dividend >= 0: targets divide such numbers in one instruction

    def _without_negatives(self, p: Poly) -> Poly:
        ctx = self.ctx
        for a in sorted({a for m in p for a in m if ctx.atoms[a].kind == "div"}):
            x, c = ctx.atoms[a].args
            low = ctx.interval(x)[0]
            if not c or (low is not None and low >= 0):
                continue
            raised = P.plus(x, c)
            low = ctx.interval(raised)[0]
            factor, rest = P.extract(p, (a,))
            left = P.plus(rest, factor, -1)
            if low is not None and low >= 0 and len(left) < len(rest):
                p = P.plus(left, P.times_mono(factor, (ctx.atom("div", (raised, c), None),)))
        return p

    # -- factoring

    def _sum(self, p: Poly, dtype: DType) -> Expr:
        if len(p) <= 1:
            return self._term(*next(iter(p.items()), (P.ONE, 0)), dtype)
        size, shared = P.content(p), P.common_mono(p)
        if size > 1 or shared:
            inner: Poly = {}
            for m, k in p.items():
                left = P.divide_mono(m, shared)
                assert left is not None
                inner[left] = k // size
            return mul(self._sum(inner, dtype), self._term(shared, size, dtype))
        factor = self._best_factor(p)
        if factor is None:
            return self._plain(p, dtype)
        mono, k = factor
        inside: Poly = {}
        outside: Poly = {}
        for m, v in p.items():
            left = P.divide_mono(m, mono)
            if left is None or (not mono and abs(v) != k) or (not mono and not m):
                outside[m] = v
            else:
                inside[left] = v // k
        head = mul(self._sum(inside, dtype), self._term(mono, k, dtype))
        if not outside:
            return head
        number = P.as_constant(outside)
        if number is not None and number < 0:
            return sub(head, const(-number, dtype))
        return add(head, self._sum(outside, dtype))

    def _best_factor(self, p: Poly) -> tuple[Mono, int] | None:
        """Return the atom in most terms, or the coefficient of most terms; at least two."""
        count: dict[tuple[Mono, int], int] = {}
        for m, k in p.items():
            for a in dict.fromkeys(m):
                count[((a,), 1)] = count.get(((a,), 1), 0) + 1
            if m and abs(k) > 1:
                count[((), abs(k))] = count.get(((), abs(k)), 0) + 1
        best, times = None, 1
        # Sorted, for a fixed choice among factors with the same count.
        for f in sorted(count):
            if count[f] > times:
                best, times = f, count[f]
        return best

    def _plain(self, p: Poly, dtype: DType) -> Expr:
        terms = sorted(m for m in p if m) + [m for m in p if not m]
        first = next((m for m in terms if p[m] > 0), terms[0])
        out = self._term(first, p[first], dtype)
        for m in terms:
            if m is not first:
                k = p[m]
                out = add(out, self._term(m, k, dtype)) if k > 0 else sub(out, self._term(m, -k, dtype))
        return out

    def _term(self, mono: Mono, k: int, dtype: DType) -> Expr:
        out: Expr | None = None
        for a in mono:
            x = self._atom(a, dtype)
            out = x if out is None else mul(out, x)
        return const(k, dtype) if out is None else mul(out, const(k, dtype))

    def _atom(self, number: int, dtype: DType) -> Expr:
        atom = self._atoms.get((number, dtype))
        if atom is None:
            atom = self._atoms[number, dtype] = self._make(number, dtype)
        return atom

    def _make(self, number: int, dtype: DType) -> Expr:
        atom = self.ctx.atoms[number]
        if atom.source is not None:
            written = self.written.get(atom.source)
            if written is None and atom.kind not in ("div", "min", "max"):
                written = atom.source
            if written is not None:  # an equation may have brought in a variable of the other width
                return cast(written, dtype)
        parts = [self.render(a, dtype) for a in atom.args]
        if atom.kind == "div":
            return floordiv(parts[0], parts[1])
        if atom.kind == "mod":
            return floormod(parts[0], parts[1])
        assert atom.kind in ("min", "max"), atom.kind
        out = parts[0]
        for x in parts[1:]:
            out = minimum(out, x) if atom.kind == "min" else maximum(out, x)
        return out
