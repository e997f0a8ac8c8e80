"""Every cost model: determinism, order and times on synthetic rows, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.tuner.search.models.cost_model import (
    BoosterSettings,
    CostModel,
    GradientBoostedModel,
    relative_relevance,
)

every_model = pytest.mark.parametrize("make", [GradientBoostedModel])
Make = Callable[[], CostModel]


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A kink, a product and a shift by group; a tenth fails, all of it where feature 5 is large."""
    rng = np.random.default_rng(seed)
    features = rng.random((count, 12)).astype(np.float32)
    groups = rng.integers(0, 4, count)
    features[:, 11] = groups
    log_time = 2.0 * np.abs(features[:, 0] - 0.5) + features[:, 1] * features[:, 2] + 0.5 * features[:, 3] + groups
    return features, np.where(features[:, 5] > 0.9, np.nan, log_time.astype(np.float64)), groups


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


@pytest.mark.slow
@every_model
def test_order_and_times_of_unseen_rows(make: Make) -> None:
    model = make()
    model.fit(*rows(400))
    features, log_time, groups = rows(400, seed=1)
    works = np.isfinite(log_time)
    score = model.rank(features)
    mean, std = model.predict(features)
    for group in range(4):
        own = works & (groups == group)
        assert spearman(-score[own], log_time[own]) > 0.9
        assert score[own].mean() > score[~works & (groups == group)].mean()
    assert spearman(mean[works], log_time[works]) > 0.9
    assert (std > 0).all()
    error = np.abs(mean - log_time)[works]
    assert np.mean(error < 2 * std[works]) > 0.4 and np.mean(error) < 0.4


@pytest.mark.slow
@every_model
def test_training_twice_gives_the_same_bits(make: Make) -> None:
    first, second = make(), make()
    for model in (first, second):
        model.fit(*rows(150))
    second.fit(*rows(60, seed=9))
    second.fit(*rows(150))
    features = rows(200, seed=4)[0]
    for a, b in zip(
        (first.rank(features), *first.predict(features)), (second.rank(features), *second.predict(features))
    ):
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_prediction_threads_leave_no_mark() -> None:
    features = np.random.default_rng(2).random((20_000, 12)).astype(np.float32)
    answers = []
    for threads in (1, 2, 5):
        model = GradientBoostedModel(BoosterSettings(threads=threads))
        model.fit(*rows(150))
        answers.append((model.rank(features), *model.predict(features)))
    for other in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0], other))


@every_model
def test_prediction_from_several_threads_at_once(make: Make) -> None:
    model = make()
    model.fit(*rows(150))
    features = rows(9000, seed=3)[0]
    wanted = model.rank(features)
    found: list[np.ndarray] = []
    workers = [threading.Thread(target=lambda: found.append(model.rank(features))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4 and all(np.array_equal(wanted, f) for f in found)


@every_model
def test_cost_model_with_too_few_rows_is_not_ready(make: Make) -> None:
    model = make()
    features, log_time, groups = rows(30)
    for few in (0, 1, 30):
        model.fit(features[:few], np.where(np.arange(few) < 1, log_time[:few], np.nan), groups[:few])
        assert not model.ready
        assert not model.rank(features).any()
        mean, std = model.predict(features)
        assert not mean.any() and (std == 1).all()


@every_model
def test_missing_and_constant_features_are_bearable(make: Make) -> None:
    features, log_time, groups = rows(80)
    features[:, 7], features[:, 8] = np.nan, 3.0
    features[::3, 0] = np.nan
    model = make()
    model.fit(features, log_time, groups)
    assert np.isfinite(model.rank(features)).all() and np.isfinite(model.predict(features)[0]).all()


@every_model
def test_lengths_must_match(make: Make) -> None:
    features, log_time, groups = rows(10)
    with pytest.raises(UserError, match=r"\(10, 12\), \(9,\)"):
        make().fit(features, log_time[:9], groups)


def test_relevance_is_relative_to_the_group() -> None:
    found = relative_relevance(np.array([1.0, 2.0, np.nan, 50.0, 40.0, 40.0]), np.array([0, 0, 0, 1, 1, 1]))
    assert found.tolist() == pytest.approx([1.0, 2 / 3, 0.0, 1 / 3, 1.0, 1.0])
