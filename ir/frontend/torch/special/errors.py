"""ATen functions about the normal distribution: erfc, erfcx, erfinv, ndtri."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.ir.frontend.torch.node import Handler
from relax_tune.ir.frontend.torch.special.formula import Formula, function
from relax_tune.ir.op.math.elementwise import Maximum, Minimum

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
    middle = x.of(x.w.emit(Minimum(), x.value, x.constant(4.0).value))
    far = x.of(x.w.emit(Maximum(), x.value, x.constant(4.0).value))
    square = 1.0 / (far * far)
    tail = square * square.polynomial(FAR[0]) / square.polynomial(FAR[1])
    near = middle.polynomial(MIDDLE[0]) / middle.polynomial(MIDDLE[1])
    return near.where(x.at_most(4.0), (1 / ROOT - tail) / far)


def _positive(x: Formula) -> Formula:
    return x.of(x.w.emit(Maximum(), x.value, x.constant(0.5).value))


def _erfc(x: Formula) -> Formula:
    size = x.abs()
    tail = (-(size * size)).exp() * _positive_erfcx(_positive(size))
    tail = (2.0 - tail).where(x.below(0.0), tail)
    return (1.0 - x.erf()).where(size.at_most(0.5), tail)


def _erfcx(x: Formula) -> Formula:
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
    wanted = q.log()
    x = (-wanted).sqrt()
    for _ in range(5):
        scaled = _positive_erfcx(x)
        x = x + (scaled.log() - x * x - wanted) * scaled * (ROOT / 2)
    return q.constant(math.inf).where(q.equals(0.0), x)


def _erfinv(y: Formula) -> Formula:
    size = y.abs()
    far = _far_erfcinv(1.0 - size)
    return _near_erfinv(y).where(size.at_most(0.5), (-far).where(y.below(0.0), far))


def _ndtri(p: Formula) -> Formula:
    """Return the inverse of the normal distribution, by that of erf in the middle and that of erfc outside."""
    upper = 1.0 - p
    low = p.below(0.5)
    far = _far_erfcinv(p.where(low, upper) * 2.0)
    middle = _near_erfinv(p * 2.0 - 1.0)
    inside = (p - 0.5).abs().at_most(0.25)
    return middle.where(inside, (-far).where(low, far)) * math.sqrt(2)


HANDLERS: Mapping[str, Handler] = {
    "aten.erfc.default": function(_erfc), "aten.special_erfcx.default": function(_erfcx),
    "aten.erfinv.default": function(_erfinv), "aten.special_ndtri.default": function(_ndtri),
}  # fmt: skip
