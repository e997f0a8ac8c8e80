"""A job's unit and the units that measured for its target before: their records share a target only while they are equally fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, feed_forward

from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.reference import disagreement
from relax_tune.errors import MeasureError
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.measure.base import OtherUnit
from relax_tune.tuner.measure.messages import MeasureResult, UnitState


@dataclass(eq=False)
class TimedRunner(RecordedRunner):
    """A recorded runner on a unit with a reference time; None for a device that cannot run the reference kernels."""

    secs: float | None = 1e-3

    def _result(self, request: Any) -> MeasureResult:
        return replace(super()._result(request), unit=UnitState("w", "h", self.info.unit))

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        if self.secs is None:
            raise MeasureError("the reference kernels failed")
        if why := disagreement(reference, {"compute": self.secs}):
            raise OtherUnit(why)
        return reference or {"compute": self.secs}


def tuned(store: MemoryStore, secs: float | None, unit: str, **options: Any) -> tuple[DeviceJob, list[str]]:
    said: list[str] = []
    device = replace(PAPER_DEVICE, unit=unit)
    job = device_job(feed_forward(), device, store, replace(QUICK, **options))
    job.tune(TimedRunner(info=device, secs=secs), notice=said.append)
    return job, said


def test_first_local_job_records_times_of_the_unit() -> None:
    store = MemoryStore()
    job, said = tuned(store, 1e-3, "cpu:a")
    target = store.target(job.target.key)
    assert target is not None and dict(target.reference) == {"compute": 1e-3} and not said


@pytest.mark.parametrize(("secs", "accepted"), [(1.2e-3, True), (2e-3, False), (5e-4, False)])
def test_local_job_on_another_unit_measures_only_at_the_same_speed(secs: float, accepted: bool) -> None:
    store = MemoryStore()
    job, _ = tuned(store, 1e-3, "cpu:a")
    before = store.count(job.target.key)
    if accepted:
        tuned(store, secs, "cpu:b", trials=3)
    else:
        with pytest.raises(OtherUnit, match="compute"):
            tuned(store, secs, "cpu:b", trials=3)
    assert (store.count(job.target.key) > before) is accepted


def test_only_unit_of_a_target_measures_at_another_speed_with_a_notice() -> None:
    store = MemoryStore()
    job, _ = tuned(store, 1e-3, "cpu:a")
    _, (notice,) = tuned(store, 2e-3, "cpu:a", trials=3)
    assert "its speed has changed" in notice and "compute" in notice
    target = store.target(job.target.key)
    assert target is not None and dict(target.reference) == {"compute": 1e-3}
    with pytest.raises(OtherUnit):
        tuned(store, 2e-3, "cpu:b", trials=4)


def test_unit_of_a_concurrent_job_is_compared() -> None:
    store = MemoryStore()
    job = device_job(feed_forward(), replace(PAPER_DEVICE, unit="cpu:b"), store, QUICK)
    runner = TimedRunner(info=job.device, secs=2e-3)
    known = store.target

    def target(key: str) -> Any:
        store.add_target(replace(job.target, reference=(("compute", 1e-3),)))  # by another job, after the first look
        vars(store)["target"] = known

    vars(store)["target"] = target
    with pytest.raises(OtherUnit):
        job.tune(runner)
    assert not runner.batches


def test_job_without_measurements_times_no_unit() -> None:
    store = MemoryStore()
    tuned(store, 1e-3, "cpu:a")
    _, said = tuned(store, 2e-3, "cpu:b")
    assert not said


def test_unit_without_reference_times_is_named() -> None:
    store = MemoryStore()
    _, (notice,) = tuned(store, None, "cpu:a")
    assert "is not compared" in notice and "the reference kernels failed" in notice
