"""The transport of a measuring process: one group at a time, with attribution of crashes and timeouts to requests.

A process of this machine (`local`) and a page in a browser (`browser`) share it.

Tests: `tests/tuner/measure/test_local.py`, `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from relax_tune.errors import FleetUnavailable, MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.codec import decode_results, encode_batch
from relax_tune.tuner.measure.ledger import Batch, Blame, Group, Ledger, RetryPolicy
from relax_tune.tuner.measure.messages import MeasureRequest, failed
from relax_tune.tuner.measure.protocol import StepStatus
from relax_tune.tuner.measure.scratch import ScratchFolder
from relax_tune.tuner.measure.sensors import unit_state
from relax_tune.tuner.measure.supervised import Ended
from relax_tune.tuner.measure.unit_lock import hold_unit

_POLL_SECS = 0.05
_PREPARE_SECS = 60.0
# A batch ends after this many times the deadlines of its requests, also if steps are reported: a kernel can write these reports.
_MOST_DEADLINES = 4.0
# A write of a step takes about a microsecond; one that is incomplete for this long comes from a kernel.
_UNREADABLE_SECS = 5.0
# The longest wait for batches of other jobs on the same unit.
_TURN_SECS = 600.0
# A request during which no step was running fails at the second loss: the first may be the fault of the process.
_MOST_LOSSES = 2


class MeasuringProcess(Protocol):
    """A process with its device open: it takes one batch at a time and answers with results.

    `device_process.child` describes the messages.

    Attributes:
        info: description of the open device.
        stop_phrase: how messages describe the end of a step over its deadline, such as `killed`.
        ended: True if no more messages will come.
        departed: True if the process ended and no request is to blame.
        shares_steps: True if kernels could write the steps that it reports, so that a batch also ends by the supervisor's clock.
    """

    info: DeviceInfo
    stop_phrase: str
    shares_steps: bool

    @property
    def ended(self) -> bool: ...

    @property
    def departed(self) -> bool: ...

    def send(self, message: Mapping[str, Any], within_secs: float) -> None:
        """Send a batch. Raises OSError when the process does not read it in time."""
        ...

    def receive(self, within_secs: float) -> dict[str, Any] | None:
        """Return the next message, or None at the time limit and after the last message."""
        ...

    def step(self) -> StepStatus | None:
        """Return the step that began last."""
        ...

    def death(self) -> str:
        """Describe how the process ended, as a predicate of `the device process`."""
        ...

    def tail(self) -> str:
        """Return a clause to append to an error; may be empty."""
        ...

    def kill(self) -> None:
        """Stop the running step. Any thread may call it, more than once."""
        ...

    def close(self) -> None:
        """Kill the process and release its resources."""
        ...


def _storage_error(error: OSError) -> MeasureError:
    return MeasureError(
        f"temporary files ({error.filename or 'for measuring'}) cannot be written: {error.strerror or error}; free some "
        "space, or point TMPDIR at a writable folder with free space"
    )


class ProcessTransport:
    """A `Transport` over one measuring process at a time.

    When a step exceeds its deadline or the process dies, the request of that step fails, and the rest of its batch continues in a
    new process. When a process dies during the step of one request among several, that request is measured once more in a batch
    by itself, because an earlier candidate may have damaged the process; only a second death is its failure.

    Args:
        name: the device in messages.
        worker: name of the measuring process in results.
        start: starts a process and opens its device. It gets a folder for temporary files, and a function that raises when the
            runner is closed. It raises FleetUnavailable if the device is not connected; the batch may be submitted again later.
        notice: receives a sentence when another process holds the unit for long.
        lock: hold the unit's lock during each batch, so that jobs and workers of this host take turns.
        wait_secs: how long to wait for a worker that lends the unit.
        unit: name of the unit in results, if the device has none.
        retries_single: see `RetryPolicy`.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        start: Callable[[Path, Callable[[], None]], MeasuringProcess],
        notice: Callable[[str], None],
        *,
        lock: bool,
        wait_secs: float = 60.0,
        unit: str = "",
        retries_single: bool = False,
    ) -> None:
        self.name, self._worker, self._start, self._notice = name, worker, start, notice
        self._lock_unit, self._wait_secs, self._unit = lock, wait_secs, unit
        self.policy = RetryPolicy(_MOST_LOSSES, bisects=True, retries_single=retries_single)
        self._folder: ScratchFolder | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._process: MeasuringProcess | None = None
        self._group: Group | None = None
        self._turn: tuple[Batch | None, ExitStack] = None, ExitStack()
        self._heard = 0.0  # when the process last sent a message or had a readable step

    def open(self) -> DeviceInfo:
        """Open the device in a process."""
        try:
            self._folder = ScratchFolder()
            self._arrays = self._folder.path / "arrays"
            self._arrays.mkdir()
            self._info = self._open_process().info
        except OSError as error:
            raise _storage_error(error) from None
        return self._info

    def slots(self) -> int:
        """Return 1: one device measures one batch at a time."""
        return 1

    def poll(self) -> Sequence[Ended]:
        """Measure the group that was sent, and return its end."""
        group, self._group = self._group, None
        if group is None:
            return ()
        reason: Blame | BaseException | None
        try:
            self._take_turn(group.batch)
            reason = self._attempt(group)
            if reason is not None:
                self._discard_process()
                self._refuse_when_stopped()
        except BaseException as error:  # only this batch fails
            reason = _storage_error(error) if isinstance(error, OSError) else error
        return (Ended(group, reason),)

    def send(self, ledger: Ledger) -> None:
        """Take the next group, which `poll` measures."""
        self._group = ledger.take()

    def end_batch(self, batch: Batch) -> None:
        """Release the unit, and add its state to the results."""
        self._turn[1].close()
        if batch.results:
            unit = unit_state(self._worker, self._info.unit or self._unit)
            batch.results = {id: replace(result, unit=unit) for id, result in batch.results.items()}

    def wake(self) -> None:
        """Do nothing: `poll` waits only for the group that it measures."""

    def stop(self) -> None:
        """Kill the process."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._discard_process()
        if self._folder is not None:
            self._folder.remove()

    # The methods below run on the dispatcher thread.

    def _take_turn(self, batch: Batch) -> None:
        """Hold the unit's lock, if there is one, until the end of a batch."""
        holder, turn = self._turn
        if self._lock_unit and holder is not batch:
            unit = self._info.unit or f"{socket.gethostname()}:{self.name}"
            limits = {"within_secs": max(_TURN_SECS, self._wait_secs), "lent_secs": self._wait_secs}
            turn.enter_context(
                hold_unit(unit, self._worker, notice=self._notice, check_cancelled=self._refuse_when_stopped, **limits)
            )
            self._turn = batch, turn

    def _open_process(self) -> MeasuringProcess:
        if self._process is None:
            self._refuse_when_stopped()
            process = self._start(self._arrays.parent, self._refuse_when_stopped)
            with self._lock:
                self._process = process
                # `stop` may have run while the process started, when there was no process to kill yet.
                stopped = self._stopped
            if stopped:
                self._discard_process()
        self._refuse_when_stopped()
        assert self._process is not None
        return self._process

    def _refuse_when_stopped(self) -> None:
        if self._stopped:
            raise MeasureError(f"the runner on {self.name!r} was closed while it measured")

    def _discard_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _attempt(self, group: Group) -> Blame | None:
        """Measure one group in one process, and store its results. Returns None if the group is complete."""
        batch, requests = group.batch, group.requests
        try:
            process = self._open_process()
        except FleetUnavailable:
            raise
        except MeasureError as error:
            self._refuse_when_stopped()
            # A device that does not open again fails these requests only: the next batch tries to open it once more.
            batch.store([failed(request.id, "device-lost", str(error)) for request in requests], requests)
            return None
        message = {
            "kind": "batch",
            "batch": encode_batch(requests, self._arrays),
            "arrays": str(self._arrays),
            "isolated": [index for index, request in enumerate(requests) if request.id in batch.isolated],
        }
        try:
            process.send(message, _PREPARE_SECS)
        except OSError as error:
            return self._death(process, requests, f"it did not read the batch ({error})")
        end = time.monotonic() + _PREPARE_SECS + _MOST_DEADLINES * sum(request.deadline_secs for request in requests)
        self._heard = time.monotonic()
        while True:
            try:
                answer = process.receive(_POLL_SECS)
            except MeasureError as error:
                return self._death(process, requests, str(error))
            if process.shares_steps and time.monotonic() > end:
                return Blame(
                    "timeout", self._step(process, requests)[1], f"the batch was not complete in time.{process.tail()}"
                )
            if answer is not None:
                self._heard = time.monotonic()
            if answer is None:
                blame = self._death(process, requests, "") if process.ended else self._overdue(process, requests)
                if blame is not None:
                    return blame
            elif answer.get("kind") == "results":
                try:
                    results = decode_results(str(answer.get("results")))
                except MeasureError as error:
                    return self._death(process, requests, str(error))
                batch.store(results, requests)
            elif answer.get("kind") == "lost":
                return Blame("lost", (), "")
            elif answer.get("kind") == "unable":
                self._discard_process()
                raise MeasureError(str(answer.get("message")))
            elif answer.get("kind") == "done":
                why = "the device process ended the batch without a result for this request; report this"
                batch.store([failed(request.id, "crash", why) for request in batch.missing(requests)], requests)
                return None

    def _step(
        self, process: MeasuringProcess, requests: list[MeasureRequest]
    ) -> tuple[StepStatus | None, tuple[str, ...]]:
        step = process.step()
        if step is None:
            return None, ()
        return step, tuple(request.id for request in requests[step.first : step.first + step.count])

    def _death(self, process: MeasuringProcess, requests: list[MeasureRequest], detail: str) -> Blame:
        step, ids = self._step(process, requests)
        phase = step.phase if step is not None else "idle"
        end = detail or process.death()
        if process.departed:
            return Blame("departed", (), end)
        return Blame("crash", ids, f"in phase {phase!r} the device process {end}.{process.tail()}")

    def _overdue(self, process: MeasuringProcess, requests: list[MeasureRequest]) -> Blame | None:
        step, ids = self._step(process, requests)
        now = time.monotonic()
        # A write is under way at this moment, and the next poll reads the step; or a kernel has overwritten it.
        if step is None and process.shares_steps and now - self._heard > _UNREADABLE_SECS:
            return self._death(process, requests, "overwrote the memory of its progress: killed")
        if step is None:
            return None
        self._heard = now
        # A step may cover several requests, so their deadlines add up.
        limit = sum(request.deadline_secs for request in requests if request.id in ids) or _PREPARE_SECS
        # A start in the future is not the process's own word.
        if 0.0 <= now - step.started <= limit:
            return None
        # The step may have ended between the two reads; the next one has a deadline by itself.
        again = process.step()
        if again is None or again.sequence != step.sequence:
            return None
        what = f"expected each step to end within {limit:g} s, got phase {step.phase!r} still running: {process.stop_phrase}"
        return Blame("timeout", ids, f"{what}.{process.tail()}")
