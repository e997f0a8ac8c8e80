"""The choice of the task that gets the next trials: the one whose next batch is expected to save most time of the model.

The idea of a gradient per task is Ansor's (Zheng et al., OSDI 2020). The expected gain of a batch follows from the
candidates tried so far. The distance from the best to the next best ones estimates how much lower times can get, since
the density of times falls about exponentially near their lower end. With a spread s between neighbours there, b more
candidates after n lower the best log time by s log((n + b) / n). Where another variant is dispatched, such as the
library, only a gain on that one counts.

The time of a record has no influence, so an interrupted job continues like an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEAREST = 8
"""Number of the best candidates that determine the spread."""
FIRST_SPREAD = 0.3
"""The spread if fewer than three candidates have a time; otherwise it counts as one candidate among all tried."""


def spread(times: Sequence[float], tried: int) -> float:
    """Return the mean distance in log time between neighbours among the best few."""
    best = sorted(math.log(t) for t in times)[: max(3, min(NEAREST, tried // 3))]
    if len(best) < 3:
        return FIRST_SPREAD
    behind = sum(t - best[0] for t in best[1:])
    steps = sum(sum(1.0 / j for j in range(1, i)) for i in range(2, len(best) + 1))
    weight = 1.0 / max(tried, len(best))
    return (behind / steps + weight * FIRST_SPREAD) / (1.0 + weight)


def expected_saving(times: Sequence[float], tried: int, batch: int, dispatched: float) -> float:
    """Return the seconds by which `batch` more candidates are expected to lower the dispatched time at one shape.

    Args:
        times: Seconds of the candidates that have a time.
        tried: Number of candidates, including failed ones.
        dispatched: Smallest seconds of any variant.
    """
    mean = spread(times, tried) * math.log1p(batch / max(tried, batch))
    behind = max(0.0, math.log(min(times) / dispatched)) if times else mean
    if mean <= 0:
        return 0.0
    saved = mean * math.exp(-behind / mean)  # E[max(0, x - behind)] of an exponential x of that mean
    return dispatched * -math.expm1(-saved)
