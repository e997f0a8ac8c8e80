"""The comparison of times before and after a swap, over calls of equal sizes.

Tests: `tests/tuner/serve/improve/test_watch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from relax_tune.tuner.serve.improve.sizes import Times

LEAST_BEFORE = 8
"""Times of a size before the swap without which it is not compared."""
LEAST_CALLS = 300
"""Compared calls after the swap: the 99th percentile of fewer is the slowest call or two."""
ALLOWED = 1.05
"""Ratio of the 99th percentiles, and of the medians, after and before, from which the swap is undone."""
SIGMAS = 3.0
"""Standard deviations by which more calls than expected are slower: a percentile of few hundred calls varies by more than 5 %."""


@dataclass(frozen=True, slots=True)
class TimesComparison:
    """Times of calls, each relative to the median of its size before the swap.

    Attributes:
        calls: Compared calls after the swap.
        median, p99: Of the calls after the swap.
        p99_before: Of the calls before.
        rises: Whether calls became slower, in the 99th percentile or the median, by more than chance explains.
    """

    calls: int
    median: float
    p99: float
    p99_before: float
    rises: bool

    def __str__(self) -> str:
        return (
            f"{self.calls} calls of equal sizes: median {self.median:.3f} of before, 99th percentile {self.p99:.3f} "
            f"after {self.p99_before:.3f}"
        )


def compare(before: Times, after: Times, least: int = LEAST_CALLS) -> TimesComparison | None:
    """Return the comparison; None while there are fewer than `least` calls of sizes that occurred before."""
    bases = {size: median(times) for size, times in before.items() if len(times) >= LEAST_BEFORE}
    earlier = [t / bases[size] for size in bases if size in after for t in before[size]]
    later = [t / bases[size] for size in bases for t in after.get(size, ())]
    if len(later) < least:
        return None
    rises = any(_rises(earlier, later, quantile) for quantile in (0.5, 0.99))
    return TimesComparison(len(later), median(later), _quantile(later, 0.99), _quantile(earlier, 0.99), rises)


def _rises(earlier: Sequence[float], later: Sequence[float], quantile: float) -> bool:
    """Return whether a quantile rose: by the allowed ratio, and with more calls beyond the earlier one than chance explains.

    If both are of one distribution, the number of later calls beyond a quantile of the earlier ones is beta-binomial.
    """
    bound, n, m = _quantile(earlier, quantile), len(earlier), len(later)
    beyond = sum(t > bound for t in later)
    deviation = math.sqrt(m * quantile * (1 - quantile) * (1 + m / n))
    return _quantile(later, quantile) > ALLOWED * bound and beyond > m * (1 - quantile) + SIGMAS * deviation


def _quantile(values: Sequence[float], quantile: float) -> float:
    return float(np.quantile(values, quantile, method="higher"))
