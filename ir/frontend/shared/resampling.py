"""Resampled axes for importers of every format: scales and positions as exact quotients of expressions over the shape symbols."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from relax_tune.ir.core.expr import Expr, add, as_int, const, eq, floordiv, mul, select, sub
from relax_tune.ir.frontend.shared.writer import Writer


def simplest(value: float) -> Fraction:
    """Return the fraction of the smallest denominator that rounds to `value` in float32 (Stern-Brocot tree)."""
    x = np.float32(value)
    low, high = (Fraction(float(x)) + Fraction(float(np.nextafter(x, np.float32(e)))) for e in (-np.inf, np.inf))
    return _between(low / 2, high / 2)


def _between(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction of the smallest denominator in [low, high]."""
    whole = low.__ceil__()
    if whole <= high:
        return Fraction(max(whole, min(0, high.__floor__())))
    floor = low.__floor__()
    rest = _between(1 / (high - floor), 1 / (low - floor))
    return floor + 1 / rest


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of an axis.

    over, under: the scale as a quotient
    wide, one: the size before it is rounded, as a quotient
    size: the size of the result
    """

    over: Expr
    under: Expr
    wide: Expr
    one: Expr
    size: Expr


def by_factor(w: Writer, n: Expr, factor: Fraction) -> Scale:
    """Return a scale that is a number."""
    over, under = const(factor.numerator), const(factor.denominator)
    wide = w.simplify(mul(n, over))
    return Scale(over, under, wide, under, w.simplify(floordiv(wide, under)))


def by_size(n: Expr, size: Expr) -> Scale:
    """Return the scale that gives a size."""
    return Scale(size, n, size, const(1), size)


def position(mode: str, n: Expr, s: Scale, region: tuple[Fraction, Fraction]) -> tuple[Expr, Expr, Expr]:
    """Return (step, start, part): element i of a result lies at `(i * step + start) / part` of a dim of size `n`."""
    if mode == "asymmetric":
        return s.under, const(0), s.over
    last, room = sub(n, 1), sub(s.wide, s.one)
    if mode == "align_corners":
        return mul(last, s.one), const(0), room
    if mode == "tf_crop_and_resize":
        whole = const(np.lcm(region[0].denominator, region[1].denominator).item())
        first, end = (const(int(r * (as_int(whole) or 1))) for r in region)
        step, start = mul(mul(sub(end, first), last), s.one), mul(mul(first, last), room)
        flat = eq(s.wide, s.one)
        single = mul(add(first, end), last)
        return step, select(flat, single, start), select(flat, mul(whole, 2), mul(whole, room))
    step, start, part = mul(s.under, 2), sub(s.under, s.over), mul(s.over, 2)
    if mode == "pytorch_half_pixel":
        return step, select(eq(s.wide, s.one), mul(s.over, -1), start), part
    if mode == "half_pixel_symmetric":
        # half of what the rounded size leaves out, in elements of x
        return step, add(sub(mul(sub(n, 1), s.over), mul(s.size, s.under)), s.under), part
    return step, start, part
