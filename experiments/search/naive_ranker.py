"""The simplest model-based search: a baseline for `replay.py` and `replay_ablation.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xgboost as xgb

from relax_tune.tuner.search.base import Result, SearchHistory, SearchProblem
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.search.strategies.baselines import fresh_sample


class NaiveRanker:
    """Boosted trees on the raw parameters of a small space of one sketch and one shape.

    They are fitted to log times after 32 random points (a failure counts as e times the slowest). The best by their
    prediction are measured, with one random point a batch.
    """

    def __init__(self, problem: SearchProblem, rng: np.random.Generator) -> None:
        self._history = SearchHistory(problem)
        self._rng = rng

    def tell(self, results: Sequence[Result]) -> None:
        self._history.add(results)

    def ask(self, n: int) -> list[Candidate]:
        if len(self._history) < 32:
            return self._history.ask(fresh_sample(self._history, self._rng, n))
        of = self._history.problem.space
        seen, listed = self._history.observations(), of.listed()
        assert listed is not None
        pool = self._history.fresh(listed)
        times = seen.log_time[:, 0]
        target = np.where(np.isfinite(times), times, np.nanmax(times) + 1.0)
        data = xgb.DMatrix(of.sketches[0].values(seen.codes[:, 1:]), label=target, nthread=1)
        options = {"max_depth": 6, "eta": 0.15, "nthread": 1, "base_score": float(target.mean())}
        model = xgb.train(options, data, 150)
        predicted = model.predict(xgb.DMatrix(of.sketches[0].values(pool[:, 1:]), nthread=1))
        order = np.argsort(predicted, kind="stable")
        chance = self._rng.permutation(order[n - 1 :])[:1]
        return self._history.ask(pool[np.concatenate([order[: n - 1], chance])])
