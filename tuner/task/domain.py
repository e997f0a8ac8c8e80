"""The range a task is tuned over: the timed shapes and their weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute

Point = tuple[int, ...]

# Combinations of symbol values tried to choose anchors; with many symbols each gets fewer levels.
COMBINATIONS = 4096
# The same for recorded values, at each call site.
SERVED_COMBINATIONS = 256
# Share of the weights that recorded shapes get, if there are any; the rest is log-uniform, so that the whole range
# counts.
SERVED_SHARE = 0.8

Served = Sequence[tuple[tuple[Expr, ...], Mapping[Var, Mapping[int, int]]]]
"""Call sites with the recorded values of the model's symbols they depend on, and how often each was seen."""


@dataclass(frozen=True, slots=True)
class Range:
    """Declared bounds of one symbol of the model, both inclusive."""

    lower: int
    upper: int

    def levels(self, count: int) -> tuple[int, ...]:
        """Return up to `count` log-spaced values including both ends."""
        low, high = max(self.lower, 1), max(self.upper, 1)
        if high <= low or count < 2:
            return (high,)
        ratio = math.log(high / low)
        return tuple(sorted({round(low * math.exp(ratio * a / (count - 1))) for a in range(count)}))


@dataclass(frozen=True)
class Domain:
    """Anchors of a task: points over its symbols, each with a weight; weights sum to 1.

    served: the share of recorded calls nearest to each point; empty where nothing was recorded, and weights are log-uniform. With
    it weights are SERVED_SHARE of the recorded calls and the rest log-uniform, and `timed` makes shares of time of those of calls.
    others: shapes within the bounds that no candidate is timed at, by which a plan is validated, the most telling first.
    """

    points: tuple[Point, ...]
    weights: tuple[float, ...]
    served: tuple[float, ...] = ()
    others: tuple[Point, ...] = ()

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
) -> Domain:
    """Choose about `count` points, spread evenly on a log scale over the range of the call sites, both ends included.

    Where recorded values are given, only the ends of the range come first. The smallest and the largest recorded point follow,
    then the points that leave the recorded ones nearest to some point: their modes.

    sites: for every call site, the task's symbols as expressions over the model's symbols. Weights are log-uniform:
    every point counts for the part of the log-scaled range nearest to it.
    """
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
    seen: dict[Point, int] = {}
    for combination in itertools.product(*levels):
        values = dict(zip(symbols, combination))
        for site in sites:
            point = tuple(_value(e, values) for e in site)
            seen[point] = seen.get(point, 0) + 1
    recorded = _recorded(served, ranges)
    if not recorded:
        chosen = _spread(sorted(seen), count)
        return Domain(tuple(chosen), _shares(chosen, seen), others=_between(sites, ranges, chosen))
    chosen = _spread(sorted({*seen, *recorded}), count, _representative(sorted({*seen, *recorded}), recorded, count))
    shares = _shares(chosen, recorded)
    weights = tuple(SERVED_SHARE * s + (1 - SERVED_SHARE) * u for s, u in zip(shares, _shares(chosen, seen)))
    return Domain(tuple(chosen), weights, shares, _between(sites, ranges, chosen))


def _shares(chosen: Sequence[Point], mass: Mapping[Point, float]) -> tuple[float, ...]:
    """Return the share of the mass that is nearest to each chosen point."""
    found = dict.fromkeys(chosen, 0.0)
    for point in sorted(mass):
        found[min(chosen, key=lambda c: (distance(c, point), c))] += mass[point]
    total = sum(mass.values())
    return tuple(found[c] / total for c in chosen)


def _recorded(served: Served, ranges: Mapping[Var, Range]) -> dict[Point, float]:
    """Count the recorded calls at each point. Symbols are assumed independent; values outside the ranges are left out."""
    found: dict[Point, float] = {}
    for site, symbols in served:
        inside = {
            v: {x: c for x, c in counts.items() if max(1, ranges[v].lower) <= x <= ranges[v].upper and c > 0}
            for v, counts in symbols.items()
        }
        if not inside or not all(inside.values()):
            continue
        limit = max(2, int(SERVED_COMBINATIONS ** (1 / len(inside)) + 1e-9))
        few = [_condensed(counts, limit) for counts in inside.values()]
        calls = max(sum(counts.values()) for counts in inside.values())
        for combination in itertools.product(*(counts.items() for counts in few)):
            values = {v: x for v, (x, _) in zip(inside, combination)}
            point = tuple(_value(e, values) for e in site)
            chance = math.prod(c / sum(counts.values()) for (_, c), counts in zip(combination, few))
            found[point] = found.get(point, 0.0) + calls * chance
    return found


def _condensed(counts: Mapping[int, int], limit: int) -> dict[int, int]:
    """Reduce counts to at most `limit` values: both ends and the most frequent. Others count for the nearest of these."""
    often = sorted(counts, key=lambda x: (-counts[x], x))
    kept = sorted({min(counts), max(counts), *[x for x in often if x not in (min(counts), max(counts))][: limit - 2]})
    found = dict.fromkeys(kept, 0)
    for value, count in counts.items():
        found[min(kept, key=lambda k: (distance((k,), (value,)), k))] += count
    return found


def _representative(points: Sequence[Point], mass: Mapping[Point, float], count: int) -> list[Point]:
    """Choose both ends of points and mass, then greedily points that bring the mass nearest to a chosen one."""
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
        left = np.minimum(left, between[:, best])
    return chosen


def _between(
    sites: Sequence[tuple[Expr, ...]], ranges: Mapping[Var, Range], chosen: Sequence[Point]
) -> tuple[Point, ...]:
    """List a point where all symbols are large, then points for each symbol, with the others in the middle.

    These are next to the symbol's ends, at primes, and at its ends.
    """
    middle = {s: round(math.sqrt(max(r.lower, 1) * max(r.upper, 1))) for s, r in ranges.items()}
    found: dict[Point, None] = {}
    if len(ranges) > 1:  # the anchors leave the room between the middle and the largest shape empty
        large = {
            s: _prime(round(low * (max(r.upper, 1) / low) ** 0.75), low)
            for s, r in ranges.items()
            if (low := max(r.lower, 1))
        }
        found |= {tuple(_value(e, large) for e in site): None for site in sites}
    for step in range(7):
        for symbol, r in ranges.items():
            low, high = max(r.lower, 1), max(r.upper, 1)
            primes = [_prime(round(low * (high / low) ** share), low) for share in (0.5, 0.8, 0.25)]
            value = (high - 1, primes[0], low + 1, primes[1], primes[2], low, high)[step]
            if low <= value <= high:
                found |= {tuple(_value(e, middle | {symbol: value}) for e in site): None for site in sites}
    return tuple(p for p in found if p not in chosen)


def _prime(most: int, least: int) -> int:
    """Return the largest prime of at most `most`, or `least` if that is larger."""
    while most > max(least, 2) and any(most % d == 0 for d in range(2, math.isqrt(most) + 1)):
        most -= 1
    return max(most, least)


def _value(e: Expr, values: Mapping[Var, int]) -> int:
    result = as_int(simplify(substitute(e, {v: const(x) for v, x in values.items()})))
    if result is None:
        raise UserError(f"the size {e!r} depends on symbols without declared bounds; declare them with --bound")
    return result


def distance(a: Point, b: Point) -> float:
    """Return the squared distance between the logarithms of two points."""
    return sum((math.log(max(x, 1)) - math.log(max(y, 1))) ** 2 for x, y in zip(a, b))


def _ends(points: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point."""
    volume = [math.prod(max(x, 1) for x in p) for p in points]
    return list(dict.fromkeys((points[volume.index(min(volume))], points[volume.index(max(volume))])))


def _spread(points: Sequence[Point], count: int, start: Sequence[Point] = ()) -> list[Point]:
    """Choose points far from each other on log coordinates, from given points or the two ends on."""
    chosen = list(start) or _ends(points)
    while len(chosen) < min(count, len(points)):
        rest = [p for p in points if p not in chosen]
        chosen.append(max(rest, key=lambda p: (min(distance(p, c) for c in chosen), p)))
    return sorted(chosen)
