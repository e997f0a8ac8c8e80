"""A lock that keeps two workers, or a worker and a job, of one host off one physical device."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from relax_tune.errors import MeasureError, TryAgainLater

_POLL_SECS = 0.05
_TOLD_SECS = 5.0


class UnitBusy(MeasureError, TryAgainLater):
    """The unit is held by another worker or job of this host."""


class UnitLock:
    """A file lock by unit in the host's temporary folder; it ends with its process.

    Workers that do not share that folder, such as those of separate containers, are not seen. A link in the file's place is not
    followed (filelock 3.20.1 and later), since anybody may put one there.

    within_secs: how long to wait for jobs, which hold it for a batch

    Raises UnitBusy when another worker or job holds the unit.
    """

    def __init__(self, unit: str, worker: str, within_secs: float = 0.0) -> None:
        path = Path(tempfile.gettempdir()) / f"relax-tune-unit-{re.sub(r'[^A-Za-z0-9.-]', '-', unit)}"
        self._lock = FileLock(path.with_suffix(path.suffix + ".lock"), mode=0o666)
        try:
            self._lock.acquire(timeout=within_secs, poll_interval=_POLL_SECS)
        except Timeout:
            raise UnitBusy(
                f"wanted the unit {unit} for the worker {worker}, found it held by another worker or job of this host (lock "
                f"{path}.lock): two of them would disturb each other's times; end one of them"
            ) from None
        except OSError as error:
            raise MeasureError(
                f"wanted to lock the unit {unit} by the file {path}.lock, found: {error.strerror}; remove it, or make it writable"
            ) from None

    def release(self) -> None:
        """Release the unit. May be called twice."""
        self._lock.release()


@contextmanager
def turn_on(
    unit: str,
    worker: str,
    within_secs: float,
    notice: Callable[[str], None] = lambda _: None,
    wanted: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold a unit for one batch; jobs of one host take turns so.

    notice: receives a sentence when another holds it for long. wanted: called while waiting; an exception ends the wait

    Raises UnitBusy when it is not free within `within_secs`, as while a worker lends it.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            lock = UnitLock(unit, worker)
            break
        except UnitBusy:
            waited = time.monotonic() - began
            if waited > within_secs:
                raise
            if not told and waited > _TOLD_SECS:
                told = True
                notice(f"waiting for the unit {unit}, which a worker or another job of this host holds")
        wanted()
        time.sleep(_POLL_SECS)
    try:
        yield
    finally:
        lock.release()
