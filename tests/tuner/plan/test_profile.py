"""Tuning and building for the shapes that were served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, feed_forward

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.shapes import Histogram, ShapeProfile
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

SERVED = {37: 500, 41: 100, 5: 3, 4000: 1}  # more than the bounds allow cannot have been served by this build


def profile_file(folder: Path, model: str = "") -> str:
    profile = ShapeProfile(model)
    profile.add("main", "n", Histogram.of(SERVED))
    profile.save(folder / "shapes.json")
    return str(folder / "shapes.json")


def answer(program: Program, symbols: dict[str, int]) -> float:
    size = sum(len(k.source) for k in program.kernels) % 97
    return 1e-6 * (1 + size) + 1e-9 * (97 - size) * sum(symbols.values()) ** 2


@pytest.mark.slow
def test_a_profile_reaches_the_anchors_the_search_the_plans_and_the_report(tmp_path: Path) -> None:
    module, store = feed_forward(), MemoryStore()
    uniform = device_job(module, PAPER_DEVICE, store, QUICK)
    job = device_job(module, PAPER_DEVICE, store, replace(QUICK, trials=1, profile=profile_file(tmp_path, uniform.key)))
    with pytest.raises(UserError, match="--record-shapes"):
        _ = device_job(module, PAPER_DEVICE, store, replace(QUICK, shapes="profile")).tasks
    assert not uniform.tasks[0].domain.served
    for task in job.tasks:
        domain = task.domain
        assert {(1,), (5,), (37,), (41,), (128,)} <= set(domain.points)
        assert domain.served[domain.points.index((37,))] > 0.8 and domain.weights[domain.points.index((37,))] > 0.6
    work = job.tune(RecordedRunner(answer))
    assert work.measurements > 0
    assert job.tune(RecordedRunner(answer)).measurements == 0, "what is asked for is on record"
    stored = device_job(module, PAPER_DEVICE, store, replace(QUICK, trials=1, shapes="profile"))
    assert [t.domain.points for t in stored.tasks] == [t.domain.points for t in job.tasks]
    assert stored.build().program.to_json() == job.build().program.to_json()
    assert {t.key for t in stored.tasks} == {t.key for t in uniform.tasks}, (
        "what is served is no part of a record's key"
    )


def test_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    file = profile_file(tmp_path, "0" * 32)
    with pytest.raises(UserError, match="for each model"):
        _ = device_job(feed_forward(), PAPER_DEVICE, MemoryStore(), replace(QUICK, profile=file)).tasks
    profile = ShapeProfile()
    profile.add("prefill", "k", Histogram.of({1: 1}))
    profile.save(file)
    with pytest.raises(UserError, match="prefill: k"):
        _ = device_job(feed_forward(), PAPER_DEVICE, MemoryStore(), replace(QUICK, profile=file)).tasks
    with pytest.raises(UserError, match="--shapes profile"):
        Settings(shapes="uniform", profile=file)
