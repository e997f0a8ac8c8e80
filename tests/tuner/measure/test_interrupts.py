"""Where an interruption strikes and where it waits."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.support.tuner_models import QUICK, RecordedRunner, paper_job, row_scale
from tests.tuner.job.job_processes import JobProcess

from relax_tune.database.records import Measurement
from relax_tune.database.store import MemoryStore
from relax_tune.tuner.cli.start import SENTENCE
from relax_tune.tuner.measure import scratch
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.scratch import CLUSTER, JOB, MEASURE, ScratchFolder


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As in a terminal, whoever started these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_waits_for_the_end_of_a_shielded_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with shielded():
            for step in range(3):
                signal.raise_signal(signal.SIGINT)
                steps.append(step)
        steps.append(99)
    assert steps == [0, 1, 2] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_shields_nest_and_the_outermost_ends_the_wait() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), shielded():
        with shielded():
            signal.raise_signal(signal.SIGINT)
            steps.append("inner")
        steps.append("outer")
    assert steps == ["inner", "outer"]


def test_an_error_inside_a_shield_is_not_lost_and_nothing_is_raised_without_a_signal() -> None:
    with pytest.raises(ValueError), shielded():
        raise ValueError
    with shielded():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_shielded_keeps_ignored_signals_and_works_in_threads() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with shielded():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    done = []

    def elsewhere() -> None:
        with shielded():
            done.append(1)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [1]


def test_interrupted_commit_is_whole() -> None:
    class Struck(MemoryStore):
        def add_measurements(self, batch: Iterable[Measurement]) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().add_measurements(batch)

    store = Struck()
    job = paper_job(row_scale, store, QUICK)
    with pytest.raises(KeyboardInterrupt):
        job.tune(RecordedRunner())
    (key,) = {r.variant.kind for r in store.query(job.target.key)}
    assert key == "generic" and store.lease(job.tasks[0].key, job.target.key) is None
    assert [j.state for j in store.jobs()] == ["interrupted"]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_during_imports_is_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    job = JobProcess(tmp_path, "tune", "nothing", "--target", "c", "--db", "sqlite:///t.db")
    try:
        job.wait_until_it_listens()
        job.process.send_signal(number)
        assert job.wait() == 128 + number, job.said()
        assert job.said().splitlines() == [SENTENCE] and not job.orphans()
    finally:
        job.kill()


LOST = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from relax_tune.tuner.cli import app as cli, start

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def command():
    Dying()
    time.sleep(60)

cli.main = command
start.main()
"""


@pytest.mark.process
def test_interruption_in_destructor_is_raised_again() -> None:
    """In a destructor an exception cannot be passed on: Python prints it and goes on."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < 50
    assert done.returncode == 130 and done.stderr.splitlines() == [SENTENCE]


@pytest.mark.process
def test_ignored_signal_does_not_interrupt() -> None:
    """`nohup relax-tune ...`, or one in the background of a script."""
    code = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from relax_tune.tuner.cli import app as cli, start\n"
        "def command():\n    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGHUP)\n    print('done')\n"
        "cli.main = command\nstart.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# -- folders of killed runners ------------------------------------------------------------------------------------------


@pytest.mark.process
def test_scratch_folder_of_killed_owner_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    code = (
        "import time\nfrom relax_tune.tuner.measure.scratch import ScratchFolder\n"
        "made = ScratchFolder()\n(made.path / 'kernel.so').write_text('x')\nprint(made.path, flush=True)\ntime.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        mine = ScratchFolder()
        assert theirs.exists() and mine.path.parent == theirs.parent == tmp_path  # its owner lives
        owner.kill()
    assert theirs.exists()
    (tmp_path / "relax-tune-measure-new").mkdir()  # being made by another at this moment
    (tmp_path / "other").mkdir()
    again = ScratchFolder()
    assert not theirs.exists() and mine.path.exists()
    for folder in (again, mine, mine):
        folder.remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "relax-tune-measure-new"]


LEAVING = """
import os, signal, sys
from relax_tune.tuner.measure.scratch import ScratchFolder
folder = ScratchFolder(sys.argv[1])
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_folders_of_killed_jobs_and_workers_are_removed_by_the_next_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def left(prefix: str) -> Path:
        command = [sys.executable, "-c", LEAVING, prefix]
        return Path(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip())

    for prefix in (MEASURE, CLUSTER, JOB):
        folder = left(prefix)
        assert folder.is_dir()
        with ScratchFolder(JOB) as own:
            assert not folder.exists() and own.path.is_dir()
        assert not own.path.exists()


@pytest.mark.process
def test_closed_cluster_process_leaves_no_folder_of_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
    processes = importlib.import_module("relax_tune.tuner.measure.cluster.processes")
    process = processes.ClusterProcess(["json.tool"], {})
    command = [sys.executable, "-c", LEAVING, MEASURE]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True)
    assert list(tmp_path.glob(f"{MEASURE}*"))
    process.close()
    assert not list(tmp_path.iterdir())


def test_sweep_of_foreign_links_and_devices_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and owner files laid out by somebody else in the shared temporary folder."""
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner").write_text("mine")
    (tmp_path / "relax-tune-measure-a").symlink_to(victim)
    for name, target in (("b", victim / "owner"), ("c", Path("/dev/null"))):
        folder = tmp_path / f"relax-tune-measure-{name}"
        folder.mkdir()
        (folder / "owner").symlink_to(target)
    (tmp_path / "relax-tune-measure-d").mkdir()
    os.mkfifo(tmp_path / "relax-tune-measure-d" / "owner")
    with_user = tmp_path / "relax-tune-measure-e"
    with_user.mkdir()
    if os.geteuid() == 0:
        os.chown(with_user, 65534, 65534)
        os.utime(with_user, (0, 0))
    ScratchFolder().remove()
    assert (victim / "owner").read_text() == "mine"
    assert sorted(p.name[-1] for p in tmp_path.glob("relax-tune-measure-*")) == ["a", "b", "c", "d", "e"]
