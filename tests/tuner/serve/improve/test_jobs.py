"""Tuning by a service of the database's queue: the artifact of a submitted profile, a failed job, the end of the server."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tuner.serve.improve.test_child import order as order
from typer.testing import CliRunner

from relax_tune.database.jobs.queue import open_queue
from relax_tune.errors import UserError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.shapes import Histogram, ShapeProfile
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.serve.improve.jobs import tuned_by_service
from relax_tune.tuner.serve.improve.order import ImproveOrder

pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
pytestmark = [pytest.mark.ccompiler, pytest.mark.process, pytest.mark.slow]


class Waiting:
    """`tuned_by_service` in a thread."""

    def __init__(self, order: ImproveOrder, path: Path) -> None:
        self.stop, self.error = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, args=(order, path))
        self._thread.start()
        with open_queue(order.db, create=True) as queue:
            while not (jobs := queue.submitted()):
                time.sleep(0.05)
        self.job = jobs[0]

    def _run(self, order: ImproveOrder, path: Path) -> None:
        try:
            tuned_by_service(order, None, path, self.stop)
        except UserError as error:
            self.error = str(error)

    def end(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def work(order: ImproveOrder) -> None:
    done = CliRunner().invoke(app, ["jobs", "work", "--device", "c", "--db", str(order.db), "--until-empty"])
    assert done.exit_code == 0, done.output


def test_service_tunes_for_the_served_sizes(order: ImproveOrder, tmp_path: Path) -> None:
    waiting = Waiting(order, tmp_path / "built.rta")
    assert "profile" in waiting.job.values("settings") and waiting.job.max_secs == pytest.approx(2)
    work(order)
    assert waiting.end() == ""
    served, built = load_artifact(order.artifact), load_artifact(tmp_path / "built.rta")
    assert built.functions == served.functions and built.programs != served.programs


def test_failed_job_is_an_error_with_the_id(order: ImproveOrder, tmp_path: Path) -> None:
    other = ShapeProfile("another model")
    other.add("main", "b", Histogram.of({8: 3}))
    other.save(tmp_path / "other.json")
    waiting = Waiting(replace(order, profile=str(tmp_path / "other.json")), tmp_path / "built.rta")
    work(order)
    error = waiting.end()
    assert waiting.job.id in error and "failed" in error and not (tmp_path / "built.rta").exists()


def test_end_of_the_server_cancels_the_job(order: ImproveOrder, tmp_path: Path) -> None:
    waiting = Waiting(order, tmp_path / "built.rta")
    waiting.stop.set()
    assert "cancelled" in waiting.end()
    with open_queue(order.db) as queue:
        assert queue.find(waiting.job.id)[0].state == "cancelled"
