"""Units of a fleet: each batch goes to the device that it is for, and only to units as fast as the target's."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tuner.measure.cluster.fake_unit import BASE_SECS, FakeRunner, fake_unit, start_fake
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import MeasureError

pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster import fleet
from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.cluster.identity import differences, requirement_text
from relax_tune.tuner.measure.cluster.lending import LentUnit
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_scheduler
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.codec import decode_results, encode_batch
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult
from relax_tune.tuner.measure.reference import MOMENTS, disagreement
from relax_tune.tuner.measure.unit_lock import UnitLock

StartFake = Callable[..., ClusterProcess]
BATCH = encode_batch([request("good", "c")])


@pytest.fixture
def address() -> Iterator[str]:
    process, found = start_scheduler()
    with process:
        yield found


@pytest.fixture
def start(address: str) -> Iterator[StartFake]:
    """Starts fake workers, and waits until the scheduler lists them."""
    with ExitStack() as stack:
        connection = SchedulerConnection(address, None, 30.0)
        stack.callback(connection.close)

        def begin(unit: str, **facts: object) -> ClusterProcess:
            process = stack.enter_context(start_fake(address, unit, **facts))
            give_up = time.monotonic() + LIMIT_SECS
            while unit not in {device.worker for device in connection.devices()}:
                assert process.wait(0.05) is None and time.monotonic() < give_up, process.log()
            return process

        yield begin


def measured_by(runner: DaskRunner, batches: int) -> list[MeasureResult]:
    futures = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(batches)]
    return [result for future in futures for result in future.result(LIMIT_SECS)]


@pytest.mark.process
def test_batch_runs_only_on_workers_with_the_device_of_the_target(address: str, start: StartFake) -> None:
    said: list[str] = []
    for unit, threads in (("one", 1), ("two", 2), ("three", 2)):
        start(unit, threads=threads, secs=0.05)
    with DaskRunner(address, "c", notice=said.append) as runner:
        assert dict(runner.device_info().fingerprint)["threads"] == "2", "most workers have it"
        assert {r.unit.unit for r in measured_by(runner, 8)} == {"two", "three"}
    assert any("2 of 3 workers" in line for line in said)


@pytest.mark.process
def test_slow_and_fast_unit_of_one_name_never_mix(address: str, start: StartFake) -> None:
    said: list[str] = []
    start("slow", slow=2.0, secs=0.05)
    start("fast", secs=0.05)
    fast, slow = ({"compute": BASE_SECS * k, "stream": BASE_SECS * k} for k in (1.0, 2.0))
    for reference, unit in ((fast, "fast"), (slow, "slow")):
        with DaskRunner(address, "c", notice=said.append) as runner:
            assert {**runner.calibrate({}), **fast} == runner.calibrate({}), "of equally many, the fastest is the first"
            assert runner.calibrate(reference) == reference
            assert {r.unit.unit for r in measured_by(runner, 6)} == {unit}
    assert any("slow is excluded: reference kernel compute: expected 1.000 ms" in line for line in said)
    with DaskRunner(address, "c") as runner, pytest.raises(MeasureError, match=r"as fast as .*slow: reference kernel"):
        runner.calibrate({"compute": BASE_SECS / 3})


@pytest.mark.process
def test_part_of_name_chooses_among_devices(address: str, start: StartFake) -> None:
    start("first", name="Abacus 100")
    start("second", name="Abacus 200")
    for part, unit in (("100", "first"), ("abacus 200", "second")):
        target = f"c:abacus {part}" if part == "100" else f"c:{part}"
        with DaskRunner(address, target) as runner:
            assert {r.unit.unit for r in measured_by(runner, 2)} == {unit}
    with pytest.raises(MeasureError, match=r"a number .*device of one machine"):
        DaskRunner(address, "c:0")
    with pytest.raises(MeasureError, match=r"'c:slate'.* 0.5 s, .*c \(Abacus 100"):
        DaskRunner(address, "c:slate", open_secs=0.5)


@pytest.mark.process
def test_part_of_a_fact_chooses_among_devices_of_one_name(address: str, start: StartFake) -> None:
    said: list[str] = []
    for unit, threads in (("one", 1), ("two", 2), ("three", 2)):
        start(unit, threads=threads)
    with DaskRunner(address, "c:threads=1", notice=said.append) as runner:
        assert {r.unit.unit for r in measured_by(runner, 2)} == {"one"} and not said
    with DaskRunner(address, "c", notice=said.append):
        assert any("others: threads=1; --target c:PART selects" in line for line in said)


@pytest.mark.process
def test_batch_of_stopped_worker_goes_to_another(
    address: str, start: StartFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENT_SECS", 3.0)
    said: list[str] = []
    first = start("first", secs=1.0)
    with DaskRunner(address, "c", notice=said.append) as runner:
        future = runner.submit([request("good", "c")])
        with pytest.raises(TimeoutError):
            future.result(0.5)
        os.killpg(first.pid, signal.SIGSTOP)
        start("second")
        assert [r.unit.unit for r in future.result(LIMIT_SECS)] == ["second"]
        os.killpg(first.pid, signal.SIGCONT)
    assert any("worker first is silent" in line and "also sent to second" in line for line in said)


@pytest.mark.process
def test_batch_of_worker_told_to_end_goes_to_another(address: str, start: StartFake) -> None:
    first = start("first", secs=30.0)
    with DaskRunner(address, "c") as runner:
        future = runner.submit([request("good", "c")])
        with pytest.raises(TimeoutError):
            future.result(1.0)
        os.kill(first.pid, signal.SIGTERM)
        start("second")
        assert [r.unit.unit for r in future.result(LIMIT_SECS)] == ["second"]


@pytest.mark.process
def test_batch_over_the_deadline_goes_to_another_worker_before_new_ones(address: str, start: StartFake) -> None:
    start("sleepy", secs=600.0)
    with DaskRunner(address, "c") as runner:
        future = runner.submit([request("good", "c", deadline_secs=1.0)])
        with pytest.raises(TimeoutError):
            future.result(1.0)
        waiting = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(100)]
        start("quick", secs=0.1)
        assert [r.unit.unit for r in future.result(LIMIT_SECS)] == ["quick"]
        assert not waiting[-1].done()


@pytest.mark.process
def test_worker_of_another_version_gets_no_batch(address: str, start: StartFake) -> None:
    start("old", protocol=1, secs=0.05)
    with pytest.raises(MeasureError, match=r"got old: c \(fake\) of another version"):
        DaskRunner(address, "c", open_secs=0.5)
    start("new", secs=0.05)
    said: list[str] = []
    with DaskRunner(address, "c", notice=said.append) as runner:
        assert {r.unit.unit for r in measured_by(runner, 4)} == {"new"}
    assert any("worker old is excluded: another version of relax-tune: expected protocol" in line for line in said)


def test_unit_refuses_batch_of_another_version() -> None:
    unit = fake_unit({"unit": "u-version"})
    wanted = json.loads(requirement_text(FakeRunner({"unit": "u"}, "").device_info(), {}))
    for protocol in (1, 99, None):
        refused = json.loads(unit.measure("c", json.dumps({**wanted, "protocol": protocol}), BATCH))["refused"]
        assert f"got {protocol}; install the same version" in refused
    unit.close()


def test_unit_refuses_batch_for_another_device() -> None:
    unit = fake_unit({"unit": "u-refuse", "threads": 2})
    other = FakeRunner({"unit": "elsewhere", "threads": 1}, "").device_info()
    same = FakeRunner({"unit": "elsewhere", "threads": 2}, "").device_info()
    refused = json.loads(unit.measure("c", requirement_text(other, {}), BATCH))
    assert refused == {"refused": "worker u-refuse: threads: expected 1, got 2"}
    moved = replace(same, libraries=(("onednn", "3.5"),))
    assert "library onednn: expected 3.5, got none" in unit.measure("c", requirement_text(moved, {}), BATCH)
    assert "reference kernel stream" in unit.measure("c", requirement_text(same, {"stream": BASE_SECS * 2}), BATCH)
    assert decode_results(unit.measure("c", requirement_text(same, {"stream": BASE_SECS}), BATCH))[0].ok
    unit.close()


def test_drifting_unit_is_quarantined_until_as_at_the_start() -> None:
    said: list[str] = []
    device = FakeRunner({"unit": "u-drift"}, "w")
    unit = LentUnit(["c"], "w", 1.25, lambda *_: device, said.append)
    wanted = requirement_text(device.device_info(), {})
    unit.check()
    assert not unit.quarantine and not said
    device.slow = 1.5
    unit.check()
    assert "reference kernel compute: expected 1.000 ms within a factor of 1.25, got 1.500 ms" in unit.quarantine
    assert "quarantined" in json.loads(unit.measure("c", wanted, BATCH))["refused"]
    assert "db prune --worker w" in said[0] and unit.state()["c"]["quarantine"] == unit.quarantine
    device.slow = 1.1
    unit.check()
    assert not unit.quarantine and "lent again" in said[1]
    assert decode_results(unit.measure("c", wanted, BATCH))[0].ok
    unit.close()


class Restless(FakeRunner):
    """A device that other processes disturb, and that counts how often it is timed."""

    timed = 0

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        self.timed += 1
        (result,) = super().submit(batch).result()
        samples = (BASE_SECS, 2 * BASE_SECS, 3 * BASE_SECS, 2 * BASE_SECS)
        done: Future[list[MeasureResult]] = Future()
        done.set_result([replace(result, timings=tuple(replace(t, samples_secs=samples) for t in result.timings))])
        return done


def test_unit_of_any_speed_waits_for_no_quiet_moment() -> None:
    device = Restless({"unit": "u-restless"}, "w")
    unit = LentUnit(["c"], "w", 1e6, lambda *_: device)
    assert device.timed == MOMENTS
    unit.close()


def test_second_worker_of_a_unit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = fake_unit({"unit": "pci:0000:0a:00.0"})
    with pytest.raises(MeasureError, match=r"unit pci:0000:0a:00.0.*locked by pci:"):
        fake_unit({"unit": "pci:0000:0a:00.0"})
    fake_unit({"unit": "pci:0000:0b:00.0"}).close()
    first.close()
    UnitLock("pci:0000:0a:00.0", "third").release()


def test_link_in_place_of_the_lock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may put one into the temporary folder; the file that it leads to stays as it is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    UnitLock("cpu:here", "first").release()
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink(missing_ok=True)
    other = tmp_path / "other"
    other.write_text("kept")
    lock.symlink_to(other)
    with pytest.raises(MeasureError, match=r"cpu:here cannot be locked .*remove it"):
        UnitLock("cpu:here", "second")
    assert other.read_text() == "kept"


def test_silence_is_longer_than_words_of_a_large_fleet_are_apart() -> None:
    from distributed.scheduler import heartbeat_interval

    for workers in (1, 100, 1000, 4000, 10_000, 50_000):
        assert fleet.silence_of(workers) >= max(fleet.SILENT_SECS, 2 * heartbeat_interval(workers))
    assert fleet.silence_of(1000) == fleet.SILENT_SECS


def test_identity_ignores_unit_and_limits() -> None:
    info = FakeRunner({"unit": "a"}, "").device_info()
    assert differences(info, replace(info, unit="b", limits=(("workers", 2),))) == ""
    assert differences(info, replace(info, name="other")) == "name: expected fake, got other"


def test_reference_times_agree_within_the_factor_both_ways() -> None:
    assert disagreement({"a": 1.0}, {"a": 1.2, "b": 9.0}, 1.25) == ""
    assert "reference kernel a" in disagreement({"a": 1.0}, {"a": 1.3}, 1.25)
    assert "reference kernel a" in disagreement({"a": 1.3}, {"a": 1.0}, 1.25)


def test_misfit_names_the_reason() -> None:
    device = LentDevice("tcp://x", "c", "w", "h", "u", "id", "fake | ", {"compute": 1.0}, 1.25, "", 0.0)
    assert device.misfit("id", {}) == device.misfit("id", {"compute": 1.1}) == ""
    assert "another device" in device.misfit("other", {})
    assert "reference kernel" in device.misfit("id", {"compute": 2.0})
    assert "quarantined: hot" in replace(device, quarantine="hot").misfit("id", {})
