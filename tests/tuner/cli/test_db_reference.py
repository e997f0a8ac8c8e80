"""`relax-tune db reference --renew` of units that measure elsewhere: workers of a scheduler, a page in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tuner.job.job_processes import JobProcess
from tests.tuner.measure.cluster.fake_unit import BASE_SECS, FakeRunner, start_fake
from typer.testing import CliRunner

from relax_tune.database.records import Target
from relax_tune.database.store import open_store
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.cli.app import app

OLD = {"compute": 9.0, "stream": 9.0}


def recorded(url: str, device: DeviceInfo, reference: Mapping[str, float]) -> str:
    """Add the target of a device to a new database, with these reference times. Returns its key."""
    target = Target(device.kind, device.name, device.fingerprint, reference=tuple(reference.items()))
    with open_store(url) as store:
        return store.add_target(target)


def stored_reference(url: str, key: str) -> dict[str, float]:
    with open_store(url, read_only=True) as store:
        target = store.target(key)
    assert target is not None
    return dict(target.reference)


@pytest.mark.process
def test_renew_over_a_scheduler_stores_the_times_of_most_workers_and_names_others(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
    from relax_tune.tuner.measure.cluster.client import SchedulerConnection
    from relax_tune.tuner.measure.cluster.processes import start_scheduler

    url = f"sqlite:///{tmp_path / 'r.db'}"
    key = recorded(url, FakeRunner({"unit": "u"}, "w").device_info(), OLD)
    with ExitStack() as stack:
        process, address = start_scheduler()
        stack.enter_context(process)
        connection = SchedulerConnection(address, None, 30.0)
        stack.callback(connection.close)
        speeds = {"one": 2.0, "two": 2.0, "three": 1.0}
        for unit, slow in speeds.items():
            stack.enter_context(start_fake(address, unit, slow=slow))
        give_up = time.monotonic() + 60
        while {d.worker for d in connection.devices()} != speeds.keys() and time.monotonic() < give_up:
            time.sleep(0.1)
        renew = ["db", "reference", "--renew", "--target", "c", "--scheduler", address, "--db", url, "--json"]
        done = CliRunner().invoke(app, renew)
        assert done.exit_code == 0, done.output
    reference = stored_reference(url, key)
    assert json.loads(done.stdout)["reference"] == reference
    assert {reference["compute"], reference["stream"]} == {2 * BASE_SECS}
    assert "three is excluded: reference kernel" in done.stderr


@pytest.mark.process
def test_renew_over_a_page_stores_the_times_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("tornado", reason="tornado is not installed (extra browser)")
    from tests.tuner.measure.browser.fake_page import FakePage
    from tests.tuner.measure.browser.tabs import ADDRESS, Tabs, runner_of

    url = f"sqlite:///{tmp_path / 'r.db'}"
    with runner_of(Tabs()) as runner:
        device = runner.device_info()
    key = recorded(url, device, OLD)
    recorded(url, replace(device, name="another"), OLD)
    renew = ["db", "reference", "--renew", "--target", "webgpu", "--browser", "127.0.0.1:0", "--db", url, "--json"]
    command = JobProcess(tmp_path, *renew)
    try:
        give_up = time.monotonic() + 60
        while (address := ADDRESS.search(command.said())) is None:
            assert command.process.poll() is None and time.monotonic() < give_up, command.said()
            time.sleep(0.1)
        page = FakePage(address[1])
        assert command.wait(60) == 0, command.said()
        assert page.asked
    finally:
        command.kill()
    reference = stored_reference(url, key)
    assert json.loads(command.output.read_text())["reference"] == reference
    assert reference["compute-page"] == pytest.approx(2e-6) and "stream-page spread" in reference
