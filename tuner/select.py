"""From a matrix of measured times to a plan: few variants, total guards, least weighted log-regret (DESIGN 7.7).

The choice is by measurement alone. Guards are comparisons of one task symbol, or of the product of all of them, with a
threshold between two anchors; they form a tree, found exactly by dynamic programming over the anchors' splits, and the tree
is flattened to an ordered list whose last entry is unconditional, so no shape is ever without a variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from relax_tune.errors import UserError
from relax_tune.tuner.domain import Domain, Point

# What one more leaf must gain, as a fraction of weighted log-time, and how much faster than a library a kernel must be.
LEAF_COST = 0.01
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Test:
    """`product of symbols[axes] <= threshold` (one axis: a plain symbol)."""

    axes: tuple[int, ...]
    threshold: int

    def holds(self, point: Point) -> bool:
        return math.prod(point[a] for a in self.axes) <= self.threshold


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Dispatch `variant` where all tests have the wanted outcome; an entry without tests always applies."""

    tests: tuple[tuple[Test, bool], ...]
    variant: str


@dataclass(frozen=True)
class Plan:
    """Ordered entries, the last one unconditional; and what was predicted for it."""

    entries: tuple[PlanEntry, ...]
    regret: float

    def choose(self, point: Point) -> str:
        for entry in self.entries:
            if all(t.holds(point) == wanted for t, wanted in entry.tests):
                return entry.variant
        raise AssertionError("a plan's last entry is unconditional")

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.variant for e in self.entries))


def select(
    times: Mapping[str, Sequence[float | None]],
    domain: Domain,
    handicap: Mapping[str, float] | None = None,
    leaf_cost: float = LEAF_COST,
) -> Plan:
    """The plan over `times` (variant key -> seconds per anchor, None where it has none).

    `handicap` multiplies a variant's times when comparing (a tuned kernel must beat a library beyond noise). Ties go to the
    smaller key, so the same records give the same plan. Raises UserError when some anchor has no measured variant.
    """
    count = len(domain.points)
    keys = sorted(times)
    weight = domain.weights
    factor = handicap or {}
    best = [min((t for k in keys if (t := times[k][a]) is not None), default=None) for a in range(count)]
    if any(b is None for b in best):
        missing = [domain.points[a] for a in range(count) if best[a] is None]
        raise UserError(f"no variant was measured at the shapes {missing}; tune again to measure them")

    def cost(key: str, a: int) -> float:
        t, b = times[key][a], best[a]
        if t is None or b is None:
            return math.inf
        return weight[a] * math.log(t * factor.get(key, 1.0) / b)

    symbols = len(domain.points[0]) if count else 0
    axes: list[tuple[int, ...]] = [(s,) for s in range(symbols)]
    if symbols > 1:
        axes.append(tuple(range(symbols)))

    @cache
    def solve(inside: frozenset[int]) -> tuple[float, tuple[PlanEntry, ...]]:
        members = sorted(inside)
        single = min((sum(cost(k, a) for a in members), k) for k in keys)
        answer: tuple[float, tuple[PlanEntry, ...]] = (single[0], (PlanEntry((), single[1]),))
        for axis in axes:
            values = sorted({math.prod(domain.points[a][s] for s in axis) for a in members})
            for low, high in zip(values, values[1:]):
                test = Test(axis, _between(low, high))
                left = frozenset(a for a in members if test.holds(domain.points[a]))
                a_cost, a_entries = solve(left)
                b_cost, b_entries = solve(inside - left)
                total = a_cost + b_cost + leaf_cost
                if total < answer[0] - 1e-12:
                    entries = tuple(PlanEntry(((test, True), *e.tests), e.variant) for e in a_entries)
                    answer = (total, entries + b_entries)
        return answer

    _, entries = solve(frozenset(range(count)))
    plan = Plan(_merge(entries), 0.0)
    regret = 0.0
    for a, point in enumerate(domain.points):
        t, b = times[plan.choose(point)][a], best[a]
        regret += weight[a] * (math.inf if t is None or b is None else t / b - 1)
    return Plan(plan.entries, regret)


def _between(low: int, high: int) -> int:
    """The threshold between two anchors: their geometric mean, rounded down."""
    return max(low, min(high - 1, math.isqrt(low * high)))


def _merge(entries: Sequence[PlanEntry]) -> tuple[PlanEntry, ...]:
    """Drop entries that the unconditional last one would answer alike."""
    kept = list(entries)
    while len(kept) > 1 and kept[-2].variant == kept[-1].variant:
        del kept[-2]
    return tuple(kept)
