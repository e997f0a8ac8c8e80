"""The strategies that do not learn: uniform sampling and a walk over the grid. They are baselines for the others.

Tests: `tests/tuner/search/strategies/test_strategy_contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.tuner.search.base import Result, SearchHistory, SearchProblem
from relax_tune.tuner.search.space import Candidate, CodeArray

GRID_CHUNK = 1 << 14


class RandomSearch:
    """Legal points uniformly at random (the same share for every sketch), without repetition."""

    def __init__(self, problem: SearchProblem, rng: np.random.Generator) -> None:
        self._history = SearchHistory(problem)
        self._rng = rng

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates; see `SearchStrategy`."""
        return self._history.ask(fresh_sample(self._history, self._rng, n))

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results, so that their candidates are not asked for again; see `SearchStrategy`."""
        self._history.add(results)


class GridSearch:
    """Every legal point in canonical order: sketch by sketch, the last parameter fastest."""

    def __init__(self, problem: SearchProblem, rng: np.random.Generator) -> None:
        self._history = SearchHistory(problem)
        self._sketch = 0
        self._next = 0

    def ask(self, n: int) -> list[Candidate]:
        """Return up to `n` new candidates; see `SearchStrategy`."""
        space = self._history.problem.space
        out: list[Candidate] = []
        while len(out) < n and self._sketch < len(space.sketches):
            # In chunks: a box may have far more points than fit in memory, most of them illegal.
            box = space.sketches[self._sketch].box
            stop = min(self._next + GRID_CHUNK, box)
            codes = self._rows(self._next, stop)
            legal = self._history.fresh(codes[space.valid(codes)])[: n - len(out)]
            # Only part of the chunk may have been used, so the walk continues behind the last point that was
            # returned.
            if len(legal) and len(out) + len(legal) == n:
                self._next += int(np.flatnonzero(space.keys(codes) == space.keys(legal[-1:]))[0]) + 1
            else:
                self._next = stop
            out += self._history.ask(legal)
            if self._next >= box:
                self._sketch, self._next = self._sketch + 1, 0
        if not len(self._history):
            space.sample(np.random.default_rng(0), 1)  # raises the error for a space without legal points
        return out

    def _rows(self, start: int, stop: int) -> CodeArray:
        space = self._history.problem.space
        codes = np.zeros((stop - start, 1 + space.width), dtype=np.int32)
        codes[:, 0] = self._sketch
        rest = np.arange(start, stop)
        for column in reversed(range(space.width)):
            rest, codes[:, 1 + column] = np.divmod(rest, space.domain_sizes[self._sketch, column])
        return codes

    def tell(self, results: Sequence[Result]) -> None:
        """Remember results, so that their candidates are not asked for again; see `SearchStrategy`."""
        self._history.add(results)


def fresh_sample(history: SearchHistory, rng: np.random.Generator, count: int) -> CodeArray:
    """Return up to `count` new random legal points, in random order.

    Raises:
        ScheduleError: The space has no legal point at all.
    """
    if count <= 0:
        return history.fresh(np.zeros((0, 1 + history.problem.space.width), dtype=np.int32))
    listed = history.problem.space.listed()
    if listed is not None and len(history) >= len(listed) > 0:
        return listed[:0]
    needed = count + len(history)  # enough even if every known point is drawn again
    drawn = history.problem.space.sample(rng, needed)
    fresh = history.fresh(drawn)
    return fresh[rng.permutation(len(fresh))[:count]]


STRATEGIES = {"grid": GridSearch, "random": RandomSearch}
