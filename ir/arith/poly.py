"""Polynomials with integer coefficients over numbered atoms.

A monomial is a sorted tuple of atom numbers (repeated for powers, `()` for the constant term); a polynomial maps monomials to
non-zero coefficients. Polynomials are never changed once built. Numbers are given out in order of first appearance by the
normaliser, so every order below is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

Mono = tuple[int, ...]
Poly = dict[Mono, int]
Key = frozenset[tuple[Mono, int]]

ONE: Mono = ()
MAX_TERMS = 200


def constant(value: int) -> Poly:
    return {ONE: value} if value else {}


def key(p: Poly) -> Key:
    """A hashable value equal for equal polynomials."""
    return frozenset(p.items())


def value_of(p: Poly) -> int | None:
    """The value of a constant polynomial."""
    if not p:
        return 0
    return p[ONE] if len(p) == 1 and ONE in p else None


def combine(a: Poly, b: Poly, scale: int = 1) -> Poly:
    """a + scale * b."""
    out = dict(a)
    for m, k in b.items():
        total = out.get(m, 0) + scale * k
        if total:
            out[m] = total
        else:
            del out[m]
    return out


def scaled(p: Poly, k: int) -> Poly:
    return {m: v * k for m, v in p.items()} if k else {}


def times_mono(p: Poly, mono: Mono, k: int = 1) -> Poly:
    """p * k * mono."""
    if not mono:
        return p if k == 1 else scaled(p, k)
    return {tuple(sorted(m + mono)): v * k for m, v in p.items()}


def product(a: Poly, b: Poly) -> Poly:
    if len(b) == 1:
        ((mono, k),) = b.items()
        return times_mono(a, mono, k)
    if len(a) == 1:
        ((mono, k),) = a.items()
        return times_mono(b, mono, k)
    out: Poly = {}
    for mono, k in a.items():
        for m, v in b.items():
            joined = tuple(sorted(m + mono))
            total = out.get(joined, 0) + v * k
            if total:
                out[joined] = total
            else:
                del out[joined]
    return out


def divide_mono(m: Mono, d: Mono) -> Mono | None:
    """m / d, or None when d does not divide m."""
    if not d:
        return m
    if len(d) > len(m):
        return None
    rest = list(m)
    for a in d:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest)


def common_mono(monos: Iterable[Mono]) -> Mono:
    """The greatest monomial dividing all."""
    shared: list[int] | None = None
    for m in monos:
        if shared is None:
            shared = list(m)
            continue
        left = list(m)
        kept = []
        for a in shared:
            if a in left:
                left.remove(a)
                kept.append(a)
        shared = kept
        if not shared:
            return ()
    return tuple(shared or ())


def content(p: Poly) -> int:
    """The greatest common divisor of the coefficients (0 for the zero polynomial)."""
    g = 0
    for k in p.values():
        g = gcd(g, k)
        if g == 1:
            break
    return g


def extract(p: Poly, mono: Mono) -> tuple[Poly, Poly]:
    """(C, R) with p == C * mono + R: the monomials that mono divides, and the others."""
    inside: Poly = {}
    outside: Poly = {}
    for m, k in p.items():
        rest = divide_mono(m, mono)
        if rest is None:
            outside[m] = k
        else:
            inside[rest] = k
    return inside, outside


def lead(p: Poly) -> Mono:
    """The monomial of highest degree; among those the one of the earliest atoms."""
    return min(p, key=lambda m: (-len(m), m))


def _residue(k: int, c: int) -> int:
    """k modulo c with the sign of k: coefficients smaller than c stay as they are."""
    return k % c if k >= 0 else -(-k % c)


def divide(p: Poly, d: Poly) -> tuple[Poly, Poly]:
    """(A, B) with p == d * A + B. B is zero when d divides p, and small otherwise: coefficients reduced keeping
    their sign, the constant term to [0, c) when d is the constant c > 0."""
    number = value_of(d)
    if number is not None:
        quotient: Poly = {}
        rest: Poly = {}
        for m, k in p.items():
            r = _residue(k, abs(number)) if m else k % abs(number)
            if r:
                rest[m] = r
            if k != r:
                quotient[m] = (k - r) // number
        return quotient, rest
    head = lead(d)
    k0 = d[head]
    quotient, rest = {}, {}
    work = dict(p)
    while work:
        m = lead(work)
        k = work[m]
        q = divide_mono(m, head)
        part = 0 if q is None else (k - _residue(k, abs(k0))) // k0
        if part and q is not None:
            quotient[q] = quotient.get(q, 0) + part
            work = combine(work, times_mono(d, q, part), -1)
        if m in work:
            rest[m] = work.pop(m)
        if len(work) > MAX_TERMS:
            return {}, p
    return quotient, rest


def divide_exactly(p: Poly, d: Poly) -> Poly | None:
    """p / d when the remainder is zero."""
    quotient, rest = divide(p, d)
    return None if rest else quotient
