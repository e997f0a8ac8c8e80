"""ATen Bessel functions: modified ones of the first kind, the same times exp(-|x|), and a spherical one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.ir.frontend.torch.node import Handler
from relax_tune.ir.frontend.torch.special.formula import Formula, function
from relax_tune.ir.op.math.elementwise import Maximum, Minimum

BORDER = 20.0
"""Argument up to which the power series is used, and from which the asymptotic one (Abramowitz and Stegun, 9.6.10 and 9.7.1)."""
TERMS = 42
FAR_TERMS = 30


def _scaled(order: int, x: Formula) -> tuple[Formula, Formula]:
    """Return the function of |x| up to the border, and that times exp(-|x|) beyond."""
    size = x.abs()
    near = size.of(size.w.emit(Minimum(), size.value, size.constant(BORDER).value))
    far = size.of(size.w.emit(Maximum(), size.value, size.constant(BORDER).value))
    quarter = near * near * 0.25
    series = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(TERMS)]
    low = quarter.polynomial(series[::-1])
    low = low * near * 0.5 if order else low
    terms = [1.0]
    for k in range(1, FAR_TERMS):
        terms.append(-terms[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    inverse = 1.0 / far
    return low, inverse.polynomial(terms[::-1]) * (inverse * (1 / (2 * math.pi))).sqrt()


def _signed(order: int, x: Formula, found: Formula) -> Formula:
    return (-found).where(x.below(0.0), found) if order else found


def _plain(order: int, x: Formula) -> Formula:
    size = x.abs()
    low, high = _scaled(order, x)
    # exp overflows before the function does
    half = (size * 0.5).exp()
    return _signed(order, x, low.where(size.at_most(BORDER), high * half * half))


def _reduced(order: int, x: Formula) -> Formula:
    size = x.abs()
    low, high = _scaled(order, x)
    return _signed(order, x, (low * (-size).exp()).where(size.at_most(BORDER), high))


def _spherical(x: Formula) -> Formula:
    """Return sin(x) / x, 1 at 0 and 0 at the infinities."""
    found = x.constant(1.0).where(x.equals(0.0), x.sin() / x)
    return x.constant(0.0).where(x.abs().equals(math.inf), found)


HANDLERS: Mapping[str, Handler] = {
    "aten.i0.default": function(lambda x: _plain(0, x)), "aten.special_i0e.default": function(lambda x: _reduced(0, x)),
    "aten.special_i1.default": function(lambda x: _plain(1, x)), "aten.special_i1e.default": function(lambda x: _reduced(1, x)),
    "aten.special_spherical_bessel_j0.default": function(_spherical),
    "aten.special_modified_bessel_i0.default": function(lambda x: _plain(0, x)),
    "aten.special_modified_bessel_i1.default": function(lambda x: _plain(1, x)),
}  # fmt: skip
