"""Interval arithmetic on integers: closed intervals whose ends may be infinite.

Tests: `tests/ir/codegen/lower/test_narrow_ints.py`.
"""

from __future__ import annotations

# (least, greatest), both inclusive; None is infinite.
Interval = tuple[int | None, int | None]
UNBOUNDED: Interval = (None, None)


def meet(a: Interval, b: Interval) -> Interval:
    """Intersect two intervals."""
    lo = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    hi = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return lo, hi


def hull(a: Interval, b: Interval) -> Interval:
    """Return the least interval that contains both."""
    return (
        None if a[0] is None or b[0] is None else min(a[0], b[0]),
        None if a[1] is None or b[1] is None else max(a[1], b[1]),
    )


def within(a: Interval, b: Interval) -> bool:
    """Return whether `a` is bounded and lies in `b`."""
    return meet(a, b) == a and None not in a


def add(a: Interval, b: Interval) -> Interval:
    """Return the interval of x + y."""
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def scale(a: Interval, k: int) -> Interval:
    """Return the interval of k * x."""
    lo, hi = None if a[0] is None else a[0] * k, None if a[1] is None else a[1] * k
    return (lo, hi) if k >= 0 else (hi, lo)


def sub(a: Interval, b: Interval) -> Interval:
    """Return the interval of x - y."""
    return add(a, scale(b, -1))


def bitwise_and(a: Interval, b: Interval) -> Interval:
    """Return the interval of x & y: at most an operand that is not negative."""
    known = [x[1] for x in (a, b) if x[0] is not None and x[0] >= 0]
    return (0, min((h for h in known if h is not None), default=None)) if known else UNBOUNDED


def mul(a: Interval, b: Interval) -> Interval:
    """Return the interval of x * y."""
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]
    if a == (0, 0) or b == (0, 0):
        return 0, 0
    if _empty(a) or _empty(b):  # contradictory facts: any interval is right
        return UNBOUNDED
    if None not in a and None not in b:
        ends = [x * y for x in a for y in b if x is not None and y is not None]
        return min(ends), max(ends)
    if a[1] is not None and a[1] <= 0:
        return scale(mul(scale(a, -1), b), -1)
    if b[1] is not None and b[1] <= 0:
        return scale(mul(a, scale(b, -1)), -1)
    for x, y in ((a, b), (b, a)):  # one is >= 0, the other of mixed sign: its finite ends scale with the largest factor
        if x[0] is not None and x[0] >= 0 and x[1] is not None:
            return None if y[0] is None else y[0] * x[1], None if y[1] is None else y[1] * x[1]
    return UNBOUNDED


def _empty(a: Interval) -> bool:
    return a[0] is not None and a[1] is not None and a[0] > a[1]


def floordiv(a: Interval, b: Interval) -> Interval:
    """Return the interval of x // y. A divisor is never zero, so a divisor >= 0 is positive."""
    if b[0] is None or b[0] < 0:
        return UNBOUNDED
    least, most = max(b[0], 1), None if b[1] is None else max(b[1], 1)
    lo = hi = None
    if a[0] is not None:
        lo = a[0] // least if a[0] < 0 else 0 if most is None else a[0] // most
    if a[1] is not None:
        hi = a[1] // least if a[1] >= 0 else -1 if most is None else a[1] // most
    return lo, hi


def floormod(a: Interval, b: Interval) -> Interval:
    """Return the interval of x % y, for y > 0 a part of [0, y)."""
    if b[0] is None or b[0] < 0:
        return UNBOUNDED
    top = None if b[1] is None else b[1] - 1
    if a[0] is not None and a[0] >= 0:
        if a[1] is not None and a[1] < max(b[0], 1):
            return a
        top = top if a[1] is None else a[1] if top is None else min(top, a[1])
    return 0, top


def minimum(a: Interval, b: Interval) -> Interval:
    """Return the interval of min(x, y)."""
    return hull(a, b)[0], meet(a, b)[1]


def maximum(a: Interval, b: Interval) -> Interval:
    """Return the interval of max(x, y)."""
    return meet(a, b)[0], hull(a, b)[1]


def absolute(a: Interval) -> Interval:
    """Return the interval of |x|."""
    return meet((0, None), hull(a, scale(a, -1)))


def select(cond: Interval, a: Interval, b: Interval) -> Interval:
    """Return the interval of one of two values."""
    return hull(a, b)
