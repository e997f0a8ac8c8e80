"""The `Device` contract over a page: every call is a request to the page. Launches are queued until a result is needed.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError, MemoryLack
from relax_tune.runtime.bound_program import BoundProgram
from relax_tune.runtime.device.base import DeviceInfo, Launch
from relax_tune.runtime.device.memory import check_transfer
from relax_tune.runtime.device.webgpu.device import check_launch, module_text
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.measure.browser.page import Page
from relax_tune.tuner.measure.browser.protocol import CHUNK, Answer
from relax_tune.tuner.measure.device_process.timing import Sample

MOST_QUEUED = 256
"""Launches that are queued before they are sent."""
# Browsers round timestamps to 0.1 ms. In a sample of 10 ms this is an error of 1 %.
_SAMPLE_SECS, _TICK_SECS = 10e-3, 100e-6
_MOST_LAUNCHES = 4096
_FLUSHED_LAUNCHES = 16  # the mean of several rounded times has a smaller rounding error
_LEAST_FILL = 64
# Pieces of arrays from this size on are cached by the page, at most this number of them.
_LEAST_CACHED, _MOST_CACHED = 1 << 16, 64


class PageBuffer:
    """Memory of the page's device. `number` is None after it was freed."""

    __slots__ = ("nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number: int | None = number
        self.nbytes = nbytes

    def live(self) -> int:
        """Return the number of the buffer. Raises MeasureError after it was freed."""
        if self.number is None:
            raise MeasureError("page: expected a live buffer, got one that was freed")
        return self.number


@dataclass(frozen=True, slots=True)
class _Handle:
    number: int
    name: str


class PageDevice:
    """A page as a device, for one thread. Every method raises PageGone after the page or its device is gone.

    Args:
        heard: called after each answer; the time limit of the current step starts again.
    """

    def __init__(self, page: Page, info: DeviceInfo, heard: Callable[[], None]) -> None:
        self.info, self.turn = info, threading.RLock()
        self._page, self._heard = page, heard
        self._limits = dict(info.limits)
        self._numbers = page.numbers
        self._queued: list[dict[str, Any]] = []
        self._gathering = False

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, _Handle]:
        """Compile kernels one after the other; see `Device.compile`."""
        handles = {}
        for kernel in kernels:
            handle = _Handle(next(self._numbers), kernel.name)
            answer = self._ask("compile", "done", kernel=handle.number, name=kernel.name, source=module_text(kernel))
            if answer.kind == "failed":
                raise BuildError(f"the page refused kernel {kernel.name}: {answer.message}")
            handles[kernel.name] = handle
        return handles

    def alloc(self, nbytes: int, lasting: bool = False) -> PageBuffer:
        """Allocate memory; see `Device.alloc`."""
        if nbytes < 0:
            raise MeasureError(f"memory: expected a size of 0 or more bytes, got {nbytes}")
        buffer = PageBuffer(next(self._numbers), nbytes)
        self._done("alloc", self._ask("alloc", "done", buffer=buffer.number, bytes=nbytes))
        return buffer

    def upload(self, buffer: PageBuffer, array: NDArray[Any]) -> None:
        """Copy an array to the page in pieces; an array of equal bytes is sent as one byte. See `Device.upload`."""
        check_transfer("page upload", array.nbytes, buffer.nbytes)
        number = buffer.live()
        if not array.nbytes:
            return
        self.synchronize()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.nbytes >= _LEAST_FILL and data.nbytes % 4 == 0 and bool((data == data[0]).all()):
            filled = self._ask("fill", "done", buffer=number, bytes=data.nbytes, value=int(data[0]))
            self._done("upload", filled)
            return
        for start in range(0, data.nbytes, CHUNK):
            self._write(number, start, data[start : start + CHUNK])

    def _write(self, number: int, start: int, part: NDArray[np.uint8]) -> None:
        """Write a piece of an array. The page caches recent pieces, so that inputs and weights are sent once."""
        if part.nbytes < _LEAST_CACHED:
            self._done("upload", self._ask("write", "done", part.data, buffer=number, offset=start, keep=0))
            return
        cached, key = self._page.cached, hashlib.blake2b(part.data, digest_size=16).digest()
        if key in cached:
            cached.move_to_end(key)
            self._done("upload", self._ask("again", "done", buffer=number, offset=start, piece=cached[key]))
            return
        if len(cached) >= _MOST_CACHED:
            self._done("upload", self._ask("forget", "done", piece=cached.popitem(last=False)[1]))
        name = next(self._numbers)
        self._done("upload", self._ask("write", "done", part.data, buffer=number, offset=start, keep=name))
        cached[key] = name

    def download(self, buffer: PageBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Copy an array from the page, in pieces; see `Device.download`."""
        result = np.empty(shape, dtype)
        check_transfer("page download", result.nbytes, buffer.nbytes)
        number = buffer.live()
        self.synchronize()
        into = result.reshape(-1).view(np.uint8)
        for start in range(0, result.nbytes, CHUNK):
            size = min(CHUNK, result.nbytes - start)
            answer = self._ask("read", "data", size=size, buffer=number, offset=start, bytes=size)
            self._done("download", answer)
            into[start : start + size] = np.frombuffer(answer.data, np.uint8)
        return result

    def copy(self, target: PageBuffer, source: PageBuffer, nbytes: int) -> None:
        """Copy on the device; see `Device.copy`. The bytes up to the end of the target's last word are copied, too."""
        check_transfer("page copy", nbytes, min(target.nbytes, source.nbytes))
        into, begin = target.live(), source.live()
        if nbytes and into != begin:
            self.synchronize()
            self._done("copy", self._ask("copy", "done", target=into, source=begin, bytes=nbytes))

    def free(self, buffer: PageBuffer) -> None:
        """Free memory; see `Device.free`."""
        number, buffer.number = buffer.number, None
        if number is not None:
            # Queued launches may still use the buffer.
            self.synchronize()
            self._done("freeing memory", self._ask("free", "done", buffer=number))

    def bind(
        self,
        kernel: _Handle,
        buffers: Sequence[PageBuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        """Return a closure that queues a launch; see `Device.bind`."""
        check_launch(f"WebGPU kernel {kernel.name}", self._limits, scalars, grid, local)
        launch_message = {
            "kernel": kernel.number,
            "buffers": [buffer.live() for buffer in buffers],
            "scalars": [int(value) for value in scalars],
            "grid": [int(extent) for extent in grid],
        }

        def launch() -> None:
            if 0 not in grid:
                if len(self._queued) >= MOST_QUEUED:
                    self.synchronize()
                self._queued.append(launch_message)

        return launch

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[PageBuffer]) -> Launch | None:
        """Return None: code of this process cannot access the page's memory."""
        return None

    def place(self, buffer: PageBuffer, array: NDArray[Any] | None) -> bool:
        """Return False: the page has separate memory."""
        return False

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None: kernels can access only the adapter's buffers."""

    def native(self, buffers: Sequence[PageBuffer]) -> None:
        """Return None: no library has kernels for a page."""
        for buffer in buffers:
            buffer.live()

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return None: launches are not recorded."""
        return None

    def synchronize(self) -> None:
        """Send the queued launches, and wait for their completion."""
        if self._gathering:
            return
        queued, self._queued = self._queued, []
        if queued:
            self._done("launching", self._ask("run", "done", launches=queued, before=[], repeats=1, timed=False))

    def timed(self, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None) -> float:
        """Return the seconds of `launches` launches of a bound program by the page's timer; 0 below its resolution.

        Args:
            flush: queues launches that run before each, untimed.
        """
        self.synchronize()
        before = [] if flush is None else self._gathered(flush)
        timed_launches = self._gathered(bound.launch)
        if not timed_launches:
            return 0.0
        answer = self._ask("run", "times", size=1, launches=timed_launches, before=before, repeats=launches, timed=True)
        self._done("timing", answer)
        return answer.secs[0]

    def _gathered(self, work: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the launches that a function queues, instead of sending them."""
        self._gathering = True
        try:
            work()
        finally:
            self._gathering = False
        queued, self._queued = self._queued, []
        return queued

    def close(self) -> None:
        """Do nothing: the page's device ends with `Page.abandon`."""

    def _ask(self, kind: str, answer_kind: str, data: Any = None, size: int = 0, **fields: Any) -> Answer:
        answer = self._page.ask(kind, answer_kind, data, size, **fields)
        self._heard()
        return answer

    def _done(self, what: str, answer: Answer) -> None:
        if answer.kind == "failed":
            error = MemoryLack if answer.what == "memory" else MeasureError
            raise error(f"{self.info.name}: {what} failed: {answer.message}")


class PageClock:
    """The page's timer: timestamps around launches on the device, or the page's own clock around their submission."""

    flushed = _FLUSHED_LAUNCHES

    def __init__(self, device: PageDevice) -> None:
        self._page = device

    def secs(self, device: Any, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None) -> Sample:
        """Return the time of one launch; see `Clock.secs`."""
        return Sample(self._page.timed(bound, launches, flush) / launches)

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        """Return a number of launches that takes long compared with the timer's resolution; see `Clock.repeats`.

        Raises:
            MeasureError: the timer measures 0 s for the largest number of launches.
        """
        launches = 1
        while single * launches < _SAMPLE_SECS / 2 and launches < _MOST_LAUNCHES:
            # A measured 0 only says that the launches took less than one tick.
            needed = math.ceil(_SAMPLE_SECS / max(single, _TICK_SECS / launches))
            launches = min(_MOST_LAUNCHES, max(2 * launches, needed))
            single = timed(launches)
        if single <= 0:
            raise MeasureError(
                f"expected a time of {launches} launches from the page's timer, got 0 s; use a larger shape, or another browser"
            )
        return launches, single
