"""The range a task is tuned over: which shapes are timed, and how much each counts (DESIGN 7.1 to 7.3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import UserError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.expr import Expr, Var, as_int, const, substitute

Point = tuple[int, ...]

# Combinations of symbol values looked at to choose anchors; with many symbols each gets fewer levels.
COMBINATIONS = 4096


@dataclass(frozen=True, slots=True)
class Range:
    """Declared bounds of one symbol of the model, both inclusive."""

    lower: int
    upper: int

    def levels(self, count: int) -> tuple[int, ...]:
        """Up to `count` log-spaced values including both ends."""
        low, high = max(self.lower, 1), max(self.upper, 1)
        if high <= low or count < 2:
            return (high,)
        ratio = math.log(high / low)
        return tuple(sorted({round(low * math.exp(ratio * a / (count - 1))) for a in range(count)}))


@dataclass(frozen=True)
class Domain:
    """Anchors of a task: points over its symbols, each with a weight; weights sum to 1."""

    points: tuple[Point, ...]
    weights: tuple[float, ...]


def anchors(
    sites: Sequence[tuple[Expr, ...]], ranges: Mapping[Var, Range], count: int = 6, per_symbol: int = 7
) -> Domain:
    """About `count` points, spread evenly on a log scale over everything the call sites can ask for, both ends included.

    `sites`: for every call site, the task's symbols as expressions over the model's symbols. Weights are log-uniform: every
    point counts for the part of the log-scaled range nearest to it.
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
    everything = sorted(seen)
    chosen = _spread(everything, count)
    mass = dict.fromkeys(chosen, 0.0)
    for point in everything:
        nearest = min(chosen, key=lambda c: (_distance(c, point), c))
        mass[nearest] += seen[point]
    total = sum(mass.values())
    return Domain(tuple(chosen), tuple(mass[c] / total for c in chosen))


def _value(e: Expr, values: Mapping[Var, int]) -> int:
    result = as_int(simplify(substitute(e, {v: const(x) for v, x in values.items()})))
    if result is None:
        raise UserError(f"the size {e!r} depends on symbols without declared bounds; declare them with --bound")
    return result


def _distance(a: Point, b: Point) -> float:
    return sum((math.log(max(x, 1)) - math.log(max(y, 1))) ** 2 for x, y in zip(a, b))


def _spread(points: Sequence[Point], count: int) -> list[Point]:
    """Farthest-point choice on log coordinates, starting from the smallest and the largest point."""
    volume = [math.prod(max(x, 1) for x in p) for p in points]
    first = points[volume.index(min(volume))]
    last = points[volume.index(max(volume))]
    chosen = [first] if first == last else [first, last]
    while len(chosen) < min(count, len(points)):
        rest = [p for p in points if p not in chosen]
        chosen.append(max(rest, key=lambda p: (min(_distance(p, c) for c in chosen), p)))
    return sorted(chosen)
