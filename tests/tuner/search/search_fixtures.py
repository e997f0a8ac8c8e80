"""Small problems every strategy must cope with, and a way to play one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchProblem, SearchStrategy
from relax_tune.tuner.search.space import Candidate, Parameter, ParameterSpace, SketchSpace

Answer = Callable[[Candidate, int], Outcome]


def tiles() -> SketchSpace:
    """Three ordered parameters; tiles must fit into 2048 and divide 64."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    return SketchSpace(
        "tiles",
        (Parameter("x", sizes), Parameter("y", sizes), Parameter("unroll", (0, 1, 2, 4))),
        lambda rows: (rows[:, 0] * rows[:, 1] <= 1024) & (rows[:, 1] % np.maximum(rows[:, 2], 1) == 0),
    )


def flat() -> SketchSpace:
    """One ordered and one unordered parameter, nothing forbidden."""
    return SketchSpace("flat", (Parameter("x", (1, 2, 4, 8, 16)), Parameter("layout", (5, 0, 9), ordered=False)))


def wide() -> SketchSpace:
    """Too many points to list, so that pools are sampled and bred."""
    return SketchSpace(
        "wide",
        tuple(Parameter(f"p{i}", tuple(range(1, 17))) for i in range(6)),
        lambda rows: rows.sum(axis=1) % 3 == 0,
    )


PROBLEMS: dict[str, Callable[[], SearchProblem]] = {
    "one sketch": lambda: SearchProblem(ParameterSpace([tiles()])),
    "two sketches, three shapes": lambda: SearchProblem(
        ParameterSpace([tiles(), flat()]),
        [[1, 8], [64, 8], [512, 8]],
        [0.2, 0.3, 0.5],
        [1e-6, 1e-5, 1e-4],
        [2e-5, 1.0, 1.0],
    ),
    "large": lambda: SearchProblem(ParameterSpace([wide(), flat()]), [[4], [400]]),
    "one parameter": lambda: SearchProblem(
        ParameterSpace([SketchSpace("line", (Parameter("x", tuple(range(1, 40))),))])
    ),
    "one point": lambda: SearchProblem(ParameterSpace([SketchSpace("fixed", ())])),
}


def bowl(candidate: Candidate, shape: int) -> Outcome:
    """A smooth time with an optimum that moves with the shape; a corner of the space fails."""
    if sum(candidate.values) % 11 == 5:
        return Failure("compile", "too many registers")
    logs = np.log2(np.maximum(np.asarray((*candidate.values, 1), dtype=np.float64), 0.5))
    return float(1e-5 * (1 + shape) * np.exp(0.1 * np.square(logs - 2.0 - shape).sum() + 0.05 * candidate.sketch))


def play(
    strategy: SearchStrategy,
    problem: SearchProblem,
    sizes: list[int],
    answer: Answer = bowl,
    shuffle: np.random.Generator | None = None,
) -> list[list[Candidate]]:
    """Ask in batches of the given sizes and answer at every shape; with `shuffle`, tell results singly, shape by shape, in random
    order."""
    asked = []
    for size in sizes:
        batch = strategy.ask(size)
        asked.append(batch)
        shapes = range(len(problem.shapes))
        if shuffle is None:
            strategy.tell([Result(c, {s: answer(c, s) for s in shapes}) for c in batch])
            continue
        single = [Result(c, {s: answer(c, s)}) for c in batch for s in shapes]
        for place in shuffle.permutation(len(single)):
            strategy.tell([single[place]])
    return asked
