"""`relax-tune jobs`: from a submitted model to its artifact, by commands and from Python."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.tuner.job.job_processes import JobProcess, small_model, work_done
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import app

pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DB", "FILES", "SCHEDULER", "EFFORT", "TARGET"):
        monkeypatch.delenv(f"RELAX_TUNE_{name}", raising=False)
    monkeypatch.delenv("RELAX_TUNE_SELF_TEST", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(*arguments: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["jobs", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


def test_submitted_job_is_listed_cancelled_and_retried(elsewhere: Path) -> None:
    small_model(elsewhere)
    (made,) = json.loads(
        answer(
            *("submit", "small.onnx", "--db", "q.db", "--target", "cuda:H100", "--bound", "n=1:8", "--trials", "4"),
            *("--priority", "7", "--note", "for Ann", "--user", "bob", "--max-minutes", "1.5", "--json"),
        )
    )
    id = made["id"]
    (listed,) = json.loads(answer("list", "--db", "q.db", "--user", "bob", "--state", "queued", "--json"))
    assert (listed["label"], listed["priority"], listed["note"], listed["max_secs"]) == ("cuda", 7, "for Ann", 90.0)
    assert listed["settings"] == {"bounds": {"n": [1, 8]}, "target": "cuda:H100", "trials": 4}
    assert json.loads(answer("list", "--db", "q.db", "--user", "ann", "--json")) == []
    assert "cuda:H100" in answer("list", "--db", "q.db") and "for Ann" in answer("show", id[:5], "--db", "q.db")
    assert "queued; cancel it first" in answer("retry", id, "--db", "q.db", code=2)
    assert answer("cancel", id[:6], "--db", "q.db") == f"{id}: cancelled\n"
    answer("wait", id, "--db", "q.db", code=130)
    assert "wanted a job that is done" in answer("fetch", id, "--db", "q.db", code=2)
    assert answer("retry", id, "--db", "q.db") == f"{id}: queued\n"
    assert answer("logs", id, "--db", "q.db") == ""
    assert "has none" in answer("show", "nothing", "--db", "q.db", code=2)


def test_wrong_arguments_are_named(elsewhere: Path) -> None:
    small_model(elsewhere)
    assert "wanted --files" in answer(
        "submit", "small.onnx", "--db", "postgresql://x@127.0.0.1:1/y", "--wait-secs", "1", code=2
    )
    assert "no such file" in answer("submit", "none.onnx", "--db", "q.db", code=2)
    assert "memory://" in answer("submit", "small.onnx", "--db", "memory://", code=2)
    assert "priority" in answer("submit", "small.onnx", "--db", "q.db", "--priority", str(10**9), code=2)
    assert "--max-minutes" in answer("submit", "small.onnx", "--db", "q.db", "--max-minutes", "0", code=2)
    assert "--attempts" in answer("submit", "small.onnx", "--db", "q.db", "--attempts", "0", code=2)
    assert "wanted at least one --device" in answer("work", "--db", "q.db", code=2)
    assert "--state wants one of queued" in answer("list", "--db", "q.db", "--state", "lost", code=2)


def test_submit_from_python_keeps_a_module(elsewhere: Path) -> None:
    module = rt.load_model(small_model(elsewhere), {"n": (1, 8)})
    job = rt.submit(module, db=elsewhere / "q.db", target="c", effort="quick", note="from a notebook")
    with open_queue("q.db") as queue:
        (stored,) = queue.submitted()
    assert stored == job and job.values("settings") == {"effort": "quick", "target": "c"}
    with pytest.raises(UserError, match=r"rt.submit takes the settings"):
        rt.submit(module, db=elsewhere / "q.db", scheduler="tcp://127.0.0.1:1")
    with pytest.raises(UserError, match="bounds belong to the loading"):
        rt.submit(module, db=elsewhere / "q.db", bounds={"n": (1, 4)})


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.heavy
def test_job_of_killed_service_is_done_by_another(elsewhere: Path) -> None:
    small_model(elsewhere)
    answer(
        "submit",
        "small.onnx",
        "--db",
        "q.db",
        "--target",
        "c",
        "--bound",
        "n=1:8",
        "--trials",
        "3",
        "--effort",
        "quick",
    )
    work = ("jobs", "work", "--db", "q.db", "--device", "c", "--until-empty")
    first = JobProcess(elsewhere, *work, log="first")
    with open_queue("q.db") as queue:
        give_up = time.monotonic() + 90
        while not (known := queue.submitted()[0]).values("progress"):
            assert first.process.poll() is None and time.monotonic() < give_up, first.said()
            time.sleep(0.05)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.orphans() == [], "what a killed service has started ends with it"
        second = JobProcess(elsewhere, *work, log="second")
        assert second.wait() == 0 and second.orphans() == []
        (done,) = queue.submitted()
        assert (done.state, done.runs, done.losses, done.exit_code) == ("done", 2, 1, 0) and known.runs == 1
        assert {run for run, _, _ in queue.log(done.id)} >= {2}
    with open_store("q.db") as store:
        assert set(work_done(store).trials.values()) == {1}, "no candidate was measured twice"
    answer("fetch", done.id, "--db", "q.db", "--out", "small.rta")
    x = np.ones((3, 16), np.float32)
    (found,) = rt.load("small.rta", device="c").run({"x": x})
    assert found.shape == (3, 12) and np.allclose(found.sum(-1), 1, atol=1e-5)
    assert "is there already" in answer("fetch", done.id, "--db", "q.db", "--out", "small.rta", code=2)
