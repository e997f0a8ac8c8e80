"""One connected page: asks of one thread, answers of the connection's, and its end."""

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
    read_answer,
    read_message,
    read_ready,
    words_of,
    write_message,
)

# A page that closes of its own accord says so by one of these codes (RFC 6455 7.4.1): closed, gone to another page, hidden.
LEFT_CODES = (1000, 1001, 4001)
# A device's timer may run this much faster than ours.
_SLACK, _SLACK_SECS = 1.05, 0.05


class PageGone(Exception):
    """The page's device is no more, so nothing of it can be used. No error of ours: no candidate is to blame for it by itself.

    left: the page was closed, or cut off for what it said, and no request is to blame
    """

    def __init__(self, message: str, left: bool) -> None:
        super().__init__(message)
        self.left = left


@dataclass(slots=True)
class _Ask:
    number: int
    kind: str
    size: int
    began: float
    answer: Future[Answer]


class Page:
    """A page that has joined. `ready` is the device that it has open, None before and after.

    send: writes a frame; close: ends the connection with a sentence. Both may be called from any thread
    changed: called whenever `ready` or `gone` changes
    numbers: names of kernels and memory, never given twice
    kept: numbers of the pieces of arrays that the page keeps in its own memory, by their hashes, the longest unused first
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
        self.kept: OrderedDict[bytes, int] = OrderedDict()
        self.ready: DeviceInfo | None = None
        self.gone: PageGone | None = None

    # The measuring thread.

    def ask(
        self, kind: str, wanted: str, data: bytes | memoryview | None = None, size: int = 0, **fields: Any
    ) -> Answer:
        """Ask one thing, and wait for its answer for as long as the device is not abandoned.

        wanted, size: kind and size of the answer (`read_answer`)

        Raises PageGone.
        """
        with self._lock:
            if self.gone is not None:
                raise self.gone
            if self._abandoned or self.ready is None:
                raise PageGone("its device was closed", True)
            self._number += 1
            asked = self._ask = _Ask(self._number, wanted, size, time.monotonic(), Future())
        self._send(write_message({"kind": kind, "id": asked.number, **fields}, data))
        return asked.answer.result()

    def abandon(self, why: str) -> None:
        """Let the page destroy its device and open another. Whoever waits for an answer gets PageGone."""
        with self._lock:
            if self.gone is not None or self.ready is None:
                return
            self._abandoned, self.ready = True, None
            self._fail(PageGone("its device was closed", True))
        self._send(write_message({"kind": "abandon", "message": why}))

    def end(self, why: str) -> None:
        """Tell the page that it is not needed any more, and part."""
        self._send(write_message({"kind": "over", "message": why}))
        self.leave(PageGone(why, True))
        self._close(why)

    # The connection's thread.

    def hear(self, frame: str | bytes) -> None:
        """Take a frame of the page. Raises Refusal for what the page may not say."""
        message, data = read_message(frame)
        kind = message["kind"]
        if kind == "ready":
            with self._lock:
                if self.ready is not None:
                    raise Refusal(
                        "wanted an answer from the page, found ready a second time; open the job's new address"
                    )
                self.ready, self._abandoned = read_ready(message), False
            self._changed()
        elif kind == "lost":
            self._lose(words_of(message))
        elif kind == "unable":
            raise Refusal(f"the page cannot measure: {words_of(message)}")
        else:
            self._answered(message, data)

    def _answered(self, message: Mapping[str, Any], data: bytes) -> None:
        with self._lock:
            asked = self._ask
            if asked is None:
                if self._abandoned:
                    return  # an answer that was on its way
                raise Refusal("wanted nothing from the page, found an answer; open the job's new address")
            answer = read_answer(message, data, asked.number, asked.kind, asked.size)
            passed = _SLACK * (time.monotonic() - asked.began) + _SLACK_SECS
            if sum(answer.secs) > passed:
                raise Refusal(
                    f"wanted times within the {passed:.3g} s that passed here, found {sum(answer.secs):.3g} s; open the job's new address"
                )
            self._ask = None
        asked.answer.set_result(answer)

    def _lose(self, words: str) -> None:
        with self._lock:
            if self._abandoned:
                return
            self.ready = None
            self._abandoned = True
            self._fail(PageGone(f"lost its device: {words}", False))
        self._changed()

    def leave(self, why: PageGone) -> None:
        """Record that the connection is no more."""
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
