"""`relax-tune jobs`: from a submitted model to its artifact, by commands and from Python."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text
from tests.tuner.job.job_processes import JobProcess, small_model, work_done
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.records import Target
from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.printable import CONTROL
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.service.content import ContentStore

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


@pytest.mark.self_test
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
    assert "cancel it first" in answer("retry", id, "--db", "q.db", code=2)
    assert answer("cancel", id[:6], "--db", "q.db") == f"{id}: cancelled\n"
    answer("wait", id, "--db", "q.db", code=130)
    assert "has no artifact" in answer("fetch", id, "--db", "q.db", code=2)
    assert answer("retry", id, "--db", "q.db") == f"{id}: queued\n"
    assert answer("logs", id, "--db", "q.db") == ""
    assert "has no job" in answer("show", "nothing", "--db", "q.db", code=2)


def test_wrong_arguments_are_named(elsewhere: Path) -> None:
    small_model(elsewhere)
    assert "needs --files" in answer(
        "submit", "small.onnx", "--target", "c", "--db", "postgresql://x@127.0.0.1:1/y", "--wait-secs", "1", code=2
    )
    assert "class of device" in answer("submit", "small.onnx", "--db", "none.db", code=2)
    assert not Path("none.db").exists()
    assert "no such file" in answer("submit", "none.onnx", "--db", "q.db", "--target", "c", code=2)
    assert "memory://" in answer("submit", "small.onnx", "--target", "c", "--db", "memory://", code=2)
    assert "priority" in answer(
        "submit", "small.onnx", "--db", "q.db", "--target", "c", "--priority", str(10**9), code=2
    )
    assert "--max-minutes" in answer(
        "submit", "small.onnx", "--db", "q.db", "--target", "c", "--max-minutes", "0", code=2
    )
    assert "--attempts" in answer("submit", "small.onnx", "--db", "q.db", "--target", "c", "--attempts", "0", code=2)
    assert "expected at least one --device" in answer("work", "--db", "q.db", code=2)
    assert "--state expects one of queued" in answer("list", "--db", "q.db", "--state", "lost", code=2)


@pytest.mark.self_test
def test_submit_from_python_keeps_a_module(elsewhere: Path) -> None:
    module = rt.load_model(small_model(elsewhere), {"n": (1, 8)})
    job = rt.submit(module, db=elsewhere / "q.db", target="c", effort="quick", note="from a notebook")
    with open_queue("q.db") as queue:
        (stored,) = queue.submitted()
    assert stored == job and job.values("settings") == {"effort": "quick", "target": "c"}
    with pytest.raises(UserError, match=r"rt.submit takes the settings"):
        rt.submit(module, db=elsewhere / "q.db", scheduler="tcp://127.0.0.1:1")
    with pytest.raises(UserError, match="bounds apply"):
        rt.submit(module, db=elsewhere / "q.db", target="c", bounds={"n": (1, 4)})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of some artifact of target c."""
    folder = tmp_path_factory.mktemp("built")
    built = rt.build(rt.load_model(small_model(folder), {"n": (1, 8)}), target="c", db="memory://", self_test=False)
    return built.save(folder / "small.rta").read_bytes()


def done_job(folder: Path, content: bytes, result: dict[str, object] | None = None, name: str = "small.onnx") -> str:
    """A job that is done as its row says, whose artifact has any content. Returns its id."""
    small_model(folder)
    job = rt.submit(str(folder / "small.onnx"), db=folder / "q.db", target="c")
    (folder / "content").write_bytes(content)
    key = ContentStore(str(folder / "q.db.files")).put_file(folder / "content")
    with open_queue("q.db") as queue, queue._write("alter") as connection:
        values = {"result": json.dumps({"artifact": key, **(result or {})}), "name": name, "id": job.id}
        connection.execute(
            text("UPDATE submitted_jobs SET state = 'done', result = :result, name = :name WHERE id = :id"), values
        )
    return job.id


@pytest.mark.ccompiler
@pytest.mark.parametrize(
    "told", ["ctypes.py", "../x.py", "/tmp/x.py", ".bashrc", "a\x1b]0;t\x07", "..", "", "x/../../y", "\u202e"]
)
def test_fetch_names_the_file_itself(elsewhere: Path, artifact: bytes, told: str) -> None:
    """Whatever name a row gives, the file ends in .rta, lies in the current folder and is an artifact."""
    id = done_job(elsewhere, artifact, {"name": told}, told or " ")
    before = set(elsewhere.iterdir())
    said = answer("fetch", id, "--db", "q.db")
    (path,) = set(elsewhere.iterdir()) - before
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*-c\.rta", path.name) and path.read_bytes() == artifact
    assert not CONTROL.search(said)


@pytest.mark.parametrize("content", [b"import os", b"", b"PK\x03\x04", b"\x7fELF"])
def test_fetch_of_another_file_leaves_none(elsewhere: Path, content: bytes) -> None:
    id = done_job(elsewhere, content, {"name": "ctypes.py"})
    before = set(elsewhere.iterdir())
    assert "is not an artifact" in answer("fetch", id, "--db", "q.db", code=2)
    answer("fetch", id, "--db", "q.db", "--out", "x.rta", code=2)
    assert set(elsewhere.iterdir()) == before


@pytest.mark.ccompiler
def test_fetch_follows_no_link(elsewhere: Path, artifact: bytes) -> None:
    id = done_job(elsewhere, artifact)
    precious = elsewhere / "precious"
    precious.write_text("precious")
    for name in (".x.rta.part", "y.rta", "x.rta.part"):
        (elsewhere / name).symlink_to(precious)
    (elsewhere / "z.rta").symlink_to(elsewhere / "none")
    answer("fetch", id, "--db", "q.db", "--out", "x.rta")
    assert (elsewhere / "x.rta").read_bytes() == artifact
    for name in ("y.rta", "z.rta", "precious"):
        assert "exists; choose another name" in answer("fetch", id, "--db", "q.db", "--out", name, code=2)
    assert precious.read_text() == "precious" and not (elsewhere / "none").exists()
    assert (elsewhere / "z.rta").is_symlink()


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
    assert "exists; choose another name" in answer("fetch", done.id, "--db", "q.db", "--out", "small.rta", code=2)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_work_on_a_unit_of_another_speed_leaves_jobs_and_says_so(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference times on record are those of a faster unit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in the service: a fact of the target
    small_model(elsewhere)
    job = rt.submit("small.onnx", db=elsewhere / "q.db", target="c", trials=2, bounds={"n": (1, 4)})
    with LocalRunner("c") as runner, open_store("q.db") as store:
        device = runner.device_info()
        times = {"compute": 1e-9, "stream": 1e-9}
        store.add_target(Target(device.kind, device.name, device.fingerprint, reference=tuple(times.items())))
    work = JobProcess(elsewhere, "jobs", "work", "--device", "c", "--db", "q.db", "--until-empty")
    try:
        assert work.wait(100) == 4, work.said()
    finally:
        work.kill()
    said = work.said()
    assert "takes no jobs for c" in said and "--renew" in said and said.count(f"job {job.id}: small.onnx") == 1
    with open_queue("q.db") as queue:
        (left,) = queue.submitted()
        assert (left.state, left.runs) == ("queued", 1) and queue.next_secs() == 0.0
