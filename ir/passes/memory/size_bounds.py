"""Greatest values of sizes within the declared bounds of their symbols.

Tests: `tests/ir/passes/memory/test_memory_plan.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count, product

from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Const, Expr, Var, as_int, const, free_vars, postorder, substitute

SPLITS = 400
"""Most boxes that are split before the upper bound is returned instead of the exact maximum."""

Box = dict[Var, tuple[int, int]]
RISING, FALLING = frozenset({1}), frozenset({-1})
MIXED, CONSTANT = frozenset({1, -1}), frozenset[int]()
Trend = frozenset[int]
"""Directions in which an expression may change when a symbol grows: 1, -1, both or none."""


def size_bound(size: Expr, env: Env) -> Expr:
    """Return an upper bound of a size: a constant, or an expression over the symbols that have no bounds.

    A symbol in which the size is monotonic is replaced by its bound. Over the other symbols, the maximum is computed by branch and bound
    (Land and Doig 1960): interval arithmetic bounds the size over boxes of the symbols, and the box with the largest bound is split first.
    """
    for v in free_vars(size):
        low, high = env.range_of(v)
        trend = _trend(size, v, env)
        if trend <= RISING and high is not None:
            size = simplify(substitute(size, {v: const(high)}), env)
        elif trend <= FALLING and low is not None:
            size = simplify(substitute(size, {v: const(low)}), env)
    ranges = {v: env.range_of(v) for v in free_vars(size)}
    box = {v: (low, high) for v, (low, high) in ranges.items() if low is not None and high is not None}
    largest = interval(size, env)[1]
    if largest is None:
        return size
    return const(_greatest(size, box, env, largest) if len(box) == len(ranges) else largest)


def _greatest(size: Expr, box: Box, env: Env, largest: int) -> int:
    """Return the greatest value in a box, or an upper bound of it after SPLITS splits.

    Args:
        largest: An upper bound over the whole box.
    """
    number = count()  # ties in the heap are broken by age, since boxes cannot be compared
    heap = [(-largest, next(number), box)]
    reached = _largest_corner(size, box)
    for _ in range(SPLITS):
        bound, _number, box = heap[0]
        if -bound <= reached:
            break
        heapq.heappop(heap)
        v = max(box, key=lambda x: box[x][1] - box[x][0])
        low, high = box[v]
        middle = (low + high) // 2
        for part in ((low, middle), (middle + 1, high)):
            half = {**box, v: part}
            above = interval(size, _within(half, env))[1]
            reached = max(reached, _largest_corner(size, half))
            # The bound of a box holds for its parts, also where interval arithmetic gives none for them.
            heapq.heappush(heap, (bound if above is None else max(bound, -above), next(number), half))
    return max(reached, -heap[0][0])


def _within(box: Box, env: Env) -> Env:
    """Return the environment with the symbols confined to a box."""
    return Env({**env.bounds, **box}, env.facts)


def _largest_corner(size: Expr, box: Box) -> int:
    """Return the greatest value at the corners of a box."""
    corners = product(*(sorted(set(ends)) for ends in box.values()))
    values = [as_int(substitute(size, dict(zip(box, map(const, at), strict=True)))) for at in corners]
    return max((x for x in values if x is not None), default=-(2**63))


def _trend(e: Expr, v: Var, env: Env) -> Trend:
    """Return the directions in which `e` may change when `v` grows."""
    done: dict[Expr, Trend] = {}
    for n in postorder((e,)):
        done[n] = RISING if n is v else CONSTANT if not n.children else _trend_of(n, done, env)
    return done[e]


def _trend_of(n: Expr, done: Mapping[Expr, Trend], env: Env) -> Trend:
    args = n.children
    trends = [done[a] for a in args]
    if not any(trends):
        return CONSTANT
    if n.op in ("add", "min", "max"):
        return trends[0] | trends[1]
    if n.op == "sub":
        return trends[0] | _reversed(trends[1])
    if n.op == "mul":
        (a, b), (x, y) = trends, args
        return _scaled(a, y, env) | _scaled(b, x, env)
    if n.op == "floordiv" and isinstance(args[1], Const):
        return _scaled(trends[0], args[1], env)
    return MIXED


def _reversed(trend: Trend) -> Trend:
    return frozenset(-s for s in trend)


def _scaled(trend: Trend, factor: Expr, env: Env) -> Trend:
    """Return the trend of a term times a factor that does not depend on the symbol."""
    low, high = interval(factor, env)
    if not trend or (low is not None and low >= 0):
        return trend
    return _reversed(trend) if high is not None and high <= 0 else MIXED
