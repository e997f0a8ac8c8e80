"""Optuna's samplers (TPE, Gaussian process, CMA-ES) behind the same interface, through its ask/tell.

Tests: `tests/tuner/search/strategies/test_strategy_contract.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from relax_tune.tuner.search.base import Result, SearchHistory, SearchProblem
from relax_tune.tuner.search.space import Candidate, CodeArray
from relax_tune.tuner.search.strategies.baselines import fresh_sample

Sampler = Literal["tpe", "gp", "cmaes"]

REJECTIONS = {"tpe": 24, "gp": 2, "cmaes": 24}
"""Suggestions per candidate that may be rejected before a random legal one replaces them. A suggestion of the Gaussian
process costs too much to reject many.
"""

MODEL_TRIALS = 10
"""Timed trials of a sketch from which the Gaussian process and CMA-ES start; CMA-ES takes a tenth of them as its first
generation's parents.
"""


class OptunaSearch:
    """Optuna's samplers over domain positions. Illegal or repeated suggestions are rejected and reported as failed.

    TPE searches all sketches in one study, the sketch among the parameters. The Gaussian process and CMA-ES need a
    fixed set of parameters, so each sketch has its own study. The better a sketch's best is, the more of its
    suggestions are taken. CMA-ES moves ordered parameters only; others are drawn at random.

    Each ask rebuilds the studies from the reported results, in canonical order: answers that arrive in another order change
    nothing. The objective is the weighted mean log time over the shapes a candidate was tried at.
    """

    packages: tuple[str, ...] = ("optuna",)
    install = "'relax-tune[tune]'"
    sampler: Sampler = "tpe"

    def __init__(self, problem: SearchProblem, rng: np.random.Generator, startup: int = 16) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._problem = problem
        self._history = SearchHistory(problem)
        self._rng = rng
        self._startup = startup

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results; see `SearchStrategy`."""
        self._history.add(results)

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates; see `SearchStrategy`."""
        if n <= 0:
            return []
        spare = fresh_sample(self._history, self._rng, n)
        count = min(n, len(spare))
        rows = self._suggested(count) if len(self._history) >= self._startup else []
        known = {row.tobytes() for code in rows for row in code}
        rows += [row[None, :] for row in spare if row.tobytes() not in known][: count - len(rows)]
        return self._history.ask(np.concatenate(rows) if rows else spare)

    def _suggested(self, count: int) -> list[CodeArray]:
        """Return up to `count` legal suggestions that are new."""
        trials = self._trials()
        studies: dict[int | None, Any] = {}
        sketches = self._sketches(trials, REJECTIONS[self.sampler] * count)
        taken = {row.tobytes() for row in self._history.visited()}
        rows: list[CodeArray] = []
        for sketch in sketches:
            if len(rows) >= count:
                break
            if sketch not in studies:
                studies[sketch] = self._study([t for s, t in trials if sketch in (None, s)])
            trial = studies[sketch].ask()
            code = self._code(trial, sketch)
            # Also if it is taken: its time is known later, when the studies are built again.
            studies[sketch].tell(trial, state=self._optuna.trial.TrialState.FAIL)
            if code[0].tobytes() not in taken and bool(self._problem.space.valid(code)[0]):
                taken.add(code[0].tobytes())
                rows.append(code)
        return rows

    def _sketches(self, trials: Sequence[tuple[int, Any]], count: int) -> list[int | None]:
        """Return the sketch of each of `count` suggestions; None if the sampler chooses it."""
        if self.sampler == "tpe":
            return [None] * count
        number = len(self._problem.space.sketches)
        best = np.full(number, -np.inf)  # an untried sketch comes first
        for sketch in range(number):
            values = [t.value for s, t in trials if s == sketch and t.value is not None]
            if any(s == sketch for s, _ in trials):
                best[sketch] = min(values, default=np.inf)
        rank = np.argsort(np.argsort(best, kind="stable"), kind="stable")
        share = 1.0 / (1 + rank)
        return [int(s) for s in self._rng.choice(number, size=count, p=share / share.sum())]

    def _trials(self) -> list[tuple[int, Any]]:
        """Convert the results to Optuna's trials, each with its sketch."""
        create = self._optuna.trial.create_trial
        failed = self._optuna.trial.TrialState.FAIL
        observed = self._history.observations()
        weights = np.where(np.isfinite(observed.log_time), self._problem.weights[None, :], 0.0)
        centred = np.nan_to_num(observed.log_time - np.log(self._problem.roofline)[None, :])
        total = weights.sum(axis=1)
        trials = []
        for code, weight, row in zip(observed.codes, total, (weights * centred).sum(axis=1)):
            sketch = int(code[0])
            kinds = self._distributions(sketch)
            values = {name: int(position) for name, position in zip(kinds, code[1:])}
            if self.sampler == "tpe":
                kinds, values = self._with_sketch(kinds), {**values, "sketch": sketch}
            outcome = {"value": float(row / weight)} if weight > 0 else {"state": failed}
            trials.append((sketch, create(params=values, distributions=kinds, **outcome)))
        return trials

    def _study(self, trials: Sequence[Any]) -> Any:
        samplers, seed = self._optuna.samplers, int(self._rng.integers(0, 2**31))
        complete = [t for t in trials if t.value is not None]
        if self.sampler == "tpe":
            # `group`: the parameters of a sketch occur only in its own trials, among which they are modelled
            # together.
            sampler = samplers.TPESampler(
                seed=seed, n_startup_trials=0, multivariate=True, group=True, constant_liar=False
            )
        elif len(complete) < MODEL_TRIALS:
            sampler = samplers.RandomSampler(seed=seed)
        elif self.sampler == "gp":
            sampler = samplers.GPSampler(seed=seed, n_startup_trials=0, warn_independent_sampling=False)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                sampler = samplers.CmaEsSampler(
                    seed=seed,
                    n_startup_trials=0,
                    source_trials=[self._moved(t) for t in complete],
                    independent_sampler=samplers.RandomSampler(seed=seed),
                    warn_independent_sampling=False,
                )
        study = self._optuna.create_study(sampler=sampler)
        study.add_trials(trials)
        return study

    def _moved(self, trial: Any) -> Any:
        """Return a trial with only the parameters that CMA-ES varies, since it starts from no others."""
        kinds = {n: d for n, d in trial.distributions.items() if not hasattr(d, "choices") and not d.single()}
        values = {n: trial.params[n] for n in kinds}
        return self._optuna.trial.create_trial(params=values, distributions=kinds, value=trial.value)

    def _distributions(self, sketch: int) -> dict[str, Any]:
        """Return the Optuna distributions of a sketch's parameters, as positions in their domains."""
        kinds = self._optuna.distributions
        return {
            f"{sketch}.{p.name}": kinds.IntDistribution(0, len(p.domain) - 1)
            if p.ordered
            else kinds.CategoricalDistribution(tuple(range(len(p.domain))))
            for p in self._problem.space.sketches[sketch].parameters
        }

    def _with_sketch(self, kinds: dict[str, Any]) -> dict[str, Any]:
        choices = tuple(range(len(self._problem.space.sketches)))
        return {"sketch": self._optuna.distributions.CategoricalDistribution(choices), **kinds}

    def _code(self, trial: Any, sketch: int | None) -> CodeArray:
        """Convert a trial's suggestion to a code of one row."""
        space = self._problem.space
        if sketch is None:
            sketch = int(trial.suggest_categorical("sketch", tuple(range(len(space.sketches)))))
        code = np.zeros((1, 1 + space.width), dtype=np.int32)
        code[0, 0] = sketch
        for j, (name, kind) in enumerate(self._distributions(sketch).items()):
            if hasattr(kind, "choices"):
                code[0, 1 + j] = trial.suggest_categorical(name, kind.choices)
            else:
                code[0, 1 + j] = trial.suggest_int(name, kind.low, kind.high)
        return code


class CmaEsSearch(OptunaSearch):
    """CMA-ES (Hansen and Ostermeier, 2001), one study per sketch."""

    packages = ("optuna", "cmaes")
    sampler: Sampler = "cmaes"


class GaussianProcessSearch(OptunaSearch):
    """Optuna's Gaussian process, one study per sketch."""

    packages = ("optuna", "scipy", "torch")
    install = "optuna scipy torch"
    sampler: Sampler = "gp"


STRATEGIES = {"optuna": OptunaSearch, "optuna-cmaes": CmaEsSearch, "optuna-gp": GaussianProcessSearch}
