"""The Gaussian process and what it makes worth measuring."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.tuner.search.models.acquisition import choose_batch, log_expected_improvement, marginal_gain
from relax_tune.tuner.search.models.surrogate import MAX_ROWS, Surrogate


def field(points: np.ndarray) -> np.ndarray:
    """Two shapes (R, 2); the third axis does not matter."""
    first = np.sin(4 * points[:, 0]) + np.square(points[:, 1] - 0.3)
    return np.stack([first, 2.0 * first + points[:, 1]], axis=1)


def fitted(count: int = 60, seed: int = 0) -> tuple[Surrogate, np.ndarray]:
    points = np.random.default_rng(seed).random((count, 3))
    return Surrogate(points, field(points), np.zeros((count, 2), dtype=np.bool_)), points


def test_surrogate_interpolates_and_is_uncertain_elsewhere() -> None:
    surrogate, points = fitted()
    at_data = surrogate.posterior(points)
    assert np.abs(at_data.mean - field(points)).max() < 0.05
    fresh = np.random.default_rng(1).random((300, 3))
    belief = surrogate.posterior(fresh)
    assert np.corrcoef(belief.mean[:, 0], field(fresh)[:, 0])[0, 1] > 0.97
    far = surrogate.posterior(np.array([[5.0, 5.0, 0.5]]))
    assert (far.std > 3 * np.median(belief.std, axis=0)).all()
    assert (belief.works == 1).all()


def test_surrogate_learns_failures() -> None:
    points = np.random.default_rng(0).random((80, 2))
    fails = points[:, 0] > 0.6
    log_time = np.where(fails, np.nan, points[:, 1])[:, None]
    surrogate = Surrogate(points, log_time, fails[:, None])
    chance = surrogate.posterior(np.array([[0.9, 0.5], [0.2, 0.5]])).works
    assert chance[0] < 0.2 and chance[1] > 0.8


def test_shapes_measured_at_different_rows() -> None:
    points = np.random.default_rng(0).random((60, 3))
    log_time = np.column_stack([field(points), np.full(60, np.nan)])
    log_time[20:, 1] = np.nan
    surrogate = Surrogate(points, log_time, np.zeros((60, 3), dtype=np.bool_))
    assert surrogate.shapes == [0, 1]
    belief = surrogate.posterior(points)
    assert np.abs(belief.mean[:, 0] - log_time[:, 0]).max() < 0.1
    assert np.abs(belief.mean[:20, 1] - log_time[:20, 1]).max() < 0.1
    assert (belief.mean[:, 2] == 0).all() and (belief.std[:, 2] == 1).all()


@pytest.mark.slow
def test_many_rows_are_thinned_and_the_fastest_kept() -> None:
    surrogate, points = fitted(2 * MAX_ROWS)
    fastest = np.argsort(field(points)[:, 0])[:50]
    assert np.abs(surrogate.posterior(points[fastest]).mean[:, 0] - field(points[fastest])[:, 0]).max() < 0.05


@pytest.mark.parametrize("u", [-60.0, -12.0, -4.01, -3.99, -1.0, 0.0, 2.0, 30.0])
def test_log_expected_improvement_against_quadrature(u: float) -> None:
    """E[max(0, x)] for x ~ N(u, 1), the density's value at 0 taken out so that the far tail does not underflow."""
    x = np.linspace(0, max(u, 0) + 12, 2_000_001)
    integral = np.trapezoid(x * np.exp(u * x - 0.5 * x * x - max(u, 0) ** 2 / 2), x)
    wanted = np.log(integral) - 0.5 * u * u + max(u, 0) ** 2 / 2 - 0.5 * np.log(2 * np.pi)
    found = log_expected_improvement(np.array([-3.0 * u]), np.array([3.0]), np.array([0.0]))[0] - np.log(3.0)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_log_expected_improvement_never_loses_the_order() -> None:
    means = np.logspace(-3, 9, 400)
    values = log_expected_improvement(means, np.ones(400), np.zeros(400))
    assert np.isfinite(values).all() and (np.diff(values) < 0).all()


def test_gain_counts_only_improvement_over_dispatchable() -> None:
    """One candidate repeats what the first shape already has, the other brings something to the second."""
    best = np.array([np.log(1.0), np.log(5.0)])
    mean = np.log(np.array([[1.0, 5.0], [4.0, 2.5], [1.05, 4.0]]))
    gain = marginal_gain(mean, np.full((3, 2), 0.01), best, np.array([0.9, 0.1]))
    assert np.argsort(-gain).tolist() == [1, 2, 0]
    assert gain[1] == pytest.approx(np.log(0.1 * np.log(2.0)), abs=1e-3)


def test_gain_without_dispatchable_prefers_the_fast() -> None:
    gain = marginal_gain(np.array([[0.0], [2.0], [1.0]]), np.full((3, 1), 0.1), np.array([np.inf]), np.array([1.0]))
    assert np.argsort(-gain).tolist() == [0, 2, 1]


def test_a_batch_spreads() -> None:
    surrogate, points = fitted(20)
    grid = np.random.default_rng(5).random((400, 3))
    twins = np.concatenate([grid, grid + 1e-4])
    best, weights = field(points).min(axis=0), np.array([0.5, 0.5])
    picks = choose_batch(surrogate, twins, surrogate.posterior(twins), best, weights, 8, 0.25)
    belief = surrogate.posterior(twins)
    greedy = np.argsort(-marginal_gain(belief.mean, belief.std, best, weights))[:8]
    assert len(set(picks)) == 8
    assert len({p % 400 for p in picks}) > len({p % 400 for p in greedy})  # a point makes its twin worth less
    assert len(choose_batch(surrogate, grid[:3], surrogate.posterior(grid[:3]), best, weights, 8, 0.0)) == 3
