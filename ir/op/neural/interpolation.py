"""Interpolation kernels as scalar expressions: linear, and cubic convolution (Keys 1981).

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.expr import Expr, add, call, const, le, lt, maximum, mul, select, sub


def linear_weights(rest: Expr) -> list[Expr]:
    """Return the weights of the elements before and after a position at distance `rest` from the former."""
    return [sub(const(1.0, rest.dtype), rest), rest]


def linear_at(away: Expr) -> Expr:
    """Return the linear kernel at a signed distance."""
    return maximum(sub(const(1.0, away.dtype), call("abs", away)), const(0.0, away.dtype))


def _near(far: Expr, a: float) -> Expr:
    """Return the cubic kernel at a distance of at most 1."""
    inner = sub(mul(const(a + 2, far.dtype), far), const(a + 3, far.dtype))
    return add(mul(mul(inner, far), far), const(1.0, far.dtype))


def _away(far: Expr, a: float) -> Expr:
    """Return the cubic kernel at a distance from 1 to 2."""
    inner = add(mul(sub(far, const(5.0, far.dtype)), far), const(8.0, far.dtype))
    return mul(sub(mul(inner, far), const(4.0, far.dtype)), const(a, far.dtype))


def cubic_at(away: Expr, sharpness: float) -> Expr:
    """Return the cubic kernel at a signed distance."""
    far = call("abs", away)
    zero, one, two = (const(v, away.dtype) for v in (0.0, 1.0, 2.0))
    return select(le(far, one), _near(far, sharpness), select(lt(far, two), _away(far, sharpness), zero))


def cubic_weights(rest: Expr, sharpness: float) -> list[Expr]:
    """Return the weights of the elements at -1, 0, 1 and 2 for a position at distance `rest` after element 0."""
    one = const(1.0, rest.dtype)
    back = sub(one, rest)
    return [
        _away(add(rest, one), sharpness),
        _near(rest, sharpness),
        _near(back, sharpness),
        _away(add(back, one), sharpness),
    ]
