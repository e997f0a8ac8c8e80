"""Scoring whole populations at all shapes: features and model in one pass, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from relax_tune.tuner.search.models.cost_model import CostModel, FeatureArray
from relax_tune.tuner.search.space import CodeArray, FloatArray, IntArray, ParameterSpace

PIECE = 1 << 15
"""(candidate, shape) rows scored at once: with fewer, the overhead in Python exceeds the gain from caches."""


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
