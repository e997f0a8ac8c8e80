"""The choice between two models, by their ordering of candidates before these were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.tuner.search.base import Observations
from relax_tune.tuner.search.space import Candidate, FloatArray, ParameterSpace

WINDOW = 64
"""Forecasts that count: the latest ones."""
ENOUGH = 16
"""Measured forecasts that are needed for a comparison."""


class Forecasts:
    """Predictions of two models at the time of each batch, for comparison with later measurements."""

    def __init__(self) -> None:
        self._said: list[tuple[Candidate, FloatArray, FloatArray]] = []

    def note(self, candidates: Sequence[Candidate], first: FloatArray, second: FloatArray) -> None:
        """Remember the mean log times (R, S) that each model predicts."""
        self._said += zip(candidates, first, second)
        self._said = self._said[-WINDOW:]

    def lead(self, space: ParameterSpace, seen: Observations, weights: FloatArray) -> float | None:
        """Return the difference of Kendall's tau, second model minus first, in -2..2; None without enough measurements."""
        row = {candidate: r for r, candidate in enumerate(space.candidates(seen.codes))}
        found = []
        for candidate, first, second in self._said:
            actual = seen.log_time[row[candidate]] if candidate in row else np.full(len(weights), np.nan)
            known = np.isfinite(actual)
            if known.any():
                share = weights[known] / weights[known].sum()
                found.append([float(values[known] @ share) for values in (actual, first, second)])
        if len(found) < ENOUGH:
            return None
        actual, first, second = np.asarray(found).T
        return tau(second, actual) - tau(first, actual)


def tau(a: FloatArray, b: FloatArray) -> float:
    """Return Kendall's rank correlation of two vectors (N,). Ties count as 0."""
    agree = np.sign(a[:, None] - a[None, :]) * np.sign(b[:, None] - b[None, :])
    return float(agree.sum() / max(len(a) * (len(a) - 1), 1))
