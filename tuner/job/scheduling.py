"""Which task the next trials go to: the one whose next batch is expected to save the most time of the whole model (DESIGN 7.9;
the idea of a gradient per task is Ansor's).

What a batch brings is read off the candidates tried so far, as a set: how far the next best ones lie behind the best tells how
much room is left below it. Times near their lower end thin out about exponentially, so that with a spread s between neighbours
there, b more candidates after n lower the best log time by s log((n + b) / n). Where something else is dispatched, such as the
library, only what comes out below that counts.

Nothing here looks at when a record was made, so an interrupted job goes on where an undisturbed one would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEAREST = 8
"""How many of the best candidates say what the spread is."""
FIRST_SPREAD = 0.3
"""The spread where fewer than three candidates have a time; elsewhere it weighs in as one candidate among all tried."""
WORTHWHILE = 2e-5
"""A batch that is expected to save less than this share of the model's time is not measured."""


def spread(times: Sequence[float], tried: int) -> float:
    """Mean distance in log time between neighbours among the best few.

    The i-th best of an exponential lower end lies s (1 + 1/2 + ... 1/(i-1)) behind the best on average, i counting from 1.
    """
    best = sorted(math.log(t) for t in times)[: max(3, min(NEAREST, tried // 3))]
    if len(best) < 3:
        return FIRST_SPREAD
    behind = sum(t - best[0] for t in best[1:])
    steps = sum(sum(1.0 / j for j in range(1, i)) for i in range(2, len(best) + 1))
    weight = 1.0 / max(tried, len(best))
    return (behind / steps + weight * FIRST_SPREAD) / (1.0 + weight)


def expected_saving(times: Sequence[float], tried: int, batch: int, dispatched: float) -> float:
    """Seconds by which `batch` more candidates are expected to lower what is dispatched at one shape.

    times: of the candidates that have one; tried: all of them, failed ones too; dispatched: seconds of the best there is.
    """
    mean = spread(times, tried) * math.log1p(batch / max(tried, batch))
    behind = max(0.0, math.log(min(times) / dispatched)) if times else mean
    if mean <= 0:
        return 0.0
    saved = mean * math.exp(-behind / mean)  # E[max(0, x - behind)] of an exponential x of that mean
    return dispatched * -math.expm1(-saved)
