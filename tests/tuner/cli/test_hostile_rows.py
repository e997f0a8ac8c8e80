"""Rows written by another hand: whatever control characters their texts hold, no command sends one to the terminal."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
from pathlib import Path

import pytest
from tests.database.records_made import ZEN, failure, timing
from tests.support.tuner_models import row_scale
from tests.tuner.dashboard.asking import ask
from typer.testing import CliRunner

from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import Environment, JobRecord, ShapeHistogram, Target, Workload
from relax_tune.database.store import open_store
from relax_tune.ir.frontend.text import save_text
from relax_tune.printable import CONTROL
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.dashboard.app import make_app
from relax_tune.tuner.dashboard.pages import Pages

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202e\x08"
TARGET = Target("c", f"zen{HOSTILE}", (("isa", f"avx{HOSTILE}"),))
ON = ("--on", TARGET.key[:12])
RECORD_VIEWS = (
    ("db", "stats"), ("db", "units", *ON), ("db", "top", *ON), ("db", "top", "matmul", *ON), ("db", "top"),
    ("db", "show", "matmul"), ("db", "show", "job"), ("db", "show", TARGET.key[:12]), ("db", "check"), ("jobs", "runs"),
)  # fmt: skip
JOB_VIEWS = (("jobs", "list"), ("jobs", "show", "aa1"), ("jobs", "logs", "aa1"), ("jobs", "wait", "aa1"))
COMMANDS = (
    *RECORD_VIEWS, *JOB_VIEWS,
    ("db", "prune", "--failed", "--dry-run", *ON), ("db", "export", "x.jsonl"),
    ("jobs", "fetch", "aa1"), ("jobs", "retry", "aa1"), ("jobs", "cancel", "aa1"),
    ("show", "matmul", "--target", "c"), ("plan", "m.relax", "--target", "c"), ("doctor",), ("devices",),
    ("build", "m.relax", "--target", "c", "--no-self-test", "--out", "m.rta", "--overwrite"),
)  # fmt: skip


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database whose free texts all hold control characters, as far as the store takes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path, bad = tmp_path / "records.db", HOSTILE
    save_text(row_scale(), tmp_path / "m.relax")
    target = TARGET
    with open_store(f"sqlite:///{path}") as store:
        store.add_target(target)
        store.add_target(ZEN)
        environment = store.add_environment(Environment((("relax-tune", bad),)))
        workload = Workload(f"w-matmul{bad}", f"def matmul{bad}(): ...", 1, f"matmul{bad}")
        store.add_workload(workload)
        more = {
            "worker": f"w{bad}",
            "host": f"h{bad}",
            "unit": f"u{bad}",
            "job": f"job{bad}",
            "environment": environment,
        }
        store.add_measurements([timing(f"m{bad}", 1e-3, target=target, workload=workload, **more)])
        store.add_measurements([timing("plain", 1e-3, target=target, workload=workload, **more)])
        store.add_workload(Workload("w-matmul", "def matmul(): ...", 1, "matmul"))
        store.add_measurements([failure("broken", "compile", f"it broke{bad}", target=ZEN)])
        store.put_plans(target.key, {workload.key: '["plan"]'})
        store.acquire_lease(workload.key, target.key, f"holder{bad}", secs=60.0)
        store.put_job(JobRecord(f"job-1{bad}", '{"effort":"quick"}', "interrupted"))
        store.put_histogram(ShapeHistogram(f"task{bad}", f"n{bad}", '{"3":1}'))
    with open_queue(f"sqlite:///{path}") as queue:
        settings = SubmittedJob.text({"target": f"c{bad}"})
        queue.submit(SubmittedJob(f"aa1{bad}", "0" * 64, f"model{bad}", settings, "c", owner=bad, note=bad))
        taken = queue.take(f"holder{bad}", 60.0)
        assert taken is not None
        assert queue.finish(taken, "failed", f"it broke{bad}", 2, 1.0, {"name": bad}, [(1, 0, f"log{bad}\n")])
    return path


def columns_of(path: Path) -> list[tuple[str, str, str]]:
    """Return table, name and type of every column, numbers too: SQLite stores any text in any of them."""
    with sqlite3.connect(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [
            (table, row[1], row[2])
            for table in tables
            for row in connection.execute(f"PRAGMA table_info('{table}')")
            if table != "alembic_version"
        ]


def altered(database: Path, table: str, column: str) -> bool:
    """Put control characters before every value of a column of a fresh copy; return False where a constraint forbids it."""
    for beside in Path().glob("records.db-*"):
        beside.unlink()
    shutil.copy("whole.db", database)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? || {column}", (HOSTILE,))
            connection.commit()
        except sqlite3.IntegrityError:
            return False
    return True


def said(caplog: pytest.LogCaptureFixture, *arguments: str) -> str:
    """All that a command prints and logs."""
    caplog.clear()
    done = CliRunner().invoke(app, [*arguments, "--db", "records.db"])
    assert done.exit_code in (0, 1, 2, 3, 130) and (done.exception is None or isinstance(done.exception, SystemExit)), (
        arguments,
        done.exception,
    )
    return done.stdout + done.stderr + caplog.text


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_prints_no_control_characters_of_records(
    database: Path, caplog: pytest.LogCaptureFixture, command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO)
    found = said(caplog, *command, *more)
    assert not CONTROL.search(found), repr(found)


@pytest.mark.parametrize(
    "every",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.heavy)],
    ids=["one view", "every view"],
)
def test_commands_print_no_control_characters_of_altered_columns(
    database: Path, caplog: pytest.LogCaptureFixture, every: bool
) -> None:
    """Each column is altered by itself, so that none hides another: keys that fit nothing, and rows that cannot be read."""
    columns = columns_of(database)
    names = {table for table, _, _ in columns}
    assert len(columns) > 60 and {"leases", "variants", "submitted_jobs", "job_logs"} <= names
    shutil.copy(database, "whole.db")
    skipped = 0
    for table, column, kind in columns:
        if not altered(database, table, column):
            continue
        of_jobs = table in ("submitted_jobs", "job_logs")
        views = JOB_VIEWS if of_jobs else RECORD_VIEWS
        for command in views if every and kind == "TEXT" else views[2:3]:
            text = said(caplog, *command)
            skipped += "skipped an invalid row" in text
            assert not CONTROL.search(text), (table, column, command, text)
    assert skipped > 5, "a notice names rows that cannot be read"


@pytest.mark.parametrize("command", [RECORD_VIEWS[0], RECORD_VIEWS[2], RECORD_VIEWS[6], *JOB_VIEWS[:2]], ids=" ".join)
def test_pages_of_commands_have_no_control_characters_of_records(
    database: Path, caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed (extra report)")
    said(caplog, *command, "--html", "view.html")
    page = Path("view.html").read_text()
    assert "x1b[2J" in page and not CONTROL.search(page)


@pytest.mark.slow
def test_dashboard_shows_no_control_characters_of_records(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("starlette", reason="Starlette is not installed (extra dashboard)")
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    with open_queue(f"sqlite:///{database}", read_only=True) as store:
        dashboard = make_app(Pages(store), None)
        (job,) = store.submitted()
        workload = next(w.key for w in store.workloads(TARGET.key) if HOSTILE in w.key)
        device = f"/devices/{TARGET.key}"
        paths = ["/", f"/jobs/{job.id}", f"/runs/job-1{HOSTILE}", device, f"{device}/tasks/{workload}"]
        for path in paths:
            answer = ask(dashboard, path)
            assert answer.status == 200 and "x1b[2J" in answer.text, path
            assert not CONTROL.search(answer.text), path
        assert ask(dashboard, f"/jobs/{HOSTILE}").status == 404
    assert not CONTROL.search(caplog.text)
