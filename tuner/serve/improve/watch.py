"""The comparison of times before and after a swap, over calls of equal sizes.

Tests: `tests/tuner/serve/improve/test_watch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from relax_tune.tuner.serve.improve.sizes import Times

LEAST_BEFORE = 8
"""Times of a size before the swap without which it is not compared."""
LEAST_CALLS = 200
"""Compared calls after the swap: the 99th percentile of fewer is the slowest call or two."""
ALLOWED = 1.05
"""Ratio of the 99th percentiles, and of the medians, after and before, from which the swap is undone."""


@dataclass(frozen=True, slots=True)
class TimesComparison:
    """Times of calls, each relative to the median of its size before the swap.

    Attributes:
        calls: Compared calls after the swap.
        median, p99: Of the calls after the swap.
        p99_before: Of the calls before.
    """

    calls: int
    median: float
    p99: float
    p99_before: float

    @property
    def rises(self) -> bool:
        """Whether calls became slower: in the 99th percentile, or half of them."""
        return self.p99 > ALLOWED * self.p99_before or self.median > ALLOWED

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
    return TimesComparison(len(later), median(later), _p99(later), _p99(earlier))


def _p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99, method="higher"))
