"""Bounds of a kernel's integers over its symbols, to choose between 32 and 64 bits.

A span bounds the absolute value of a polynomial and of all its intermediate results. It is itself a polynomial over symbols, with
rational coefficients > 0 and symbols >= 0. Values read from memory have no span.

Tests: `tests/ir/codegen/lower/test_index_width.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction
from functools import reduce
from math import ceil, floor

from relax_tune.ir.arith import poly as P
from relax_tune.ir.codegen.lower.affine import ONE, Algebra, Monomial, Poly, as_constant
from relax_tune.ir.core.expr import Expr, Op, Var, as_int, const, maximum, mul, sub

INT_MOST, LONG_MOST = (1 << 31) - 1, (1 << 63) - 1
# Most spans that do not cover one another; further ones are merged.
MAX_INCOMPARABLE = 8
ZERO, ONCE = Fraction(0), Fraction(1)

Span = P.PolyOf[Expr, Fraction]


def larger(a: Span, b: Span) -> Span:
    """Return a span that covers both."""
    return {m: max(a.get(m, ZERO), b.get(m, ZERO)) for m in (*a, *b)}


class Spans:
    """The spans of a kernel's variables and of all noted polynomials.

    Attributes:
        signed: Symbols that may be negative.
        clamps: Whether a value from memory that is clamped between two bounds has their span, although it is itself unbounded.
    """

    def __init__(self, algebra: Algebra, signed: Collection[Expr] = (), clamps: bool = False) -> None:
        self.algebra, self.signed, self.clamps = algebra, signed, clamps
        self.variables: dict[Var, Span | None] = {}
        self._atoms: dict[Expr, Span | None] = {}
        self._noted: dict[tuple[tuple[Monomial, int], ...], Span | None] = {}
        self._largest: list[Span] = []

    def variable(self, v: Var, extent: Poly) -> None:
        """Record a loop's variable, which is less than `extent`."""
        span = self.note(extent)
        # The variable is at most extent - 1. The 1 is subtracted only from a constant term, since spans have no
        # negative coefficients.
        self.variables[v] = None if span is None else P.plus(span, P.constant(min(span.get(ONE, ZERO), ONCE)), -1)

    def note(self, p: Poly) -> Span | None:
        """Return the span of a polynomial; None if one of its atoms is unbounded, so that it needs 64 bits."""
        key = tuple(p.items())
        if key not in self._noted:
            self._noted[key] = self._note(p)
        return self._noted[key]

    def _note(self, p: Poly) -> Span | None:
        # Positive and negative terms are summed separately: in any order of the terms, partial sums lie between the two.
        sums: list[Span] = [{}, {}]
        known = True
        for m, c in p.items():
            term: Span = P.constant(ONCE)
            for atom in m:
                bound = self._atom(atom)
                known = known and bound is not None
                term = term if bound is None else self.algebra.times(term, bound)
                self._record(term)
            sums[c < 0] = P.plus(sums[c < 0], term, abs(c))
        bound = larger(*sums)
        self._record(bound)
        return bound if known else None

    def _record(self, span: Span) -> None:
        """Include a span in the maximum of all spans."""

        def below(a: Span, b: Span) -> bool:
            return all(c <= b.get(m, ZERO) for m, c in a.items())

        if any(below(span, x) for x in self._largest):
            return
        # Maximal spans only, since every launch checks them.
        self._largest = [x for x in self._largest if not below(x, span)]
        self._largest.append(span if len(self._largest) < MAX_INCOMPARABLE else larger(self._largest.pop(), span))

    def _atom(self, a: Expr) -> Span | None:
        if isinstance(a, Var):
            low, high = self.algebra.atom_interval(a)
            if low is not None and high is not None:
                return P.constant(Fraction(max(abs(low), abs(high))))
            return self.variables.get(a, {(a,): ONCE})
        if a not in self._atoms or not self.algebra.free(a).isdisjoint(self.algebra.env):
            self._atoms[a] = self._operation(a)
        return self._atoms[a]

    def _operation(self, a: Expr) -> Span | None:
        if not isinstance(a, Op) or a.op not in ("floordiv", "floormod", "min", "max", "select", "abs"):
            return None
        parts = [self.note(self.algebra.poly(x)) for x in (a.args[1:] if a.op == "select" else a.args)]
        known = [x for x in parts if x is not None]
        if len(known) < len(parts):
            return self._between(a) if self.clamps and a.op in ("min", "max") else None
        divisor = as_constant(self.algebra.poly(a.args[1])) if a.op in ("floordiv", "floormod") else None
        if a.op == "floordiv":
            # A symbolic divisor is at least 1 where the quotient is defined, so the dividend bounds it.
            return P.scaled(known[0], Fraction(1, max(divisor or 1, 1)))
        if a.op == "floormod":
            return known[1] if divisor is None else P.constant(Fraction(abs(divisor)))
        return known[0] if len(known) == 1 else larger(*known)

    def _between(self, a: Op) -> Span | None:
        """Return the span of `max(min(x, b), c)` or `min(max(x, b), c)`; b and c bound the magnitude of its value."""
        for inner, outer in (a.args, a.args[::-1]):
            bound = self.note(self.algebra.poly(outer))
            if bound is None or not isinstance(inner, Op) or inner.op != {"max": "min", "min": "max"}.get(a.op):
                continue
            spans = [self.note(self.algebra.poly(x)) for x in inner.args]
            known = [x for x in spans if x is not None]
            if known:
                return larger(bound, known[0])
        return None

    def most(self, symbols: Iterable[Var]) -> Expr:
        """Return the maximum of all noted spans and of these symbols, as an expression for the launch to check."""
        for symbol in symbols:
            self._record({(symbol,): ONCE})
        totals: list[Expr] = []
        for span in self._largest:
            total: Expr = const(0)
            for m, c in span.items():
                term: Expr = const(1)
                for v in m:
                    term = mul(term, maximum(v, sub(const(0), v)) if v in self.signed else v)
                if c >= 1 or not m:
                    total = total + mul(term, const(min(ceil(c), LONG_MOST)))
                else:
                    # A fraction c < 1 as an integer quotient, rounded up: c * t <= t // floor(1 / c) + 1.
                    total = total + term // floor(1 / c) + 1
            totals.append(total)
        return reduce(maximum, totals) if totals else const(0)


def fits(most: Expr) -> bool | None:
    """Return whether 32 bits hold numbers up to `most`; None if that depends on symbols."""
    known = as_int(most)
    return None if known is None else known <= INT_MOST
