"""ATen functions about gamma: lgamma, digamma, polygamma."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode
from relax_tune.ir.frontend.torch.special.formula import Formula, function

# Lanczos (1964) with g = 7 and nine terms, as in Godfrey's table: relative errors below 1e-14 for x >= 1/2.
LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
STEPS = 12
"""Number of steps by which an argument is raised before its asymptotic series."""
MOST = 20
"""Largest order of polygamma."""


def bernoulli(count: int) -> list[Fraction]:
    """Return the Bernoulli numbers B_2, B_4 ... B_2count."""
    found = [Fraction(1)]
    for m in range(1, 2 * count + 1):
        found.append(-sum(math.comb(m + 1, k) * b for k, b in enumerate(found)) / Fraction(m + 1))
    return found[2::2]


def _turn(x: Formula) -> tuple[Formula, Formula]:
    """Return sin(pi x) and cos(pi x), but for the sign of both, by the distance of x from the next integer."""
    angle = (x - x.rint()) * math.pi
    return angle.sin(), angle.cos()


def _positive_lgamma(x: Formula) -> Formula:
    """Return the logarithm of gamma for x >= 1/2."""
    total = x * 0.0 + LANCZOS[0]
    for k, c in enumerate(LANCZOS[1:]):
        total = total + x.constant(c) / (x + float(k))
    t = x + 6.5
    return (x - 0.5) * (t.log() - 1.0) + (total.log() + (0.5 * math.log(2 * math.pi) - 7.0))


def _lgamma(x: Formula) -> Formula:
    """Return log(abs(gamma(x))): below 1/2 by its reflection, `log(pi / abs(sin(pi x))) - lgamma(1 - x)`."""
    low = x.below(0.5)
    found = _positive_lgamma((1.0 - x).where(low, x))
    found = ((math.pi / _turn(x)[0].abs()).log() - found).where(low, found)
    for zero in (1.0, 2.0):
        found = x.constant(0.0).where(x.equals(zero), found)
    return x.constant(math.inf).where(x.abs().equals(math.inf), found)


def _positive_polygamma(order: int, x: Formula) -> Formula:
    """Return `(-1)^(order + 1) order! * sum over k of (x + k)^-(order + 1)` for x >= 0, by Euler's and Maclaurin's formula.

    For order 0 the sum is that of digamma, `log` in place of the integral."""
    s, y = order + 1, x + float(STEPS + order)
    parts = [1.0 / (x + float(k)) for k in range(STEPS + order)]
    total = _power(parts[0], s)
    for p in parts[1:]:
        total = total + _power(p, s)
    inverse = 1.0 / y
    square = inverse * inverse
    factors, rising = [], Fraction(s)
    for k, b in enumerate(bernoulli(10), 1):
        factors.append(float(b * rising / math.factorial(2 * k)))
        rising *= (s + 2 * k - 1) * (s + 2 * k)
    tail = square.polynomial(factors[::-1])
    rest = tail * square + inverse * 0.5
    if order == 0:
        return y.log() - rest - total
    whole = _power(inverse, order)
    total = total + (whole * (1 / order) + whole * rest)
    return total * float((-1) ** (order + 1) * math.factorial(order))


def _power(x: Formula, exponent: int) -> Formula:
    """Return a power with an exponent of at least 1 by products."""
    half = x if exponent == 1 else _power(x, exponent // 2)
    if exponent == 1:
        return x
    return half * half * x if exponent % 2 else half * half


def _cotangents(order: int) -> list[int]:
    """Return the polynomial P with `d^order/dx^order cot(x) = P(cot(x))`, the coefficient of the highest power first."""
    rising = [0, 1]  # by ascending powers
    for _ in range(order):
        slope = [k * c for k, c in enumerate(rising)][1:]
        rising = [-(a + b) for a, b in zip([*slope, 0, 0], [0, 0, *slope])]
    return rising[::-1]


def polygamma(order: int, x: Formula) -> Formula:
    """Return the derivative of digamma of an order; below 0 by its reflection, a polynomial of cot(pi x)."""
    low = x.below(0.0)
    found = _positive_polygamma(order, (1.0 - x).where(low, x))
    sine, cosine = _turn(x)
    mirrored = (cosine / sine).polynomial([float(c) * -(math.pi ** (order + 1)) for c in _cotangents(order)])
    mirrored = mirrored + found if order % 2 == 0 else mirrored - found
    return mirrored.where(low, found)


def _digamma(x: Formula) -> Formula:
    """Return digamma: NaN at the poles below 0, and at 0 infinite with the sign of -x."""
    pole = x.constant(math.nan).where(x.below(0.0), -1.0 / x)
    return pole.where(x.equals(x.rint()), polygamma(0, x)).where(x.at_most(0.0), polygamma(0, x))


def _at_ends(order: int, x: Formula) -> Formula:
    """Return polygamma with torch's values at the infinities: from order 2 on NaN, and that of a pole."""
    found = polygamma(order, x)
    if order < 2:
        return found
    found = x.constant(math.nan).where(x.equals(math.inf), found)
    return x.constant(math.inf if order % 2 else -math.inf).where(x.equals(-math.inf), found)


def _polygamma(w: Writer, n: TorchNode) -> ImportedValue:
    order = n.number(0, "n")
    if not 0 <= order <= MOST:
        raise n.refuse(f"wanted an order of 0 to {MOST}, found {order}; compute it outside")
    compute = _digamma if order == 0 else lambda x: _at_ends(order, x)
    return function(compute, 1)(w, n)  # type: ignore[return-value]


HANDLERS: Mapping[str, Handler] = {
    "aten.lgamma.default": function(_lgamma), "aten.digamma.default": function(_digamma),
    "aten.polygamma.default": _polygamma,
}  # fmt: skip
