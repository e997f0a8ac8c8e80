"""Turns on a unit: jobs of one host take theirs batch by batch, and none measures while a worker lends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import MeasureError, TryAgainLater
from relax_tune.tuner.measure import supervised, unit_lock
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.unit_lock import UnitLock, turn_on


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_turn_waits_for_the_holder_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_lock, "_TOLD_SECS", 0.05)
    said: list[str] = []
    held = UnitLock("cpu:here", "worker")
    with (
        pytest.raises(TryAgainLater, match=r"unit cpu:here .* held by another worker or job"),
        turn_on("cpu:here", "job", 0.2),
    ):
        pytest.fail("the unit was held")

    def told(sentence: str) -> None:
        said.append(sentence)
        held.release()

    with turn_on("cpu:here", "job", LIMIT_SECS, told), pytest.raises(MeasureError):
        UnitLock("cpu:here", "another")
    UnitLock("cpu:here", "another").release()
    assert said == ["waiting for the unit cpu:here, which a worker or another job of this host holds"]


def test_turn_ends_when_nobody_wants_the_unit_any_more() -> None:
    def closed() -> None:
        raise MeasureError("closed")

    held = UnitLock("cpu:here", "worker")
    with pytest.raises(MeasureError, match="closed"), turn_on("cpu:here", "job", LIMIT_SECS, wanted=closed):
        pytest.fail("the unit was held")
    held.release()


@pytest.mark.process
@pytest.mark.ccompiler
def test_local_runner_measures_only_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_TURN_SECS", 0.2)
    with LocalRunner("c") as runner, LocalRunner("c", lock=False) as lent:
        held = UnitLock(runner.device_info().unit, "worker")
        with pytest.raises(TryAgainLater, match="held by another worker or job"):
            runner.submit([request("good", "c")]).result(LIMIT_SECS)
        assert lent.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok, "a worker holds the lock itself"
        held.release()
        assert runner.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok
