"""The choice of a plan from a matrix of measured times: few variants, total guards, least weighted log-regret.

The choice is by measurement only. A difference counts by its expectation, given its standard error. Guards compare a
task
symbol, or the product of all of them, with a threshold. Others test a remainder: of the symbol by a tile size, or of its number
of tiles by the number of workers. (`ceildiv(x, t) <= c` is `x <= c * t`, so thresholds are enough for it.) They form a tree
(`tuner/plan/guard_tree`) that is flattened to an ordered list whose last entry is unconditional. So every shape has a variant.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.tuner.plan.guard_tree import FloatArray, GuardSplit, GuardTree, Leaf, Quantity, Tree, leaves
from relax_tune.tuner.task.domain import Domain, Point

# Gain that justifies another leaf, as a fraction of weighted log-time, and least gain of a kernel over a library.
LEAF_COST = 0.005
NOISE = 0.03
# Number of joint standard errors from which two times count as different.
BEYOND = 2.0
# Assumed spread of a shape that was timed once.
UNKNOWN_SPREAD = 0.03
# Cost of a point at which a variant has no time: above any ratio of times, but finite, so that fewer such points are better.
MISSING = 1e3
# Prior standard deviation of the difference of two variants in log time.
PRIOR_SPREAD = 0.1

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
Times = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class GuardTest:
    """`ceildiv(product of symbols[axes], divisor)` is at most `threshold`; with a modulus, its remainder is `threshold`."""

    axes: tuple[int, ...]
    threshold: int
    divisor: int = 1
    modulus: int = 0

    def holds(self, point: Point) -> bool:
        value = Quantity(self.axes, self.divisor, self.modulus).at(point)
        return value == self.threshold if self.modulus else value <= self.threshold


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Dispatch `variant` where all tests have the stated outcome; an entry without tests always applies."""

    tests: tuple[tuple[GuardTest, bool], ...]
    variant: str


@dataclass(frozen=True)
class DispatchPlan:
    """Ordered entries, the last one unconditional, and their predicted cost."""

    entries: tuple[PlanEntry, ...]
    regret: float

    def choose(self, point: Point) -> str:
        for entry in self.entries:
            if all(t.holds(point) == outcome for t, outcome in entry.tests):
                return entry.variant
        raise AssertionError("a plan's last entry is unconditional")

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.variant for e in self.entries))


def standard_error(samples: Sequence[float]) -> float:
    """Return the relative standard error of the median of samples.

    It is derived from the median absolute deviation, which is robust to outliers.
    """
    middle = statistics.median(samples)
    if len(samples) < 2 or middle <= 0:
        return UNKNOWN_SPREAD
    # 1.4826 makes the median absolute deviation an estimate of the standard deviation of normal samples; the standard error
    # of their median is 1.2533 (the root of pi / 2) times the one of their mean.
    deviation = 1.4826 * statistics.median(abs(s - middle) for s in samples) / middle
    return 1.2533 * deviation / math.sqrt(len(samples))


def beyond(error: float, other: float) -> float:
    """Return by how much the logarithms of two times with these standard errors must differ."""
    return BEYOND * math.hypot(error, other)


def select(
    times: Times,
    domain: Domain,
    errors: Times | None = None,
    libraries: Collection[str] = (),
    leaf_cost: float = LEAF_COST,
    steps: Sequence[int] = (),
    workers: int = 1,
) -> DispatchPlan:
    """Return the plan of least weighted lag in log time, plus a price for each leaf.

    Ties go to fewer variants and smaller keys, so equal times give equal plans.

    Args:
        times: Seconds per point of each variant, by key; None without a time.
        errors: Relative standard error of each time; None: times are exact.
        libraries: Variants that others must beat beyond noise, and by NOISE at least.
        leaf_cost: Gain in weighted log time that justifies another leaf.
        steps: Tile sizes whose remainders guards may test.
        workers: Divisor of numbers of tiles whose remainder guards may test.

    Raises:
        UserError: A point has no measured variant.
    """
    keys = sorted(times)
    log_time = np.asarray([[math.nan if t is None else math.log(t) for t in times[k]] for k in keys])
    log_time = log_time.reshape(len(keys), len(domain.points))
    known = np.isfinite(log_time)
    if not known.any(axis=0).all():
        missing = [p for p, k in zip(domain.points, known.any(axis=0)) if not k]
        raise UserError(f"no variant was measured at the shapes {missing}; tune again to measure them")
    error = np.zeros_like(log_time)
    if errors is not None:
        error = np.asarray([[e or 0.0 for e in errors.get(k, [0.0] * len(domain.points))] for k in keys])
    # Neighbouring sizes are neighbours by the product of the dims, for any number of symbols.
    order = np.argsort([math.prod(p) for p in domain.points], kind="stable")
    gaps = _gaps(log_time, error, np.asarray([k in libraries for k in keys], dtype=np.bool_), order)
    weights = np.asarray(domain.weights)
    costs = np.where(known, weights * gaps, MISSING)
    ordered, remainders = _quantities(len(domain.points[0]), steps, workers)
    if not ordered:
        tree: Tree = Leaf(np.arange(len(domain.points)), int(np.argmin(costs.sum(axis=1))))
    else:
        _, tree = GuardTree(costs, domain.points, leaf_cost, ordered, remainders).best()
    entries = _merge(_flattened(tree, keys, log_time, domain.points))
    plan = DispatchPlan(entries, 0.0)
    row = {k: n for n, k in enumerate(keys)}
    chosen = log_time[[row[plan.choose(p)] for p in domain.points], np.arange(len(domain.points))]
    return DispatchPlan(entries, float((weights * np.expm1(chosen - np.nanmin(log_time, axis=0))).sum()))


def _gaps(log_time: FloatArray, error: FloatArray, library: BoolArray, order: IntArray) -> FloatArray:
    """Return the expected lag of each variant behind the dispatched one at each point, (K, N) in log time.

    It is the posterior mean of a difference measured with these errors, under a normal prior around 0 (`PRIOR_SPREAD`). Where
    a library was timed, the other variants carry the handicap of beating it. The noise at a point is pooled over neighbours
    whose differences have the same sign.

    Args:
        order: Points by size.
    """
    count = log_time.shape[1]
    points = np.arange(count)
    timed = np.where(np.isfinite(log_time), log_time, np.inf)
    handicap = np.zeros_like(log_time)
    if library.any():
        of_library = np.where(library[:, None], timed, np.inf)
        best = np.argmin(of_library, axis=0)
        there = np.isfinite(of_library[best, points])
        # A variant that beats the library at n neighbouring sizes is n agreeing observations: the margin shrinks with
        # sqrt(n).
        agreeing = _runs((timed < of_library[best, points])[:, order])[:, np.argsort(order)]
        margin = np.maximum(math.log1p(NOISE), BEYOND * np.hypot(error, error[best, points]) / np.sqrt(agreeing))
        handicap = np.where(there & ~library[:, None], margin, 0.0)
    first = np.argmin(timed + handicap, axis=0)
    gaps = log_time + handicap - (timed + handicap)[first, points]
    # The posterior mean of a normal difference with a normal prior around 0: uncertain differences shrink, so that
    # noise adds no leaf.
    expected: FloatArray = gaps * PRIOR_SPREAD**2 / (PRIOR_SPREAD**2 + error**2 + error[first, points] ** 2)
    return expected


def _runs(x: BoolArray) -> IntArray:
    """Return for each element of a row the length of the run of equal elements around it."""
    run_lengths = np.ones(x.shape, np.int64)
    for row, lengths in zip(x, run_lengths, strict=True):
        starts = np.flatnonzero(np.diff(row, prepend=not row[0] if row.size else False))
        sizes = np.diff(starts, append=row.size)
        lengths[:] = np.repeat(sizes, sizes)
    return run_lengths


def _quantities(symbols: int, steps: Sequence[int], workers: int) -> tuple[list[Quantity], list[Quantity]]:
    """Return the quantities for thresholds and the quantities for remainders."""
    axes: list[tuple[int, ...]] = [(s,) for s in range(symbols)]
    if symbols > 1:
        axes.append(tuple(range(symbols)))
    sizes = sorted({s for s in steps if s > 1})
    remainders = [Quantity(a, 1, s) for a in axes for s in sizes]
    if workers > 1:
        # The remainder of the number of tiles by workers: whether the last round of tiles occupies all workers.
        remainders += [Quantity(a, s, workers) for a in axes for s in sizes]
    return [Quantity(a) for a in axes], remainders


def _flattened(tree: Tree, keys: Sequence[str], log_time: FloatArray, points: Sequence[Point]) -> tuple[PlanEntry, ...]:
    if isinstance(tree, Leaf):
        return (PlanEntry((), keys[tree.variant]),)
    q = tree.quantity
    threshold = tree.low if q.modulus else _crossing(tree, log_time, points)
    test = GuardTest(q.axes, threshold, q.divisor, q.modulus)
    inside = _flattened(tree.yes, keys, log_time, points)
    outside = _flattened(tree.no, keys, log_time, points)
    return (*(PlanEntry(((test, True), *e.tests), e.variant) for e in inside), *outside)


def _crossing(split: GuardSplit, log_time: FloatArray, points: Sequence[Point]) -> int:
    """Return the value between two points at which the variants on both sides are equally fast.

    Both times are taken for straight lines on log-log paper. Where the times do not cross, it is the geometric mean of the points,
    or their mean if one is negative.
    """
    q, low, high = split.quantity, split.low, split.high
    below = [(m, n.variant) for n in leaves(split.yes) for m in n.members if q.at(points[m]) == low]
    above = [(m, n.variant) for n in leaves(split.no) for m in n.members if q.at(points[m]) == high]
    at_low = [log_time[b][m] - log_time[a][m] for m, a in below for _, b in above]
    at_high = [log_time[a][m] - log_time[b][m] for m, b in above for _, a in below]
    # Lead of the lower side at its end, and of the upper side at its end.
    lead, lag = float(np.mean(at_low)), float(np.mean(at_high))
    if low < 1 or not (math.isfinite(lead) and math.isfinite(lag) and lead >= 0 and lag >= 0 and lead + lag > 0):
        between = (low + high) // 2 if low < 0 else math.isqrt(low * high)
        return max(low, min(high - 1, between))
    share = lead / (lead + lag)
    # The exponential of a logarithm may be just below the whole number.
    return max(low, min(high - 1, math.floor(math.exp((1 - share) * math.log(low) + share * math.log(high)) + 1e-9)))


def _merge(entries: Sequence[PlanEntry]) -> tuple[PlanEntry, ...]:
    """Drop entries that the unconditional last one would answer alike."""
    merged = list(entries)
    while len(merged) > 1 and merged[-2].variant == merged[-1].variant:
        del merged[-2]
    return tuple(merged)
