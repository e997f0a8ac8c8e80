"""The default strategy: evolution over whole populations at once, scored by two models, proposing by marginal gain.

A round: (1) fit a Gaussian process on this search's own measurements and boosted trees on those plus any history; (2)
breed a pool (or take the whole space when it is smaller than a pool) from random legal points and the best measured
ones, by mutation along ordered domains and crossover; (3) fill the batch by expected marginal gain, a few slots by an
optimistic bound, and now and then a random point. The belief about a point mixes both models: where their means differ,
it is less certain than either.

Tests: `tests/tuner/search/test_replay.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from relax_tune.tuner.search.base import Observations, Result, SearchHistory, SearchProblem, TrainingRows, isin
from relax_tune.tuner.search.embedding import Embedding
from relax_tune.tuner.search.models.acquisition import choose_batch, marginal_gain
from relax_tune.tuner.search.models.cost_model import CostModel, FeatureArray, GradientBoostedModel
from relax_tune.tuner.search.models.surrogate import Posterior, Surrogate
from relax_tune.tuner.search.space import Candidate, CodeArray, FloatArray, IntArray, ParameterSpace
from relax_tune.tuner.search.strategies.baselines import fresh_sample

REFIT_GROWTH = 1.1
ENOUGH = 32
"""Timed rows from which a history is used."""
PIECE = 1 << 15
"""(candidate, shape) rows scored at once: with fewer, the overhead in Python exceeds the gain from caches."""
ALIKE = 6
"""Candidates that the history ranks best, per point; the most dissimilar of them are used."""


@dataclass(frozen=True, slots=True)
class EvolutionSettings:
    """Sizes of the rounds; no value depends on a space.

    `design` points spread over the space come first. `trees` is the weight of the cost model in the mixed belief. Of
    each batch, `explore` is the share chosen by the optimistic bound and `epsilon` at random. A space of up to
    `exhaustive` legal points is scored whole. Otherwise `population` points live through `generations`, after `screened`
    random ones were scored by the cost model only.
    """

    design: int = 16
    trees: float = 0.5
    explore: float = 0.3
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
        self._loaded_prior: TrainingRows | None = None
        self._model: CostModel | None = None
        self._model_rows = 0
        self._model_scale: tuple[float, float] | None = None

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results; see `SearchStrategy`."""
        self._history.add(results)

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates; see `SearchStrategy`."""
        if n <= 0:
            return []
        observed = self._history.observations()
        times = np.isfinite(observed.log_time)
        design = min(n, max(0, self.settings.design - len(self._history)))
        # While no shape has four times, the process has too little data: the batch continues the space-filling
        # design.
        if (times.sum(axis=0).max(initial=0)) < 4:
            design = n
        known = self._transferred(design // 2, observed)
        codes = np.concatenate([known, self._spread(design - len(known), known)])
        if design < n:
            codes = np.concatenate([codes, self._propose(n - design, observed, codes)])
        return self._history.ask(codes)

    @property
    def _prior(self) -> TrainingRows | None:
        if not self._asked_prior:
            rows = self.problem.history()
            self._asked_prior = True
            self._loaded_prior = rows if rows is not None and np.isfinite(rows.log_time).sum() >= ENOUGH else None
        return self._loaded_prior

    def _transferred(self, count: int, observed: Observations) -> CodeArray:
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
        model = self._fitted(observed)
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
        references = space.coordinates(np.concatenate([self._history.visited(), taken]))
        return pool[_farthest(space.coordinates(pool), count, references)]

    # -- with models ---------------------------------------------------------------------------------------------------

    def _propose(self, count: int, observed: Observations, taken: CodeArray) -> CodeArray:
        space, settings = self.problem.space, self.settings
        self._embedded = self._embedded or Embedding(space)
        judge = _Judge(self.problem, self._embedded, observed, self._fitted(observed), settings.trees)
        pool = self._pool(judge, observed)
        pool = pool[~isin(space.keys(pool), space.keys(taken))] if len(taken) and len(pool) else pool
        if not len(pool):
            return pool
        at_random = int((self._rng.random(count) < settings.epsilon).sum())
        belief = judge.belief(pool)
        finalists = np.argsort(-judge.gain(belief), kind="stable")[: settings.finalists]
        picks = choose_batch(
            judge.surrogate,
            self._embedded(pool[finalists]),
            belief.rows(finalists),
            judge.best,
            self.problem.weights,
            count - at_random,
            settings.explore,
        )
        chosen = finalists[picks]
        left = np.setdiff1d(np.arange(len(pool)), chosen)
        chance = self._rng.permutation(left)[: count - len(chosen)]
        return np.asarray(pool[np.concatenate([chosen, chance])])

    def _fitted(self, observed: Observations) -> CostModel:
        """Return the cost model trained on the history and all results.

        It is trained again once there are a tenth more results, or their scale has changed.
        """
        rows, shapes = np.nonzero(np.isfinite(observed.log_time) | observed.failed)
        same_scale = observed.scale == self._model_scale
        if (
            self._model is not None
            and same_scale
            and len(rows) < max(self._model_rows + 1, self._model_rows * REFIT_GROWTH)
        ):
            return self._model
        model = self._make_model()
        features = self.problem.space.features(observed.codes, self.problem.shapes)[rows, shapes]
        log_time = observed.log_time[rows, shapes] - np.log(self.problem.roofline)[shapes]
        # Groups of the history count from 0, so own groups are negative: the ranking compares rows only within a
        # group.
        groups = -1 - shapes.astype(np.int64)
        if self._prior is not None:
            features = np.concatenate([self._prior.features, features])
            log_time = np.concatenate([self._prior.log_time, log_time])
            groups = np.concatenate([self._prior.groups, groups])
        model.fit(features, log_time, groups)
        self._model, self._model_rows, self._model_scale = model, len(rows), observed.scale
        return model

    def _pool(self, judge: _Judge, observed: Observations) -> CodeArray:
        """Return promising new legal points: all of a small space, else evolved from a random sample."""
        space, settings = self.problem.space, self.settings
        listed = space.listed()
        if listed is not None and len(listed) <= settings.exhaustive:
            return self._history.fresh(listed)
        screened = fresh_sample(self._history, self._rng, settings.screened)
        ranked = screened[np.argsort(-judge.rank(screened), kind="stable")]
        half = settings.population // 2
        population = np.concatenate([ranked[:half], ranked[half:][:: max(1, len(ranked[half:]) // half)]])
        # The best measured points come first: the tournament prefers the front of the list.
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
            by_gain = np.argsort(-judge.gain(judge.belief(archive)), kind="stable")[:half]
            parents = np.concatenate([judge.elites(settings.population // 16), archive[by_gain]])
        return archive

    def _tournament(self, parents: CodeArray, count: int) -> CodeArray:
        """Draw parents with a preference for the front of the list."""
        # The smaller of two uniform draws: the chance of a place falls linearly along the list.
        places = np.minimum(self._rng.integers(0, len(parents), count), self._rng.integers(0, len(parents), count))
        return np.asarray(parents[places])


class _Judge:
    """The two models of a round, and the best dispatchable times."""

    def __init__(
        self, problem: SearchProblem, embedded: Embedding, observed: Observations, model: CostModel, trees: float
    ) -> None:
        self._problem = problem
        self._embedded = embedded
        self._observed = observed
        self._model = model
        self._trees = trees if model.ready else 0.0
        self._middle = _medians(observed.log_time)
        self.best = observed.best(problem)
        self.surrogate = Surrogate(
            embedded(observed.codes), compressed(observed.log_time, self._middle), observed.failed
        )

    def elites(self, count: int) -> CodeArray:
        """Return the measured points that come closest to the best at any shape."""
        gaps = self._observed.log_time - self.best[None, :]
        behind = np.where(np.isfinite(gaps), gaps, np.inf).min(axis=1)
        order = np.argsort(behind, kind="stable")[:count]
        return np.asarray(self._observed.codes[order[np.isfinite(behind[order])]])

    def belief(self, codes: CodeArray) -> Posterior:
        """Return the belief about codes (R, 1 + P): mean and deviation of a mixture of the process and the trees.

        Both count as equally uncertain, so that their disagreement adds to the deviation of the process.
        """
        belief = self.surrogate.posterior(self._embedded(codes))
        if not self._trees or not len(codes):
            return belief
        space, problem = self._problem.space, self._problem
        mean = score(space, codes, problem.shapes, lambda rows: self._model.predict(rows)[0])
        difference = compressed(mean + np.log(problem.roofline), self._middle) - belief.mean
        spread = np.sqrt(np.square(belief.std) + self._trees * (1.0 - self._trees) * np.square(difference))
        return Posterior(belief.mean + self._trees * difference, spread, belief.works)

    def gain(self, belief: Posterior) -> FloatArray:
        """Return log expected marginal gain (R,), discounted by the probability of success."""
        known = self.surrogate.shapes
        return marginal_gain(
            belief.mean[:, known], belief.std[:, known], self.best[known], self._problem.weights[known]
        ) + np.log(belief.works)

    def rank(self, codes: CodeArray) -> FloatArray:
        """Return scores (R,) of the trees' ranking head."""
        return rank_population(self._model, self._problem.space, codes, self._problem.shapes, self._problem.weights)


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


def _medians(log_time: FloatArray) -> FloatArray:
    """Return the median log time (S,) at each shape, inf without times."""
    return np.array([np.median(of[np.isfinite(of)]) if np.isfinite(of).any() else np.inf for of in log_time.T])


def compressed(log_time: FloatArray, middle: FloatArray) -> FloatArray:
    """Return log times (N, S), compressed above the medians (S,), so that the process resolves the fast ones."""
    # A quarter of the slope stays, so that slow points keep their order.
    return np.asarray(log_time - 0.75 * np.maximum(log_time - middle, 0.0))


def mutate(space: ParameterSpace, rng: np.random.Generator, parents: CodeArray) -> CodeArray:
    """Return one child per parent (R, 1 + P): one to three parameters changed, constraints ignored.

    A change is one step along an ordered domain or, one time in three, to any value. An unordered domain always takes
    any value.
    """
    children = parents.copy()
    sizes = space.domain_sizes[parents[:, 0]]
    if not space.width:
        return children
    mutable = sizes > 1
    # 2 exceeds every draw, so parameters with one value come last
    order = np.argsort(np.where(mutable, rng.random(sizes.shape), 2.0), axis=1)
    depth = 1 + rng.integers(0, 3, len(parents))
    hit = np.zeros(sizes.shape, dtype=np.bool_)
    for place in range(min(3, space.width)):
        rows = np.flatnonzero(depth > place)
        hit[rows, order[rows, place]] = True
    step = np.where(rng.random(sizes.shape) < 0.5, -1, 1)
    jump = rng.integers(0, sizes)
    walks = space.ordered[parents[:, 0]] & (rng.random(sizes.shape) < 2.0 / 3.0)
    moved = np.where(walks, np.clip(parents[:, 1:] + step, 0, sizes - 1), jump)
    children[:, 1:] = np.where(hit & mutable, moved, parents[:, 1:])
    return children


def crossover(rng: np.random.Generator, parents: CodeArray, count: int) -> CodeArray:
    """Return up to `count` children (R, 1 + P), each parameter from either of two parents of one sketch. Constraints
    are ignored.
    """
    left = rng.integers(0, len(parents), count)
    right = rng.integers(0, len(parents), count)
    pairs = parents[left, 0] == parents[right, 0]
    a, b = parents[left[pairs]], parents[right[pairs]]
    return np.asarray(np.where(rng.random(a.shape) < 0.5, a, b))


def score(
    space: ParameterSpace,
    codes: CodeArray,
    shapes: IntArray,
    model: Callable[[FeatureArray], FloatArray],
    threads: int = 2,
) -> FloatArray:
    """Apply `model(features (K, F) f32) -> (K,)` to every (candidate, shape).

    Returns (R, S) for codes (R, 1 + P) and shapes (S, D). Chunks are independent, so neither their size nor `threads`
    changes the result.
    """
    step = max(1, PIECE // len(shapes))
    out = np.empty((len(codes), len(shapes)))

    def piece(start: int) -> None:
        features = space.features(codes[start : start + step], shapes)
        out[start : start + step] = model(features.reshape(-1, features.shape[2])).reshape(-1, len(shapes))

    starts = range(0, len(codes), step)
    if len(starts) < 2 or threads < 2:
        for start in starts:
            piece(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(piece, starts))
    return out


def rank_population(
    model: CostModel, space: ParameterSpace, codes: CodeArray, shapes: IntArray, weights: FloatArray
) -> FloatArray:
    """Return one score (R,) per candidate, larger is faster: the model's rank at each shape, standardised and weighted."""
    if not len(codes):
        return np.zeros(0)
    scores = score(space, codes, shapes, model.rank)
    scores = (scores - scores.mean(axis=0)) / (scores.std(axis=0) + 1e-9)
    return np.asarray(scores @ weights)


STRATEGIES = {"evolution": EvolutionarySearch}
