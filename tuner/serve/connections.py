"""Connections of slow clients, and of many: limits that uvicorn does not have.

uvicorn closes a connection that is idle after an answer. It waits without a limit for the head of a request, and for a client that does
not read its answer.

Tests: `tests/tuner/serve/test_serve_faults.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # not on this system
    resource = None  # type: ignore[assignment]


class TimedConnection(AutoHTTPProtocol):  # type: ignore[misc,valid-type,unused-ignore]
    """A connection that is closed when the head of a request, or the reading of an answer, takes too long."""

    head_secs: ClassVar[float] = 10.0
    """Seconds for the head of a request, from the connection or from its first byte."""
    read_secs: ClassVar[float] = 30.0
    """Seconds for which a client may leave an answer unread."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: asyncio.TimerHandle | None = None
        self._read: asyncio.TimerHandle | None = None
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Handle data; a head that is still incomplete has its time from the first byte on."""
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._head is None:
            self._head = self.loop.call_later(self.head_secs, self._close)
        elif not waits and self._head is not None:
            self._head.cancel()
            self._head = None

    def _close(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._read is None:
            self._read = self.loop.call_later(self.read_secs, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        super().resume_writing()
        self._end_read()

    def _end_read(self) -> None:
        if self._read is not None:
            self._read.cancel()
            self._read = None

    def connection_lost(self, error: Exception | None) -> None:
        """End both times."""
        self._end_read()
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(error)


def many_files() -> None:
    """Let this process open as many files, and with them connections, as the system allows it to."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
