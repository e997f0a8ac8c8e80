"""The default strategy: evolution over whole populations at once, scored by two models, proposing by marginal gain.

A round: (1) fit a Gaussian process on this search's own measurements and boosted trees on those plus any history; (2)
breed a pool (or take the whole space when it is smaller than a pool) from random legal points and the best measured
ones, by mutation along ordered domains and crossover; (3) fill the batch with slots of four kinds: expected marginal
gain under the process, the same under the trees, an optimistic bound, and now and then a random point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.tuner.search.base import Observations, Result, SearchHistory, SearchProblem, TrainingRows, isin
from relax_tune.tuner.search.constraint_axes import Embedding
from relax_tune.tuner.search.models.acquisition import choose_batch, marginal_gain
from relax_tune.tuner.search.models.cost_model import CostModel, GradientBoostedModel
from relax_tune.tuner.search.models.model_trust import Forecasts
from relax_tune.tuner.search.models.scoring import rank_population
from relax_tune.tuner.search.models.surrogate import Surrogate
from relax_tune.tuner.search.space import Candidate, CodeArray, FloatArray
from relax_tune.tuner.search.strategies.baselines import fresh_sample
from relax_tune.tuner.search.strategies.genetic import crossover, mutate

REFIT_GROWTH = 1.1
TREES_MOST = 0.6
ENOUGH = 32
"""Timed rows from which a history is used."""
ALIKE = 6
"""Factor on the wanted points: of the best by the history, the most dissimilar ones are taken."""


@dataclass(frozen=True, slots=True)
class EvolutionSettings:
    """Sizes of the rounds; no value depends on a space.

    `design` points spread over the space come first. Of each batch, `trees` is the share chosen by the cost model,
    `explore` by the optimistic bound and `epsilon` at random (the rest by the process). A space of up to `exhaustive`
    legal points is scored whole. Otherwise `population` points live through `generations`, after `screened` random ones
    were scored by the cost model only.
    """

    design: int = 16
    trees: float = 0.2
    explore: float = 0.15
    epsilon: float = 0.02
    exhaustive: int = 1 << 15
    screened: int = 8192
    population: int = 1024
    generations: int = 4
    finalists: int = 400


class EvolutionarySearch:
    """See the module. `make_model` builds the cost model of each round; the problem's history warms it up."""

    def __init__(
        self,
        problem: SearchProblem,
        rng: np.random.Generator,
        settings: EvolutionSettings = EvolutionSettings(),
        make_model: Callable[[], CostModel] = GradientBoostedModel,
    ) -> None:
        self.problem = problem
        self.settings = settings
        self._history = SearchHistory(problem)
        self._rng = rng
        self._make_model = make_model
        self._embedded: Embedding | None = None
        self._asked_prior = False
        self._found_prior: TrainingRows | None = None
        self._model: CostModel | None = None
        self._model_rows = 0
        self._forecasts = Forecasts()

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results; see `SearchStrategy`."""
        self._history.add(results)

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates; see `SearchStrategy`."""
        if n <= 0:
            return []
        seen = self._history.observations()
        times = np.isfinite(seen.log_time)
        design = min(n, max(0, self.settings.design - len(self._history)))
        if (times.sum(axis=0).max(initial=0)) < 4:
            design = n
        known = self._transferred(design // 2, seen)
        codes = np.concatenate([known, self._spread(design - len(known), known)])
        if design < n:
            codes = np.concatenate([codes, self._propose(n - design, seen, codes)])
        return self._history.ask(codes)

    @property
    def _prior(self) -> TrainingRows | None:
        if not self._asked_prior:
            found = self.problem.history()
            self._asked_prior = True
            self._found_prior = found if found is not None and np.isfinite(found.log_time).sum() >= ENOUGH else None
        return self._found_prior

    def _transferred(self, count: int, seen: Observations) -> CodeArray:
        """Return the best candidates under a model of the recorded history, each unlike the others."""
        space = self.problem.space
        if count <= 0 or self._prior is None:
            return np.zeros((0, 1 + space.width), dtype=np.int32)
        listed = space.listed()
        small = listed is not None and len(listed) <= self.settings.exhaustive
        pool = (
            self._history.fresh(listed)
            if small and listed is not None
            else fresh_sample(self._history, self._rng, self.settings.screened)
        )
        model = self._fitted(seen)
        order = rank_population(model, space, pool, self.problem.shapes, self.problem.weights)
        front = pool[np.argsort(-order, kind="stable")[: ALIKE * count]]
        return front[_farthest(space.coordinates(front), count)]

    # -- without a model -----------------------------------------------------------------------------------------------

    def _spread(self, count: int, taken: CodeArray) -> CodeArray:
        """Return points far from each other, from `taken` and from all points asked for.

        Each is the farthest of a random pool.
        """
        if count <= 0:
            return np.zeros((0, 1 + self.problem.space.width), dtype=np.int32)
        space = self.problem.space
        pool = fresh_sample(self._history, self._rng, max(512, 4 * count))
        pool = pool[~isin(space.keys(pool), space.keys(taken))] if len(taken) and len(pool) else pool
        references = space.coordinates(np.concatenate([self._history.seen(), taken]))
        return pool[_farthest(space.coordinates(pool), count, references)]

    # -- with models ---------------------------------------------------------------------------------------------------

    def _propose(self, count: int, seen: Observations, taken: CodeArray) -> CodeArray:
        space, settings = self.problem.space, self.settings
        self._embedded = self._embedded or Embedding(space)
        judge = _Judge(self.problem, self._embedded, seen, self._fitted(seen), settings.finalists)
        pool = self._pool(judge, seen)
        pool = pool[~isin(space.keys(pool), space.keys(taken))] if len(taken) and len(pool) else pool
        if not len(pool):
            return pool
        at_random = int((self._rng.random(count) < settings.epsilon).sum())
        by_trees = int((self._rng.random(count) < self._trees_share(judge, seen)).sum())
        by_trees = min(by_trees, count - at_random)
        gain = judge.gain(pool)
        chosen: list[int] = np.argsort(-judge.rank(pool), kind="stable")[:by_trees].tolist() if by_trees else []
        left = np.setdiff1d(np.arange(len(pool)), chosen)
        finalists = left[np.argsort(-gain[left], kind="stable")[: settings.finalists]]
        picks = choose_batch(
            judge.surrogate,
            self._embedded(pool[finalists]),
            judge.best,
            self.problem.weights,
            count - at_random - len(chosen),
            settings.explore,
        )
        chosen += finalists[picks].tolist()
        left = np.setdiff1d(np.arange(len(pool)), chosen)
        chosen += self._rng.permutation(left)[: count - len(chosen)].tolist()
        if judge.has_trees:
            self._forecasts.note(space.candidates(pool[chosen]), *judge.forecasts(pool[chosen]))
        return pool[chosen]

    def _trees_share(self, judge: _Judge, seen: Observations) -> float:
        """Return the share of slots that the cost model fills.

        It is `settings.trees` if the model orders as well as the Gaussian process, more if better, less if worse.
        Without evidence it is 0, or `settings.trees` with a history.
        """
        if not judge.has_trees:
            return 0.0
        lead = self._forecasts.lead(self.problem.space, seen, self.problem.weights)
        if lead is None:
            return self.settings.trees if self._prior is not None else 0.0
        return min(max(self.settings.trees + lead, 0.0), TREES_MOST)

    def _fitted(self, seen: Observations) -> CostModel:
        """Return the cost model trained on the history and all results.

        It is trained again once there are a tenth more results.
        """
        rows, shapes = np.nonzero(np.isfinite(seen.log_time) | seen.failed)
        if self._model is not None and len(rows) < max(self._model_rows + 1, self._model_rows * REFIT_GROWTH):
            return self._model
        model = self._make_model()
        features = self.problem.space.features(seen.codes, self.problem.shapes)[rows, shapes]
        log_time = seen.log_time[rows, shapes] - np.log(self.problem.roofline)[shapes]
        groups = -1 - shapes.astype(np.int64)
        if self._prior is not None:
            features = np.concatenate([self._prior.features, features])
            log_time = np.concatenate([self._prior.log_time, log_time])
            groups = np.concatenate([self._prior.groups, groups])
        model.fit(features, log_time, groups)
        self._model, self._model_rows = model, len(rows)
        return model

    def _pool(self, judge: _Judge, seen: Observations) -> CodeArray:
        """Return promising new legal points: all of a small space, else evolved from a random sample."""
        space, settings = self.problem.space, self.settings
        listed = space.listed()
        if listed is not None and len(listed) <= settings.exhaustive:
            return self._history.fresh(listed)
        screened = fresh_sample(self._history, self._rng, settings.screened)
        ranked = screened[np.argsort(-judge.rank(screened), kind="stable")]
        half = settings.population // 2
        population = np.concatenate([ranked[:half], ranked[half:][:: max(1, len(ranked[half:]) // half)]])
        parents = np.concatenate([judge.elites(settings.population // 16), population])
        archive = population
        for _ in range(settings.generations):
            children = np.concatenate(
                [
                    mutate(space, self._rng, self._tournament(parents, settings.population)),
                    crossover(self._rng, parents, settings.population // 2),
                ]
            )
            children = self._history.fresh(children[space.valid(children)])
            if not len(children):
                break
            archive = space.distinct(np.concatenate([archive, children]))
            by_gain = np.argsort(-judge.gain(archive), kind="stable")[:half]
            by_rank = np.argsort(-judge.rank(archive), kind="stable")[: half // 2]
            parents = np.concatenate([judge.elites(settings.population // 16), archive[by_gain], archive[by_rank]])
        return archive

    def _tournament(self, parents: CodeArray, count: int) -> CodeArray:
        """Draw parents with a preference for the front of the list."""
        places = np.minimum(self._rng.integers(0, len(parents), count), self._rng.integers(0, len(parents), count))
        return np.asarray(parents[places])


class _Judge:
    """The two models of a round, and the best dispatchable times."""

    def __init__(
        self, problem: SearchProblem, embedded: Embedding, seen: Observations, model: CostModel, finalists: int
    ) -> None:
        self._problem = problem
        self._embedded = embedded
        self._seen = seen
        self._model = model
        self._finalists = finalists
        self.best = seen.best(problem)
        self.surrogate = Surrogate(embedded(seen.codes), compressed(seen.log_time), seen.failed)
        self.has_trees = model.ready

    def elites(self, count: int) -> CodeArray:
        """Return the measured points that come closest to the best at any shape."""
        gaps = self._seen.log_time - self.best[None, :]
        behind = np.where(np.isfinite(gaps), gaps, np.inf).min(axis=1)
        order = np.argsort(behind, kind="stable")[:count]
        return np.asarray(self._seen.codes[order[np.isfinite(behind[order])]])

    def gain(self, codes: CodeArray) -> FloatArray:
        """Return log expected marginal gain (R,) under the process, discounted by the probability of success."""
        belief = self.surrogate.posterior(self._embedded(codes))
        known = self.surrogate.shapes
        return marginal_gain(
            belief.mean[:, known], belief.std[:, known], self.best[known], self._problem.weights[known]
        ) + np.log(belief.works)

    def forecasts(self, codes: CodeArray) -> tuple[FloatArray, FloatArray]:
        """Return the mean log seconds (R, S), (R, S) that the process and the trees predict."""
        space, shapes = self._problem.space, self._problem.shapes
        features = space.features(codes, shapes)
        trees = self._model.predict(features.reshape(-1, features.shape[2]))[0].reshape(len(codes), len(shapes))
        return self.surrogate.posterior(self._embedded(codes)).mean, trees + np.log(self._problem.roofline)

    def rank(self, codes: CodeArray) -> FloatArray:
        """Return scores (R,) under the trees.

        The ranking head scores all rows, the time heads' marginal gain its best few.
        """
        space, shapes = self._problem.space, self._problem.shapes
        total = rank_population(self._model, space, codes, shapes, self._problem.weights)
        front = np.argsort(-total, kind="stable")[: max(self._finalists, len(codes) // 25)]
        features = space.features(codes[front], shapes)
        mean, std = self._model.predict(features.reshape(-1, features.shape[2]))
        best = self.best - np.log(self._problem.roofline)
        gain = marginal_gain(mean.reshape(len(front), -1), std.reshape(len(front), -1), best, self._problem.weights)
        total[front] = total.max(initial=0.0) + 1.0 + np.argsort(np.argsort(gain, kind="stable"), kind="stable")
        return total


def _farthest(points: FloatArray, count: int, references: FloatArray | None = None) -> list[int]:
    """Return up to `count` positions among points (R, A), each far from the references and from earlier choices.

    Without references the first point comes first.
    """
    distance = np.full(len(points), np.inf)
    for reference in () if references is None else references:
        distance = np.minimum(distance, np.square(points - reference).sum(axis=1))
    chosen: list[int] = []
    for _ in range(min(count, len(points))):
        pick = int(np.argmax(distance))
        chosen.append(pick)
        distance = np.minimum(distance, np.square(points - points[pick]).sum(axis=1))
        distance[chosen] = -1.0
    return chosen


def compressed(log_time: FloatArray) -> FloatArray:
    """Return log times (N, S) with the slower half compressed, so that the process resolves the fast ones."""
    out = log_time.copy()
    for shape in range(log_time.shape[1]):
        known = np.isfinite(log_time[:, shape])
        if known.any():
            middle = np.median(log_time[known, shape])
            out[known, shape] = np.where(
                log_time[known, shape] > middle,
                middle + 0.25 * (log_time[known, shape] - middle),
                log_time[known, shape],
            )
    return out
