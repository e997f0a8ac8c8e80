"""`tune` interrupted at random moments, in real processes: nothing is lost or doubled, and the work adds up.

What is equal: with a strategy that asks the same candidates whatever the times (random) and a budget of one batch a task, the
set of (workload, variant, point) on record is that of a run nobody interrupted. With one that listens to times (evolution) the
number of candidates by task is. In both, no candidate is spent a trial on twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.effort import some
from tests.tuner.job.job_processes import Done, JobProcess, scratch, small_model, work_done

from relax_tune.database.store import open_store
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.start import SENTENCE
from relax_tune.tuner.job.job_log import state_of

pytest.importorskip("onnx", reason="onnx is not installed (extra onnx)")
pytestmark = pytest.mark.ccompiler

HOW = ("terminal", "twice", "interrupt", "terminate", "kill", "kill-child")
STOPS = {"terminal": 130, "twice": 130, "interrupt": 130, "terminate": 143, "kill": -9}


@dataclass
class Folder:
    """One database, tuned by one interrupted command after another. seen: ids of the records there were after the last
    one; left: files nobody asked for that it left."""

    path: Path
    strategy: str = "random"
    seen: frozenset[str] = field(default_factory=frozenset)
    left: set[str] = field(default_factory=set)
    rounds: int = 0

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path / 't.db'}"

    def start(self) -> JobProcess:
        self.rounds += 1
        fixed = ("--target", "c", "--effort", "quick", "--trials", "4", "--bound", "n=1:16", "--db", "sqlite:///t.db")
        command = ("tune", "small.onnx", *fixed, "--strategy", self.strategy, "--out", "small.rta")
        return JobProcess(self.path, *command, log=f"log{self.rounds}")

    def done(self) -> Done | None:
        """What is on record; None before there is a database."""
        if not (self.path / "t.db").exists():
            return None
        with open_store(self.url) as store:
            return work_done(store) if store.targets() else None

    def states(self) -> list[str]:
        with open_store(self.url) as store:
            return [state_of(job) for job in store.jobs()]

    def leftovers(self) -> list[str]:
        """Files nobody asked for."""
        wanted = {"t.db", "t.db-wal", "t.db-shm", "small.onnx", "small.rta", "cache", "tmp"}
        here = {p.name for p in self.path.iterdir() if not p.name.startswith("log")} - wanted
        there = [p.name for p in scratch(self.path).iterdir()]
        # the file of a lock stays: who removes it, another may hold
        return sorted(here) + sorted(n for n in there if not (n.startswith("relax-tune-unit-") and n.endswith(".lock")))


def strike(job: JobProcess, how: str) -> bool:
    """Interrupt a command; False when it had ended by itself before."""
    if job.process.poll() is not None:
        return False
    if how == "kill-child":
        for pid in job.children()[:1]:
            os.kill(pid, signal.SIGKILL)
        return True
    try:
        if how in ("terminal", "twice"):
            os.killpg(job.process.pid, signal.SIGINT)
            if how == "twice":  # an impatient second press, while the first one's clean-up runs
                time.sleep(0.05)
                os.killpg(job.process.pid, signal.SIGINT)
        else:
            job.process.send_signal(
                {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]
            )
    except ProcessLookupError:
        return False
    return True


def interrupted_round(folder: Folder, how: str, after_secs: float) -> int:
    """One command, struck once; checks all that must hold whenever that was. Returns its exit code."""
    job = folder.start()
    try:
        job.wait_until_it_listens()
        give_up = time.monotonic() + after_secs
        while job.process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.005)
        struck = strike(job, how)
        finished = "wrote " in job.output.read_text(errors="replace")
        code = job.wait()
        what = f"{how} after {after_secs:.3f} s: exit code {code}\n{job.said()}"
        if struck and how in STOPS and not finished:
            assert code == STOPS[how], what
        elif how == "kill-child" and code == 2:  # struck while the device was being opened: there is none to measure on
            assert len(job.said().splitlines()) == 1 and "the process died of signal SIGKILL" in job.said(), what
        else:
            assert code in (0, STOPS.get(how)), what
        assert "Traceback" not in job.said() and "Exception ignored" not in job.said(), what
        if code in (130, 143):
            assert job.said().splitlines() == [SENTENCE], what
        elif code != 2:
            assert not job.said(), what
        assert not job.orphans(), what
        left = set(folder.leftovers())
        # who is killed leaves what the next run removes, if that gets so far
        assert how == "kill" or left <= folder.left, f"{what}{left}"
        folder.left = left
        done = folder.done()
        if done is not None:
            assert folder.seen <= done.ids, what
            assert max(done.trials.values(), default=0) <= 1, what
            announced = job.output.read_text(errors="replace")
            for line in announced.splitlines():
                if line.startswith("[") and " trials, " in line:
                    assert done.trials, what
            folder.seen = done.ids
            assert "running" not in folder.states(), what
        return code
    finally:
        job.kill()


def finish(folder: Folder, whole: Done) -> None:
    """The last run, which nobody interrupts, and the comparison with a database nobody interrupted."""
    job = folder.start()
    try:
        assert job.wait() == 0, job.said()
        assert not job.orphans()
    finally:
        job.kill()
    done = folder.done()
    assert done is not None and folder.seen <= done.ids
    assert folder.leftovers() == []
    assert set(done.trials.values()) == {1}
    assert done.tuned == whole.tuned
    if folder.strategy == "random":
        assert done.points == whole.points
    load_artifact(folder.path / "small.rta")
    assert set(folder.states()) <= {"done", "interrupted"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, float]:
    """What an uninterrupted run leaves, and how long it listened."""
    folder = Folder(tmp_path_factory.mktemp("whole"))
    small_model(folder.path)
    job = folder.start()
    try:
        job.wait_until_it_listens()
        began = time.monotonic()
        assert job.wait() == 0, job.said()
        took = time.monotonic() - began
    finally:
        job.kill()
    done = folder.done()
    assert done is not None and done.points and set(done.trials.values()) == {1}
    return done, took


@pytest.mark.heavy
@pytest.mark.parametrize("strategy", ["evolution", "random"])
def test_interruptions_at_random_moments_change_nothing_but_the_number_of_runs(
    strategy: str, tmp_path: Path, whole: tuple[Done, float]
) -> None:
    generator = random.Random(f"interruptions {strategy}")
    folder = Folder(tmp_path, strategy)
    small_model(tmp_path)
    ways = {"random": ("terminal", "kill", "kill-child"), "evolution": ("twice", "kill")}[strategy]
    for how in some(ways, 2):
        interrupted_round(folder, how, generator.uniform(0, whole[1]))
    finish(folder, whole[0])


SAVING = """
import os, sys, time
from relax_tune.runtime.artifact import save_artifact
from relax_tune.runtime.program.program import Program
from tests.tuner.measure.measure_programs import program

def wait(descriptor):
    print("written", flush=True)
    time.sleep(600)

os.fsync = wait
import numpy as np
save_artifact(sys.argv[1], program("good", "c"), {"w": np.ones(4, np.float32)})
"""


@pytest.mark.process
def test_killed_save_leaves_no_file(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except (AttributeError, OSError) as error:
        pytest.skip(f"files without a name are not possible here: {error}")
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SAVING, str(tmp_path / "m.rta")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(root)}) as saving:
        assert saving.stdout is not None and saving.stdout.readline() == b"written\n"
        saving.kill()
    assert list(tmp_path.iterdir()) == []
