"""The proof search: p >= 0 for every assignment that the env allows.

Each step replaces an atom by a bound of it, so that the new polynomial is a lower bound of the old one, and constant intervals
close the search. A step can only lose precision, never truth: without a proof the answer is unknown.

Tests: `tests/ir/arith/test_strength.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import opposite
from relax_tune.ir.arith.counterexamples import Samples
from relax_tune.ir.arith.normal import Normalizer
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core.expr import Expr

# Polynomials tried per proof, by nesting depth (a nested proof decides the sign of a factor), and per question.
FUEL = (40, 12, 4)
TOTAL_FUEL = 1000
MAX_STEPS = 10


class Prover:
    """Proofs of p >= 0 within one question, each polynomial tried once at each depth of nesting."""

    __slots__ = ("_levels", "_proved", "_samples", "ctx", "depth", "spent")

    def __init__(self, ctx: Normalizer) -> None:
        self.ctx = ctx
        self.depth = 0
        self.spent = 0
        self._proved: dict[tuple[int, P.Key], bool] = {}
        self._levels: dict[int, int] = {}
        self._samples: Samples | None = None

    def nonneg(self, p: Poly) -> bool:
        """Prove p >= 0 for every assignment the env allows; return False without a proof."""
        lo, hi = self.ctx.interval(p)
        if lo is not None and lo >= 0:
            return True
        # Interval arithmetic is exact for a constant, so a search could not add to its answer.
        if (hi is not None and hi < 0) or self.depth >= len(FUEL) or P.as_constant(p) is not None:
            return False
        key = (self.depth, P.key(p))
        proved = self._proved.get(key)
        if proved is None:
            self.depth += 1
            try:
                proved = _Search(self, FUEL[self.depth - 1]).holds(p, 0)
                if not proved and self.spent >= TOTAL_FUEL:  # a claim that a fact makes needs no fuel
                    proved = any(self._follows(p, fact) for fact in self.ctx.inequalities)
                self._proved[key] = proved
            finally:
                self.depth -= 1
        return proved

    def _follows(self, p: Poly, fact: Poly) -> bool:
        """Return whether p is the fact plus a number that is never negative."""
        lo = self.ctx.interval(P.plus(p, fact, -1))[0]
        return lo is not None and lo >= 0

    def refuted(self, p: Poly) -> bool:
        """Look for an assignment with p < 0 among the samples."""
        if self._samples is None:
            if not self.ctx.ready:  # the facts are not all read
                return False
            self._samples = Samples(self.ctx)
        return self._samples.refute(p)

    def level(self, a: int) -> int:
        """Count the definitions between an atom and free symbols. Relaxations replace atoms of high levels first."""
        level = self._levels.get(a)
        if level is None:
            self._levels[a] = 0  # cuts cycles of bounds
            below = [x for p in self.ctx.atoms[a].args for m in p for x in m]
            below += [x for b in self.ctx.bounds(a) for m in b.limit for x in m]
            level = self._levels[a] = 1 + max((self.level(x) for x in set(below)), default=-1)
        return level


class _Search:
    """Depth-first search over relaxations, with a budget. No polynomial is tried twice."""

    def __init__(self, prover: Prover, fuel: int) -> None:
        self.prover, self.ctx = prover, prover.ctx
        self.fuel = fuel
        self.tried: set[P.Key] = set()

    def holds(self, p: Poly, step: int) -> bool:
        p = _tightened(p)
        lo, hi = self.ctx.interval(p)
        if lo is not None and lo >= 0:
            return True
        if (hi is not None and hi < 0) or step >= MAX_STEPS or len(p) > P.MAX_TERMS or self.prover.refuted(p):
            return False
        key = P.key(p)
        if key in self.tried or self.fuel <= 0 or self.prover.spent >= TOTAL_FUEL:
            return False
        # Entered before the relaxations, so that a cycle of bounds that leads back to p ends.
        self.tried.add(key)
        self.fuel -= 1
        self.prover.spent += 1
        # All branches share one `fuel`, and a failed branch does not give it back. So the most promising relaxations
        # must come first.
        return any(all(self.holds(q, step + 1) for q in cases) for cases in self.relaxations(p))

    def relaxations(self, p: Poly) -> Iterator[tuple[Poly, ...]]:
        """Yield alternatives: tuples of polynomials that imply p >= 0 when all are >= 0."""
        for fact in self.ctx.inequalities:  # the claim may be little more than a fact
            for (q,) in self.subtract(p, fact):
                lo = self.ctx.interval(q)[0]
                if lo is not None and lo >= 0:
                    yield (q,)
        # Atoms defined by others first: their bounds bring in the atoms below, where terms cancel.
        atoms = sorted({a for m in p for a in m}, key=lambda a: (-self.prover.level(a), a))
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
            if self.prover.nonneg(p):
                return 1
            if self.prover.nonneg(P.scaled(p, -1)):
                return -1
        return 0

    def replace(self, a: int, factor: Poly, rest: Poly, sign: int) -> Iterator[tuple[Poly, ...]]:
        """Replace a in factor * a + rest by a lower bound (sign 1) or an upper bound (sign -1)."""
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
                yield (P.minus_one(P.plus(relaxed, bound.scale)),)
        if P.as_constant(factor) is None:
            end = ctx.atom_interval(a)[0 if sign > 0 else 1]
            if end is not None:
                yield (P.plus(P.scaled(factor, end), rest),)

    def subtract(self, p: Poly, fact: Poly) -> Iterator[tuple[Poly]]:
        """Subtract from p a non-negative multiple of a fact that cancels one monomial."""
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
                # the smallest multiples at which the monomials cancel
                g = gcd(v, k)
                scale = abs(k) // g
                less = P.plus(P.scaled(p, scale), P.times_mono(fact, left, abs(v) // g), -1)
                # scale * p - multiple >= -(scale - 1) suffices, since p is an integer
                yield (self.ctx.reduced(P.plus(less, P.constant(scale - 1))),)


def _tightened(p: Poly) -> Poly:
    """Tighten an inequality: g * x + c >= 0 iff x + c // g >= 0."""
    g = 0
    for m, k in p.items():
        if m:
            g = gcd(g, k)
            if g == 1:
                return p
    if g == 0:
        return p
    return {m: k // g for m, k in p.items() if k // g}


@dataclass(slots=True, eq=False)
class Question(Normalizer):
    """Normal forms, proofs and decisions under one env, for one question about expressions of one dtype."""

    prover: Prover = field(init=False)

    def __post_init__(self) -> None:
        self.prover = Prover(self)

    def nonneg(self, p: Poly) -> bool:
        """Prove p >= 0 for every assignment the env allows."""
        return self.prover.nonneg(p)

    def assumed(self, cond: Expr) -> Proof:
        """Decide a condition that is a fact, or whose opposite is one."""
        facts = self.env.facts
        if cond in facts:
            return Proof.YES
        return Proof.NO if facts and opposite(cond) in facts else Proof.UNKNOWN
