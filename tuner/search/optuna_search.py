"""Optuna's samplers (TPE by default) behind the same interface, through its ask/tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import History, Result, SearchProblem
from relax_tune.tuner.search.baselines import fresh_sample
from relax_tune.tuner.search.space import Candidate, CodeArray

REJECTIONS = 24
"""Suggestions that may break a constraint or repeat, for each candidate asked, before a random legal one takes the
place.
"""


class OptunaSearch:
    """TPE over domain positions, the sketch among them. Illegal or repeated suggestions are rejected and told as
    failed.

    Each ask rebuilds the study from what was told, in canonical order: answers that arrive in another order change
    nothing. The objective is the weighted mean log time over the shapes a candidate was tried at.

    Raises:
        UserError: optuna is not installed.
    """

    def __init__(self, problem: SearchProblem, rng: np.random.Generator, startup: int = 16) -> None:
        self._optuna = _import_optuna()
        self._problem = problem
        self._history = History(problem)
        self._rng = rng
        self._startup = startup

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results; see `SearchStrategy`."""
        self._history.add(results)

    def ask(self, n: int) -> list[Candidate]:
        """Up to `n` new candidates; see `SearchStrategy`."""
        if n <= 0:
            return []
        study = self._study()
        space = self._problem.space
        rows: list[CodeArray] = []
        spare = fresh_sample(self._history, self._rng, n)
        state = self._optuna.trial.TrialState
        taken = {row.tobytes() for row in self._history.seen()}
        for _ in range(REJECTIONS * n):
            if len(rows) >= min(n, len(spare)) or len(self._history) + len(rows) < self._startup:
                break
            trial = study.ask()
            code = self._suggest(trial)
            study.tell(trial, state=state.FAIL)
            if code[0].tobytes() not in taken and bool(space.valid(code)[0]):
                taken.add(code[0].tobytes())
                rows.append(code)
        known = {row.tobytes() for code in rows for row in code}
        rows += [row[None, :] for row in spare if row.tobytes() not in known][: min(n, len(spare)) - len(rows)]
        return self._history.ask(np.concatenate(rows) if rows else spare)

    def _study(self) -> Any:
        optuna = self._optuna
        sampler = optuna.samplers.TPESampler(
            seed=int(self._rng.integers(0, 2**31)),
            n_startup_trials=0,
            multivariate=True,
            group=True,
            constant_liar=False,
        )
        study = optuna.create_study(sampler=sampler)
        seen = self._history.observations()
        weights = np.where(np.isfinite(seen.log_time), self._problem.weights[None, :], 0.0)
        centred = np.nan_to_num(seen.log_time - np.log(self._problem.roofline)[None, :])
        total = weights.sum(axis=1)
        for code, weight, row in zip(seen.codes, total, (weights * centred).sum(axis=1)):
            parameters, distributions = self._described(code)
            if weight > 0:
                trial = optuna.trial.create_trial(
                    params=parameters, distributions=distributions, value=float(row / weight)
                )
            else:
                state = optuna.trial.TrialState.FAIL
                trial = optuna.trial.create_trial(params=parameters, distributions=distributions, state=state)
            study.add_trial(trial)
        return study

    def _names(self, sketch: int) -> list[tuple[str, int, bool]]:
        parameters = self._problem.space.sketches[sketch].parameters
        return [(f"{sketch}.{p.name}", len(p.domain), p.ordered) for p in parameters]

    def _described(self, code: CodeArray) -> tuple[dict[str, Any], dict[str, Any]]:
        """Optuna's view of a code: parameters and distributions by name."""
        distributions = self._optuna.distributions
        sketch = int(code[0])
        parameters: dict[str, Any] = {"sketch": sketch}
        kinds: dict[str, Any] = {
            "sketch": distributions.CategoricalDistribution(tuple(range(len(self._problem.space.sketches))))
        }
        for (name, size, ordered), position in zip(self._names(sketch), code[1:].tolist()):
            parameters[name] = position
            if ordered:
                kinds[name] = distributions.IntDistribution(0, size - 1)
            else:
                kinds[name] = distributions.CategoricalDistribution(tuple(range(size)))
        return parameters, kinds

    def _suggest(self, trial: Any) -> CodeArray:
        space = self._problem.space
        code = np.zeros((1, 1 + space.width), dtype=np.int32)
        sketch = trial.suggest_categorical("sketch", tuple(range(len(space.sketches))))
        code[0, 0] = sketch
        for j, (name, size, ordered) in enumerate(self._names(int(sketch))):
            if ordered:
                code[0, 1 + j] = trial.suggest_int(name, 0, size - 1)
            else:
                code[0, 1 + j] = trial.suggest_categorical(name, tuple(range(size)))
        return code


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("wanted the optuna strategy, found no optuna; pip install 'relax-tune[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
