"""The implementation of `base.Runner`: one thread sends groups of requests over a transport, and resolves the futures.

There are three transports: a device process of this machine (`local`), a page in a browser (`browser.runner`), and the workers of a
Dask scheduler (`cluster.runner`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.ledger import Batch, Blame, Group, Ledger, RetryPolicy
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, distinct_requests
from relax_tune.tuner.measure.reference import Reference, disagreement, measure_reference, measure_until_agreed


class Ended(NamedTuple):
    """The end of an attempt at a group, whose results the transport has stored in the batch.

    Attributes:
        reason: None if each request has a result; a `Blame` if the rest may be sent again; an error that the batch fails with.
    """

    group: Group
    reason: Blame | BaseException | None = None


class Transport(Protocol):
    """The way of requests to one kind of device, and of results back.

    The dispatcher thread of the runner calls `open`, `poll`, `send` and `end_batch`; any thread may call the other methods. When
    `poll` or `send` raises, nothing can be measured at present: all pending batches fail with the error, and the transport has
    dropped their groups.

    Attributes:
        name: the device in messages.
        policy: how often requests are sent again.
    """

    name: str
    policy: RetryPolicy

    def open(self) -> DeviceInfo:
        """Open the device; see `Runner.device_info`."""
        ...

    def slots(self) -> int:
        """See `Runner.slots`."""
        ...

    def poll(self) -> Sequence[Ended]:
        """Return the attempts that have ended. Waits for one, for `wake`, or for about a second if one is under way."""
        ...

    def send(self, ledger: Ledger) -> None:
        """Take groups from the ledger and send them to all free units."""
        ...

    def end_batch(self, batch: Batch) -> None:
        """Complete the results of a batch whose future is about to be resolved, and release the unit."""
        ...

    def wake(self) -> None:
        """End a wait of `poll`: a batch was submitted."""
        ...

    def stop(self) -> None:
        """End running attempts: the runner is closed. May be called twice."""
        ...

    def close(self) -> None:
        """Release everything, after the dispatcher has ended. May be called twice."""
        ...


class SupervisedRunner:
    """The `Runner` over a transport, which it owns.

    A `ledger.Ledger` decides which requests of an attempt that ended early are sent again, and which have failed.

    Raises:
        MeasureError: the transport cannot open the device.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._ledger = Ledger(transport.policy)
        self._pending: list[Batch] = []
        self._reference: Reference = {}
        opened: Future[DeviceInfo] = Future()
        # A child process asks to die with the thread that started it, so one thread starts every child and outlives them.
        self._thread = threading.Thread(
            target=self._dispatch, args=(opened,), name=f"measure-{transport.name}", daemon=True
        )
        try:
            self._thread.start()
            self._info = opened.result()
        except BaseException:
            self.close()
            raise

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """Submit a batch; see `Runner.submit`. Raises MeasureError when the runner is closed."""
        job = Batch(distinct_requests(batch))
        job.finish()  # resolves an empty batch
        with self._lock:
            # Checked under the lock that `close` takes: a batch behind its None would never be answered.
            if self._closed:
                raise MeasureError(f"the runner on {self.transport.name!r} is closed; open a new one")
            if job.requests:
                self._inbox.put(job)
        # The dispatcher itself, in a callback of a future, collects new batches before it polls again.
        if threading.current_thread() is not self._thread:
            self.transport.wake()
        return job.future

    def device_info(self) -> DeviceInfo:
        """Describe the measured device; see `Runner.device_info`."""
        return self._info

    def slots(self) -> int:
        """Return how many batches it pays to submit at a time; see `Runner.slots`."""
        return self.transport.slots()

    def calibrate(self, reference: Reference) -> Reference:
        """Compare the one unit of this runner with reference times; see `Runner.calibrate`."""
        if not reference:
            self._reference = self._reference or measure_reference(self)
            return self._reference
        if not self._reference or disagreement(reference, self._reference):
            measure_until_agreed(self, reference)
            self._reference = reference
        return reference

    def close(self) -> None:
        """Close the runner; see `Runner.close`."""
        with shielded():
            with self._lock:
                self._closed = True
            self._inbox.put(None)
            # Before the join, because the dispatcher may be waiting for a measurement.
            self.transport.stop()
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The methods below run on the dispatcher thread.

    def _dispatch(self, opened: Future[DeviceInfo]) -> None:
        try:
            opened.set_result(self.transport.open())
        except BaseException as error:
            opened.set_exception(error)
            return
        while self._collect():
            try:
                self.transport.send(self._ledger)
                for group, reason in self.transport.poll():
                    self._settle(group, reason)
            except BaseException as error:  # the callers get it; this thread must survive for the next batch
                self._fail_pending(error)
        self._fail_pending(MeasureError(f"the runner on {self.transport.name!r} was closed while it measured"))

    def _collect(self) -> bool:
        """Take the submitted batches; wait for one if none is pending. Returns False when the runner is closed."""
        self._pending = [batch for batch in self._pending if not batch.future.done()]
        while True:
            try:
                # While batches are pending this only looks into the inbox; it is `poll` that waits then.
                batch = self._inbox.get(block=not self._pending)
            except queue.Empty:
                return True
            if batch is None:
                return False
            self._pending.append(batch)
            self._ledger.add(batch)

    def _settle(self, group: Group, reason: Blame | BaseException | None) -> None:
        """Resolve the batch of an ended attempt, or put what has to be sent again into the ledger."""
        batch = group.batch
        if isinstance(reason, Blame):
            self._ledger.end_early(group, reason)
            reason = None
        elif reason is None and (missing := [request.id for request in batch.missing(group.requests)]):
            reason = MeasureError(
                f"expected a result for each request from {self.transport.name!r}, got none for {missing}"
            )
        if reason is not None or not batch.missing(batch.requests):
            self._resolve(batch, reason)

    def _resolve(self, batch: Batch, error: BaseException | None) -> None:
        self.transport.end_batch(batch)
        if error is None:
            batch.finish()
        else:
            batch.fail(error)

    def _fail_pending(self, error: BaseException) -> None:
        self._ledger.clear()
        for batch in self._pending:
            if not batch.future.done():
                self._resolve(batch, error)
