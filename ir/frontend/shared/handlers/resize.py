"""Resampled axes of both formats: scales and positions as exact quotients of expressions over the shape symbols.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from relax_tune.ir.core.expr import Expr, add, as_int, const, eq, floordiv, maximum, mul, select, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.neural.resize import Resize

Region = tuple[Fraction, Fraction]
"""Begin and end of a part of an axis, as fractions of its size."""
WHOLE: Region = (Fraction(0), Fraction(1))


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

    Attributes:
        over, under: The scale as a quotient.
        wide, one: The size before it is rounded, as a quotient.
        size: The size of the result.
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


def position(mode: str, n: Expr, s: Scale, region: Region) -> tuple[Expr, Expr, Expr]:
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


def resampled(
    w: Writer,
    x: ImportedValue,
    axes: Iterable[tuple[int, Scale, Region]],
    mode: str,
    kernel: str,
    antialias: bool,
    **attributes: Any,
) -> Value:
    """Emit `x` resampled along axes.

    Args:
        axes: Axis, scale and region of each resampled dim.
        mode: Mode of `position`.
        kernel, attributes: Attributes of `Resize`.
    """
    rows = []
    for axis, scale, region in axes:
        step, start, part = position(mode, x.shape[axis], scale, region)
        row = (scale.size, step, start, *(maximum(e, 1) for e in (part, scale.under, scale.over)))
        rows.append((axis, *map(w.simplify, row)))
    resized, sizes, steps, starts, parts, wide, narrow = zip(*rows, strict=True)
    if antialias:
        attributes |= {"wide": wide, "narrow": narrow}
    return w.emit(Resize(resized, sizes, steps, starts, parts, kernel, **attributes), w.tensor(x))
