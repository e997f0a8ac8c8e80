"""Services: jobs run in processes, end once, go back or are lost as these end; whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_tune.database.engine import LostConnection
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import Target
from relax_tune.errors import TryAgainLater, UserError
from relax_tune.tuner.service import job_process
from relax_tune.tuner.service import service as serving_module
from relax_tune.tuner.service.service import Service, ServiceOptions
from relax_tune.tuner.service.work_order import WorkOrder, work_order

FAKE = Path(__file__).with_name("fake_child.py")
KEY = "0" * 64


def job(id: str, name: str = "quick", **more: object) -> SubmittedJob:
    return SubmittedJob(id, KEY, name, '{"target":"c","trials":4}', "c", **more)  # type: ignore[arg-type]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    with open_queue(f"sqlite:///{tmp_path / 'q.db'}", create=True) as opened:
        yield opened


def service(queue: JobQueue, folder: Path, said: list[str] | None = None) -> Service:
    command = (sys.executable, str(FAKE), str(folder / "ledger"))
    options = ServiceOptions({}, str(folder / "files"), None, 60.0, 0.05, 0.05, command)
    return Service(queue, options, threading.Event(), (said if said is not None else []).append)


def ledger(folder: Path) -> list[str]:
    path = folder / "ledger"
    return path.read_text().split() if path.exists() else []


@pytest.mark.process
def test_service_ends_each_job_as_the_process_ends(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "_LATER_SECS", 0.2)
    monkeypatch.setattr(serving_module, "_MOST_RUNS", 3)
    for name, attempts in (("quick", 5), ("wrong", 5), ("later", 5), ("crash", 2)):
        queue.submit(job(name, name, attempts=attempts))
    said: list[str] = []
    assert service(queue, tmp_path, said).serve(until_empty=True) == 4, "it waits for the job that was put back"
    found = {j.id: j for j in queue.submitted()}
    assert {id: j.state for id, j in found.items()} == {
        "quick": "done",
        "wrong": "failed",
        "later": "failed",
        "crash": "failed",
    }
    assert (found["wrong"].exit_code, found["wrong"].message) == (2, "expected another model")
    assert "the scheduler is away" in found["later"].message and found["later"].runs == 3
    assert "killed by signal 6, as 1 times before" in found["crash"].message and found["crash"].runs == 2
    assert found["quick"].values("result")["settings"] == {"target": "c", "trials": 4}
    assert [text for _, _, text in queue.log("crash")] == ["log of crash\n"] * 2
    assert ledger(tmp_path) == ["quick"] and any(line.startswith("job quick: done") for line in said)


@pytest.mark.process
def test_unforeseen_end_of_a_process_costs_an_attempt_and_names_the_reason(queue: JobQueue, tmp_path: Path) -> None:
    """It is no end of the job: a network that breaks has many faces."""
    queue.submit(job("one", "broken", attempts=3))
    said: list[str] = []
    assert service(queue, tmp_path, said).serve(until_empty=True) == 1
    (ended,) = queue.submitted()
    assert (ended.state, ended.runs, ended.losses) == ("failed", 3, 3)
    assert "ended with exit code 1 (KeyError: 'workers'), as 2 times before" in ended.message
    assert sum("it is now queued" in line for line in said) == 2


@pytest.mark.process
def test_job_of_a_refused_unit_goes_to_another_at_once(queue: JobQueue, tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    for folder in (slow, fast):
        folder.mkdir()
    (fast / "ledger.fast").touch()
    for id in ("one", "two"):
        queue.submit(job(id, "compared"))
    refused = service(queue, slow)
    assert refused.serve(until_empty=True) == 0
    assert "as fast as in the records" in refused.left_to_others()
    jobs = queue.submitted()
    assert sorted(j.runs for j in jobs) == [0, 1], "the second job is not tried, as its target is the same"
    assert max(jobs, key=lambda j: j.runs).message.endswith("expected a unit as fast as in the records")
    assert queue.next_secs() == 0.0
    assert service(queue, fast).serve(until_empty=True) == 2
    assert refused.left_to_others() == "" and all(j.state == "done" for j in queue.submitted())


@pytest.mark.process
@pytest.mark.parametrize("change", ["renewed times", "time"])
def test_refused_unit_is_tried_again_after_a_change(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "time":
        monkeypatch.setattr(serving_module, "_ASIDE_SECS", 1.0)
    stored = {"compute": 1e-3}
    monkeypatch.setattr(queue, "target", lambda key: Target("c", "cpu", reference=tuple(stored.items())))
    queue.submit(job("one", "compared"))
    said: list[str] = []
    serving = service(queue, tmp_path, said)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    wait_until(lambda: any(line.startswith("takes no jobs for c") for line in said))
    (tmp_path / "ledger.fast").touch()
    if change == "renewed times":
        time.sleep(0.5)
        assert queue.submitted()[0].runs == 1
        stored["compute"] = 2e-3
    wait_until(lambda: queue.submitted()[0].state == "done")
    serving.stop.set()
    thread.join(30)
    assert queue.submitted()[0].runs == 2 and ledger(tmp_path) == ["one"]


@pytest.mark.process
def test_service_told_to_end_puts_the_job_back(queue: JobQueue, tmp_path: Path) -> None:
    queue.submit(job("one", "endless"))
    serving = service(queue, tmp_path)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    wait_until(lambda: queue.submitted()[0].values("progress") != {})
    serving.stop.set()
    thread.join(30)
    (found,) = queue.submitted()
    assert (found.state, found.losses, found.spent_secs > 0) == ("queued", 0, True)
    assert "goes back into the queue" in queue.log("one")[-1][2]


@pytest.mark.process
def test_put_back_job_keeps_the_log_of_failed_beats(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit(job("one", "endless"))
    serving, seen = service(queue, tmp_path), list[str]()

    def away(*given: object) -> str:
        seen.extend(text for _, _, text in given[-1])  # type: ignore[attr-defined]
        raise TryAgainLater("the database is away")

    monkeypatch.setattr(queue, "beat", away)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    wait_until(lambda: "log of endless" in "".join(seen))
    serving.stop.set()
    thread.join(30)
    assert "log of endless" in "".join(text for _, _, text in queue.log("one"))


@pytest.mark.process
def test_cancelled_job_is_ended_by_the_service(queue: JobQueue, tmp_path: Path) -> None:
    queue.submit(job("one", "endless"))
    serving = service(queue, tmp_path)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    wait_until(lambda: queue.submitted()[0].state == "running")
    queue.cancel("one")
    wait_until(lambda: queue.submitted()[0].state == "cancelled")
    serving.stop.set()
    thread.join(30)
    assert ledger(tmp_path) == []


@pytest.mark.process
def test_job_lost_to_another_service_is_ended_here(queue: JobQueue, tmp_path: Path) -> None:
    queue.submit(job("one", "endless"))
    said: list[str] = []
    serving = service(queue, tmp_path, said)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    wait_until(lambda: queue.submitted()[0].state == "running")
    (running,) = queue.submitted()
    assert queue.take("another", 600.0, dead=[running.holder]) is not None
    wait_until(lambda: any("was lost to another service" in line for line in said))
    serving.stop.set()
    thread.join(30)
    assert queue.submitted()[0].holder == "another"


@pytest.mark.process
def test_endless_log_is_cut(queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_process, "LOG_BYTES", 100_000)
    queue.submit(job("one", "loud"))
    service(queue, tmp_path).serve(until_empty=True)
    parts = [text for _, _, text in queue.log("one")]
    assert 100_000 <= sum(map(len, parts)) <= 100_100 and max(map(len, parts)) <= 32 << 10
    assert "\ufffdyyy" in "".join(parts) and parts[-1].endswith("not stored)\n")


def test_row_chooses_no_path_host_or_trust() -> None:
    for settings in ('{"trust_model":true}', '{"scheduler":"tcp://x:1"}', '{"db":"x.db"}', '{"prior":"/etc/passwd"}'):
        with pytest.raises(UserError, match="expected settings among"):
            work_order(SubmittedJob("one", KEY, "m", settings, "c"), {}, "files")
    with pytest.raises(UserError, match="64 hex digits"):
        work_order(SubmittedJob("one", KEY, "m", '{"profile":"/etc/passwd"}', "c"), {}, "files")
    with pytest.raises(UserError, match="64 hex digits"):
        work_order(SubmittedJob("one", "../../etc/passwd", "m", "{}", "c"), {}, "files")
    with pytest.raises(UserError, match="expected bounds"):
        work_order(SubmittedJob("one", KEY, "m", '{"bounds":{"n":[1]}}', "c"), {}, "files")


@pytest.mark.parametrize("trust", [True, False])
def test_service_alone_says_whether_torch_may_unpickle_a_model(trust: bool) -> None:
    order = WorkOrder.from_json(work_order(job("one"), {"trust_model": trust}, "files").to_json())
    assert order.settings(None).trust_model is trust


def test_order_leaves_the_time_left_by_earlier_runs() -> None:
    begun = SubmittedJob("one", KEY, "m", '{"target":"c","bounds":{"n":[1,8]}}', "c", max_secs=600.0, spent_secs=540.0)
    order = WorkOrder.from_json(work_order(begun, {"db": "x.db"}, "files").to_json())
    assert order.max_minutes == 1.0 and order.bounds == {"n": (1, 8)}
    settings = order.settings(None)
    assert (settings.target, settings.db, settings.max_minutes) == ("c", "x.db", 1.0)


SERVICE = """
import sys, threading
from relax_tune.database.jobs.queue import open_queue
from relax_tune.tuner.service.service import Service, ServiceOptions
url, files, *command = sys.argv[1:]
with open_queue(url) as queue:
    options = ServiceOptions({}, files, None, 60.0, 0.1, 0.1, tuple(command))
    Service(queue, options, threading.Event()).serve()
"""


@pytest.mark.process
def test_jobs_are_done_once_while_services_are_killed(sql_url: str, tmp_path: Path) -> None:
    """Services are killed while they run a job; others see that at once, since they share a machine."""
    count, running = 12, []
    with open_queue(sql_url, create=True) as queue:
        for n in range(count):
            queue.submit(job(f"j{n:02}", attempts=20))
        fake = (sys.executable, str(FAKE), str(tmp_path / "ledger"))
        start = [sys.executable, "-c", SERVICE, sql_url, str(tmp_path / "files"), *fake]
        try:
            running = [subprocess.Popen(start) for _ in range(2)]
            for kill in range(3):
                wait_until(lambda kill=kill: len(ledger(tmp_path)) > 2 * kill)
                os.kill(running[kill % 2].pid, signal.SIGKILL)
                running[kill % 2].wait()
                running[kill % 2] = subprocess.Popen(start)
            wait_until(lambda: all(j.state == "done" for j in queue.submitted()))
        finally:
            for process in running:
                process.kill()
                process.wait()
        found = queue.submitted()
        assert len(found) == count and all(j.exit_code == 0 for j in found)
        done = Counter(ledger(tmp_path))
        assert set(done) == {j.id for j in found}
        for j in found:
            assert done[j.id] <= j.runs and j.runs - 1 == j.losses


def wait_until(holds: Callable[[], bool], secs: float = 90.0) -> None:
    give_up = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_job_with_a_raising_run_counts_as_ended(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> WorkOrder:
        raise RuntimeError("broken")

    monkeypatch.setattr(serving_module, "work_order", broken)
    queue.submit(job("one"))
    serving, seen = service(queue, tmp_path), list[str]()
    serving.observe = seen.append
    with pytest.raises(RuntimeError, match="broken"):
        serving.serve()
    assert seen == ["taken", "lost"]


def test_job_without_a_written_end_is_given_up(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(*_: object) -> WorkOrder:
        raise UserError("expected another setting")

    def away(*_: object) -> bool:
        serving.stop.set()
        raise LostConnection("the database is away")

    monkeypatch.setattr(serving_module, "work_order", unfit)
    monkeypatch.setattr(queue, "finish", away)
    queue.submit(job("one"))
    said, seen = list[str](), list[str]()
    serving = service(queue, tmp_path, said)
    serving.observe = seen.append
    assert serving.serve() == 0 and seen == ["taken", "lost"]
    assert "abandoned" in said[-1]
