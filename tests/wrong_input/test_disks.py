"""Full disks and folders that cannot be written: one paragraph, nothing half-written, and on with it when there is room.

A full disk is a small tmpfs where the tests may mount one. Elsewhere a limit on the size of files stands for it, which the
system enforces in the same places.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.conftest import BIAS, small_program
from tests.tuner.cli.cli_model import make_bert
from tests.wrong_input.storage_cases import commands, files, made_database, paragraph_of

from relax_tune.database.exchange.jsonl import export_file
from relax_tune.database.records import Measurement
from relax_tune.database.store import open_store
from relax_tune.runtime.artifact import save_artifact

ROOT = Path(__file__).parents[2]
FILL_BUT = 110_000
SIDES = ("-shm", "-wal")  # SQLite leaves its own behind where only a limit makes the disk full
LIMITED = (
    "import resource, signal\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
)


class Disk:
    """A folder on a disk of its own. `before`: Python that a process must run first for the disk to be small to it."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder, self.before = folder, ""
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True
        )
        self.mounted = done.returncode == 0
        if not self.mounted:
            self.before = LIMITED.format(size=kilobytes * 1024 // 2)

    def fill(self, but: int = 0) -> None:
        """Leave room for `but` bytes: on the disk, or, where it is only a limit, in the largest file there is."""
        if not self.mounted:
            largest = max((p.stat().st_size for p in self.folder.iterdir() if p.is_file()), default=0)
            self.before = LIMITED.format(size=largest + but if but else 0)
            return
        left = os.statvfs(self.folder)
        with (self.folder / "fill").open("wb", buffering=0) as file:
            file.write(bytes(max(0, left.f_bavail * left.f_frsize - but)))
            with contextlib.suppress(OSError):
                while not but and file.write(bytes(512)):
                    pass

    def make_room(self) -> None:
        """As much as anybody wants."""
        self.before = ""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    """What a test adds here is unmounted."""
    made: list[Disk] = []
    yield made
    for disk in made:
        disk.close()


def disk_of(disks: list[Disk], folder: Path, kilobytes: int) -> Disk:
    disks.append(Disk(folder, kilobytes))
    return disks[-1]


TUNE = """
import sys
import relax_tune as rt
from relax_tune.errors import DatabaseError, MeasureError
from tests.support.tuner_models import row_scale
try:
    rt.tune(row_scale(), target="c", db=sys.argv[1], effort="quick", trials=int(sys.argv[2]))
except (DatabaseError, MeasureError) as error:
    print(type(error).__name__, error)
"""


def tuned(folder: Path, db: str, trials: int, before: str = "", **variables: str) -> str:
    """What a job of one small task in a process of its own says it failed of; nothing when it ended."""
    done = subprocess.run(
        [sys.executable, "-c", before + TUNE, db, str(trials)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(path: Path) -> dict[str, Measurement]:
    with open_store(str(path), read_only=True) as store:
        assert store.check() == []
        return {m.id: m for target in store.targets() for m in store.query(target.key)}


@pytest.mark.process
@pytest.mark.ccompiler
def test_tune_on_filling_disk_keeps_records_and_resumes(tmp_path: Path, disks: list[Disk]) -> None:
    disk = disk_of(disks, tmp_path / "small", 600)
    path = tmp_path / "small" / "r.db"
    assert tuned(tmp_path, "small/r.db", 1) == ""
    first = records(path)
    disk.fill(but=FILL_BUT)
    said = tuned(tmp_path, "small/r.db", 12, disk.before)
    assert said.startswith("DatabaseError sqlite:///small/r.db: could not"), said
    assert "free some space" in said or "everything committed before is safe" in said
    before = records(path)
    assert before.items() >= first.items() and all(m.status == "ok" for m in before.values())
    disk.make_room()
    assert tuned(tmp_path, "small/r.db", 12) == ""
    after = records(path)
    assert after.items() > before.items(), "nothing lost, nothing measured again"


@pytest.mark.process
@pytest.mark.ccompiler
def test_no_room_to_compile_in_is_no_candidates_failure(tmp_path: Path, disks: list[Disk]) -> None:
    disk = disk_of(disks, tmp_path / "small", 120)
    said = tuned(tmp_path, "r.db", 8, disk.before, TMPDIR=str(disk.folder)) if disk.mounted else "MeasureError TMPDIR"
    assert said.startswith("MeasureError") and "TMPDIR" in said, said
    path = tmp_path / "r.db"
    assert not path.exists() or all(m.status == "ok" for m in records(path).values())
    disk.make_room()
    assert tuned(tmp_path, "r.db", 8, TMPDIR=str(disk.folder)) == "" and records(path)


@pytest.mark.heavy
@pytest.mark.process
@pytest.mark.ccompiler
def test_other_writes_on_full_disk_are_refused(tmp_path: Path, disks: list[Disk]) -> None:
    bert = make_bert(tmp_path / "bert")
    source = made_database(tmp_path / "source.db")
    records = tmp_path / "records.jsonl"
    with open_store(str(source)) as store:
        export_file(store, records)
    save_artifact(tmp_path / "model.rta", small_program("c"), {"bias": BIAS})
    disk = disk_of(disks, tmp_path / "small", 700)
    open_store(str(disk.folder / "empty.db")).close()
    save_artifact(disk.folder / "old.rta", small_program("c"), {"bias": BIAS})
    (disk.folder / "old.jsonl").write_text("old\n")
    (disk.folder / "cache").mkdir()
    disk.fill()
    before = files(disk.folder)
    target = ("--target", "c", "--bound", "b=1:1", "--bound", "n=1:4")
    lines: list[tuple[object, ...]] = [
        ("db", "import", records, "--db", "small/empty.db"),
        ("db", "import", records, "--db", "small/new.db"),
        ("db", "merge", source, "--db", "small/empty.db"),
        ("db", "export", "small/new.jsonl", "--db", source),
        ("db", "export", "small/old.jsonl", "--db", source),
        ("build", bert, *target, "--db", source, "--policy", "generic", "--out", "small/new.rta"),
        ("build", bert, *target, "--db", source, "--policy", "generic", "--overwrite", "--out", "small/old.rta"),
    ]
    for line, (code, _, said) in zip(lines, commands(tmp_path, *lines, before=disk.before)):
        assert "space" in paragraph_of(code, said), line
    after = {name: data for name, data in files(disk.folder).items() if disk.mounted or not name.endswith(SIDES)}
    assert after == before, "nothing half-written, nothing replaced by half"
    code = (
        "from relax_tune.errors import RelaxTuneError\n"
        "from relax_tune.runtime.artifact import load_artifact\n"
        "try: load_artifact('model.rta').open().close()\n"
        "except RelaxTuneError as error: print('said:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", disk.before + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"RELAX_TUNE_CACHE": str(disk.folder / "cache"), "OMP_NUM_THREADS": "1"},
    )
    assert "point RELAX_TUNE_CACHE at" in done.stdout and "refused the source" not in done.stdout, done
    disk.make_room()
    if disk.mounted:
        (disk.folder / "fill").unlink()
    for code_, _, said in commands(tmp_path, *lines):
        assert code_ == 0, said


@pytest.mark.ccompiler
def test_unwritable_folders_are_refused(tmp_path: Path) -> None:
    bert = make_bert(tmp_path / "bert")
    source = made_database(tmp_path / "source.db")
    locked = tmp_path / "locked"
    locked.mkdir()
    (tmp_path / "out.rta").mkdir()
    (tmp_path / "x.jsonl").write_text("{}\n")
    before = files(tmp_path)
    model = ("--target", "c", "--bound", "b=1:1", "--bound", "n=1:4")
    lines: list[tuple[tuple[object, ...], str]] = [
        (("tune", bert, *model, "--db", "locked/r.db", "--out", "m.rta"), "read-only"),
        (("tune", bert, *model, "--db", "r.db", "--out", "locked/m.rta"), "locked cannot"),
        (("tune", bert, *model, "--db", "r.db", "--out", "locked/deep/m.rta"), "locked cannot"),
        (("tune", bert, *model, "--db", "r.db", "--out", "out.rta"), "got a folder"),
        (("tune", bert, *model, "--db", "r.db", "--out", source, "--target", "c"), "is no whole artifact"),
        (("build", bert, *model, "--db", source, "--out", "locked/m.rta"), "locked cannot"),
        (("build", bert, *model, "--db", "no/r.db"), "no file"),
        (("db", "export", "locked/x.jsonl", "--db", source), "Permission denied"),
        (("db", "export", "no/x.jsonl", "--db", source), "No such file"),
        (("db", "export", "out.rta", "--db", source), "Is a directory"),
        (("db", "export", ".", "--db", source), "Is a directory"),
        (("db", "export", "source.db/x", "--db", source), "Not a directory"),
        (("db", "import", "locked", "--db", "locked/r.db"), "read-only"),
        (("db", "import", "x.jsonl"), "Permission denied"),  # this user's own database
    ]
    locked.chmod(0o555)
    try:
        ended = commands(
            tmp_path, *(line for line, _ in lines), unprivileged=True, XDG_DATA_HOME=str(locked), HOME=str(tmp_path)
        )
        ((code, _, said),) = commands(
            tmp_path,
            ("build", bert, *model, "--db", source, "--out", "m.rta"),
            unprivileged=True,
            RELAX_TUNE_CACHE=str(locked / "cache"),
        )
    finally:
        locked.chmod(0o755)
    for (line, says), (ended_code, _, ended_said) in zip(lines, ended):
        assert says in paragraph_of(ended_code, ended_said), line
    assert "point RELAX_TUNE_CACHE at" in paragraph_of(code, said)
    assert files(tmp_path) == before
