"""The `Device` contract over a page: every call is asked of it and awaited. Launches are held back until something waits for them."""

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

HELD = 256
"""Launches that are held back before they are sent."""
# Browsers round timestamps to tenths of a millisecond: a sample lasts as many of them as make that one part in a hundred.
_SAMPLE_SECS, _TICK_SECS = 10e-3, 100e-6
_MOST_LAUNCHES = 4096
_FLUSHED_LAUNCHES = 16  # a mean of coarse times is less coarse
_LEAST_FILL = 64
_LEAST_KEPT, _MOST_KEPT = 1 << 16, 64


class PageBuffer:
    """Memory of the page's device; freed once `number` is None."""

    __slots__ = ("nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number: int | None = number
        self.nbytes = nbytes

    def live(self) -> int:
        """Return its number. Raises MeasureError once it is freed."""
        if self.number is None:
            raise MeasureError("page: wanted a live buffer, found one that was freed")
        return self.number


@dataclass(frozen=True, slots=True)
class _Handle:
    number: int
    name: str


class PageDevice:
    """A page as a device, for one thread. Every method raises PageGone once the page or its device is gone.

    heard: called after each answer, from which a deadline counts anew
    """

    def __init__(self, page: Page, info: DeviceInfo, heard: Callable[[], None]) -> None:
        self.info, self.turn = info, threading.RLock()
        self._page, self._heard = page, heard
        self._limits = dict(info.limits)
        self._numbers = page.numbers
        self._held: list[dict[str, Any]] = []
        self._gathering = False

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, _Handle]:
        """Compile kernels, one after the other; see `Device.compile`."""
        found = {}
        for kernel in kernels:
            handle = _Handle(next(self._numbers), kernel.name)
            answer = self._ask("compile", "done", kernel=handle.number, name=kernel.name, source=module_text(kernel))
            if answer.kind == "failed":
                raise BuildError(f"the page refused kernel {kernel.name}: {answer.message}")
            found[kernel.name] = handle
        return found

    def alloc(self, nbytes: int, lasting: bool = False) -> PageBuffer:
        """Allocate memory; see `Device.alloc`."""
        if nbytes < 0:
            raise MeasureError(f"memory: wanted a size of 0 or more bytes, found {nbytes}")
        made = PageBuffer(next(self._numbers), nbytes)
        self._done("alloc", self._ask("alloc", "done", buffer=made.number, bytes=nbytes))
        return made

    def upload(self, buffer: PageBuffer, array: NDArray[Any]) -> None:
        """Copy an array to the page, in pieces; one of equal bytes travels as that byte. See `Device.upload`."""
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
        """Write a piece of an array. The page keeps those of the last arrays, so that they travel once."""
        if part.nbytes < _LEAST_KEPT:
            self._done("upload", self._ask("write", "done", part.data, buffer=number, offset=start, keep=0))
            return
        kept, key = self._page.kept, hashlib.blake2b(part.data, digest_size=16).digest()
        if key in kept:
            kept.move_to_end(key)
            self._done("upload", self._ask("again", "done", buffer=number, offset=start, kept=kept[key]))
            return
        if len(kept) >= _MOST_KEPT:
            self._done("upload", self._ask("forget", "done", kept=kept.popitem(last=False)[1]))
        name = next(self._numbers)
        self._done("upload", self._ask("write", "done", part.data, buffer=number, offset=start, keep=name))
        kept[key] = name

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
        """Copy on the device; see `Device.copy`. The rest of the target's last word is copied, too."""
        check_transfer("page copy", nbytes, min(target.nbytes, source.nbytes))
        into, begin = target.live(), source.live()
        if nbytes and into != begin:
            self.synchronize()
            self._done("copy", self._ask("copy", "done", target=into, source=begin, bytes=nbytes))

    def free(self, buffer: PageBuffer) -> None:
        """Free memory; see `Device.free`."""
        number, buffer.number = buffer.number, None
        if number is not None:
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
        """Return a closure that holds a launch back; see `Device.bind`."""
        check_launch(f"WebGPU kernel {kernel.name}", self._limits, scalars, grid, local)
        asked = {
            "kernel": kernel.number,
            "buffers": [buffer.live() for buffer in buffers],
            "scalars": [int(value) for value in scalars],
            "grid": [int(extent) for extent in grid],
        }

        def launch() -> None:
            if 0 not in grid:
                if len(self._held) >= HELD:
                    self.synchronize()
                self._held.append(asked)

        return launch

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[PageBuffer]) -> Launch | None:
        """Return None: no code of this process reaches the page's memory."""
        return None

    def place(self, buffer: PageBuffer, array: NDArray[Any] | None) -> bool:
        """Return False: the page has memory of its own."""
        return False

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None: kernels reach only the adapter's buffers."""

    def native(self, buffers: Sequence[PageBuffer]) -> None:
        """Return None: no library has kernels for a page."""
        for buffer in buffers:
            buffer.live()

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return None: launches travel as they are."""
        return None

    def synchronize(self) -> None:
        """Send what is held back, and wait for it."""
        if self._gathering:
            return
        held, self._held = self._held, []
        if held:
            self._done("launching", self._ask("run", "done", launches=held, before=[], repeats=1, timed=False))

    def timed(self, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None) -> float:
        """Return the seconds of `launches` launches of a bound program by the page's timer, 0 where it is too coarse.

        flush: launches that come before each, untimed
        """
        self.synchronize()
        before = [] if flush is None else self._gathered(flush)
        held = self._gathered(bound.launch)
        if not held:
            return 0.0
        answer = self._ask("run", "times", size=1, launches=held, before=before, repeats=launches, timed=True)
        self._done("timing", answer)
        return answer.secs[0]

    def _gathered(self, work: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the launches that something makes, instead of sending them."""
        self._gathering = True
        try:
            work()
        finally:
            self._gathering = False
        held, self._held = self._held, []
        return held

    def close(self) -> None:
        """Do nothing: the page's device ends with `Page.abandon`."""

    def _ask(self, kind: str, wanted: str, data: Any = None, size: int = 0, **fields: Any) -> Answer:
        answer = self._page.ask(kind, wanted, data, size, **fields)
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

    def secs(self, device: Any, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None) -> float:
        """Return the seconds per launch; see `Clock.secs`."""
        return self._page.timed(bound, launches, flush) / launches

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        """Return a number of launches that outweighs the timer's coarse steps; see `Clock.repeats`.

        Raises MeasureError where the timer sees nothing of them.
        """
        launches = 1
        while single * launches < _SAMPLE_SECS / 2 and launches < _MOST_LAUNCHES:
            wanted = math.ceil(_SAMPLE_SECS / max(single, _TICK_SECS / launches))
            launches = min(_MOST_LAUNCHES, max(2 * launches, wanted))
            single = timed(launches)
        if single <= 0:
            raise MeasureError(
                f"wanted a time of {launches} launches from the page's timer, found 0 s; use a larger shape, or another browser"
            )
        return launches, single
