"""A scheduler that goes away: batches wait for it, and a job ends by one error that says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.tuner.measure.cluster.fake_unit import start_fake
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import FleetUnavailable, MeasureError, TryAgainLater
from relax_tune.tuner.measure.cluster.address import host_and_port
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_scheduler

pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster import client as clients
from relax_tune.tuner.measure.cluster import runner as runners
from relax_tune.tuner.measure.cluster.client import SchedulerConnection, SchedulerLost
from relax_tune.tuner.measure.cluster.runner import DaskRunner


@dataclass
class Head:
    """A scheduler that can be lost and started again at its port, with made-up units."""

    stack: ExitStack
    process: ClusterProcess
    address: str
    workers: list[ClusterProcess] = field(default_factory=list)

    def kill(self) -> None:
        self.process.kill()

    def again(self) -> None:
        process, address = start_scheduler(port=host_and_port(self.address)[1])
        self.process = self.stack.enter_context(process)
        assert address == self.address

    def lend(self, secs: float = 0.0, unit: str = "unit") -> ClusterProcess:
        worker = self.stack.enter_context(start_fake(self.address, unit, secs=secs))
        self.workers.append(worker)
        return worker


@pytest.fixture
def head() -> Iterator[Head]:
    process, address = start_scheduler()
    with ExitStack() as stack:
        yield Head(stack, stack.enter_context(process), address)


@pytest.mark.process
@pytest.mark.slow
def test_batches_wait_for_a_scheduler_until_started_again(head: Head) -> None:
    """Those that were under way and those that were queued; the worker comes back as well."""
    head.lend(secs=2.0)
    said: list[str] = []
    with DaskRunner(head.address, "c", open_secs=60.0, notice=said.append) as runner:
        futures = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(2)]
        with pytest.raises(TimeoutError):
            futures[0].result(1.0)
        head.kill()
        assert runner.slots() == 1
        until(lambda: any("waiting for the scheduler" in line and head.address in line for line in said))
        head.again()
        head.lend()
        assert [f.result(LIMIT_SECS)[0].ok for f in futures] == [True, True]
        assert any("is back" in line for line in said) and runner.slots() == 1
        (after,) = runner.submit([request("good", "c", id="after")]).result(LIMIT_SECS)
        assert after.ok


@pytest.mark.process
@pytest.mark.slow
def test_scheduler_staying_away_ends_every_call_by_one_error(head: Head) -> None:
    head.lend(secs=2.0)
    with DaskRunner(head.address, "c", open_secs=60.0):
        pass  # the worker is connected: the next runner waits for a few seconds only
    said: list[str] = []
    with DaskRunner(head.address, "c", open_secs=4.0, notice=said.append) as runner:
        futures = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(2)]
        with pytest.raises(TimeoutError):
            futures[0].result(1.0)
        head.kill()
        for future in futures:
            with pytest.raises(
                FleetUnavailable,
                match=rf"{head.address} does not answer .*results are stored",
            ):
                future.result(LIMIT_SECS)
        with pytest.raises(FleetUnavailable, match="does not answer since"):
            runner.calibrate({"compute": 1e-3})
        with pytest.raises(TryAgainLater):
            runner.submit([request("good", "c")]).result(LIMIT_SECS)
        assert runner.slots() == 1 and sum("waiting for the scheduler" in line for line in said) >= 1
    with pytest.raises(FleetUnavailable):
        DaskRunner(head.address, "c", open_secs=0.5)


@pytest.mark.process
@pytest.mark.slow
def test_idle_runner_outlives_a_scheduler(head: Head) -> None:
    head.lend()
    with DaskRunner(head.address, "c", open_secs=60.0) as runner:
        assert runner.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok
        head.kill()
        time.sleep(0.5)
        head.again()
        head.lend()
        assert runner.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok
        assert runner.calibrate({"compute": 1e-3, "stream": 1e-3})


@pytest.mark.process
def test_connection_asks_no_memory_of_a_lost_scheduler(head: Head) -> None:
    """Dask gives the answer before, or an empty one, while it reconnects."""
    head.lend()
    with closing(SchedulerConnection(head.address, None, 20.0)) as connection:
        until(lambda: connection.devices())
        head.kill()
        until(lambda: connection.client.status != "running")
        for call in (connection.devices, connection.processing, lambda: connection.ask(lambda c: c.submit(sum, [1]))):
            with pytest.raises(SchedulerLost, match=head.address):
                call()
        assert connection.restore()
        head.again()
        assert connection.restore() == "" and connection.devices() == [] and connection.restore() == ""


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (KeyError("workers"), "running", SchedulerLost),
        (OSError("closed"), "running", SchedulerLost),
        (TimeoutError(), "running", SchedulerLost),
        (AttributeError("None"), "running", SchedulerLost),
        (RuntimeError("IOLoop is closed"), "running", SchedulerLost),
        (ValueError("odd"), "running", MeasureError),
        (ValueError("odd"), "connecting", SchedulerLost),
    ],
)
def test_every_error_of_dask_becomes_one_of_ours(raised: Exception, status: str, kind: type[Exception]) -> None:
    class Client:
        status = "running"

    client = Client()
    connection = SchedulerConnection.__new__(SchedulerConnection)
    connection.client, connection.address = client, "tls://head:1"

    def call(_: Any) -> None:
        client.status = status
        raise raised

    with pytest.raises(MeasureError) as caught:
        connection.ask(call)
    assert type(caught.value) is kind and "tls://head:1" in str(caught.value)


@pytest.mark.process
@pytest.mark.slow
def test_batch_of_a_breaking_connection_is_given_up(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_MOST_DISCONNECTS", 0)
    head.lend(secs=5.0)
    with DaskRunner(head.address, "c", open_secs=60.0) as runner:
        future = runner.submit([request("good", "c")])
        with pytest.raises(TimeoutError):
            future.result(1.0)
        head.kill()
        with pytest.raises(FleetUnavailable, match="lost 0 times"):
            future.result(LIMIT_SECS)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("module", ["client", "batched", "core", "comm.tcp", "comm.core"])
def test_log_of_dask_about_a_lost_connection_is_silent_until_closed(
    head: Head, module: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(f"distributed.{module}")
    logger.addHandler(caplog.handler)
    try:
        with closing(SchedulerConnection(head.address, None, 20.0)):
            with closing(SchedulerConnection(head.address, None, 20.0)):
                logger.error("a traceback")
            logger.error("a traceback")
        assert not [r for r in caplog.records if r.msg == "a traceback"]
        logger.error("after the connection")
        assert [r for r in caplog.records if r.msg == "after the connection"]
    finally:
        logger.removeHandler(caplog.handler)


def test_opening_names_the_awaited_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_WAITING_SECS", 0.1)
    said: list[str] = []
    with pytest.raises(FleetUnavailable):
        SchedulerConnection("tls://127.0.0.1:9", None, 1.0, said.append)
    assert said == ["waiting for the scheduler at tls://127.0.0.1:9"]


def until(holds: Any, secs: float = LIMIT_SECS) -> None:
    give_up = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)
