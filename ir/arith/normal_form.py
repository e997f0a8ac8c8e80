"""Division and decisions that all normal forms share.

A normal form writes an integer expression as a polynomial over atoms. `Normalizer` is the form for proofs. `codegen/lower/affine`
has the form that kernels print, whose atoms are expressions.

Tests: `tests/ir/arith/test_random_expressions.py`.
"""

from __future__ import annotations

from math import gcd
from typing import Generic, Literal

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.poly import A, PolyOver
from relax_tune.ir.arith.proof import FLIP, Proof
from relax_tune.ir.core.expr import Const, Expr
from relax_tune.ir.core.intervals import Interval

CONNECTIVES = frozenset({"and", "or", "not"})
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})


class NormalForm(Generic[A]):
    """Polynomials of expressions over atoms with constant intervals."""

    __slots__ = ()

    # -- given by each form

    def poly(self, e: Expr) -> PolyOver[A]:
        """Return the polynomial of an integer expression."""
        raise NotImplementedError

    def atom_interval(self, atom: A) -> Interval:
        """Return a constant interval of an atom."""
        raise NotImplementedError

    def assumed(self, cond: Expr) -> Proof:
        """Return the known truth of a condition without looking into it."""
        return Proof.UNKNOWN

    # -- signs

    def interval(self, p: PolyOver[A]) -> Interval:
        """Return a constant interval of a polynomial."""
        return P.bounds(p, self.atom_interval)

    def nonneg(self, p: PolyOver[A]) -> bool:
        """Prove p >= 0 from constant intervals."""
        lo = self.interval(p)[0]
        return lo is not None and lo >= 0

    def beats(self, kind: Literal["min", "max"], winner: PolyOver[A], loser: PolyOver[A]) -> bool:
        """Prove that one of two numbers is their minimum or maximum."""
        return self.nonneg(P.plus(loser, winner, -1) if kind == "min" else P.plus(winner, loser, -1))

    # -- conditions

    def decide(self, cond: Expr) -> Proof:
        """Decide a condition: comparisons of integers under and, or, not."""
        done: dict[Expr, Proof] = {}
        stack = [cond]
        while stack:
            n = stack[-1]
            parts = n.args if n.op in CONNECTIVES else ()
            below = [x for x in parts if x not in done]
            if below:
                stack.extend(reversed(below))
                continue
            stack.pop()
            if n not in done:
                done[n] = self._decide(n, [done[x] for x in parts])
        return done[cond]

    def _decide(self, n: Expr, parts: list[Proof]) -> Proof:
        if isinstance(n, Const):
            return Proof.YES if n.value else Proof.NO
        known = self.assumed(n)
        if known is not Proof.UNKNOWN:
            return known
        if n.op == "not":
            return FLIP[parts[0]]
        if n.op in CONNECTIVES:
            strong, weak = (Proof.NO, Proof.YES) if n.op == "and" else (Proof.YES, Proof.NO)
            if strong in parts:
                return strong
            return weak if all(p is weak for p in parts) else Proof.UNKNOWN
        if n.op not in COMPARISONS or not all(a.dtype.is_int for a in n.args):
            return Proof.UNKNOWN
        difference = P.plus(self.poly(n.args[1]), self.poly(n.args[0]), -1)
        if n.op in ("lt", "le"):
            return self._at_least(difference, 1 if n.op == "lt" else 0)
        return self._is_zero(difference) if n.op == "eq" else FLIP[self._is_zero(difference)]

    def _at_least(self, p: PolyOver[A], least: int) -> Proof:
        """Decide p >= least."""
        if self.nonneg(P.plus(p, P.constant(least), -1)):
            return Proof.YES
        if self.nonneg(P.plus(P.constant(least - 1), p, -1)):
            return Proof.NO
        return Proof.UNKNOWN

    def _is_zero(self, p: PolyOver[A]) -> Proof:
        """Decide p == 0."""
        number = P.as_constant(p)
        if number is not None:
            return Proof.YES if number == 0 else Proof.NO
        # All other terms are multiples of their greatest common divisor, so the sum is 0 only if the constant is one,
        # too.
        if p.get(P.ONE, 0) % gcd(*(k for m, k in p.items() if m)):
            return Proof.NO
        # p < 0 is tried only where p >= 0 has no proof, since both cannot hold; likewise p > 0.
        below, above = self.nonneg(P.scaled(p, -1)), self.nonneg(p)
        if below and above:
            return Proof.YES
        if not above and self.nonneg(P.minus_one(P.scaled(p, -1))):
            return Proof.NO
        if not below and self.nonneg(P.minus_one(p)):
            return Proof.NO
        return Proof.UNKNOWN

    # -- floor division

    def constant_quotient(self, p: PolyOver[A], d: int) -> int | None:
        """Return the quotient p // d if it is the same for all values of the atoms, else None.

        Args:
            d: positive.
        """
        lo, hi = self.interval(p)
        return lo // d if lo is not None and hi is not None and lo // d == hi // d else None

    def cancel(self, x: PolyOver[A], c: PolyOver[A]) -> tuple[PolyOver[A], PolyOver[A], PolyOver[A]] | None:
        """Return a factor g of c > 0, a quotient y and a remainder r in [0, g); None without such a factor.

        x == g * y + r, so x // c == y // (c / g). The remainder x % c is y % (c / g) * g + r.
        """
        size = P.content(c)
        sizes = {gcd(k, size) for m, k in x.items() if m} - {1}
        shared = P.common_mono(c)
        factors: list[tuple[tuple[A, ...], int]] = []
        if shared:
            for m in x:
                common = P.common_mono((m, shared))
                if common:
                    factors.append((common, gcd(size, x[m])))
        # Larger divisors first: they leave a smaller quotient, and `div` cancels what remains.
        factors += [((), g) for g in sorted(sizes, reverse=True)]
        for mono, g in dict.fromkeys(factors):
            quotient, rest = P.divide_by_term(x, mono, g)
            if not mono and not any(quotient):
                continue
            factor = {mono: g}
            if rest:
                if not self.nonneg(rest) or not self.nonneg(P.minus_one(P.plus(factor, rest, -1))):
                    continue
            elif mono and not self.nonneg(factor):
                continue
            return factor, quotient, rest
        return None
