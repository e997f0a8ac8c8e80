"""A scheduler killed under `relax-tune tune` and under a submitted job, with real workers: nothing is lost, nothing done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.tuner.job.job_processes import JobProcess, small_model, work_done
from tests.tuner.measure.cluster.lent import lend

from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.store import open_store
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.measure.cluster.address import host_and_port
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_scheduler

pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster.runner import DaskRunner

pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
pytestmark = [pytest.mark.process, pytest.mark.ccompiler, pytest.mark.slow]
MODEL = ("small.onnx", "--target", "c", "--bound", "n=1:8", "--trials", "6", "--effort", "quick")


class Fleet:
    """A scheduler and a worker with the processor of this machine."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        process, self.address = start_scheduler()
        self.scheduler = stack.enter_context(process)
        self.worker = self._lend()

    def _lend(self) -> ClusterProcess:
        worker = self._stack.enter_context(lend(self.address, environment={"OMP_NUM_THREADS": "1"}))
        with DaskRunner(self.address, "c", open_secs=120):  # the jobs of these tests wait for a few seconds only
            return worker

    def again(self) -> None:
        """Start the scheduler again at its port, and a worker, as `relax-tune worker` does when the former ends."""
        process, address = start_scheduler(port=host_and_port(self.address)[1])
        assert address == self.address
        self.scheduler = self._stack.enter_context(process)
        self.worker.close()
        self.worker = self._lend()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.chdir(tmp_path)
    small_model(tmp_path)
    with ExitStack() as stack:
        yield Fleet(stack)


@pytest.fixture
def started() -> Iterator[list[JobProcess]]:
    """Processes to end with the test, whatever happens."""
    found: list[JobProcess] = []
    yield found
    for process in found:
        process.kill()


def tune(fleet: Fleet, folder: Path, log: str, wait_secs: int) -> JobProcess:
    options = ("--db", "q.db", "--scheduler", fleet.address, "--wait-secs", str(wait_secs), "--out", f"{log}.rta")
    return JobProcess(folder, "tune", *MODEL, *options, log=log)


def records() -> int:
    if not Path("q.db").exists():
        return 0
    with open_store("q.db") as store:
        return sum(store.count(target.key) for target in store.targets())


def until(holds: Callable[[], object], process: JobProcess, secs: float = 120) -> None:
    give_up = time.monotonic() + secs
    while not holds():
        assert process.process.poll() is None and time.monotonic() < give_up, told(process)
        time.sleep(0.05)


def told(process: JobProcess) -> str:
    return process.said() + process.output.read_text(errors="replace")


def test_tune_outlives_a_killed_scheduler(fleet: Fleet, tmp_path: Path, started: list[JobProcess]) -> None:
    job = tune(fleet, tmp_path, "first", 90)
    started.append(job)
    until(lambda: records() > 5, job)
    fleet.scheduler.kill()
    until(lambda: "waiting for the scheduler" in told(job), job)
    fleet.again()
    assert job.wait(240) == 0, told(job)
    assert "is back" in told(job) and "Traceback" not in told(job)
    with open_store("q.db") as store:
        assert set(work_done(store).trials.values()) == {1}, "no candidate was measured twice"
    load_artifact(tmp_path / "first.rta")


def test_tune_ends_for_later_when_the_scheduler_stays_away(
    fleet: Fleet, tmp_path: Path, started: list[JobProcess]
) -> None:
    job = tune(fleet, tmp_path, "first", 4)
    started.append(job)
    until(lambda: records() > 5, job)
    fleet.scheduler.kill()
    assert job.wait(120) == 4, told(job)
    (last,) = [line for line in job.said().splitlines() if line.startswith("error: ")]
    assert f"{fleet.address} does not answer since" in last and "measured results are stored" in last
    assert "Traceback" not in told(job) and not job.orphans()
    before = records()
    assert before > 5
    fleet.again()
    again = tune(fleet, tmp_path, "again", 90)
    started.append(again)
    assert again.wait(240) == 0, told(again)
    with open_store("q.db") as store:
        assert set(work_done(store).trials.values()) == {1}, "what was measured before is not measured again"
    assert records() > before


def test_submitted_job_goes_back_and_is_done_when_the_scheduler_is_back(
    fleet: Fleet, tmp_path: Path, started: list[JobProcess]
) -> None:
    submitted = JobProcess(tmp_path, "jobs", "submit", *MODEL, "--db", "q.db", log="submit")
    started.append(submitted)
    assert submitted.wait() == 0, told(submitted)
    work = ("jobs", "work", "--db", "q.db", "--scheduler", fleet.address, "--wait-secs", "4")
    service = JobProcess(tmp_path, *work, log="work")
    started.append(service)
    with open_queue("q.db") as queue:
        until(lambda: queue.submitted()[0].values("progress") and records() > 5, service)
        fleet.scheduler.kill()
        until(lambda: queue.submitted()[0].state == "queued", service)
        (waiting,) = queue.submitted()
        assert f"{fleet.address} does not answer since" in waiting.message and waiting.not_before > time.time()
        fleet.again()
        hurry(queue)
        until(lambda: queue.submitted()[0].ended, service, 240)
        (done,) = queue.submitted()
        said = "".join(part for _, _, part in queue.log(done.id))
        assert (done.state, done.losses) == ("done", 0) and done.runs > 1, done.message
        assert "Traceback" not in said + told(service) and "waiting for the scheduler" in said
    with open_store("q.db") as store:
        assert set(work_done(store).trials.values()) == {1}


def hurry(queue: JobQueue) -> None:
    """Let a job that waits have its turn now."""
    with queue._write("hurry") as connection:
        connection.execute(text("UPDATE submitted_jobs SET not_before = 0 WHERE state = 'queued'"))
