"""The contract between the tuning loop and a search strategy, and the history that the built-in strategies share.

Tests: `tests/tuner/search/strategies/test_strategy_contract.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.space import (
    BoolArray,
    Candidate,
    CodeArray,
    FeatureArray,
    FloatArray,
    IntArray,
    KeyArray,
    ParameterSpace,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a candidate at a shape: its stage (compile, launch, wrong-result, timeout ...) and message."""

    stage: str
    message: str = ""


Outcome = float | Failure
"""Seconds (any finite number where `SearchProblem.any_number` is set; less is better), or the failure."""


@dataclass(frozen=True)
class Result:
    """The measurement of a candidate: an outcome for each tried shape (indices into `SearchProblem.shapes`)."""

    candidate: Candidate
    outcomes: Mapping[int, Outcome]


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows from other tasks and devices for a cost model.

    Attributes:
        features: (N, F) f32, with the columns of the space; NaN where a row lacks a feature.
        log_time: (N,) log(seconds / roofline), NaN for failures.
        groups: (N,) one number for each (task, shape), all >= 0.
    """

    features: FeatureArray
    log_time: FloatArray
    groups: IntArray


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A space to be searched, and the objective.

    Attributes:
        shapes: (S, D) int64, the anchors.
        weights: (S,) importance of the anchors, positive, summing to 1.
        roofline: (S,) seconds, a lower bound or any other positive scale of the time at each shape (default 1), which makes times
            of different shapes comparable.
        baseline: Returns (S,) seconds of the best variant outside the space, such as a library's; inf without one (the default).
            Called for each batch. A candidate counts by its gain over the baseline.
        history: Returns training rows of other tasks and devices. A strategy that uses them calls it once, on first use.
        any_number: Outcomes are any finite numbers, negative ones and zero included, in place of seconds.

    Raises:
        UserError: Sizes do not match, weights are not a distribution, or times are not positive.
    """

    space: ParameterSpace
    shapes: IntArray
    weights: FloatArray
    roofline: FloatArray
    baseline: Callable[[], Sequence[float]]
    history: Callable[[], TrainingRows | None]
    any_number: bool

    def __init__(
        self,
        space: ParameterSpace,
        shapes: Sequence[Sequence[int]] | IntArray = ((),),
        weights: Sequence[float] | FloatArray | None = None,
        roofline: Sequence[float] | FloatArray | None = None,
        baseline: Callable[[], Sequence[float]] | Sequence[float] | FloatArray | None = None,
        history: Callable[[], TrainingRows | None] = lambda: None,
        any_number: bool = False,
    ) -> None:
        points = np.asarray(shapes, dtype=np.int64)
        if points.ndim != 2 or not len(points):
            raise UserError(
                f"expected shapes as a non-empty (S, D) array, got an array of shape {points.shape}; pass one row a shape"
            )
        count = len(points)
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "history", history)
        object.__setattr__(self, "any_number", any_number)
        fixed = [math.inf] * count if baseline is None or callable(baseline) else [float(t) for t in baseline]
        object.__setattr__(self, "baseline", baseline if callable(baseline) else lambda: fixed)
        object.__setattr__(self, "shapes", points)
        for name, given, default in (
            ("weights", weights, 1.0 / count),
            ("roofline", roofline, 1.0),
        ):
            value = np.full(count, default) if given is None else np.asarray(given, dtype=np.float64)
            if value.shape != (count,) or not (value > 0).all():
                raise UserError(
                    f"expected {name} as {count} positive numbers, one a shape, got {value.tolist()}; "
                    "drop the shapes that do not count"
                )
            object.__setattr__(self, name, value)
        if abs(float(self.weights.sum()) - 1.0) > 1e-6:
            raise UserError(f"expected weights that sum to 1, got {self.weights.tolist()}; divide them by their sum")


@runtime_checkable
class SearchStrategy(Protocol):
    """A strategy that proposes candidates and learns from their measurements.

    Promises of every strategy:

    * `ask(n)` returns at most `n` candidates that satisfy the constraints, each of them new: never asked for or reported before;
      fewer only when the space is exhausted, and then an empty list ever after.
    * The candidates depend on the problem, the generator's state at construction, the sizes of the asks so far and the
      *set* of results reported between them: not on the order or the chunks in which results arrived, nor on threads or
      clocks.
    * `tell` accepts results of candidates that were never asked (records from a database) and several results of one
      candidate, whose outcomes are united (per shape the faster time, and a time rather than a failure). It keeps no
      reference to the mappings given.
    * A failed outcome is never treated as a time. A space in which everything fails is searched to its end.

    Not thread-safe: one loop owns a strategy.
    """

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates.

        Raises:
            ScheduleError: The space has no candidate that satisfies its constraints.
        """
        ...

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results."""
        ...


@dataclass(frozen=True, eq=False)
class Observations:
    """All reported results, in canonical order of the candidates.

    Attributes:
        codes: (N, 1 + P) int32.
        log_time: (N, S), NaN without a time.
        failed: (N, S), True for a failure.
        scale: Centre and spread of a linear scale that stands for the logarithm where numbers of both signs were reported.
    """

    codes: CodeArray
    log_time: FloatArray
    failed: BoolArray
    scale: tuple[float, float] | None = None

    def best(self, problem: SearchProblem) -> FloatArray:
        """Return log seconds (S,) of the best dispatchable variant at each shape, baseline included; inf without one."""
        floor = np.log(np.asarray(problem.baseline(), dtype=np.float64))
        for row in self.log_time:
            # `fmin` ignores NaN: a shape without a time does not hide the times of other candidates there.
            floor = np.fmin(floor, row)
        return floor


class SearchHistory:
    """The results reported to a strategy and the candidates it asked for, in an order independent of their arrival."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._outcomes: dict[Candidate, dict[int, Outcome]] = {}
        self._visited: set[Candidate] = set()

    def __len__(self) -> int:
        return len(self._visited)

    def add(self, results: Sequence[Result]) -> None:
        """Add results to the history.

        Raises:
            UserError: A result is not of this space, or is no positive time. No result is added then.
        """
        shapes = len(self.problem.shapes)
        # All results are checked before any is added, so that a refused call leaves the history as it was.
        for result in results:
            if result.candidate not in self._visited and not self.problem.space.contains(result.candidate):
                raise UserError(
                    f"expected results of candidates of this search space, got {result.candidate.key}, which is not in it or breaks its "
                    "constraints; tell only what ParameterSpace.contains accepts"
                )
            for shape, outcome in result.outcomes.items():
                if not 0 <= shape < shapes:
                    raise UserError(
                        f"expected shape indices below {shapes}, got {shape} for {result.candidate.key}; add the shape first"
                    )
                if not isinstance(outcome, Failure) and not self._is_outcome(outcome):
                    raise UserError(
                        f"expected positive seconds for {result.candidate.key} at shape {shape}, got {outcome}; "
                        "tell a Failure when there is no time"
                    )
        for result in results:
            self._visited.add(result.candidate)
            known = self._outcomes.setdefault(result.candidate, {})
            for shape, outcome in result.outcomes.items():
                known[shape] = _united(known.get(shape), outcome)

    def _is_outcome(self, number: float) -> bool:
        return math.isfinite(number) and (number > 0 or self.problem.any_number)

    def ask(self, codes: CodeArray) -> list[Candidate]:
        """Turn codes into candidates and record that they were asked for."""
        candidates = self.problem.space.candidates(codes)
        self._visited.update(candidates)
        return candidates

    def visited(self) -> CodeArray:
        """Return codes (R, 1 + P) of all candidates asked for or reported, in canonical order."""
        # Sorted, since the set's order depends on the order of arrival, and strategies must not.
        return self.problem.space.encode(sorted(self._visited))

    def fresh(self, codes: CodeArray) -> CodeArray:
        """Return the distinct rows that were neither asked for nor reported, in their order."""
        space = self.problem.space
        if not len(codes):
            return codes
        codes = space.distinct(codes)
        return codes[~isin(space.keys(codes), space.keys(self.visited()))]

    def observations(self) -> Observations:
        """Return all results so far."""
        candidates = sorted(self._outcomes)
        numbers = np.full((len(candidates), len(self.problem.shapes)), np.nan)
        failed = np.zeros(numbers.shape, dtype=np.bool_)
        for r, candidate in enumerate(candidates):
            for shape, outcome in self._outcomes[candidate].items():
                if isinstance(outcome, Failure):
                    failed[r, shape] = True
                else:
                    numbers[r, shape] = outcome
        scale = None if _of_one_sign(numbers) else _centre_and_spread(numbers)
        log_time = _signed_log(numbers) if scale is None else numbers / scale[1] - scale[0] / scale[1]
        return Observations(self.problem.space.encode(candidates), log_time, failed, scale)


def _of_one_sign(numbers: FloatArray) -> bool:
    known = numbers[~np.isnan(numbers)]
    return bool((known > 0).all() or (known < 0).all())


def _signed_log(numbers: FloatArray) -> FloatArray:
    """Return logarithms of positive numbers; of negative ones the negated logarithms of their sizes, which have the same order."""
    return np.asarray(np.sign(numbers) * np.log(np.abs(numbers)))


def _centre_and_spread(numbers: FloatArray) -> tuple[float, float]:
    """Return the median and the distance of the quartiles, or of the ends where the quartiles are equal."""
    ends = np.nanquantile(numbers, (0.0, 0.25, 0.5, 0.75, 1.0))
    # Halved before they are subtracted: the distance of two finite numbers may exceed the largest one.
    spread = (ends[3] / 2 - ends[1] / 2) or (ends[4] / 2 - ends[0] / 2) or 0.5
    return float(ends[2]), float(min(spread, np.finfo(np.float64).max / 2) * 2)


def isin(keys: KeyArray, members: KeyArray) -> BoolArray:
    """Return for each key whether it is among the members. Unlike `np.isin`, it supports raw-byte keys."""
    if keys.dtype.kind == "i" or not len(keys) or not len(members):
        return np.isin(keys, members) if len(keys) and len(members) else np.zeros(len(keys), dtype=np.bool_)
    known = {m.tobytes() for m in members}
    return np.fromiter((k.tobytes() in known for k in keys), dtype=np.bool_, count=len(keys))


def _united(old: Outcome | None, new: Outcome) -> Outcome:
    if old is None:
        return new
    return min(old, new, key=_rank)


def _rank(outcome: Outcome) -> tuple[Any, ...]:
    """Return a sort key that puts times before failures, and orders failures by their text."""
    return (1, outcome.stage, outcome.message) if isinstance(outcome, Failure) else (0, outcome)
