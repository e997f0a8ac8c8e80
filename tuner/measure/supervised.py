"""The supervisor of a measuring process: one thread that measures one batch after another, and blames who ended it.

A process of this machine (`local`) and a page in a browser (`browser`) are supervised alike.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from relax_tune.errors import FleetAway, MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.codec import decode_results, encode_batch
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.messages import (
    MeasureRequest,
    MeasureResult,
    Stage,
    UnitState,
    distinct_requests,
    failed,
)
from relax_tune.tuner.measure.protocol import StepStatus
from relax_tune.tuner.measure.scratch import ScratchFolder
from relax_tune.tuner.measure.sensors import unit_state
from relax_tune.tuner.measure.unit_lock import turn_on

_POLL_SECS = 0.05
_PREPARE_SECS = 60.0
# The longest wait for batches of other jobs on the same unit.
_TURN_SECS = 600.0

Results = dict[str, MeasureResult]
Job = tuple[list[MeasureRequest], "Future[list[MeasureResult]]"]


class MeasuringProcess(Protocol):
    """A process with its device open, as its supervisor sees it: it takes one batch at a time and tells results.

    `device_process.child` says which messages pass. info: the device; ended: no more messages will come; left: it ended and no
    request is to blame; stopped: words for what `close` does to a step that hangs.
    """

    info: DeviceInfo
    stopped: str

    @property
    def ended(self) -> bool: ...

    @property
    def left(self) -> bool: ...

    def send(self, message: Mapping[str, Any], within_secs: float) -> None:
        """Send a batch. Raises OSError when it is not taken in time."""
        ...

    def receive(self, within_secs: float) -> dict[str, Any] | None:
        """Return the next message, or None when none came in time or none will come any more."""
        ...

    def step(self) -> StepStatus | None:
        """Return the last step that it began."""
        ...

    def death(self) -> str:
        """Describe its end, as words that complete `the process ...`."""
        ...

    def tail(self) -> str:
        """Return a clause to append to an error; may be empty."""
        ...

    def kill(self) -> None:
        """End what runs. Any thread may call it, twice too."""
        ...

    def close(self) -> None:
        """Kill, and release everything."""
        ...


@dataclass(frozen=True, slots=True)
class _Blame:
    """Why an attempt ended before its batch did. ids: requests whose step was running (none: between requests)."""

    kind: Literal["crash", "timeout", "lost", "left"]
    ids: tuple[str, ...]
    message: str


def _no_room(error: OSError) -> MeasureError:
    return MeasureError(
        f"wanted to write temporary files ({error.filename or 'to measure with'}), found: {error.strerror or error}; free some "
        "space, or point TMPDIR at a folder that can be written and has room"
    )


class SupervisedRunner:
    """A `Runner` over one measuring process at a time, which `_start` gives.

    A step over its deadline or a death costs the guilty request a failed result; the rest of its batch continues in a fresh
    process. When a process dies during the step of one request among several, that request is tried once more by itself,
    because an earlier candidate may have damaged the process; only a second death is its failure.

    what: name of the device in messages. worker: name under which results say who measured. lock: hold the unit's lock during
    each batch, so that jobs and workers of this host take turns. notice: receives a sentence when another holds the unit for
    long.
    """

    _patient = False
    """True if a request that was alone in its batch gets a second try too."""

    def __init__(self, what: str, worker: str, lock: bool, notice: Callable[[str], None]) -> None:
        self._spec, self._worker = what, worker
        self._lock_unit, self._notice = lock, notice
        try:
            self._folder = ScratchFolder()
            self._arrays = self._folder.path / "arrays"
            self._arrays.mkdir()
        except OSError as error:
            raise _no_room(error) from None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._process: MeasuringProcess | None = None
        opened: Future[DeviceInfo] = Future()
        # The child asks to die with the thread that started it, so one thread starts every child and outlives them.
        self._thread = threading.Thread(target=self._serve, args=(opened,), name=f"measure-{what}", daemon=True)
        try:
            self._thread.start()
            self._info = opened.result()
        except BaseException:
            self.close()
            raise

    def _start(self) -> MeasuringProcess:
        """Return a process with its device open, on the supervisor's thread.

        Raises MeasureError where the device cannot be opened, FleetAway where it is away and the batch may be tried later.
        """
        raise NotImplementedError

    def _state(self) -> UnitState:
        """Describe the unit after a batch."""
        return unit_state(self._worker, self._info.unit)

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """Submit a batch; see `Runner.submit`. Raises MeasureError when the runner is closed."""
        future: Future[list[MeasureResult]] = Future()
        distinct = distinct_requests(batch)
        with self._lock:
            if self._closed:
                raise MeasureError(f"wanted to measure on {self._spec!r}, found its runner closed; open a new one")
            self._jobs.put((distinct, future))
        return future

    def device_info(self) -> DeviceInfo:
        """Describe the measured device; see `Runner.device_info`."""
        return self._info

    def slots(self) -> int:
        """Return 1: one device measures one batch at a time."""
        return 1

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        """Return `reference`: one device has nobody to differ from."""
        return reference

    def close(self) -> None:
        """Close the runner; see `Runner.close`."""
        with shielded():
            with self._lock:
                self._closed = True
                if self._process is not None:
                    self._process.kill()
            self._jobs.put(None)
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What follows runs on the supervisor thread.

    def _serve(self, opened: Future[DeviceInfo]) -> None:
        try:
            opened.set_result(self._opened_process().info)
        except BaseException as error:
            opened.set_exception(_no_room(error) if isinstance(error, OSError) else error)
            return
        while (job := self._jobs.get()) is not None:
            batch, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with self._turn():
                    found = self._measure(batch)
                unit = self._state()
                future.set_result([replace(result, unit=unit) for result in found])
            except BaseException as error:  # goes to the caller; this thread lives for the next batch
                future.set_exception(_no_room(error) if isinstance(error, OSError) else error)
        self._discard_process()

    def _turn(self) -> AbstractContextManager[None]:
        if not self._lock_unit:
            return nullcontext()
        unit = self._info.unit or f"{socket.gethostname()}:{self._spec}"
        return turn_on(unit, self._worker, _TURN_SECS, self._notice, self._refuse_when_closed)

    def _opened_process(self) -> MeasuringProcess:
        if self._process is None:
            self._refuse_when_closed()
            process = self._start()
            with self._lock:
                self._process = process
                closed = self._closed
            if closed:
                self._discard_process()
        self._refuse_when_closed()
        assert self._process is not None
        return self._process

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise MeasureError(f"wanted to measure on {self._spec!r}, found its runner closed meanwhile")

    def _discard_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _measure(self, batch: list[MeasureRequest]) -> list[MeasureResult]:
        results: Results = {}
        work: deque[list[MeasureRequest]] = deque([batch] if batch else [])
        alone: set[str] = set()
        unblamed: set[str] = set()
        doubted: set[str] = set()
        while work:
            group = work.popleft()
            blame = self._attempt(group, alone, results)
            if blame is not None:
                self._discard_process()
                self._refuse_when_closed()
            rest = [request for request in group if request.id not in results]
            if blame is None or not rest:
                continue
            if blame.kind == "left":
                work.appendleft(rest)
                continue
            guilty = tuple(id for id in blame.ids if id not in results)
            if len(rest) == 1 and not guilty:
                if rest[0].id not in unblamed:  # no step of it was running: the process may be at fault
                    unblamed.add(rest[0].id)
                    work.appendleft(rest)
                    continue
                guilty = (rest[0].id,)
            others = [request for request in rest if request.id not in guilty]
            if blame.kind == "lost" and len(rest) < len(group):
                work.appendleft(rest)
            elif not guilty:
                work.extendleft([rest[len(rest) // 2 :], rest[: len(rest) // 2]])
            elif len(guilty) > 1:
                alone.update(guilty)
                work.appendleft(rest)
            else:
                first = len(group) > 1 or (self._patient and guilty[0] not in doubted)
                if blame.kind == "crash" and first:
                    doubted.add(guilty[0])
                    work.append([request for request in rest if request.id in guilty])
                else:
                    stage: Stage = "timeout" if blame.kind == "timeout" else "crash"
                    results[guilty[0]] = failed(guilty[0], stage, blame.message)
                if others:
                    work.appendleft(others)
        return [results[request.id] for request in batch]

    def _attempt(self, group: list[MeasureRequest], alone: set[str], results: Results) -> _Blame | None:
        """Measure one batch in one child, and add its results. Returns None when the batch ended normally."""
        try:
            process = self._opened_process()
        except FleetAway:
            raise
        except MeasureError as error:
            self._refuse_when_closed()
            for request in group:
                results[request.id] = failed(request.id, "device-lost", str(error))
            return None
        message = {
            "kind": "batch",
            "batch": encode_batch(group, self._arrays),
            "arrays": str(self._arrays),
            "alone": [index for index, request in enumerate(group) if request.id in alone],
        }
        try:
            process.send(message, _PREPARE_SECS)
        except OSError as error:
            return self._death(process, group, f"it did not take the batch ({error})")
        wanted = {request.id for request in group}
        while True:
            try:
                answer = process.receive(_POLL_SECS)
            except MeasureError as error:
                return self._death(process, group, str(error))
            if answer is None:
                blame = self._death(process, group, "") if process.ended else self._overdue(process, group)
                if blame is not None:
                    return blame
            elif answer.get("kind") == "results":
                for result in decode_results(str(answer.get("results"))):
                    if result.id in wanted:
                        results.setdefault(result.id, result)
            elif answer.get("kind") == "lost":
                return _Blame("lost", (), "")
            elif answer.get("kind") == "unable":
                self._discard_process()
                raise MeasureError(str(answer.get("message")))
            elif answer.get("kind") == "done":
                for request in group:
                    if request.id not in results:
                        message_ = "wanted a result from the device process, found it done without one; report this"
                        results[request.id] = failed(request.id, "crash", message_)
                return None

    def _step(
        self, process: MeasuringProcess, group: list[MeasureRequest]
    ) -> tuple[StepStatus | None, tuple[str, ...]]:
        step = process.step()
        if step is None:
            return None, ()
        return step, tuple(request.id for request in group[step.first : step.first + step.count])

    def _death(self, process: MeasuringProcess, group: list[MeasureRequest], detail: str) -> _Blame:
        step, ids = self._step(process, group)
        phase = step.phase if step is not None else "idle"
        end = detail or process.death()
        if process.left:
            return _Blame("left", (), end)
        return _Blame("crash", ids, f"in phase {phase!r} the device process {end}.{process.tail()}")

    def _overdue(self, process: MeasuringProcess, group: list[MeasureRequest]) -> _Blame | None:
        step, ids = self._step(process, group)
        if step is None:
            return None
        limit = sum(request.deadline_secs for request in group if request.id in ids) or _PREPARE_SECS
        if time.monotonic() - step.started <= limit:
            return None
        again = process.step()
        if again is None or again.sequence != step.sequence:
            return None
        what = (
            f"wanted each step to end within {limit:g} s, found phase {step.phase!r} still running: {process.stopped}"
        )
        return _Blame("timeout", ids, f"{what}.{process.tail()}")
