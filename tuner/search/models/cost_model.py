"""Cost models: from features of (candidate, shape) rows to an order and to times with uncertainty.

Times are log(seconds / roofline), so that rows of different shapes, tasks and devices can be trained on together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relax_tune.errors import UserError

FeatureArray = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CHUNK = 4096
"""Rows a prediction call takes at once: small enough to stay in the cache, large enough to hide the call."""


@runtime_checkable
class CostModel(Protocol):
    """A model that learns from measured rows and scores others.

    Promises: training is a function of the *arguments* only (single-threaded, seeded, no clock), so that any number of
    workers or prediction threads gives equal results; callers pass rows in a canonical order. Before the first `fit`
    with a time in it, `ready` is False, `rank` answers zeros and `predict` zeros with unit spread. Arrays are neither
    stored nor changed. Predicting from several threads at once is safe; fitting is not.
    """

    @property
    def ready(self) -> bool:
        """True if the model has learnt from at least one time."""
        ...

    def fit(self, features: FeatureArray, log_time: FloatArray, groups: IntArray) -> None:
        """Train from scratch.

        `features: (N, F) f32` (NaN where a row has none), `log_time: (N,)` log(seconds / roofline), NaN for a failure,
        `groups: (N,)` any integers: rows are ordered against rows of their own group, one group a (task, shape).

        Raises:
            UserError: Lengths that do not match.
        """
        ...

    def rank(self, features: FeatureArray) -> FloatArray:
        """Return scores (N,) that order the rows of a group: larger is faster, likely failures are at the bottom."""
        ...

    def predict(self, features: FeatureArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation (N,), (N,) of log_time, assuming that the candidate works."""
        ...


@dataclass(frozen=True, slots=True)
class BoosterSettings:
    """Size and learning rate of the trees.

    Attributes:
        heads: Members of the ensemble, whose disagreement measures the uncertainty.
        head_rows: Share of the rows that each member is trained on.
        threads: Threads of predictions; training is single-threaded.
    """

    depth: int = 5
    trees: int = 64
    eta: float = 0.15
    heads: int = 4
    head_rows: float = 0.75
    threads: int = 2
    seed: int = 0


class GradientBoostedModel:
    """xgboost: a pairwise ranking head and an ensemble of squared-error heads, each on its own subset of the rows."""

    def __init__(self, settings: BoosterSettings = BoosterSettings()) -> None:
        self.settings = settings
        self._ranker: Any = None
        self._heads: list[Any] = []
        self._center = 0.0
        self._noise = 1.0

    @property
    def ready(self) -> bool:
        """True if the model has learnt from at least one time."""
        return bool(self._heads)

    def fit(self, features: FeatureArray, log_time: FloatArray, groups: IntArray) -> None:
        """Train the heads; see `CostModel`."""
        features, log_time, groups = _checked(features, log_time, groups)
        works = np.isfinite(log_time)
        self._heads, self._ranker = [], None
        # One time has no spread, from which heads could learn a difference.
        if works.sum() < 2:
            return
        # The trees start from 0 (`base_score`). Few of them at a small learning rate would not reach the mean.
        self._center = float(log_time[works].mean())
        self._train_heads(features[works], log_time[works] - self._center)
        self._train_ranker(features, log_time, groups)

    def _train_ranker(self, features: FeatureArray, log_time: FloatArray, groups: IntArray) -> None:
        import xgboost as xgb

        # xgboost expects rows of a group next to each other. Stable, so that equal inputs give equal models.
        order = np.argsort(groups, kind="stable")
        relevance = relative_relevance(log_time, groups)
        data = xgb.DMatrix(features[order], label=relevance[order], qid=_dense(groups[order]), nthread=1)
        parameters = self._parameters("rank:pairwise", self.settings.seed)
        parameters |= {
            "lambdarank_pair_method": "mean",
            "lambdarank_num_pair_per_sample": 4,
            "lambdarank_score_normalization": 0,
        }
        self._ranker = xgb.train(parameters, data, num_boost_round=self.settings.trees)

    def _train_heads(self, features: FeatureArray, target: FloatArray) -> None:
        import xgboost as xgb

        rng = np.random.default_rng(self.settings.seed)
        count = max(2, round(self.settings.head_rows * len(target)))
        residuals = []
        for head in range(self.settings.heads):
            rows = np.sort(rng.permutation(len(target))[:count])
            data = xgb.DMatrix(features[rows], label=target[rows], nthread=1)
            booster = xgb.train(
                self._parameters("reg:squarederror", self.settings.seed + 1 + head), data, self.settings.trees
            )
            # predictions run in threads of our own, on chunks; xgboost's would oversubscribe the processor
            booster.set_param({"nthread": 1})
            self._heads.append(booster)
            # Rows outside of its training set measure the member's error without another training.
            out = np.setdiff1d(np.arange(len(target)), rows)
            if len(out):
                residuals.append(target[out] - booster.inplace_predict(features[out]))
        self._noise = float(np.sqrt(np.mean(np.concatenate(residuals) ** 2))) if residuals else float(target.std())

    def _parameters(self, objective: str, seed: int) -> dict[str, Any]:
        s = self.settings
        return {
            "objective": objective,
            "tree_method": "hist",
            "max_depth": s.depth,
            "eta": s.eta,
            # It is compared with sums of second derivatives, which for pairs are far below 1.
            "min_child_weight": 0 if objective.startswith("rank") else 1,
            "base_score": 0.0,
            "nthread": 1,
            "seed": seed,
            "verbosity": 0,
        }

    def rank(self, features: FeatureArray) -> FloatArray:
        """Return scores (N,), larger is faster; see `CostModel`."""
        if self._ranker is None:
            return np.zeros(len(features))
        return self._chunked(self._ranker, features)

    def predict(self, features: FeatureArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and spread (N,), (N,).

        The spread combines the heads' disagreement with a third of their error on rows outside their training sets.
        """
        if not self.ready:
            return np.zeros(len(features)), np.ones(len(features))
        each = np.stack([self._chunked(head, features) for head in self._heads])
        spread = np.sqrt(each.var(axis=0) + (self._noise / 3.0) ** 2)
        return each.mean(axis=0) + self._center, spread

    def _chunked(self, booster: Any, features: FeatureArray) -> FloatArray:
        starts = range(0, len(features), CHUNK)
        out = np.empty(len(features), dtype=np.float64)

        def score(start: int) -> None:
            out[start : start + CHUNK] = booster.inplace_predict(features[start : start + CHUNK])

        if len(starts) < 2 or self.settings.threads < 2:
            for start in starts:
                score(start)
        else:
            with ThreadPoolExecutor(self.settings.threads) as pool:
                list(pool.map(score, starts))
        return out


def relative_relevance(log_time: FloatArray, groups: IntArray) -> FloatArray:
    """Return the relevance (N,) of each row within its group, by its rank.

    It is 1 for the fastest and 0 for failures.
    """
    out = np.zeros(len(log_time), dtype=np.float64)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        time = np.where(np.isfinite(log_time[rows]), log_time[rows], np.inf)
        slower = np.searchsorted(np.sort(time), time, side="left")
        out[rows] = np.where(np.isfinite(time), 1.0 - slower / len(rows), 0.0)
    return out


def _dense(groups: IntArray) -> IntArray:
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


def _checked(
    features: FeatureArray, log_time: FloatArray, groups: IntArray
) -> tuple[FeatureArray, FloatArray, IntArray]:
    if features.ndim != 2 or log_time.shape != (len(features),) or groups.shape != (len(features),):
        raise UserError(
            f"expected features (N, F), log_time (N,) and groups (N,), got {features.shape}, {log_time.shape} and {groups.shape}; "
            "pass one row for each measured (candidate, shape)"
        )
    return np.ascontiguousarray(features, dtype=np.float32), log_time.astype(np.float64), groups.astype(np.int64)
