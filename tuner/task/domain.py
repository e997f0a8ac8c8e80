"""The range a task is tuned over: the timed shapes and their weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, eq, free_vars, le, substitute
from relax_tune.schedules.cost.vectorized import compile_numpy
from relax_tune.tuner.task.allowed_sizes import AllowedSizes, Range

Point = tuple[int, ...]

# Combinations of symbol values from which anchors are chosen; with many symbols each gets fewer levels.
COMBINATIONS = 4096
# The same for recorded values, at each call site.
SERVED_COMBINATIONS = 256
# Share of the weights for recorded shapes, if there are any; the rest is log-uniform, so that the whole range counts.
SERVED_SHARE = 0.8

# Sizes in the small and in the larger check, each for a symbol of at most FEW values and for others. If a lower bound exceeds
# the size, the check takes the bound plus BEYOND.
CHECK_SIZES, FEW, BEYOND = ((5, 19), (2, 67)), 16, (0, 31)

Served = Sequence[tuple[tuple[Expr, ...], Mapping[Var, Mapping[int, int]]]]
"""Call sites with the recorded values of the model's symbols they depend on, and the count of each value."""


@dataclass(frozen=True)
class Domain:
    """Anchors of a task: points over its symbols, each with a weight; weights sum to 1.

    Attributes:
        served: Share of the recorded calls nearest to each point; empty without recorded calls, then weights are log-uniform.
            Otherwise SERVED_SHARE of the weights follows the recorded calls, and `timed` turns shares of calls into shares of time.
        others: Shapes within the bounds at which plans are validated but no candidate is searched, the most informative first.
        checked: Two small shapes at which every candidate is checked; empty if the model's bounds are not known.
    """

    points: tuple[Point, ...]
    weights: tuple[float, ...]
    served: tuple[float, ...] = ()
    others: tuple[Point, ...] = ()
    checked: tuple[Point, ...] = ()

    def timed(self, secs: Sequence[float]) -> Domain:
        """Return the same points weighted for comparing ratios of times.

        A recorded call counts for the time it takes, `secs` at each point. Sums of seconds need the plain weights.
        Log-uniform weights do not change.
        """
        total = sum(s * t for s, t in zip(self.served, secs))
        if not (0 < total < math.inf):
            return self
        shares = zip(self.weights, self.served, secs)
        weights = tuple(w + SERVED_SHARE * (s * t / total - s) for w, s, t in shares)
        return replace(self, weights=weights)


def anchors(
    sites: Sequence[tuple[Expr, ...]],
    ranges: Mapping[Var, Range],
    count: int = 6,
    per_symbol: int = 7,
    served: Served = (),
    allowed: AllowedSizes[Var] | None = None,
) -> Domain:
    """Choose about `count` points, spread evenly on a log scale over the range of the call sites, both ends included.

    With recorded values, the ends of the range and of the recorded points come first, then greedily the points that bring the
    recorded ones nearest to a chosen point. Weights are log-uniform: every point counts for the part of the log-scaled range
    nearest to it.

    Args:
        sites: For every call site, the task's symbols as expressions over the model's symbols.
        per_symbol: Most levels of one symbol.
        allowed: Sizes that the model's symbols may have together; None: every combination within the ranges.
    """
    limits = AllowedSizes(ranges, ()) if allowed is None else allowed
    ranges = {v: limits.tightened(v) for v in ranges}
    symbols = list(ranges)
    if not symbols:
        points = {tuple(_value(e, {}) for e in site) for site in sites}
        return Domain(tuple(sorted(points)), tuple(1 / len(points) for _ in points))
    wide = max(r.upper / max(r.lower, 1) for r in ranges.values())
    while True:
        levels = [
            ranges[s].levels(
                per_symbol if ranges[s].upper / max(ranges[s].lower, 1) > 16 or wide <= 16 else min(3, per_symbol)
            )
            for s in symbols
        ]
        if per_symbol <= 2 or math.prod(map(len, levels)) <= COMBINATIONS:
            break
        per_symbol -= 1
    counts: dict[Point, int] = {}
    combinations = [dict(zip(symbols, c)) for c in itertools.product(*levels)]
    sizes = limits.all_nearest(combinations) or combinations
    for site in dict.fromkeys(sites):
        for point in _points(site, sizes):
            counts[point] = counts.get(point, 0) + sites.count(site)
    recorded = _recorded(served, limits)
    if not recorded:
        chosen = _spread(sorted(counts), count)
        return Domain(tuple(chosen), _shares(chosen, counts), others=_between(sites, limits, symbols, chosen))
    chosen = _spread(
        sorted({*counts, *recorded}), count, _representative(sorted({*counts, *recorded}), recorded, count)
    )
    shares = _shares(chosen, recorded)
    weights = tuple(SERVED_SHARE * s + (1 - SERVED_SHARE) * u for s, u in zip(shares, _shares(chosen, counts)))
    return Domain(tuple(chosen), weights, shares, _between(sites, limits, symbols, chosen))


def checked_points(site: Sequence[Expr], domain: Domain, limits: Sequence[AllowedSizes[Var]]) -> tuple[Point, ...]:
    """Return two small shapes of a call site; neither is a multiple of a tile size, as far as the bounds allow.

    Args:
        limits: Sizes that the model's symbols may have, the preferred limits first.

    Returns:
        Two points; none if no allowed sizes are near.
    """
    symbols, points = free_vars(*site), list[Point]()
    tops = [max(p[a] for p in domain.points) for a in range(len(site))]
    for sizes, beyond in zip(CHECK_SIZES, BEYOND):
        spans = {v: limits[0].ranges[v] for v in symbols}
        start = {
            v: min(r.upper, size if (size := sizes[r.upper > FEW]) >= r.lower else r.lower + beyond)
            for v, r in spans.items()
        }
        # computed sizes of the task, such as n - 79, should be that large, too
        large = [le(const(min(top, sizes[top > FEW])), e) for top, e in zip(tops, site) if not isinstance(e, Var)]
        near = next((v for m in (limits[0].where(large), *limits) for v in m.all_nearest([start])), None)
        if near is None:
            return ()
        points.append(tuple(_value(e, near) for e in site))
    return tuple(points)


def is_allowed(point: Point, sites: Sequence[tuple[Expr, ...]], limits: AllowedSizes[Var]) -> bool:
    """Return True if a search finds allowed sizes at which a call site has the shape `point`."""
    for site in dict.fromkeys(sites):
        facts = [eq(e, const(x)) for e, x in zip(site, point, strict=True)]
        symbols = free_vars(*site)
        known = {e: x for e, x in zip(site, point) if isinstance(e, Var)}
        start = {v: known.get(v, limits.ranges[v].middle) for v in symbols}
        if not symbols or limits.where(facts).all_nearest([start]):
            return True
    return False


def _shares(chosen: Sequence[Point], mass: Mapping[Point, float]) -> tuple[float, ...]:
    """Return the share of the mass that is nearest to each chosen point."""
    points, order = list(mass), sorted(set(chosen))  # of equally near points the smallest
    logs, ahead = (
        np.log(np.maximum(np.asarray(x, dtype=np.float64).reshape(len(x), -1), 1.0)) for x in (points, order)
    )
    nearest = ((logs[:, None] - ahead[None]) ** 2).sum(axis=2).argmin(axis=1)
    shares = dict.fromkeys(chosen, 0.0)
    for point, at in sorted(zip(points, nearest.tolist())):
        shares[order[at]] += mass[point]
    total = sum(mass.values())
    return tuple(shares[c] / total for c in chosen)


def _recorded(served: Served, limits: AllowedSizes[Var]) -> dict[Point, float]:
    """Count the recorded calls at each point. Symbols are assumed independent; sizes that are not allowed are left out."""
    calls_at, ranges = dict[Point, float](), limits.ranges
    for site, symbols in served:
        inside = {
            v: {x: c for x, c in counts.items() if max(1, ranges[v].lower) <= x <= ranges[v].upper and c > 0}
            for v, counts in symbols.items()
        }
        if not inside or not all(inside.values()):
            continue
        # the epsilon repairs roots of exact powers that float arithmetic rounds down
        limit = max(2, int(SERVED_COMBINATIONS ** (1 / len(inside)) + 1e-9))
        few = [_condensed(counts, limit) for counts in inside.values()]
        calls = max(sum(counts.values()) for counts in inside.values())
        for combination in itertools.product(*(counts.items() for counts in few)):
            values = {v: x for v, (x, _) in zip(inside, combination)}
            if not limits.holds(values):
                continue
            point = tuple(_value(e, values) for e in site)
            chance = math.prod(c / sum(counts.values()) for (_, c), counts in zip(combination, few))
            calls_at[point] = calls_at.get(point, 0.0) + calls * chance
    return calls_at


def _condensed(counts: Mapping[int, int], limit: int) -> dict[int, int]:
    """Reduce counts to at most `limit` values: both ends and the most frequent. Other values count for the nearest one."""
    often = sorted(counts, key=lambda x: (-counts[x], x))
    values = sorted({min(counts), max(counts), *[x for x in often if x not in (min(counts), max(counts))][: limit - 2]})
    condensed = dict.fromkeys(values, 0)
    for value, count in counts.items():
        condensed[min(values, key=lambda k: (distance((k,), (value,)), k))] += count
    return condensed


def _representative(points: Sequence[Point], mass: Mapping[Point, float], count: int) -> list[Point]:
    """Choose the ends of the points and of the mass, then greedily points that bring the mass nearest to a chosen one."""
    known = sorted(mass)
    ends = (*_ends(points), *_ends(known))
    chosen = list(dict.fromkeys(ends))[: max(2, count)]
    logs = np.log(np.maximum(np.asarray(known, dtype=np.float64).reshape(len(known), -1), 1.0))
    ahead = np.log(np.maximum(np.asarray(chosen, dtype=np.float64).reshape(len(chosen), -1), 1.0))
    weights = np.asarray([mass[p] for p in known])
    between = ((logs[:, None] - logs[None]) ** 2).sum(axis=2)
    left = ((logs[:, None] - ahead[None]) ** 2).sum(axis=2).min(axis=1)
    while len(chosen) < count and (weights * left).sum() > 0:
        best = int(np.argmin((weights[:, None] * np.minimum(left[:, None], between)).sum(axis=0)))
        chosen.append(known[best])
        # Greedy clustering: each step adds the recorded point that most lowers the weighted squared distances to the
        # nearest chosen point.
        left = np.minimum(left, between[:, best])
    return chosen


def _between(
    sites: Sequence[tuple[Expr, ...]], limits: AllowedSizes[Var], symbols: Sequence[Var], chosen: Sequence[Point]
) -> tuple[Point, ...]:
    """Return a point where all symbols are large, then points that vary one symbol while the others are in the middle.

    The varied symbol is next to its ends, at primes, and at its ends.
    """
    ranges = {s: limits.tightened(s) for s in symbols}
    middle = {s: round(math.sqrt(max(r.lower, 1) * max(r.upper, 1))) for s, r in ranges.items()}
    tried: list[dict[Var, int]] = []
    if len(ranges) > 1:  # no anchor lies between the middle and the largest shape
        large = {
            s: _prime(round(low * (max(r.upper, 1) / low) ** 0.75), low)
            for s, r in ranges.items()
            if (low := max(r.lower, 1))
        }
        tried.append(large)
    for step in range(7):
        for symbol, r in ranges.items():
            low, high = max(r.lower, 1), max(r.upper, 1)
            # Primes are divided by no tile, so they show the cost of tails that anchors at round sizes hide.
            primes = [_prime(round(low * (high / low) ** share), low) for share in (0.5, 0.8, 0.25)]
            value = (high - 1, primes[0], low + 1, primes[1], primes[2], low, high)[step]
            if low <= value <= high:
                tried.append(middle | {symbol: value})
    points = dict.fromkeys(tuple(_value(e, v) for e in site) for v in limits.all_nearest(tried) for site in sites)
    return tuple(p for p in points if p not in chosen)


def _prime(most: int, least: int) -> int:
    """Return the largest prime of at most `most`, or `least` if that is larger."""
    while most > max(least, 2) and any(most % d == 0 for d in range(2, math.isqrt(most) + 1)):
        most -= 1
    return max(most, least)


def _value(e: Expr, values: Mapping[Var, int]) -> int:
    result = as_int(simplify(substitute(e, {v: const(x) for v, x in values.items()})))
    if result is None:
        raise UserError(
            f"the size {e!r} depends on symbols without declared bounds; declare them (bounds=, or --bound)"
        )
    return result


def _points(site: Sequence[Expr], sizes: Sequence[Mapping[Var, int]]) -> list[Point]:
    """Return the point of a call site at each of several sizes of the model's symbols, which all name the same symbols."""
    used = free_vars(*site)
    if not site or len({v.name for v in used}) < len(used) or not all(v in sizes[0] for v in used):
        return [tuple(_value(e, values) for e in site) for values in sizes]
    try:
        run, _ = compile_numpy(site)
    except ValueError:  # an operation that sizes do not use
        return [tuple(_value(e, values) for e in site) for values in sizes]
    columns = run({v.name: np.asarray([values[v] for values in sizes], np.float64) for v in used})
    return list(zip(*(np.broadcast_to(c, (len(sizes),)).astype(np.int64).tolist() for c in columns)))


def distance(a: Point, b: Point) -> float:
    """Return the squared distance between the logarithms of two points."""
    return sum((math.log(max(x, 1)) - math.log(max(y, 1))) ** 2 for x, y in zip(a, b))


def _ends(points: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point."""
    volume = [math.prod(max(x, 1) for x in p) for p in points]
    return list(dict.fromkeys((points[volume.index(min(volume))], points[volume.index(max(volume))])))


def _spread(points: Sequence[Point], count: int, start: Sequence[Point] = ()) -> list[Point]:
    """Choose points far from each other in log coordinates, beginning with `start` or the two ends."""
    chosen = list(start) or _ends(points)
    logs = np.log(np.maximum(np.asarray(points, dtype=np.float64).reshape(len(points), -1), 1.0))
    ahead = np.log(np.maximum(np.asarray(chosen, dtype=np.float64).reshape(len(chosen), -1), 1.0))
    near = ((logs[:, None] - ahead[None]) ** 2).sum(axis=2).min(axis=1)
    while len(chosen) < min(count, len(points)):
        best = max((i for i, p in enumerate(points) if p not in chosen), key=lambda i: (near[i], points[i]))
        chosen.append(points[best])
        near = np.minimum(near, ((logs - logs[best]) ** 2).sum(axis=1))
    return sorted(chosen)
