"""Where trials go: the arithmetic of expected savings, simulated models against equal shares, and the loop itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tuner_models import QUICK, RecordedRunner, attention, by_text, paper_job, row_scale

from relax_tune.runtime.program.program import Program
from relax_tune.tuner import settings as settings_module
from relax_tune.tuner.job.scheduling import FIRST_SPREAD, expected_saving, spread

seconds = st.floats(1e-7, 1e-1)


@pytest.mark.slow
@given(st.lists(seconds, max_size=40), st.integers(0, 40), st.integers(1, 16), seconds, st.randoms())
def test_saving_is_a_share_of_dispatched_time_in_any_order(
    times: list[float], failed: int, batch: int, other: float, shuffle: Any
) -> None:
    dispatched = min([*times, other])
    tried = len(times) + failed
    saving = expected_saving(times, tried, batch, dispatched)
    assert 0 <= saving < dispatched
    mixed = list(times)
    shuffle.shuffle(mixed)
    assert expected_saving(mixed, tried, batch, dispatched) == pytest.approx(saving)
    assert expected_saving(times, tried, batch + 1, dispatched) >= saving * (1 - 1e-12)
    assert expected_saving([7 * t for t in times], tried, batch, 7 * dispatched) == pytest.approx(7 * saving)


def test_saving_far_behind_the_library_is_zero_and_on_a_plateau_small() -> None:
    times = [1.0, 1.1, 1.3, 1.6]
    assert expected_saving(times, 8, 8, 1.0) > 50 * expected_saving(times, 8, 8, 0.2) > 0
    flat = [1.0 + 1e-4 * i for i in range(32)]
    rough = [1.0 * 1.2**i for i in range(32)]
    assert expected_saving(flat, 32, 8, 1.0) < 0.1 * expected_saving(rough, 32, 8, 1.0)
    assert spread([], 0) == spread([1.0, 2.0], 9) == FIRST_SPREAD


def test_the_spread_of_an_exponential_lower_end_is_found() -> None:
    rng = np.random.default_rng(0)
    for true in (0.05, 0.3, 1.0):
        found = [spread(np.exp(-rng.exponential(true, 64)).tolist(), 64) for _ in range(400)]
        assert np.mean(found) == pytest.approx(true, rel=0.15)


def model_time(draws: np.ndarray, scale: np.ndarray, taken: list[int]) -> float:
    return float(sum(s * np.exp(d[:n].min()) for s, d, n in zip(scale, draws, taken)))


def test_savings_beat_equal_shares_for_the_same_trials() -> None:
    """Models of eight tasks whose times and whose room for improvement differ; a trial is a draw from a task's own spread."""
    ours, equal = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        scale = np.exp(rng.normal(0, 1.5, 8))
        draws = rng.exponential(1.0, (8, 2000)) * np.exp(rng.normal(-1.5, 1.0, (8, 1)))
        taken = [8] * 8
        while sum(taken) < 8 * 32:
            worth = [
                expected_saving((s * np.exp(d[:n])).tolist(), n, 8, float(s * np.exp(d[:n].min())))
                for s, d, n in zip(scale, draws, taken)
            ]
            taken[int(np.argmax(worth))] += 8
        floor = float(scale.sum())
        ours.append(model_time(draws, scale, taken) / floor - 1)
        equal.append(model_time(draws, scale, [32] * 8) / floor - 1)
    assert np.mean(ours) < 0.8 * np.mean(equal)
    assert np.mean(np.array(ours) < np.array(equal)) > 0.7


@pytest.mark.slow
def test_loop_spends_trials_on_the_costliest_tasks() -> None:
    job = paper_job(attention, settings=replace(QUICK, trials=12))
    heavy = str(job.tasks[-1].name)

    def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
        found = by_text(program, symbols)
        return found if isinstance(found, str) or program.name != heavy else 1000 * found

    runner = RecordedRunner(answer)
    result = job.tune(runner)
    tried = Counter({t.name: len(_tuned(job, t)) for t in job.tasks})
    assert result.trials == 12 * len(job.tasks) == sum(tried.values())
    assert tried[heavy] == max(tried.values()) >= 16 and min(tried.values()) >= 8


@pytest.mark.slow
def test_a_job_stops_when_nothing_more_is_to_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes the same time, but for a part in a million."""
    monkeypatch.setattr(settings_module, "NEGLIGIBLE", 1e-2)

    def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
        digest = hashlib.blake2b("".join(k.source for k in program.kernels).encode(), digest_size=2).digest()
        return 1e-3 * (1 + 1e-11 * int.from_bytes(digest, "little"))

    settings = replace(QUICK, trials=24)
    job = paper_job(row_scale, settings=settings)
    assert 8 < job.tune(RecordedRunner(answer)).trials < 24
    assert job.build().plans
    again = RecordedRunner(answer)
    assert paper_job(row_scale, job.store, settings).tune(again).measurements == 0 and not again.batches
    rough = paper_job(row_scale, settings=settings)
    assert rough.tune(RecordedRunner()).trials == 24


def _tuned(job: Any, task: Any) -> set[str]:
    return {r.variant.key for r in job.store.query(job.target.key, task.key, kinds=("tuned",))}
