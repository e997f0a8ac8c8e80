"""`MeasuringProcess` over a page: a thread that runs batches on the page, in place of a child process.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.tuner.measure.browser.device import PageClock, PageDevice
from relax_tune.tuner.measure.browser.page import Page, PageGone
from relax_tune.tuner.measure.codec import decode_batch, encode_results
from relax_tune.tuner.measure.device_process.batch import BatchMeasurement, DeviceLostError
from relax_tune.tuner.measure.device_process.child import probe
from relax_tune.tuner.measure.messages import MeasureResult
from relax_tune.tuner.measure.protocol import StepStatus


class _Steps:
    """The current step of a batch. Its time counts from the page's last answer, so that slow transfers do not count as a hang.

    The thread that measures replaces `status`; other threads read it.
    """

    def __init__(self) -> None:
        self.status = StepStatus(0, 0, 0, "idle", time.monotonic())

    def tell(self, first: int, count: int, phase: str) -> None:
        """Record that a step begins."""
        self.status = StepStatus(self.status.sequence + 1, first, count, phase, time.monotonic())

    def heard(self) -> None:
        """Record that the page has answered."""
        self.tell(self.status.first, self.status.count, self.status.phase)


class PageProcess:
    """The measuring of batches on one device of a page; see `process_transport.MeasuringProcess`."""

    stop_phrase = "the page's device was closed"
    shares_steps = False

    def __init__(self, page: Page, info: DeviceInfo) -> None:
        self.info, self._page = info, page
        self._steps = _Steps()
        self._inbox: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = False
        self._end: PageGone | None = None
        self._thread = threading.Thread(target=self._serve, name="measure-page", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if no more messages will come."""
        return self._ended

    @property
    def departed(self) -> bool:
        """True if the page was closed, or disconnected for a protocol violation."""
        return self._end is not None and self._end.departed

    def send(self, message: Mapping[str, Any], within_secs: float) -> None:
        """Take a batch; see `MeasuringProcess.send`."""
        self._steps.tell(0, 0, "idle")
        self._inbox.put(message)

    def receive(self, within_secs: float) -> dict[str, Any] | None:
        """Return the next message; see `MeasuringProcess.receive`."""
        if self._ended:
            return None
        try:
            message = self._outbox.get(timeout=within_secs)
        except queue.Empty:
            return None
        self._ended = message is None
        return message

    def step(self) -> StepStatus | None:
        """Return the step that began last."""
        return self._steps.status

    def death(self) -> str:
        """Describe how the process ended, as a predicate of `the device process`."""
        return f"ended, since the page {self._end}" if self._end is not None else "ended"

    def tail(self) -> str:
        """Return an empty text: a page has no output."""
        return ""

    def kill(self) -> None:
        """Make the page destroy its device, which stops its kernels."""
        self._page.abandon("The job has closed this device: a kernel took longer than its deadline, or failed.")
        self._inbox.put(None)

    def close(self) -> None:
        """Kill, and wait for the thread."""
        self.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread.

    def _serve(self) -> None:
        try:
            device = PageDevice(self._page, self.info, self._steps.heard)
            plain = cast(Device, device)
            measurement = BatchMeasurement(
                plain, {}, self._steps, self._answer, lambda: probe(plain), limited=False, clock=PageClock(device)
            )
            while (message := self._inbox.get()) is not None:
                requests = decode_batch(message["batch"], Path(message["arrays"]))
                measurement.run(requests, isolated=frozenset(message["isolated"]))
                self._steps.tell(0, 0, "idle")
                self._outbox.put({"kind": "done"})
        except PageGone as gone:
            self._end = gone
        except DeviceLostError:
            self._outbox.put({"kind": "lost"})
        except (MeasureError, OSError) as error:
            self._outbox.put({"kind": "unable", "message": str(error)})
        finally:
            self._outbox.put(None)

    def _answer(self, *results: MeasureResult) -> None:
        self._outbox.put({"kind": "results", "results": encode_results(results)})
