"""Names of jobs that tell whether their process lives, and what follows for leases and for the list of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.tuner_models import QUICK, RecordedRunner, add_records, paper_job, row_scale

from relax_tune.database.records import JobRecord
from relax_tune.database.store import MemoryStore
from relax_tune.tuner.job import job_names, loop
from relax_tune.tuner.job.job_log import SILENT_SECS, RunningJob, state_of
from relax_tune.tuner.job.job_names import lives, new_holder


def dead_holder() -> str:
    """The name of a process that has ended."""
    code = "from relax_tune.tuner.job.job_names import new_holder; print(new_holder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def parts(name: str) -> list[str]:
    return name.split("@")[1].split(":")


def test_names_are_all_different_and_alive() -> None:
    names = {new_holder() for _ in range(100)}
    assert len(names) == 100 and all(lives(name) is True for name in names)
    assert all(len(name) < 200 and int(parts(name)[1]) == os.getpid() for name in names)


@pytest.mark.process
def test_lives_of_ended_process_is_false() -> None:
    assert lives(dead_holder()) is False


@pytest.mark.process
def test_lives_of_zombie_process_is_false() -> None:
    code = "from relax_tune.tuner.job.job_names import new_holder; print(new_holder(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        name = child.stdout.readline().strip()
        assert lives(name) is True
        child.stdin.write("\n")
        child.stdin.flush()
        give_up = time.monotonic() + 20
        while lives(name) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert child.returncode is None and lives(name) is False


def test_another_process_under_the_same_number_is_another() -> None:
    random, rest = new_holder().split("@")
    host, pid, start, machine = rest.split(":")
    assert lives(f"{random}@{host}:{pid}:{int(start) - 1}:{machine}") is False


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name[:-16] + "0123456789abcdef",
        lambda name: name.rsplit(":", 1)[0],
        lambda name: "job-a",
        lambda name: "",
        lambda name: name.replace(f":{os.getpid()}:", ":" + "9" * 30 + ":"),
        lambda name: name + "\n",
    ],
)
def test_of_other_machines_and_other_names_nothing_is_known(change: Callable[[str], str]) -> None:
    assert lives(change(new_holder())) is None


@pytest.mark.process
def test_lives_without_proc_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, alive = dead_holder(), new_holder()
    monkeypatch.setattr(job_names, "_machine", lambda: None)
    assert lives(dead) is lives(alive) is lives(new_holder()) is None


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("who", ["dead", "elsewhere", "alive"])
def test_lease_of_dead_local_holder_is_taken(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"dead": dead_holder, "alive": new_holder, "elsewhere": lambda: new_holder()[:-16] + "0123456789abcdef"}[
        who
    ]()
    store = MemoryStore()
    job = paper_job(row_scale, store, QUICK)
    task = (job.tasks[0].key, job.target.key)
    store.add_target(job.target)
    add_records(store, job.tasks[0], ())
    assert store.acquire_lease(*task, name, secs=1000.0)
    slept: list[float] = []

    def sleep(secs: float) -> None:
        slept.append(secs)
        assert store.lease(*task).holder == name and store.count(job.target.key) == 0  # type: ignore[union-attr]
        if len(slept) == 3:
            held = store.lease(*task)
            assert held is not None and store.release_lease(held)

    monkeypatch.setattr(loop.time, "sleep", sleep)
    assert job.tune(RecordedRunner()).measurements > 0
    assert len(slept) == (0 if who == "dead" else 3)
    assert store.lease(*task) is None


# -- the list of jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_killed_job_is_not_listed_as_running() -> None:
    dead, alive = dead_holder(), new_holder()
    assert state_of(JobRecord(dead, "{}", "running")) == "interrupted"
    assert state_of(JobRecord(alive, "{}", "running")) == "running"
    for state in ("done", "failed", "interrupted", "queued"):
        assert state_of(JobRecord(dead, "{}", state)) == state  # type: ignore[arg-type]


def test_remote_job_seen_lately_is_running() -> None:
    far = new_holder()[:-16] + "0123456789abcdef"
    for ago, state in ((0.0, "running"), (SILENT_SECS + 1, "interrupted"), (-1e6, "interrupted")):
        job = JobRecord(far, json.dumps({"seen_at": 1e6 - ago}), "running")
        assert state_of(job, now=1e6) == state
    for settings in ("{}", "[]", '{"seen_at": "yesterday"}', '{"seen_at": null}'):
        assert state_of(JobRecord(far, settings, "running"), now=1e6) == "interrupted"


@pytest.mark.process
def test_new_job_records_dead_jobs() -> None:
    store = MemoryStore()
    dead, alive = JobRecord(dead_holder(), '{"a":1}', "running"), JobRecord(new_holder(), "{}", "running")
    for job in (dead, alive):
        store.put_job(job)
    with RunningJob(store, QUICK) as running:
        assert store.job(dead.id) == replace(dead, state="interrupted")
        assert store.job(alive.id) == alive
        mine = store.job(running.name)
        assert mine is not None and mine.state == "running" and state_of(mine) == "running"
        assert json.loads(mine.settings)["target"] == QUICK.target
    assert store.job(running.name).state == "done"  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt), RunningJob(store, QUICK) as running:
        raise KeyboardInterrupt
    assert store.job(running.name).state == "interrupted"  # type: ignore[union-attr]
