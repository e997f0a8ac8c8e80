"""The lock of a physical device: one worker or job of a host measures on it at a time.

Tests: `tests/tuner/measure/test_unit_lock.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from relax_tune.errors import MeasureError, TryAgainLater
from relax_tune.json_shapes import has_shape
from relax_tune.printable import printable

_POLL_SECS = 0.05
_NOTICE_SECS = 5.0
# Unix seconds that every platform can show: the year 2100.
_LAST_MOMENT = 4.1e9


class UnitBusy(MeasureError, TryAgainLater):
    """Another worker or job of this host holds the unit."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a unit's lock, as it describes itself in a file next to the lock.

    Attributes:
        worker: its name.
        since: Unix seconds.
        lends: it holds the lock as long as it runs, as a worker does, and not for one batch.
    """

    worker: str
    pid: int
    since: float
    lends: bool

    def __str__(self) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(self.since))
        what = "lends it" if self.lends else "measures on it"
        return f"{self.worker:.80} (process {self.pid}), which {what} since {moment}"


class UnitLock:
    """A file lock by unit in the host's temporary folder; it ends with its process.

    Workers that do not share that folder, for example in separate containers, do not exclude each other. A symbolic link at the
    file's path is not followed (filelock 3.20.1 and later), since every user may create one there.

    Args:
        within_secs: how long to wait for jobs, which hold the lock for one batch.
        lends: hold it as long as the process runs.

    Raises:
        UnitBusy: another worker or job holds the unit.
    """

    def __init__(self, unit: str, worker: str, within_secs: float = 0.0, lends: bool = False) -> None:
        path = _path(unit)
        # Jobs of other users take the same lock.
        self._lock = FileLock(path.with_suffix(path.suffix + ".lock"), mode=0o666)
        try:
            self._lock.acquire(timeout=within_secs, poll_interval=_POLL_SECS)
        except Timeout:
            raise UnitBusy(
                f"the unit {unit}, expected for the worker {worker}, is locked by {_name(holder(unit))} (lock {path}.lock): they "
                "would disturb each other's times; end one of them"
            ) from None
        except OSError as error:
            raise MeasureError(
                f"the unit {unit} cannot be locked by the file {path}.lock: {error.strerror}; remove it, or make it writable"
            ) from None
        self._description = _describe(path, Holder(worker, os.getpid(), time.time(), lends))

    def release(self) -> None:
        """Release the unit. May be called twice."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                # Before the lock is free: the next holder writes another description.
                self._description.unlink(missing_ok=True)
        self._lock.release()


def holder(unit: str) -> Holder | None:
    """Return who holds a unit, as the holder says; None if unknown."""
    try:  # any user may put a link or a pipe there
        descriptor = os.open(_description_of(_path(unit)), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            values = json.loads(file.read(1000) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    if not has_shape(values, {"worker": str, "pid": int, "since": float, "lends": bool}):
        return None
    # Any user may write the file, and formatting a later time raises on some systems.
    if not 0 <= values["since"] < _LAST_MOMENT:
        return None
    return Holder(printable(values["worker"]), values["pid"], values["since"], values["lends"])


def _name(known: Holder | None) -> str:
    return "another worker or job of this host" if known is None else str(known)


def _path(unit: str) -> Path:
    return Path(tempfile.gettempdir()) / f"relax-tune-unit-{re.sub(r'[^A-Za-z0-9.-]', '-', unit)}"


def _description_of(path: Path) -> Path:
    return path.with_suffix(path.suffix + ".holder")


def _describe(path: Path, known: Holder) -> Path:
    """Write the description of a holder, if the folder permits; it only explains the wait of others."""
    file = _description_of(path)
    with contextlib.suppress(OSError):
        part = file.with_suffix(f".{os.urandom(8).hex()}.part")
        with part.open("x") as output:
            json.dump(asdict(known), output)
        # Renamed into place, so that others never read half of it.
        part.replace(file)
    return file


@contextmanager
def hold_unit(
    unit: str,
    worker: str,
    within_secs: float,
    notice: Callable[[str], None] = lambda _: None,
    check_cancelled: Callable[[], None] = lambda: None,
    lent_secs: float | None = None,
) -> Iterator[None]:
    """Hold a unit's lock for one batch, so that jobs of one host take turns.

    Args:
        within_secs: how long to wait for other jobs.
        lent_secs: how long to wait for a worker that lends the unit; None for `within_secs`.
        notice: receives a sentence when another process holds the lock for long.
        check_cancelled: called while waiting; an exception ends the wait.

    Raises:
        UnitBusy: the unit is not free in time.
    """
    began, noticed = time.monotonic(), False
    while True:
        try:
            # Tried again and again instead of with a timeout, because the limit depends on the holder, who may change
            # meanwhile.
            lock = UnitLock(unit, worker)
            break
        except UnitBusy:
            waited, known = time.monotonic() - began, holder(unit)
            limit = within_secs if lent_secs is None or known is None or not known.lends else lent_secs
            if waited > limit:
                raise
            if not noticed and waited > _NOTICE_SECS:
                noticed = True
                notice(f"waiting up to {limit:g} s for the unit {unit}, locked by {_name(known)}")
        check_cancelled()
        time.sleep(_POLL_SECS)
    try:
        yield
    finally:
        lock.release()
