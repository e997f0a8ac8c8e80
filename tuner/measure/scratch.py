"""Temporary folders that are removed after their owner ends, even if it was killed.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from typing import Self

from relax_tune.tuner.measure.interrupts import shielded

try:
    import fcntl
except ImportError:  # no such locks here: folders of killed owners stay until the system cleans up
    fcntl = None  # type: ignore[assignment]

MEASURE, CLUSTER, JOB = "relax-tune-measure-", "relax-tune-cluster-", "relax-tune-job-"
"""Prefixes of the folders of runners, of schedulers and workers, and of submitted jobs."""
_OWNER = "owner"
# A younger folder without a locked owner file may still be under construction by a live process.
_CREATION_SECS = 600.0


class ScratchFolder:
    """A temporary folder of one owner, at `path`.

    The constructor also removes the folders of dead owners. Each owner holds a file lock, which ends with its process.

    Args:
        prefix: start of the name, `MEASURE`, `CLUSTER` or `JOB`.

    Raises:
        OSError: no folder can be created.
    """

    def __init__(self, prefix: str = MEASURE) -> None:
        self._prefix = prefix
        # Swept here, since no later moment is certain to come: the owner may be killed.
        sweep()
        while not self._create():
            pass

    def _create(self) -> bool:
        """Try to create and lock a folder. Returns False if another process removed it before it was locked."""
        with shielded():
            self.path = Path(tempfile.mkdtemp(prefix=self._prefix))
            owner = self.path / _OWNER
            try:
                lock = os.open(owner, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                return False
            # A sweep may have removed the folder between its creation and the lock, which then protects nothing.
            if _locked(lock) and owner.exists():
                self._end = weakref.finalize(self, _remove, self.path, lock)
                return True
            os.close(lock)
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its contents; the interpreter's end does the same. May be called twice."""
        self._end()


def _remove(path: Path, lock: int) -> None:
    for _ in range(20):  # compilers that were just killed may need a moment to let go
        remove_tree(path)
        if not path.exists():
            break
        time.sleep(0.05)
    os.close(lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it, as far as possible. Links are not followed."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # a measured kernel may nest its folders deeper than Python calls functions
        with contextlib.suppress(OSError):
            _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Move all folders below a folder up into it."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        waiting, moved = [name for name in os.listdir(top)], 0
        while waiting:
            name = waiting.pop()
            try:
                opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            except OSError:  # a file or a link
                continue
            try:
                for inner in os.listdir(opened):
                    moved += 1
                    os.rename(inner, f".moved-{moved}", src_dir_fd=opened, dst_dir_fd=top)
                    waiting.append(f".moved-{moved}")
            finally:
                os.close(opened)
    finally:
        os.close(top)


def _locked(descriptor: int) -> bool:
    """Lock an open file. Returns False when another process holds the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep() -> None:
    """Remove the folders of this user's dead owners among the temporary files. Links are not followed."""
    if fcntl is None:
        return
    where = Path(tempfile.gettempdir())
    for folder in (path for prefix in (MEASURE, CLUSTER, JOB) for path in where.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # swept by another at this moment
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            try:
                # O_NONBLOCK, because opening a pipe of that name would wait for its other end.
                descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                if time.time() - status.st_mtime > _CREATION_SECS:
                    remove_tree(folder)
                continue
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _locked(descriptor):
                    remove_tree(folder)
            finally:
                os.close(descriptor)
