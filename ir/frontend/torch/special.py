"""ATen special functions, by series and rational functions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value

Operand = Union["Formula", float]


def _unary(write: Callable[[Writer, Value], Value]) -> Callable[[Formula], Formula]:
    return lambda x: x.of(write(x.w, x.value))


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A tensor of float64 in a formula."""

    w: Writer
    value: Value

    def of(self, value: Value) -> Formula:
        return Formula(self.w, value)

    def constant(self, number: float) -> Formula:
        return self.of(self.w.literal(number, f64))

    def tensor(self, other: Operand) -> Value:
        return other.value if isinstance(other, Formula) else self.w.literal(other, f64)

    def factor(self, other: Operand) -> Value | float:
        """Return an operand of a sum or product: a finite number is an attribute of the operator."""
        return other if isinstance(other, (int, float)) and math.isfinite(other) else self.tensor(other)

    def __add__(self, other: Operand) -> Formula:
        return self.of(self.w.add(self.value, self.factor(other)))

    def __mul__(self, other: Operand) -> Formula:
        return self.of(self.w.mul(self.value, self.factor(other)))

    def __sub__(self, other: Operand) -> Formula:
        return self.of(self.w.sub(self.value, other.value)) if isinstance(other, Formula) else self + -other

    def __rsub__(self, other: float) -> Formula:
        return self.of(self.w.sub(other, self.value))

    def __truediv__(self, other: Formula) -> Formula:
        return self.of(self.w.div(self.value, other.value))

    def __rtruediv__(self, other: float) -> Formula:
        return self.of(self.w.div(self.tensor(other), self.value))

    def __neg__(self) -> Formula:
        return self * -1.0

    exp, log, sqrt, erf, abs = map(_unary, (Writer.exp, Writer.log, Writer.sqrt, Writer.erf, Writer.abs))
    floor, rint, sin, cos = map(_unary, (Writer.floor, Writer.rint, Writer.sin, Writer.cos))

    def power(self, exponent: float) -> Formula:
        return self.of(self.w.power(self.value, exponent))

    def below(self, other: Operand) -> Value:
        return self.w.less(self.value, self.tensor(other))

    def at_most(self, other: Operand) -> Value:
        return self.w.less_equal(self.value, self.tensor(other))

    def equals(self, other: Operand) -> Value:
        return self.w.equal(self.value, self.tensor(other))

    def where(self, cond: Value, other: Operand) -> Formula:
        """Return this where `cond` is true, else the other."""
        return self.of(self.w.where(cond, self.value, self.tensor(other)))

    def polynomial(self, coefficients: Sequence[float]) -> Formula:
        """Return a polynomial by Horner's rule, the coefficient of the highest power first."""
        value = self * coefficients[0] + coefficients[1]
        for c in coefficients[2:]:
            value = value * self + c
        return value


def function(compute: Callable[[Formula], Formula], position: int = 0) -> Handler:
    """Make a handler of a function of one tensor, computed in float64 and rounded once."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        y = compute(Formula(w, as_value(w, n.item(position), f64)))
        return w.of(w.cast(y.value, n.dtype))

    return handler


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
    numbers = [Fraction(1)]
    for m in range(1, 2 * count + 1):
        numbers.append(-sum(math.comb(m + 1, k) * b for k, b in enumerate(numbers)) / Fraction(m + 1))
    return numbers[2::2]


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


def lgamma(x: Formula) -> Formula:
    """Return log(abs(gamma(x))): below 1/2 by its reflection, `log(pi / abs(sin(pi x))) - lgamma(1 - x)`."""
    low = x.below(0.5)
    y = _positive_lgamma((1.0 - x).where(low, x))
    y = ((math.pi / _turn(x)[0].abs()).log() - y).where(low, y)
    for zero in (1.0, 2.0):
        y = x.constant(0.0).where(x.equals(zero), y)
    return x.constant(math.inf).where(x.abs().equals(math.inf), y)


def _positive_polygamma(order: int, x: Formula) -> Formula:
    """Return `(-1)^(order + 1) order! * sum over k of (x + k)^-(order + 1)` for x >= 0, by Euler's and Maclaurin's formula.

    For order 0 this is digamma, with `log` in place of the integral."""
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
    y = _positive_polygamma(order, (1.0 - x).where(low, x))
    sine, cosine = _turn(x)
    mirrored = (cosine / sine).polynomial([float(c) * -(math.pi ** (order + 1)) for c in _cotangents(order)])
    mirrored = mirrored + y if order % 2 == 0 else mirrored - y
    return mirrored.where(low, y)


def digamma(x: Formula) -> Formula:
    """Return digamma: NaN at the poles below 0, and at 0 infinite with the sign of -x."""
    pole = x.constant(math.nan).where(x.below(0.0), -1.0 / x)
    return pole.where(x.equals(x.rint()), polygamma(0, x)).where(x.at_most(0.0), polygamma(0, x))


def _at_ends(order: int, x: Formula) -> Formula:
    """Return polygamma with torch's values at the infinities: from order 2 on NaN at +inf, and the value of a pole at -inf."""
    y = polygamma(order, x)
    if order < 2:
        return y
    y = x.constant(math.nan).where(x.equals(math.inf), y)
    return x.constant(math.inf if order % 2 else -math.inf).where(x.equals(-math.inf), y)


def _polygamma(w: Writer, n: TorchNode) -> ImportedValue:
    order = n.number(0, "n")
    if not 0 <= order <= MOST:
        raise n.refuse(f"expected an order of 0 to {MOST}, got {order}; compute it outside")
    compute = digamma if order == 0 else lambda x: _at_ends(order, x)
    return function(compute, 1)(w, n)  # type: ignore[return-value]


ROOT = math.sqrt(math.pi)


# exp(x^2) erfc(x) as quotients of polynomials (Cody 1969), of x for 1/2 to 4 and of 1 / x^2 above.
MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 66.1191906371416295, 298.635138197400131,
     881.952221241769090, 1712.04761263407058, 2051.07837782607147, 1230.33935479799725),
    (1.0, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019, 3290.79923573345963,
     4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)  # fmt: skip


FAR = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3),
)  # fmt: skip


# First digits of the inverse of erf where |y| <= 1/2 (Giles 2010), a polynomial of -log(1 - y^2) - 5/2.
NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip


def _positive_erfcx(x: Formula) -> Formula:
    """Return exp(x^2) erfc(x) for x >= 1/2."""
    middle = x.of(x.w.minimum(x.value, x.constant(4.0).value))
    far = x.of(x.w.maximum(x.value, x.constant(4.0).value))
    square = 1.0 / (far * far)
    tail = square * square.polynomial(FAR[0]) / square.polynomial(FAR[1])
    near = middle.polynomial(MIDDLE[0]) / middle.polynomial(MIDDLE[1])
    return near.where(x.at_most(4.0), (1 / ROOT - tail) / far)


def _positive(x: Formula) -> Formula:
    return x.of(x.w.maximum(x.value, x.constant(0.5).value))


def erfc(x: Formula) -> Formula:
    size = x.abs()
    tail = (-(size * size)).exp() * _positive_erfcx(_positive(size))
    tail = (2.0 - tail).where(x.below(0.0), tail)
    return (1.0 - x.erf()).where(size.at_most(0.5), tail)


def erfcx(x: Formula) -> Formula:
    size = x.abs()
    square = (x * x).exp()
    tail = _positive_erfcx(_positive(size))
    tail = (square * 2.0 - tail).where(x.below(0.0), tail)
    return (square * (1.0 - x.erf())).where(size.at_most(0.5), tail)


def _near_erfinv(y: Formula) -> Formula:
    """Return the inverse of erf for |y| <= 1/2, with two steps of Halley's method."""
    x = y * (-(1.0 - y * y).log() - 2.5).polynomial(NEAR)
    for _ in range(2):
        step = (x.erf() - y) * (x * x).exp() * (ROOT / 2)
        x = x - step / (x * step + 1.0)
    return x


def _far_erfcinv(q: Formula) -> Formula:
    """Return the inverse of erfc for q in (0, 1/2]: Newton's method on log(erfc(x)), which is concave, from above.

    No step falls below the root, which is above 0.47, where the quotient for 1/2 to 4 still holds."""
    target = q.log()
    x = (-target).sqrt()
    for _ in range(5):
        scaled = _positive_erfcx(x)
        x = x + (scaled.log() - x * x - target) * scaled * (ROOT / 2)
    return q.constant(math.inf).where(q.equals(0.0), x)


def erfinv(y: Formula) -> Formula:
    size = y.abs()
    far = _far_erfcinv(1.0 - size)
    return _near_erfinv(y).where(size.at_most(0.5), (-far).where(y.below(0.0), far))


def ndtri(p: Formula) -> Formula:
    """Return the inverse of the normal distribution, by the inverses of erf in the middle and of erfc outside."""
    upper = 1.0 - p
    low = p.below(0.5)
    far = _far_erfcinv(p.where(low, upper) * 2.0)
    middle = _near_erfinv(p * 2.0 - 1.0)
    inside = (p - 0.5).abs().at_most(0.25)
    return middle.where(inside, (-far).where(low, far)) * math.sqrt(2)


BORDER = 20.0
"""Argument up to which the power series is used, and from which the asymptotic one (Abramowitz and Stegun, 9.6.10 and 9.7.1)."""


TERMS = 42


FAR_TERMS = 30


def _scaled_bessel(order: int, x: Formula) -> tuple[Formula, Formula]:
    """Return the function of |x| up to the border, and that times exp(-|x|) beyond."""
    size = x.abs()
    near = size.of(size.w.minimum(size.value, size.constant(BORDER).value))
    far = size.of(size.w.maximum(size.value, size.constant(BORDER).value))
    quarter = near * near * 0.25
    series = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(TERMS)]
    low = quarter.polynomial(series[::-1])
    low = low * near * 0.5 if order else low
    terms = [1.0]
    for k in range(1, FAR_TERMS):
        terms.append(-terms[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    inverse = 1.0 / far
    return low, inverse.polynomial(terms[::-1]) * (inverse * (1 / (2 * math.pi))).sqrt()


def _signed(order: int, x: Formula, y: Formula) -> Formula:
    return (-y).where(x.below(0.0), y) if order else y


def bessel_i(order: int, x: Formula) -> Formula:
    size = x.abs()
    low, high = _scaled_bessel(order, x)
    # exp overflows before the function does
    half = (size * 0.5).exp()
    return _signed(order, x, low.where(size.at_most(BORDER), high * half * half))


def scaled_bessel_i(order: int, x: Formula) -> Formula:
    size = x.abs()
    low, high = _scaled_bessel(order, x)
    return _signed(order, x, (low * (-size).exp()).where(size.at_most(BORDER), high))


def _spherical(x: Formula) -> Formula:
    """Return sin(x) / x, 1 at 0 and 0 at the infinities."""
    y = x.constant(1.0).where(x.equals(0.0), x.sin() / x)
    return x.constant(0.0).where(x.abs().equals(math.inf), y)


HANDLERS: Mapping[str, Handler] = {
    "aten.lgamma.default": function(lgamma), "aten.digamma.default": function(digamma),
    "aten.polygamma.default": _polygamma, "aten.erfc.default": function(erfc),
    "aten.special_erfcx.default": function(erfcx), "aten.erfinv.default": function(erfinv),
    "aten.special_ndtri.default": function(ndtri), "aten.i0.default": function(lambda x: bessel_i(0, x)),
    "aten.special_i0e.default": function(lambda x: scaled_bessel_i(0, x)),
    "aten.special_i1.default": function(lambda x: bessel_i(1, x)),
    "aten.special_i1e.default": function(lambda x: scaled_bessel_i(1, x)),
    "aten.special_spherical_bessel_j0.default": function(_spherical),
    "aten.special_modified_bessel_i0.default": function(lambda x: bessel_i(0, x)),
    "aten.special_modified_bessel_i1.default": function(lambda x: bessel_i(1, x)),
}  # fmt: skip
