"""The queue of a function: requests wait until the device is free; then the policy chooses which of them run together.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from relax_tune.errors import RelaxTuneError
from relax_tune.tuner.serve.functions import CallArguments, ServedFunction
from relax_tune.tuner.serve.metrics import Metrics
from relax_tune.tuner.serve.policy import PlannedBatch, Shape, Waiting, next_batch
from relax_tune.tuner.serve.rows import Arrays
from relax_tune.tuner.serve.tensors import RequestError

T = TypeVar("T")
QUIET_SECS = 0.2
"""Seconds without requests after which the device counts as idle, and further shapes are timed."""


class DeviceTurn:
    """The turn of a device: one call at a time, in a thread that is its own, in the order in which coroutines ask for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="relax-tune-serve")
        self._lock = asyncio.Lock()
        self.used_at = time.monotonic()

    async def run(self, prepare: Callable[[], Callable[[], T] | None]) -> T | None:
        """Run what `prepare` returns in the thread. `prepare` is called when the device is free; it returns None if nothing is to be done.

        When the coroutine is cancelled, the call goes on to its end, and so does the turn.
        """
        async with self._lock:
            call = prepare()
            if call is None:
                return None
            future = asyncio.get_running_loop().run_in_executor(self._thread, call)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await asyncio.wait([future])
                raise

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, and note that the device is in use."""
        self.used_at = time.monotonic()
        try:
            result = await self.run(lambda: function)
        finally:
            self.used_at = time.monotonic()
        return result  # type: ignore[return-value]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has run or waited for a while."""
        return not self._lock.locked() and time.monotonic() - self.used_at > QUIET_SECS

    def close(self) -> None:
        """Wait for the call that runs, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in the queue: `expires` is the time at which its client stops waiting."""

    waiting: Waiting
    call: CallArguments
    expires: float
    future: asyncio.Future[Arrays]


class Batcher:
    """The queue of one function. All of its methods run in the thread of the event loop.

    Args:
        function: The function.
        turn: The turn of its device.
        bound_secs: Time within which requests should be answered (`--p99-ms`).
        metrics: Receives counts and times.
        labels: Name and version of the model, for the metrics.
        choose: Returns the batch to run now; the policy, unless an experiment compares another one.
        observe: Receives the seconds of each call of the function, in the thread of the device.
    """

    def __init__(
        self,
        function: ServedFunction,
        turn: DeviceTurn,
        bound_secs: float,
        metrics: Metrics,
        labels: tuple[str, str],
        choose: Callable[..., PlannedBatch] = next_batch,
        observe: Callable[[float], None] = lambda secs: None,
    ) -> None:
        self.function, self._turn, self._bound_secs = function, turn, bound_secs
        self._metrics, self._labels, self._choose, self._observe = metrics, labels, choose, observe
        self._entries: dict[int, _Entry] = {}
        self._arrived = asyncio.Event()
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def infer(self, call: CallArguments, expires: float = math.inf) -> Arrays:
        """Return the results of a request. A request whose coroutine is cancelled leaves the queue.

        Args:
            call: Checked arguments.
            expires: Time of `time.monotonic` after which it does not start any more.

        Raises:
            RequestError: It expired.
            RelaxTuneError: The call failed.
        """
        self._number += 1
        now = time.monotonic()
        waiting = Waiting(self._number, min(now + self._bound_secs, expires), call.rows, call.length, call.group)
        entry = _Entry(waiting, call, expires, asyncio.get_running_loop().create_future())
        self._entries[waiting.number] = entry
        self._turn.used_at = now
        self._arrived.set()
        try:
            return await entry.future
        finally:
            self._entries.pop(waiting.number, None)

    async def work(self) -> None:
        """Answer requests until cancelled."""
        while True:
            await self._arrived.wait()
            await self.step()

    async def step(self) -> None:
        """Run one batch of the requests that wait when the device becomes free."""
        try:
            await self._turn.run(self._prepare)
        except Exception as error:  # a defect of the policy must not leave requests without an answer
            for entry in list(self._entries.values()):
                if not entry.future.done():
                    entry.future.set_exception(error)
            self._entries.clear()
        self._turn.used_at = time.monotonic()
        if not self._entries:
            self._arrived.clear()

    def _prepare(self) -> Callable[[], None] | None:
        """Take a batch out of the queue; return the function that runs it."""
        now = time.monotonic()
        for entry in [e for e in self._entries.values() if e.expires <= now or e.future.done()]:
            del self._entries[entry.waiting.number]
            if not entry.future.done():
                entry.future.set_exception(RequestError("the request waited for longer than its timeout", 504))
        if not self._entries:
            return None
        waiting = [e.waiting for e in self._entries.values()]
        joined = self.function.joining is not None
        batch = self._choose(waiting, now, self.function.times, self.function.most_rows if joined else 1)
        entries = [self._entries.pop(w.number) for w in batch.members]
        loop = asyncio.get_running_loop()
        return lambda: self._run(entries, batch.shape if joined else None, loop)

    def _run(self, entries: Sequence[_Entry], shape: Shape | None, loop: asyncio.AbstractEventLoop) -> None:
        """Run a batch, in the thread of the device. Requests of a batch that fails run one by one."""
        start = time.perf_counter()
        outcomes: list[Arrays | Exception]
        try:
            outcomes = list(self.function.run([e.call for e in entries], shape))
            self._observe(time.perf_counter() - start)
        except RelaxTuneError as error:
            outcomes = [error] if len(entries) == 1 else [self._single(e.call, shape) for e in entries]
        except Exception as error:  # the requests fail with it, the server goes on
            outcomes = [error] * len(entries)
        secs = time.perf_counter() - start
        loop.call_soon_threadsafe(self._answer, entries, outcomes, shape, secs)

    def _single(self, call: CallArguments, shape: Shape | None) -> Arrays | Exception:
        own = None if shape is None else shape._replace(rows=call.rows, length=call.length)
        try:
            return self.function.run([call], own)[0]
        except RelaxTuneError as error:
            return error

    def _answer(
        self, entries: Sequence[_Entry], outcomes: Sequence[Arrays | Exception], shape: Shape | None, secs: float
    ) -> None:
        rows = sum(e.call.rows for e in entries)
        if shape is not None and not any(isinstance(o, Exception) for o in outcomes):
            self.function.times.add(shape.rows, shape.length, secs)
        self._metrics.batch(self._labels, len(entries), rows, secs)
        for entry, outcome in zip(entries, outcomes, strict=True):
            if entry.future.done():
                continue
            if isinstance(outcome, Exception):
                entry.future.set_exception(outcome)
            else:
                entry.future.set_result(outcome)

    async def measure(self, points: Sequence[tuple[int, int]], budget_secs: float) -> None:
        """Time some shapes, at least one, until the budget is used up. Shapes beyond the bound on latency are left to estimates."""
        start = time.monotonic()
        for rows, length in points:
            if self.function.times.secs(rows, length) > self._bound_secs and self.function.times.has_times:
                self.function.times.skip(rows, length)
                continue
            secs = await self._turn.run(partial(partial, self.function.time, rows, length))
            if secs is not None and math.isfinite(secs):
                self.function.times.add(rows, length, secs)
            else:
                self.function.times.skip(rows, length)
            if time.monotonic() - start > budget_secs:
                return

    async def measure_when_idle(self) -> None:
        """Time the shapes that are not timed yet, one at a time, while nothing waits. Ends when all are timed."""
        while self.function.joining is not None and (missing := self.function.times.missing()):
            await asyncio.sleep(QUIET_SECS / 4)
            if self._turn.is_quiet:
                await self.measure(missing[:1], 0.0)
