"""Several `relax-tune` processes on one database at once: the work of one run, shared; nothing lost, nothing done twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.database.conftest import POSTGRES
from tests.tuner.job.job_processes import Done, JobProcess, small_model, work_done

from relax_tune.database.store import open_store
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.job_log import state_of

pytest.importorskip("onnx", reason="onnx is not installed (extra onnx)")
pytestmark = pytest.mark.ccompiler

FIXED = ("small.onnx", "--target", "c", "--effort", "quick", "--bound", "n=1:16")


def tune(folder: Path, url: str, name: str, strategy: str = "random") -> JobProcess:
    more = ("--trials", "4", "--strategy", strategy, "--db", url, "--out", f"{name}.rta")
    return JobProcess(folder, "tune", *FIXED, *more, log=name)


def build(folder: Path, url: str, name: str) -> JobProcess:
    return JobProcess(folder, "build", *FIXED, "--db", url, "--out", f"{name}.rta", log=name)


def on_record(url: str) -> Done:
    with open_store(url) as store:
        (target,) = store.targets()
        for workload in store.workloads(target.key):
            assert store.lease(workload.key, target.key) is None, "a lease was not given back"
        return work_done(store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """What one run alone leaves."""
    folder = tmp_path_factory.mktemp("alone")
    small_model(folder)
    job = tune(folder, "sqlite:///t.db", "alone")
    try:
        assert job.wait() == 0, job.said()
    finally:
        job.kill()
    return on_record(f"sqlite:///{folder / 't.db'}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model(tmp_path)
    return tmp_path


@pytest.fixture
def running() -> Iterator[list[JobProcess]]:
    """Processes to end with the test, whatever happens."""
    started: list[JobProcess] = []
    yield started
    for job in started:
        job.kill()


@pytest.mark.heavy
def test_two_tunes_at_once_do_the_work_of_one(
    sql_url: str, folder: Path, running: list[JobProcess], whole: Done
) -> None:
    share(2, sql_url, folder, running, whole)


@pytest.mark.heavy
def test_three_tunes_at_once_do_the_work_of_one(folder: Path, running: list[JobProcess], whole: Done) -> None:
    share(3, f"sqlite:///{folder / 't.db'}", folder, running, whole)


def share(jobs: int, sql_url: str, folder: Path, running: list[JobProcess], whole: Done) -> None:
    """Several jobs from beginning to end."""
    running += [tune(folder, sql_url, f"job{i}") for i in range(jobs)]
    for job in running:
        assert job.wait() == 0 and not job.said(), job.said()
    found = on_record(sql_url)
    assert found.points == whole.points
    assert set(found.trials.values()) == {1}, "a candidate was tried by two jobs"
    with open_store(sql_url) as store:
        assert [job.state for job in store.jobs()] == ["done"] * jobs
        made = {record.job for target in store.targets() for record in store.query(target.key)}
        assert made <= {job.id for job in store.jobs()}
    for i in range(jobs):
        load_artifact(folder / f"job{i}.rta")


@pytest.mark.heavy
@pytest.mark.parametrize("sql_url", ["sqlite", POSTGRES], indirect=True)
def test_two_tunes_with_one_killed_finish_everything(
    sql_url: str, folder: Path, running: list[JobProcess], whole: Done
) -> None:
    """The lease of the killed one runs for another minute by its clock; the other does not wait for that."""
    victim = tune(folder, sql_url, "victim", "evolution")
    running.append(victim)
    held = None
    give_up = time.monotonic() + 60
    open_store(sql_url).close()
    with open_store(sql_url) as store:
        while held is None and time.monotonic() < give_up and victim.process.poll() is None:
            for target in store.targets():
                leases = [store.lease(workload.key, target.key) for workload in store.workloads(None)]
                held = next((lease for lease in leases if lease is not None), held)
        assert held is not None, victim.said()
        other = tune(folder, sql_url, "other", "evolution")
        running.append(other)
        victim.process.send_signal(signal.SIGKILL)
        victim.wait()
        began = time.time()
        assert store.lease(held.workload, held.target) is not None and held.expires_at > began + 30
        assert other.wait() == 0, other.said()
        assert not victim.orphans() and not other.orphans()
        assert {job.id: state_of(job) for job in store.jobs()}[held.holder] == "interrupted"
        assert sorted(state_of(job) for job in store.jobs()) == ["done", "interrupted"]
    found = on_record(sql_url)
    assert found.tuned == whole.tuned and set(found.trials.values()) == {1}


@pytest.mark.heavy
def test_a_tune_beside_a_build(folder: Path, running: list[JobProcess], whole: Done) -> None:
    """Builds at any moment of a tune see whole batches, and disturb nothing."""
    sql_url = f"sqlite:///{folder / 't.db'}"
    open_store(sql_url).close()
    tuning = tune(folder, sql_url, "tuning")
    running.append(tuning)
    number = 0
    while tuning.process.poll() is None:
        building = build(folder, sql_url, f"build{number}")
        running.append(building)
        complaints = [line for line in building.said().splitlines() if "no usable record" not in line]
        assert building.wait() == 0 and not complaints, building.said()
        load_artifact(folder / f"build{number}.rta")
        number += 1
    assert tuning.wait() == 0 and not tuning.said(), tuning.said()
    found = on_record(sql_url)
    assert found.points == whole.points and set(found.trials.values()) == {1}
    last = build(folder, sql_url, "last")
    running.append(last)
    assert last.wait() == 0, last.said()
    assert (folder / "last.rta").read_bytes() == (folder / "tuning.rta").read_bytes()
