"""The comparison of an artifact with the one that is served: results and times at served sizes.

Tests: `tests/tuner/serve/improve/test_check.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.errors import UserError
from relax_tune.runtime.model import Model
from relax_tune.tuner.serve.improve.sizes import Size
from relax_tune.tuner.serve.rows import Arrays, sample

SIZES = 32
"""Served sizes that are compared, at most: quantiles of the calls."""
LEAST_REPEATS, MOST_REPEATS = 5, 50
LEAST_GAIN = 0.02
"""Share of the time of the served mix that an artifact has to save."""
SLOWER = 1.05
"""Ratio of the 99th percentiles of the mix beyond which an artifact is refused."""


@dataclass(frozen=True, slots=True)
class ArtifactComparison:
    """An artifact against the one that is served.

    Attributes:
        difference: Greatest difference of a result, relative to its largest element.
        where: Size and result of this difference.
        gain: Share of the time of the mix that it saves.
        p99: Ratio of the 99th percentiles of the times of the mix.
        sizes: Number of compared sizes.
    """

    difference: float
    where: str
    gain: float
    p99: float
    sizes: int

    def refusal(self, tolerance: float) -> str:
        """Return why the artifact must not be served; empty if it may."""
        if not self.difference <= tolerance:
            return f"{self.where} differs by {self.difference:.2g} of its largest element, more than {tolerance:g}"
        if self.gain < LEAST_GAIN:
            return f"it saves {self.gain:.1%} of the time of the served mix, less than {LEAST_GAIN:.0%}"
        if self.p99 > SLOWER:
            return f"the 99th percentile of the served mix takes {self.p99:.2f} of the time"
        return ""


def compare(old: Model, new: Model, sizes: Sequence[tuple[Size, float]], secs: float) -> ArtifactComparison:
    """Compare the results of two models on random arguments, and time them alternately.

    Args:
        old: The model that is served.
        new: The other one, of the same signature.
        sizes: Sizes with their shares of the calls.
        secs: Time for all sizes together; each is timed at least `LEAST_REPEATS` times.
    """
    generator = np.random.default_rng(0)
    worst, where = 0.0, ""
    times = list[tuple[float, float, float]]()
    for (function, values), share in sizes:
        try:
            arrays = _arguments(old, function, values, generator)
        except UserError:  # a size that the program refuses
            continue
        results = [model.run(arrays, function) for model in (old, new)]
        for name, before, after in zip(results[0].names, *results, strict=True):
            change = difference(np.asarray(before), np.asarray(after))
            if not change <= worst:
                worst, where = change, f"{function} at {', '.join(map(str, values))}: {name}"
        times.append((share, *_times(old, new, function, arrays, secs * share)))
    if not times:
        return ArtifactComparison(worst, where, 0.0, 1.0, 0)
    shares, before_secs, after_secs = map(np.array, zip(*times, strict=True))
    gain = 1 - float(shares @ after_secs) / float(shares @ before_secs)
    return ArtifactComparison(worst, where, gain, _p99(after_secs, shares) / _p99(before_secs, shares), len(times))


def _arguments(model: Model, function: str, values: Sequence[int], generator: np.random.Generator) -> Arrays:
    executor = model.executors[function]
    return sample(executor.program, values, executor.bind(tuple(values)).values, generator)


def difference(old: np.ndarray, new: np.ndarray) -> float:
    """Return the greatest difference, relative to the largest element; infinity for other shapes, types, infinities or no-numbers."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return float("inf")
    before, after = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(before)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    most = np.abs(before[finite] - after[finite]).max()
    largest = np.abs(before[finite]).max()
    return float(most / largest) if largest else float(most)


def _times(old: Model, new: Model, function: str, arrays: Arrays, secs: float) -> tuple[float, float]:
    """Return the fastest call of each: a process of low priority is interrupted in many others."""
    fastest, start = [float("inf")] * 2, time.perf_counter()
    for repeat in range(MOST_REPEATS):
        # alternating orders, so that neither always follows the other
        for which in (0, 1) if repeat % 2 else (1, 0):
            begin = time.perf_counter()
            (old, new)[which].executors[function].run(arrays, in_place=True)
            fastest[which] = min(fastest[which], time.perf_counter() - begin)
        if repeat + 1 >= LEAST_REPEATS and time.perf_counter() - start > secs:
            break
    return fastest[0], fastest[1]


def _p99(secs: np.ndarray, shares: np.ndarray) -> float:
    """Return the 99th percentile of times with shares."""
    order = np.argsort(secs)
    at = int(np.searchsorted(np.cumsum(shares[order]), 0.99 * shares.sum()))
    return float(secs[order][min(at, len(secs) - 1)])
