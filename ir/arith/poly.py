"""Polynomials with integer coefficients over atoms of any kind; sums, products and multiples take rational ones too.

A monomial is a sorted tuple of atoms (repeated for powers, `()` for the constant term). A polynomial maps monomials to
non-zero coefficients, and is never changed once built. The normaliser's atoms are numbers, given out in order of first
appearance, so every order below is deterministic. The lowering's atoms are expressions, ordered by a rank.

Tests: `tests/ir/arith/test_random_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from math import gcd
from typing import TypeVar

from relax_tune.ir.core import intervals
from relax_tune.ir.core.intervals import UNBOUNDED, Interval

A = TypeVar("A", bound=Hashable)
K = TypeVar("K", int, Fraction)
PolyOf = dict[tuple[A, ...], K]
PolyOver = PolyOf[A, int]
Mono = tuple[int, ...]
Poly = PolyOver[int]
Key = frozenset[tuple[Mono, int]]

ONE: tuple[()] = ()
MAX_TERMS = 200


def constant(value: K) -> PolyOf[A, K]:
    """Return a constant polynomial."""
    return {ONE: value} if value else {}


def key(p: Poly) -> Key:
    """Return a hashable value that is equal for equal polynomials."""
    return frozenset(p.items())


def as_constant(p: PolyOf[A, K]) -> K | int | None:
    """Return the value of a constant polynomial, None for others."""
    if not p:
        return 0
    return p.get(ONE) if len(p) == 1 else None


def plus(a: PolyOf[A, K], b: PolyOf[A, K], scale: int = 1) -> PolyOf[A, K]:
    """Return a + scale * b."""
    out = dict(a)
    for m, k in b.items():
        total = out.get(m, 0) + scale * k
        if total:
            out[m] = total
        else:
            out.pop(m, None)
    return out


def bounds(p: PolyOver[A], of_atom: Callable[[A], Interval]) -> Interval:
    """Return a constant interval of a polynomial, from the intervals of its atoms."""
    lo: int | None = 0
    hi: int | None = 0
    for mono, k in p.items():
        least: int | None = 1
        most: int | None = 1
        if mono:
            least, most = of_atom(mono[0])
            for a in mono[1:]:
                least, most = intervals.mul((least, most), of_atom(a))
        if k < 0:
            least, most = most, least
        lo = None if lo is None or least is None else lo + k * least
        hi = None if hi is None or most is None else hi + k * most
        if lo is None and hi is None:
            return UNBOUNDED
    return lo, hi


def scaled(p: PolyOf[A, K], k: K) -> PolyOf[A, K]:
    return {m: v * k for m, v in p.items()} if k else {}


def minus_one(p: PolyOver[A]) -> PolyOver[A]:
    return plus(p, constant(1), -1)


def times_mono(p: Poly, mono: Mono, k: int = 1) -> Poly:
    """Return p * k * mono."""
    if not mono:
        return p if k == 1 else scaled(p, k)
    return {tuple(sorted(m + mono)): v * k for m, v in p.items()}


def product(a: PolyOf[A, K], b: PolyOf[A, K], rank: Callable[[A], int] | None = None) -> PolyOf[A, K]:
    """Return a * b.

    Args:
        rank: order of atoms in a monomial; None: their natural order.
    """
    for p, factor in ((a, as_constant(b)), (b, as_constant(a))):
        if factor is not None:
            return {m: v * factor for m, v in p.items()} if factor else {}
    out: PolyOf[A, K] = {}
    for mono, k in a.items():
        for m, v in b.items():
            joined = mono + m if not mono or not m else tuple(sorted(mono + m, key=rank))  # type: ignore[type-var,arg-type]
            total = out.get(joined, 0) + v * k
            if total:
                out[joined] = total
            else:
                del out[joined]
    return out


def divide_mono(m: tuple[A, ...], d: tuple[A, ...]) -> tuple[A, ...] | None:
    """Return m / d, None when d does not divide m."""
    if not d:
        return m
    if len(d) > len(m):
        return None
    # Monomials are multisets: a * a divides a * a * b, but not a * b.
    rest = list(m)
    for a in d:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest)


def common_mono(monos: Iterable[tuple[A, ...]]) -> tuple[A, ...]:
    """Return the greatest common divisor of monomials."""
    shared: list[A] | None = None
    for m in monos:
        if shared is None:
            shared = list(m)
            continue
        left = list(m)
        common = []
        for a in shared:
            if a in left:
                left.remove(a)
                common.append(a)
        shared = common
        if not shared:
            return ()
    return tuple(shared or ())


def content(p: PolyOver[A]) -> int:
    """Return the greatest common divisor of the coefficients (0 for the zero polynomial)."""
    g = 0
    for k in p.values():
        g = gcd(g, k)
        if g == 1:
            break
    return g


def extract(p: Poly, mono: Mono) -> tuple[Poly, Poly]:
    """Return (C, R) with p == C * mono + R, where mono divides no monomial of R."""
    inside: Poly = {}
    outside: Poly = {}
    for m, k in p.items():
        rest = divide_mono(m, mono)
        if rest is None:
            outside[m] = k
        else:
            inside[rest] = k
    return inside, outside


def divide_by_term(p: PolyOver[A], mono: tuple[A, ...], k: int) -> tuple[PolyOver[A], PolyOver[A]]:
    """Return (A, B) with p == k * mono * A + B for k > 0.

    A term that the divisor does not divide stays whole in B, but a constant is split."""
    quotient: PolyOver[A] = {}
    rest: PolyOver[A] = {}
    for m, v in p.items():
        left = divide_mono(m, mono)
        if left is None or (m and v % k):
            rest[m] = v
            continue
        if v // k:
            quotient[left] = v // k
        if v % k:
            rest[m] = v % k
    return quotient, rest


def lead(p: Poly) -> Mono:
    """Return the monomial of highest degree, of earliest atoms among equals."""
    return min(p, key=lambda m: (-len(m), m))


def _residue(k: int, c: int) -> int:
    """Return k modulo c with the sign of k: coefficients smaller than c stay as they are."""
    return k % c if k >= 0 else -(-k % c)


def divide_by_number(p: PolyOver[A], d: int) -> tuple[PolyOver[A], PolyOver[A]]:
    """Return (A, B) with p == d * A + B, the coefficients of B as `divide` reduces them."""
    quotient: PolyOver[A] = {}
    rest: PolyOver[A] = {}
    for m, k in p.items():
        r = _residue(k, abs(d)) if m else k % abs(d)
        if r:
            rest[m] = r
        if k != r:
            quotient[m] = (k - r) // d
    return quotient, rest


def divide(p: Poly, d: Poly) -> tuple[Poly, Poly]:
    """Return (A, B) with p == d * A + B. B is zero when d divides p.

    Otherwise the coefficients of B are reduced keeping their sign, its constant term to [0, c) for a constant d = c > 0."""
    number = as_constant(d)
    if number is not None:
        return divide_by_number(p, number)
    head = lead(d)
    k0 = d[head]
    quotient: Poly = {}
    rest: Poly = {}
    work = dict(p)
    while work:
        m = lead(work)
        k = work[m]
        q = divide_mono(m, head)
        part = 0 if q is None else (k - _residue(k, abs(k0))) // k0
        if part and q is not None:
            quotient[q] = quotient.get(q, 0) + part
            work = plus(work, times_mono(d, q, part), -1)
        # What the divisor leaves of the leading term is final. Moving it to the rest makes the leading monomial
        # smaller with every pass, so the division ends.
        if m in work:
            rest[m] = work.pop(m)
        # Long division by a sum may lengthen the dividend at every step.
        if len(work) > MAX_TERMS:
            return {}, p
    return quotient, rest


def divide_exactly(p: Poly, d: Poly) -> Poly | None:
    """Return p / d, None when a remainder is left."""
    quotient, rest = divide(p, d)
    return None if rest else quotient
