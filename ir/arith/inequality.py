"""The proof search: is a polynomial >= 0 for every assignment the env allows?

Each step replaces an atom by a bound of it, so that the new polynomial is a lower bound of the old one, and constant intervals
close the search. A step can only lose precision, never truth: no proof found means unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.poly import Poly

if TYPE_CHECKING:
    from relax_tune.ir.arith.normal import Normalizer

# Polynomials looked at per proof, by nesting depth (a proof inside a proof decides the sign of a factor), and per question.
FUEL = (40, 12, 4)
TOTAL_FUEL = 1000
MAX_STEPS = 10


def nonneg(ctx: Normalizer, p: Poly) -> bool:
    """p >= 0: proved, or False."""
    lo, hi = ctx.interval(p)
    if lo is not None and lo >= 0:
        return True
    if (hi is not None and hi < 0) or ctx.depth >= len(FUEL) or P.as_constant(p) is not None:
        return False
    key = (ctx.depth, P.key(p))
    found = ctx.proved.get(key)
    if found is None:
        ctx.depth += 1
        try:
            found = _Search(ctx, FUEL[ctx.depth - 1]).holds(p, 0)
            if not found and ctx.spent >= TOTAL_FUEL:  # a claim that a fact makes needs no fuel
                found = any(_follows(ctx, p, fact) for fact in ctx.inequalities)
            ctx.proved[key] = found
        finally:
            ctx.depth -= 1
    return found


def _follows(ctx: Normalizer, p: Poly, fact: Poly) -> bool:
    """p is a fact and something never negative."""
    lo = ctx.interval(P.plus(p, fact, -1))[0]
    return lo is not None and lo >= 0


class _Search:
    """Depth-first over relaxations, with a budget and no polynomial twice."""

    def __init__(self, ctx: Normalizer, fuel: int) -> None:
        self.ctx = ctx
        self.fuel = fuel
        self.seen: set[P.Key] = set()

    def holds(self, p: Poly, step: int) -> bool:
        p = _tightened(p)
        lo, hi = self.ctx.interval(p)
        if lo is not None and lo >= 0:
            return True
        if (hi is not None and hi < 0) or step >= MAX_STEPS or len(p) > P.MAX_TERMS or self.ctx.refuted(p):
            return False
        key = P.key(p)
        if key in self.seen or self.fuel <= 0 or self.ctx.spent >= TOTAL_FUEL:
            return False
        self.seen.add(key)
        self.fuel -= 1
        self.ctx.spent += 1
        return any(all(self.holds(q, step + 1) for q in cases) for cases in self.relaxations(p))

    def relaxations(self, p: Poly) -> Iterator[tuple[Poly, ...]]:
        """Alternatives; each is a tuple of polynomials whose all being >= 0 makes p >= 0."""
        for fact in self.ctx.inequalities:  # the claim may be little more than a fact
            for (q,) in self.subtract(p, fact):
                lo = self.ctx.interval(q)[0]
                if lo is not None and lo >= 0:
                    yield (q,)
        atoms = sorted({a for m in p for a in m}, key=lambda a: (-_level(self.ctx, a), a))
        for a in atoms:
            factor, rest = P.extract(p, (a,))
            sign = self.sign(factor)
            if sign:
                yield from self.replace(a, factor, rest, sign)
        for fact in self.ctx.inequalities:
            yield from self.subtract(p, fact)

    def sign(self, p: Poly) -> int:
        lo, hi = self.ctx.interval(p)
        if lo is not None and lo >= 0:
            return 1
        if hi is not None and hi <= 0:
            return -1
        if P.as_constant(p) is None:
            if nonneg(self.ctx, p):
                return 1
            if nonneg(self.ctx, P.scaled(p, -1)):
                return -1
        return 0

    def replace(self, a: int, factor: Poly, rest: Poly, sign: int) -> Iterator[tuple[Poly, ...]]:
        """factor * a + rest with a replaced by a lower bound (sign 1) or an upper bound (sign -1)."""
        ctx, atom = self.ctx, self.ctx.atoms[a]
        if atom.kind in ("min", "max", "select"):
            cases = [P.plus(ctx.mul(factor, x), rest) for x in atom.args]
            # min is one of its arguments, and at most each of them
            if atom.kind == "select" or (atom.kind == "min") == (sign > 0):
                yield tuple(cases)
            else:
                for c in cases:
                    yield (c,)
            return
        for bound in ctx.bounds(a):
            if bound.upper == (sign > 0):
                continue
            whole = P.divide_exactly(factor, bound.scale)
            if whole is not None:
                yield (P.plus(ctx.mul(whole, bound.limit), rest),)
            else:  # s * p >= factor * limit + s * rest, and p >= 0 iff s * p > -s
                relaxed = P.plus(ctx.mul(factor, bound.limit), ctx.mul(bound.scale, rest))
                yield (ctx.minus_one(P.plus(relaxed, bound.scale)),)
        if P.as_constant(factor) is None:
            end = ctx.atom_interval(a)[0 if sign > 0 else 1]
            if end is not None:
                yield (P.plus(P.scaled(factor, end), rest),)

    def subtract(self, p: Poly, fact: Poly) -> Iterator[tuple[Poly]]:
        """p minus a non-negative multiple of a fact that cancels one monomial of p."""
        for mono, k in fact.items():
            if not mono:
                continue
            for m, v in p.items():
                left = P.divide_mono(m, mono)
                if left is None or v * k < 0:
                    continue
                lo = self.ctx.interval({left: 1})[0]
                if lo is None or lo < 0:
                    continue
                g = gcd(v, k)
                scale = abs(k) // g
                less = P.plus(P.scaled(p, scale), P.times_mono(fact, left, abs(v) // g), -1)
                yield (self.ctx.reduced(P.plus(less, P.constant(scale - 1))),)


def _tightened(p: Poly) -> Poly:
    """g * x + c >= 0 iff x + c // g >= 0."""
    g = 0
    for m, k in p.items():
        if m:
            g = gcd(g, k)
            if g == 1:
                return p
    if g == 0:
        return p
    return {m: k // g for m, k in p.items() if k // g}


def _level(ctx: Normalizer, a: int) -> int:
    """How many definitions stand between an atom and free symbols: what depends on others is replaced before them."""
    found = ctx.levels.get(a)
    if found is None:
        ctx.levels[a] = 0  # cuts cycles of bounds
        below = [x for p in ctx.atoms[a].args for m in p for x in m]
        below += [x for b in ctx.bounds(a) for m in b.limit for x in m]
        found = ctx.levels[a] = 1 + max((_level(ctx, x) for x in set(below)), default=-1)
    return found
