"""The protocol of a supervisor and its device process: framed JSON over two pipes, and mapped memory of progress.

Frames are an 8-byte length and UTF-8 text. They use separate file descriptors, since compilers print on stdout and stderr.
`ProgressMap` is memory that both sides map: a write between two timed launches is cheap, and outlives the writer.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType

from relax_tune.errors import MeasureError

try:
    import fcntl
except ImportError:  # no sealed memory here
    fcntl = None  # type: ignore[assignment]

_LENGTH = struct.Struct("<Q")
_STEP = struct.Struct("<QqqqdQ")  # sequence, first request, count, phase, start (monotonic seconds), sequence again

PHASES: tuple[str, ...] = ("idle", "prepare", "compile", "check", "time")


def write_frame(descriptor: int, text: str, within_secs: float | None = None) -> None:
    """Write one frame completely.

    Raises BrokenPipeError when the reader is gone, and TimeoutError when it does not read for `within_secs` (which
    needs a non-blocking descriptor; None waits forever on a blocking one).
    """
    data = text.encode()
    view = memoryview(_LENGTH.pack(len(data)) + data)
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    # A pipe takes at most its free space, so a message may need several writes.
    while view:
        if within_secs is not None and not poll.poll(within_secs * 1000):
            raise TimeoutError(f"expected the device process to read its message within {within_secs} s")
        view = view[os.write(descriptor, view) :]


class FrameReader:
    """A reader of frames from one descriptor, which never waits longer than its time limit.

    Args:
        most_bytes: length of the longest frame.
    """

    def __init__(self, descriptor: int, most_bytes: int = 1 << 34) -> None:
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._data = bytearray()
        self.ended = False

    def next(self, within_secs: float | None) -> str | None:
        """Return the next frame; None when none arrived in time, or when `ended` became true.

        within_secs: None waits forever

        The stream ends when the writer closed or died, perhaps in the middle of a frame. Raises MeasureError when the
        stream cannot be frames.
        """
        while True:
            frame = self._take()
            if frame is not None or self.ended:
                return frame
            if not self._poll.poll(None if within_secs is None else within_secs * 1000):
                return None
            part = os.read(self._descriptor, 1 << 20)
            self.ended = not part
            self._data += part

    def _take(self) -> str | None:
        if len(self._data) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._data)
        if size > self._most_bytes:
            raise MeasureError(
                f"expected a message of at most {self._most_bytes} bytes between supervisor and device process, got a length "
                f"of {size}; another program wrote to their pipe"
            )
        end = _LENGTH.size + size
        if len(self._data) < end:
            return None
        text = self._data[_LENGTH.size : end].decode(errors="replace")
        del self._data[:end]
        return text


def _sized_memory() -> int:
    """Return a descriptor of memory for one step."""
    if fcntl is not None and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _STEP.size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.truncate(_STEP.size)
        return os.dup(file.fileno())


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The current step of the device process, on `count` requests of the batch from index `first` on.

    count: 0 between requests
    started: on `time.monotonic`'s clock, which the processes of one machine share
    """

    sequence: int
    first: int
    count: int
    phase: str
    started: float


class ProgressMap:
    """The mapped progress; one writer (the device process) and one reader (its supervisor).

    Its size is sealed where the system can: a kernel that truncated it would end the supervisor by SIGBUS.

    Args:
        descriptor: the inherited one in the device process; None makes the memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _sized_memory() if descriptor is None else descriptor
        self._map = mmap.mmap(self.descriptor, _STEP.size)
        self._sequence = 0

    def tell(self, first: int, count: int, phase: str) -> None:
        """Record that a step begins (about a microsecond)."""
        self._sequence += 1
        now = time.monotonic()
        _STEP.pack_into(self._map, 0, self._sequence, first, count, PHASES.index(phase), now, self._sequence)

    def read(self) -> StepStatus | None:
        """Return the last step recorded, or None during a write."""
        before, first, count, phase, started, after = _STEP.unpack_from(self._map, 0)
        # A sequence lock: the writer stores the number first and last, so different numbers mean a write that is
        # under way.
        if before != after or not 0 <= phase < len(PHASES):
            return None
        return StepStatus(before, first, count, PHASES[phase], started)

    def clear(self) -> None:
        """Reset to no step; the supervisor calls it while no process is writing."""
        _STEP.pack_into(self._map, 0, 0, 0, 0, 0, time.monotonic(), 0)
        self._sequence = 0

    def close(self) -> None:
        """Unmap the memory."""
        self._map.close()
        os.close(self.descriptor)

    def __enter__(self) -> ProgressMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
