"""The predicted loss of a plan at the served shapes, from recorded times only.

Between the shapes at which a variant was timed, its log time is interpolated linearly in the log of the shape. With
several symbols it is the mean of the nearest times, weighted by closeness. There is no prediction outside of these
shapes. A plan loses where another variant is predicted to be faster by more than the selection's noise margin.

Tests: `tests/tuner/plan/test_profile.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.database.records import Measurement
from relax_tune.tuner.plan.plans import pooled, usable
from relax_tune.tuner.plan.select import NOISE
from relax_tune.tuner.plan.stored_plans import StoredPlan
from relax_tune.tuner.task.domain import Domain, Point, distance
from relax_tune.tuner.task.variants import TaskVariants

ALLOWED = 0.03
"""Regret above which a model is worth tuning again."""
SHAPES = 48
"""Most shapes that represent the served ones."""
NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Drift:
    """The loss of a task's plan at the served shapes.

    Attributes:
        secs: Weighted seconds of a call with the fastest recorded variants.
        lost: Seconds that the plan takes in addition.
        unmeasured: Share of calls at shapes outside the timed range of the plan's variant.
    """

    secs: float
    lost: float
    unmeasured: float

    @property
    def regret(self) -> float:
        """The share of time lost."""
        return self.lost / self.secs if self.secs > 0 else 0.0


def drift(task_variants: TaskVariants, records: Sequence[Measurement], plan: StoredPlan, domain: Domain) -> Drift:
    """Predict the loss of a stored plan over a domain whose points represent the served calls."""
    samples, variants = pooled(records)
    known = {k: _Times.of(secs_of_plan) for k, secs_of_plan in samples.items() if usable(task_variants, variants[k])}
    secs = lost = unmeasured = 0.0
    for point, share in zip(domain.points, domain.served or domain.weights, strict=True):
        times = {k: t for k, of in known.items() if (t := of.at(point)) is not None}
        secs_of_plan = times.get(plan[0].choose(point))
        if secs_of_plan is None:
            unmeasured += share
            continue
        best = min(times.values())
        secs += share * best
        # Differences within the noise of a measurement are no loss: another choice would not be faster for sure.
        lost += share * (secs_of_plan - best) if secs_of_plan > (1 + NOISE) * best else 0.0
    return Drift(secs, lost, unmeasured)


def model_regret(drifts: Mapping[str, Drift], calls: Mapping[str, int]) -> float:
    """Return the share of a model's time that its plans lose.

    Args:
        calls: Calls of each task in one run.
    """
    secs = sum(calls[k] * d.secs for k, d in drifts.items())
    return sum(calls[k] * d.lost for k, d in drifts.items()) / secs if secs > 0 else 0.0


@dataclass(frozen=True)
class _Times:
    """Median seconds of a variant at the shapes it was timed at."""

    points: tuple[Point, ...]
    secs: tuple[float, ...]

    @staticmethod
    def of(samples: Mapping[tuple[tuple[str, int], ...], Sequence[float]]) -> _Times:
        timed = {tuple(x for _, x in _in_order(shape)): statistics.median(own) for shape, own in samples.items()}
        points = sorted(timed)
        return _Times(tuple(points), tuple(timed[p] for p in points))

    def at(self, point: Point) -> float | None:
        """Return the seconds at a point; None outside of the timed range."""
        ranges = list(zip(*self.points, strict=True))
        if any(not min(r) <= x <= max(r) for r, x in zip(ranges, point, strict=True)):
            return None
        if len(point) == 1:
            # In logarithms of both, a time that grows with a power of the size is a straight line.
            logs = [math.log(max(p[0], 1)) for p in self.points]
            return float(np.exp(np.interp(math.log(max(point[0], 1)), logs, np.log(self.secs))))
        near = sorted((distance(p, point), t) for p, t in zip(self.points, self.secs))[:NEIGHBOURS]
        # Inverse distance weighting (Shepard, 1968). The small number gives a measured point nearly all the weight.
        weights = [1 / (d + 1e-9) for d, _ in near]
        return math.exp(sum(w * math.log(t) for w, (_, t) in zip(weights, near)) / sum(weights))


def _in_order(shape: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """Return the symbols of a record by number."""
    return sorted(shape, key=lambda s: int(s[0][1:]))
