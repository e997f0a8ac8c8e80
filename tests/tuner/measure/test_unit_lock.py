"""Turns on a unit: jobs of one host take theirs batch by batch, and none measures while a worker lends it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import MeasureError, TryAgainLater
from relax_tune.tuner.measure import process_transport, unit_lock
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.unit_lock import UnitLock, hold_unit, holder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_hold_unit_waits_for_the_holder_then_gives_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_lock, "_NOTICE_SECS", 0.05)
    notices: list[str] = []
    lock = UnitLock("cpu:here", "worker")
    with (
        pytest.raises(TryAgainLater, match=r"unit cpu:here.*locked by worker"),
        hold_unit("cpu:here", "job", 0.2),
    ):
        pytest.fail("the unit was free")

    def release(sentence: str) -> None:
        notices.append(sentence)
        lock.release()

    with hold_unit("cpu:here", "job", LIMIT_SECS, release), pytest.raises(MeasureError):
        UnitLock("cpu:here", "another")
    UnitLock("cpu:here", "another").release()
    (sentence,) = notices
    assert f"cpu:here, locked by worker (process {os.getpid()}), which measures on it since" in sentence


def test_hold_unit_waits_for_lent_units_only_as_long_as_told() -> None:
    lock = UnitLock("cpu:here", "gpu1/c", lends=True)
    began = time.monotonic()
    with (
        pytest.raises(TryAgainLater, match=r"gpu1/c .*which lends it"),
        hold_unit("cpu:here", "job", LIMIT_SECS, lent_secs=0.1),
    ):
        pytest.fail("the unit was free")
    assert time.monotonic() - began < LIMIT_SECS / 2
    lock.release()
    assert holder("cpu:here") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"worker": 1}', '{"worker":"a","pid":1,"since":1e300,"lends":true}'])
def test_description_of_a_holder_by_others_is_not_trusted(text: str, tmp_path: Path) -> None:
    lock = UnitLock("cpu:here", "worker")
    (tmp_path / "relax-tune-unit-cpu-here.holder").write_text(text)
    with pytest.raises(TryAgainLater, match="another worker or job"):
        UnitLock("cpu:here", "second")
    lock.release()


def test_hold_unit_ends_when_cancelled() -> None:
    def closed() -> None:
        raise MeasureError("closed")

    lock = UnitLock("cpu:here", "worker")
    with pytest.raises(MeasureError, match="closed"), hold_unit("cpu:here", "job", LIMIT_SECS, check_cancelled=closed):
        pytest.fail("the unit was free")
    lock.release()


@pytest.mark.process
@pytest.mark.ccompiler
def test_local_runner_measures_only_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_transport, "_TURN_SECS", 0.2)
    with LocalRunner("c", wait_secs=0.1) as runner, LocalRunner("c", lock=False) as lent:
        lock = UnitLock(runner.device_info().unit, "worker")
        with pytest.raises(TryAgainLater, match="locked by worker"):
            runner.submit([request("good", "c")]).result(LIMIT_SECS)
        assert lent.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok, (
            "a worker, which holds the lock already, must measure"
        )
        lock.release()
        assert runner.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok


@pytest.mark.process
@pytest.mark.ccompiler
def test_local_runner_waits_for_a_lent_unit_as_long_as_asked() -> None:
    with LocalRunner("c", wait_secs=0.1) as runner:
        lock = UnitLock(runner.device_info().unit, "worker", lends=True)
        with pytest.raises(TryAgainLater, match="locked by worker"):
            runner.submit([request("good", "c")]).result(LIMIT_SECS / 4)
        lock.release()
