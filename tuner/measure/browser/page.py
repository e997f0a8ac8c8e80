"""One connected page: requests from the measuring thread, answers on the connection's thread, and the end of the connection.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.browser.protocol import (
    Answer,
    Refusal,
    message_text,
    read_answer,
    read_message,
    read_ready,
    write_message,
)

# Status codes of a deliberate close (RFC 6455 7.4.1): closed, navigated to another page, hidden.
DEPARTURE_CODES = (1000, 1001, 4001)
# Tolerance for a device's timer that runs faster than ours.
_SLACK, _SLACK_SECS = 1.05, 0.05


class PageGone(Exception):
    """The page's device is gone, with its memory and kernels. Whether a candidate is to blame depends on `departed`.

    Attributes:
        departed: the page was closed, or disconnected for a protocol violation; no request is to blame.
    """

    def __init__(self, message: str, departed: bool) -> None:
        super().__init__(message)
        self.departed = departed


@dataclass(slots=True)
class _Ask:
    number: int
    kind: str
    size: int
    began: float
    answer: Future[Answer]


class Page:
    """A page that has joined.

    Args:
        send: writes a frame; may be called from any thread.
        close: ends the connection with a reason; may be called from any thread.
        changed: called whenever `ready` or `gone` changes.

    Attributes:
        ready: description of the open device; None before it is opened and after it is closed.
        gone: reason why the connection ended; None while it lives.
        numbers: unique ids of kernels and buffers.
        cached: ids of the array pieces that the page caches, by their hashes, least recently used first.
    """

    def __init__(
        self, send: Callable[[str | bytes], None], close: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self._send, self._close, self._changed = send, close, changed
        self._lock = threading.Lock()
        self._ask: _Ask | None = None
        self._number = 0
        self._abandoned = False
        self.numbers = itertools.count(1)
        self.cached: OrderedDict[bytes, int] = OrderedDict()
        self.ready: DeviceInfo | None = None
        self.gone: PageGone | None = None

    # The measuring thread.

    def ask(
        self, kind: str, answer_kind: str, data: bytes | memoryview | None = None, size: int = 0, **fields: Any
    ) -> Answer:
        """Send one request and wait for its answer.

        Args:
            answer_kind, size: expected kind and size of the answer (`read_answer`).

        Raises:
            PageGone: the page or its device is gone, or `abandon` was called.
        """
        with self._lock:
            if self.gone is not None:
                raise self.gone
            if self._abandoned or self.ready is None:
                raise PageGone("its device was closed", True)
            self._number += 1
            # Noted before the request is sent, because the answer may come at once.
            asked = self._ask = _Ask(self._number, answer_kind, size, time.monotonic(), Future())
        self._send(write_message({"kind": kind, "id": asked.number, **fields}, data))
        return asked.answer.result()

    def abandon(self, why: str) -> None:
        """Make the page destroy its device and open another. A waiting `ask` raises PageGone."""
        with self._lock:
            if self.gone is not None or self.ready is None:
                return
            self._abandoned, self.ready = True, None
            self._fail(PageGone("its device was closed", True))
        self._send(write_message({"kind": "abandon", "message": why}))

    def end(self, why: str) -> None:
        """Tell the page that the job does not need it any more, and close the connection."""
        self._send(write_message({"kind": "over", "message": why}))
        self.leave(PageGone(why, True))
        self._close(why)

    # The connection's thread.

    def hear(self, frame: str | bytes) -> None:
        """Process a frame of the page. Raises Refusal for a violation of the protocol."""
        message, data = read_message(frame)
        kind = message["kind"]
        if kind == "ready":
            with self._lock:
                if self.ready is not None:
                    raise Refusal(
                        "expected an answer from the page, got ready a second time; open the job's new address"
                    )
                self.ready, self._abandoned = read_ready(message), False
            self._changed()
        elif kind == "lost":
            self._lose(message_text(message))
        elif kind == "unable":
            raise Refusal(f"the page cannot measure: {message_text(message)}")
        else:
            self._answered(message, data)

    def _answered(self, message: Mapping[str, Any], data: bytes) -> None:
        with self._lock:
            asked = self._ask
            if asked is None:
                if self._abandoned:
                    return  # sent before the page got `abandon`
                raise Refusal("got an answer from the page without a request; open the job's new address")
            answer = read_answer(message, data, asked.number, asked.kind, asked.size)
            # Launches cannot have taken longer than we have waited for their answer: a larger time is an error or a
            # forgery.
            passed = _SLACK * (time.monotonic() - asked.began) + _SLACK_SECS
            if sum(answer.secs) > passed:
                raise Refusal(
                    f"expected times of at most {passed:.3g} s, the time since the request, got {sum(answer.secs):.3g} s; "
                    "open the job's new address"
                )
            self._ask = None
        asked.answer.set_result(answer)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._abandoned:
                return
            self.ready = None
            self._abandoned = True
            self._fail(PageGone(f"lost its device: {reason}", False))
        self._changed()

    def leave(self, why: PageGone) -> None:
        """Record the end of the connection."""
        with self._lock:
            if self.gone is not None:
                return
            self.gone, self.ready = why, None
            self._fail(why)
        self._changed()

    def _fail(self, why: PageGone) -> None:
        asked, self._ask = self._ask, None
        if asked is not None:
            asked.answer.set_exception(why)
