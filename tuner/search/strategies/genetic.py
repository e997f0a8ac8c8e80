"""Mutation and crossover of whole populations of codes."""

from __future__ import annotations

import numpy as np

from relax_tune.tuner.search.space import CodeArray, ParameterSpace


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
