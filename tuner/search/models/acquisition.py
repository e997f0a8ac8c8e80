"""The expected improvement of measuring a candidate over the dispatchable variants, shape by shape."""

from __future__ import annotations

import numpy as np

from relax_tune.tuner.search.models.surrogate import Posterior, Surrogate
from relax_tune.tuner.search.space import FloatArray

_SQRT_2PI = float(np.sqrt(2.0 * np.pi))


def log_expected_improvement(mean: FloatArray, std: FloatArray, best: FloatArray) -> FloatArray:
    """Return log E[max(0, best - x)] for x ~ N(mean, std), elementwise.

    It is exact far into the tail, where the expectation itself underflows.
    """
    u = (best - mean) / std
    # Three formulas, each where it is accurate: the sum cancels below -4, and below -1e5 the Mills ratio's own correction
    # is lost, so the asymptotic form 1 / u^2 of the expectation is used.
    deep = np.clip(u, -1e5, -4.0)
    density = np.exp(-0.5 * np.square(u)) / _SQRT_2PI
    near = np.log(np.maximum(u * _normal_cdf(u) + density, 1e-300))
    tail = -0.5 * np.square(deep) - np.log(_SQRT_2PI) + np.log(np.maximum(1.0 + deep * _mills(-deep), 1e-300))
    farther = -0.5 * np.square(np.minimum(u, 0.0)) - np.log(_SQRT_2PI) - 2.0 * np.log(np.maximum(-u, 1.0))
    return np.asarray(np.log(std) + np.where(u < -1e5, farther, np.where(u < -4.0, tail, near)))


def marginal_gain(mean: FloatArray, std: FloatArray, best: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the log of the weighted expected gain (R,) over `best` (S,), for beliefs (R, S) about log seconds.

    At one shape this orders as expected improvement does. A shape at which nothing can be dispatched yet (`best` is
    inf) counts as if the slowest belief could be.
    """
    # An infinite reference would give every candidate the same infinite gain.
    reference = np.where(np.isfinite(best), best, mean.max(axis=0, initial=-np.inf))
    terms = log_expected_improvement(mean, std, reference[None, :]) + np.log(weights)[None, :]
    # The largest term is taken out before exponentiation (log-sum-exp), since the gains may be below the smallest
    # float.
    top = terms.max(axis=1)
    return np.asarray(top + np.log(np.exp(terms - top[:, None]).sum(axis=1)))


def choose_batch(
    surrogate: Surrogate,
    points: FloatArray,
    belief: Posterior,
    best: FloatArray,
    weights: FloatArray,
    count: int,
    explore: float,
) -> list[int]:
    """Return up to `count` positions among points (R, A) with beliefs (R, S), chosen one after the other.

    After each choice the process gets the mean there as an observation. So the next choice is at another point, since
    uncertainty shrinks around it, and gains count only beyond it. The last `explore` share of the batch goes by an
    optimistic bound instead, which leaves basins that expected improvement would keep refining.
    """
    known = surrogate.shapes
    mean, best = belief.mean[:, known], best[known].copy()
    share = weights[known] / weights[known].sum()
    covariance = surrogate.correlations(points)
    spread = belief.std[:, known]
    left = {id(c): c.copy() for c in covariance.values()}
    amplitude = spread / np.sqrt(np.stack([np.maximum(np.diag(covariance[s]), 1e-10) for s in known], axis=1))
    # Log gain plus log probability: the expected gain counts only if the candidate works.
    chance = np.log(belief.works)
    chosen: list[int] = []
    optimistic = round(explore * count)
    free = np.ones(len(points), dtype=np.bool_)
    while len(chosen) < min(count, len(points)):
        variance = np.stack([np.diag(left[id(covariance[s])]) for s in known], axis=1)
        std = amplitude * np.sqrt(np.maximum(variance, 1e-10))
        if len(chosen) < count - optimistic or not np.isfinite(best).all():
            score = marginal_gain(mean, std, best, share) + chance
        else:
            # Lower confidence bound at 2.5 deviations: leaves a basin whose expected improvement is small but whose
            # neighbours are unknown.
            score = ((best - mean + 2.5 * std) * share).sum(axis=1) + chance
        pick = int(np.argmax(np.where(free, score, -np.inf)))
        chosen.append(pick)
        free[pick] = False
        # Kriging believer (Ginsbourger et al., 2010): the mean stands for the measurement, so only the covariance
        # changes, by a rank-one update.
        best = np.fmin(best, mean[pick])
        for key, c in left.items():
            column = c[:, pick]
            left[key] = c - np.outer(column, column) / (column[pick] + surrogate.noise)
    return chosen


def _normal_cdf(u: FloatArray) -> FloatArray:
    """Compute the standard normal distribution function, with an absolute error below 1e-8.

    The Mills ratio serves beyond |u| = 1.5, a series inside.
    """
    inside = np.clip(u, -1.5, 1.5)
    term, total = inside.copy(), inside.copy()
    for k in range(1, 20):  # sum of u^(2k+1) / (1 * 3 * 5 ... (2k+1))
        term = term * np.square(inside) / (2 * k + 1)
        total = total + term
    middle = 0.5 + total * np.exp(-0.5 * np.square(inside)) / _SQRT_2PI
    size = np.maximum(np.abs(u), 1.5)
    tail = np.exp(-0.5 * np.square(size)) / _SQRT_2PI * _mills(size)
    return np.where(np.abs(u) <= 1.5, middle, np.where(u < 0, tail, 1.0 - tail))


def _mills(x: FloatArray) -> FloatArray:
    """Compute (1 - cdf(x)) / density(x) for x >= 1.5 by its continued fraction.

    The fraction is x + 1/(x + 2/(x + 3/(x + ...))).
    """
    fraction = x
    # evaluated from the inside; 40 terms leave an error of 3e-8 at x = 1.5, where the fraction converges most slowly
    for k in range(40, 0, -1):
        fraction = x + k / fraction
    return 1.0 / fraction
