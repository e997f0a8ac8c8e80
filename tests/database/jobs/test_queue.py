"""Submitted jobs: each is taken by one service at a time, in turn, and ends once, whoever is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.database.conftest import POSTGRES

from relax_tune.database.jobs import queue as queues
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.sql import leases
from relax_tune.errors import DatabaseError


def job(id: str, **more: object) -> SubmittedJob:
    return SubmittedJob(id, "file:00", f"model-{id}", '{"target":"c"}', "c", **more)  # type: ignore[arg-type]


@pytest.fixture(params=["sqlite", POSTGRES])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobQueue]:
    postgres = request.param == "postgres"
    url = request.getfixturevalue("postgres_store") if postgres else f"sqlite:///{tmp_path / 'records.db'}"
    with open_queue(url, create=True) as opened:
        yield opened


def state_of(queue: JobQueue, id: str) -> SubmittedJob:
    (found,) = queue.find(id)
    return found


def test_jobs_are_taken_by_priority_then_age(queue: JobQueue) -> None:
    for id, priority in (("late", 0), ("low", -1), ("urgent", 5), ("later", 0)):
        queue.submit(job(id, priority=priority))
    taken = [queue.take(f"h{n}", 60.0) for n in range(5)]
    assert [t and t.id for t in taken] == ["urgent", "late", "later", "low", None]
    assert taken[0] is not None and (taken[0].state, taken[0].runs) == ("running", 1)
    assert taken[0].started_at is not None and taken[0].expires_at >= taken[0].started_at + 59


def test_take_with_labels_leaves_other_devices(queue: JobQueue) -> None:
    queue.submit(job("gpu", priority=9))
    with queue._write("relabel") as connection:
        connection.execute(text("UPDATE submitted_jobs SET label = 'cuda'"))
    queue.submit(job("cpu"))
    assert (first := queue.take("a", 60.0, ["c"])) is not None and first.id == "cpu"
    assert queue.take("b", 60.0, ["c"]) is None
    assert (second := queue.take("b", 60.0, ["c", "cuda"])) is not None and second.id == "gpu"


def test_submit_and_take_again_after_lost_answers_change_nothing(queue: JobQueue) -> None:
    stored = queue.submit(job("one"))
    assert queue.submit(job("one", note="other")) == stored
    queue.submit(job("two"))
    first = queue.take("holder", 60.0)
    again = queue.take("holder", 60.0)
    assert first is not None and again is not None and again.id == first.id == "one" and again.runs == 1
    assert queue.finish(first, "done", "", 0, 1.0, {"artifact": "x"})
    assert queue.finish(first, "done", "", 0, 1.0, {"artifact": "x"}), "an answer that was lost is given again"
    assert not queue.finish(first, "failed", "", 2, 1.0, {})
    assert state_of(queue, "one").values("result") == {"artifact": "x"}


def test_expired_hold_goes_to_another_and_the_first_is_fenced_off(queue: JobQueue) -> None:
    queue.submit(job("one"))
    first = queue.take("first", 0.0)
    second = queue.take("second", 60.0)
    assert first is not None and second is not None and second.id == "one" and (second.runs, second.losses) == (2, 1)
    assert queue.beat(first, 60.0, 1.0, {"trials": 1}, [(1, 0, "stale")]) == "lost"
    assert not queue.finish(first, "done", "", 0, 1.0, {}) and not queue.put_back(first, "", 0.0, 1.0)
    assert queue.log("one") == []
    assert queue.beat(second, 60.0, 2.0, {"trials": 2}, [(2, 0, "a\n"), (2, 1, "b\n")]) == "extended"
    assert queue.beat(second, 60.0, 2.0, None, [(2, 1, "b\n"), (2, 2, "c\n")]) == "extended"
    assert queue.log("one") == [(2, 0, "a\n"), (2, 1, "b\n"), (2, 2, "c\n")]
    assert queue.log("one", (2, 1)) == [(2, 2, "c\n")]
    assert queue.finish(second, "done", "built", 0, 3.0, {}, [(2, 3, "end\n")])
    ended = state_of(queue, "one")
    assert (ended.state, ended.exit_code, ended.spent_secs, ended.values("progress")) == ("done", 0, 3.0, {"trials": 2})
    assert queue.log("one", (2, 2)) == [(2, 3, "end\n")] and ended.ended


def test_hold_by_a_dead_process_is_freed_at_once(queue: JobQueue) -> None:
    queue.submit(job("one"))
    queue.take("dead", 600.0)
    assert queue.holders() == ["dead"] and queue.take("other", 60.0) is None
    found = queue.take("other", 60.0, dead=["dead"])
    assert found is not None and found.losses == 1


def test_job_losing_services_too_often_is_given_up(queue: JobQueue) -> None:
    queue.submit(job("poison", attempts=3))
    assert [queue.take(f"h{n}", 0.0) is not None for n in range(4)] == [True, True, True, False]
    ended = state_of(queue, "poison")
    assert ended.state == "failed" and "lost, as 2 times before" in ended.message
    assert queue.retry("poison") == "failed"
    fresh = queue.take("again", 60.0)
    assert fresh is not None and (fresh.losses, fresh.runs, fresh.ended_at) == (0, 4, None)


def test_job_with_killed_process_counts_as_lost(queue: JobQueue) -> None:
    queue.submit(job("one", attempts=2))
    first = queue.take("a", 60.0)
    assert first is not None and queue.lose(first, "its process was killed", 1.0, [(1, 0, "x")]) == "queued"
    assert queue.lose(first, "again", 1.0) is None
    second = queue.take("b", 60.0)
    assert second is not None and second.losses == 1 and queue.lose(second, "its process was killed", 2.0) == "failed"
    assert state_of(queue, "one").message.startswith("its process was killed, as 1 times before")


def test_cancel_ends_queued_jobs_and_asks_running_ones(queue: JobQueue) -> None:
    queue.submit(job("waits"))
    assert queue.cancel("waits") == "cancelled" and queue.take("h", 60.0) is None
    queue.submit(job("runs"))
    running = queue.take("h", 60.0)
    assert running is not None and queue.cancel("runs") == "running"
    assert queue.beat(running, 60.0, 0.0) == "cancel"
    assert queue.finish(running, "cancelled", "cancelled", 130, 0.0, {})
    assert queue.cancel("nobody") is None and queue.retry("nobody") is None
    queue.submit(job("lost"))
    queue.take("h2", 0.0)
    queue.cancel("lost")
    assert queue.take("h3", 60.0) is None, "a cancelled job whose service is lost does not run again"
    assert state_of(queue, "lost").state == "cancelled"


def test_job_put_back_waits(queue: JobQueue) -> None:
    queue.submit(job("one"))
    taken = queue.take("h", 60.0)
    assert taken is not None and queue.put_back(taken, "the scheduler is away", 600.0, 1.5)
    assert queue.take("h2", 60.0) is None
    waiting = state_of(queue, "one")
    assert (waiting.state, waiting.message, waiting.losses, waiting.spent_secs) == (
        "queued",
        "the scheduler is away",
        0,
        1.5,
    )


def test_next_job_is_in_no_time_later_or_never(queue: JobQueue) -> None:
    assert queue.next_secs() is None
    taken = queue.submit(job("one")) and queue.take("a", 60.0)
    assert taken is not None and queue.next_secs() is None, "a running job is not queued"
    queue.put_back(taken, "later", 30.0, 1.0)
    assert 25 < (queue.next_secs() or 0) <= 30 and queue.next_secs(["cuda"]) is None
    queue.submit(job("two"))
    assert queue.next_secs(["c"]) == 0


def test_jobs_are_listed_newest_first_and_found_by_start(queue: JobQueue) -> None:
    for id in ("aa1", "aa2", "b%"):
        queue.submit(job(id, owner="ann" if id == "aa1" else "bob"))
    assert [j.id for j in queue.submitted()] == ["b%", "aa2", "aa1"]
    assert [j.id for j in queue.submitted(owner="bob", limit=1)] == ["b%"]
    assert [j.id for j in queue.submitted(["running"])] == []
    assert [j.id for j in queue.find("aa")] == ["aa1", "aa2"] and queue.find("%") == []


def test_jobs_of_one_tick_of_the_clock_stay_in_order(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "clock", lambda connection: 1.7e9)
    ids = ["c", "a", "b", "0"]
    for id in ids:
        queue.submit(job(id))
    assert [j.id for j in queue.submitted()] == ids[::-1]
    taken = [queue.take(f"holder-{id}", 60.0) for id in ids]
    assert [None if j is None else j.id for j in taken] == ids


def test_altered_row_is_an_error_naming_the_field(queue: JobQueue) -> None:
    queue.submit(job("one"))
    with queue._write("alter") as connection:
        connection.execute(text("UPDATE submitted_jobs SET settings = '[1]'"))
    with pytest.raises(DatabaseError, match=r"job 'one' settings: expected a JSON object"):
        queue.find("one")


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", ""), ("priority", 10**7), ("note", "x" * 1001), ("attempts", -1), ("max_secs", -1.0), ("name", "a\0")],
)
def test_submitted_job_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    with pytest.raises(DatabaseError, match=field):
        replace(job("one"), **{field: value})


def test_queue_in_memory_is_refused() -> None:
    with pytest.raises(DatabaseError, match=r"memory://"):
        open_queue("memory://")


TAKER = """
import sys, uuid
from relax_tune.database.jobs.queue import open_queue
with open_queue(sys.argv[1]) as queue:
    sys.stdin.readline()
    while (job := queue.take(uuid.uuid4().hex, 60.0)) is not None:
        print(job.id, queue.finish(job, "done", "", 0, 0.0, {}), flush=True)
"""


@pytest.mark.process
def test_processes_taking_at_once_share_no_job(sql_url: str) -> None:
    with open_queue(sql_url, create=True) as queue:
        for n in range(40):
            queue.submit(job(f"j{n:02}"))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, sql_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [line for process in running for line in process.communicate(timeout=120)[0].splitlines()]
    assert Counter(said) == Counter(f"j{n:02} True" for n in range(40))


FAR = ["1e18", "'Infinity'", "'NaN'"]


@pytest.mark.parametrize("moment", FAR)
def test_hold_of_any_expiry_ends_after_a_service_s_time(queue: JobQueue, moment: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(queues, "HOLD_SECS", 0.05)
    queue.submit(job("one"))
    assert queue.take("team-a", 60.0) is not None
    change(queue, f"expires_at = {moment}")
    assert queue.take("b", 0.05) is None
    time.sleep(0.1)
    found = queue.take("b", 0.05)
    assert found is not None and (found.id, found.losses) == ("one", 1)


@pytest.mark.parametrize("moment", FAR)
def test_queued_job_waits_no_longer_than_one_put_back(queue: JobQueue, moment: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(queues, "MAX_DELAY_SECS", 0.05)
    queue.submit(job("one"))
    change(queue, f"not_before = {moment}")
    assert queue.take("b", 60.0) is None
    time.sleep(0.1)
    assert queue.take("b", 60.0) is not None


@pytest.mark.parametrize(
    "assignment", ["settings = '[]'", "settings = 'no'", "priority = 2000000", "note = char(0)", "losses = 'x'"]
)
def test_job_of_unreadable_row_fails_and_the_next_is_taken(tmp_path: Path, assignment: str) -> None:
    """One row stops neither services nor lists."""
    said: list[str] = []
    with open_queue(f"sqlite:///{tmp_path / 'records.db'}", create=True, notice=said.append) as queue:
        queue.submit(job("bad", priority=1_000_000))
        change(queue, assignment)
        queue.submit(job("good"))
        taken = queue.take("a", 60.0)
        assert taken is not None and taken.id == "good" and any("'bad'" in line for line in said)
        assert queue.take("b", 60.0) is None
        assert [one.id for one in queue.submitted()] == ["good"]


def change(queue: JobQueue, assignment: str) -> None:
    """Write to the rows of all jobs by another hand."""
    with queue._write("alter a job") as connection:
        connection.execute(text(f"UPDATE submitted_jobs SET {assignment}"))
