"""A lock that keeps two workers of one host off one physical device."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from relax_tune.errors import MeasureError


class UnitLock:
    """A file lock by unit in the host's temporary folder; it ends with its process.

    Workers that do not share that folder, such as those of separate containers, are not seen. A link in the file's place is not
    followed (filelock 3.20.1 and later), since anybody may put one there.

    Raises MeasureError when another worker holds the unit.
    """

    def __init__(self, unit: str, worker: str) -> None:
        path = Path(tempfile.gettempdir()) / f"relax-tune-unit-{re.sub(r'[^A-Za-z0-9.-]', '-', unit)}"
        self._lock = FileLock(path.with_suffix(path.suffix + ".lock"), mode=0o666)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise MeasureError(
                f"wanted the unit {unit} for the worker {worker}, found it lent by another worker of this host (lock "
                f"{path}.lock): two of them would disturb each other's times; end one of them"
            ) from None
        except OSError as error:
            raise MeasureError(
                f"wanted to lock the unit {unit} by the file {path}.lock, found: {error.strerror}; remove it, or make it writable"
            ) from None

    def release(self) -> None:
        """Release the unit. May be called twice."""
        self._lock.release()
