"""The remote runner: Dask Distributed sends batches to workers that own devices (extra `cluster`)."""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from relax_tune.errors import FleetAway, MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.batches import CallerBatch, RunnerEvent, SentFlight, SentTask, hidden_key
from relax_tune.tuner.measure.cluster.client import SchedulerConnection, device_info_of, import_dask, raise_told
from relax_tune.tuner.measure.cluster.fleet import (
    LentDevice,
    asked_for,
    label_and_part,
    listing,
    silence_of,
    usual_identity,
    usual_reference,
)
from relax_tune.tuner.measure.cluster.identity import identity_of, protocol_misfit, wanted_text
from relax_tune.tuner.measure.cluster.reference import Reference
from relax_tune.tuner.measure.cluster.trust.expiry import expiry_warnings
from relax_tune.tuner.measure.codec import decode_results, encode_batch
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, distinct_requests, failed

_POLL_SECS = 1.0
_FETCHES = 8
# A worker that is missing for so long has left.
_GONE_SECS = 3.0
# A worker that refused a batch is left out for so long; meanwhile the scheduler hears of its state.
_REFUSED_SECS = 30.0
# The first word about waiting comes after so long, further ones at this interval.
_WAITING_SECS, _WAITING_AGAIN_SECS = 5.0, 60.0


class DaskRunner:
    """A `Runner` on the workers of a scheduler that lend a device of one class, such as `cuda`.

    target: class of the device, or `CLASS:PART` with a part of its name or platform. Of several kinds of device, the one that most
        workers lend is taken. Each batch names this device, its libraries and its reference times, and goes only to a unit that has
        the same; a worker whose device differs refuses it.

    At most one batch is under way per worker; with several workers, several batches are measured at a time. Dask's own retries
    are off. When a worker is lost, its batch is sent again, at most `attempts` times in all. The last time it is sent request by
    request, so that a request that kills workers costs only itself. A batch whose worker is silent, or which takes longer than the
    deadlines of its requests together, is sent to another worker too; the first answer counts.

    tls: certificate of a job; on loopback this user's own is taken.
    open_secs: seconds to wait for the scheduler (at most `ANSWER_SECS`) and for a
    worker. notice: receives a sentence when a worker is left out, or when something is waited for.

    Of Dask's messages only text and a few of our functions are read, so a worker can answer with false times and nothing else.

    Raises MeasureError when any of these does not come within `open_secs`, when certificates do not fit, or when Dask is
    not installed.
    """

    def __init__(
        self,
        scheduler_address: str,
        target: str,
        *,
        tls: TlsFiles | None = None,
        open_secs: float = 60.0,
        attempts: int = 3,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._distributed, self._tasks = import_dask()
        self._address = scheduler_address
        self._label, self._part = label_and_part(target)
        self._target = target
        self._open_secs = open_secs
        self._attempts = attempts
        self._notice = notice
        self._noticed: set[str] = set()
        for line in expiry_warnings(tls):
            notice(line)
        self._events: queue.SimpleQueue[RunnerEvent | None] = queue.SimpleQueue()
        self._waiting: deque[SentTask] = deque()
        self._flying: dict[str, SentFlight] = {}
        self._refused: dict[str, float] = {}
        self._fetching = ThreadPoolExecutor(_FETCHES, "dask-fetch")
        self._others: tuple[float, dict[str, int]] = (0.0, {})
        self._landed: set[str] = set()
        self._listed: tuple[float, list[LentDevice]] = (0.0, [])
        self._judged: tuple[list[LentDevice] | None, Reference, list[LentDevice]] = (None, {}, [])
        self._lock = threading.Lock()
        self._closed = False
        give_up = time.monotonic() + open_secs
        self._connection = SchedulerConnection(scheduler_address, tls, open_secs)
        self._client = self._connection.client
        try:
            self._info, self._reference = self._choose(give_up)
            self._identity = identity_of(self._info)
        except BaseException:
            self._connection.close()
            raise
        self._thread = threading.Thread(target=self._dispatch, name=f"dask-{target}", daemon=True)
        self._thread.start()

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """Submit a batch; see `Runner.submit`. Raises MeasureError when the runner is closed."""
        distinct = distinct_requests(batch)
        job = CallerBatch(distinct, Future(), {})
        job.finish()  # an empty batch is already answered
        with self._lock:
            if self._closed:
                raise MeasureError(f"wanted to measure on {self._target!r}, found its runner closed; open a new one")
            if distinct:
                self._events.put(RunnerEvent(task=SentTask(job, distinct)))
        return job.future

    def device_info(self) -> DeviceInfo:
        """Describe the measured device; see `Runner.device_info`."""
        return self._info

    def slots(self) -> int:
        """Return the number of fitting workers, and with several a quarter more: a worker then finds its next batch ready."""
        count = len(self._fitting())
        return count + count // 4 if count > 1 else 1

    def calibrate(self, reference: Reference) -> Reference:
        """Measure on units of these reference times only; see `Runner.calibrate`. Raises MeasureError when no unit has them."""
        if not reference:
            return self._reference
        devices = [d for d in self._asked() if d.identity == self._identity]
        misfits = {d.worker: why for d in devices if (why := d.misfit(self._identity, reference))}
        if devices and len(misfits) == len(devices):
            raise MeasureError(
                f"wanted a unit of {self._info.name!r} as fast as those that the records are of, found: {listing(misfits)}; "
                "lend a unit that is, or look at `relax-tune db units`, prune what was measured wrongly, and tune into "
                "another database"
            )
        self._reference = reference
        return reference

    def close(self) -> None:
        """Close the runner; see `Runner.close`. The workers stay up, and the result of a running batch is dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._events.put(None)
        self._thread.join()
        self._fetching.shutdown(cancel_futures=True)
        self._connection.close()

    def __enter__(self) -> DaskRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Opening.

    def _devices(self) -> list[LentDevice]:
        """Return all lent devices. The scheduler is asked at most once in `_POLL_SECS`."""
        asked, found = self._listed
        if not found or time.monotonic() - asked >= _POLL_SECS:
            found = self._connection.devices()
            self._listed = time.monotonic(), found
        return found

    def _asked(self) -> list[LentDevice]:
        return asked_for(self._devices(), self._label, self._part)

    def _choose(self, give_up: float) -> tuple[DeviceInfo, Reference]:
        """Choose the device to measure on, and its reference times, when a worker lends one."""
        began, said = time.monotonic(), False
        while not (found := [d for d in self._asked() if not d.quarantine and not protocol_misfit(d.protocol)]):
            if time.monotonic() > give_up:
                raise FleetAway(
                    f"wanted a worker that lends {self._target!r} at {self._address} within {self._open_secs:g} s, found "
                    f"{self._lent()}; start one with `relax-tune worker`"
                )
            if not said and time.monotonic() - began > _WAITING_SECS:
                said = True
                self._notice(f"waiting for a worker that lends {self._target} at {self._address}")
            time.sleep(0.1)
        identity = usual_identity(found)
        chosen = [d for d in found if d.identity == identity]
        info = self._describe(min(chosen, key=lambda d: d.silent_secs), give_up)
        if len(chosen) < len(found):
            others = ", ".join(sorted({d.about.strip(" |") for d in found} - {chosen[0].about.strip(" |")}))
            self._notice(
                f"measuring on {info.name}, which {len(chosen)} of {len(found)} workers lend as {self._target}; others: "
                f"{others or 'the same device with other software'}; --target {self._label}:PART of a name chooses"
            )
        return info, usual_reference(chosen)

    def _lent(self) -> str:
        """List what there is instead."""
        found = {
            d.worker: f"{d.label} ({d.about.strip(' |')}){' quarantined' * bool(d.quarantine)}"
            f"{' of another version' * bool(protocol_misfit(d.protocol))}"
            for d in self._devices()
        }
        return listing(found) if found else "no workers"

    def _describe(self, device: LentDevice, give_up: float) -> DeviceInfo:
        within = max(give_up - time.monotonic(), 0.0) + 2.0
        try:
            told = self._client.run(
                self._tasks.describe_device, self._label, workers=[device.address], callback_timeout=within
            )
        except TimeoutError as error:
            raise FleetAway(
                f"wanted the worker {device.worker} to describe {self._target!r} within {within:.0f} s, found no answer; "
                "start it again"
            ) from error
        except Exception as error:  # Dask has many
            raise MeasureError(
                f"wanted the device {self._target!r} of the worker {device.worker}, found that asking for it failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        return device_info_of(told.get(device.address))

    # What follows runs on the dispatcher thread.

    def _dispatch(self) -> None:
        alone_since: float | None = None
        while True:
            try:
                event = self._events.get(timeout=_POLL_SECS)
            except queue.Empty:
                event = RunnerEvent()
            while event is not None:  # all that has come meanwhile, before workers are looked for
                if event.task is not None:
                    self._waiting.append(event.task)
                if event.key is not None and event.key in self._flying:
                    self._land(self._flying.pop(event.key), event.answer)
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
            if event is None:
                break
            if not self._waiting and not self._flying:
                alone_since = None
                continue
            try:
                fitting = self._fitting()
                alone_since = None if fitting else (alone_since or time.monotonic())
                if alone_since is not None:
                    self._alone(time.monotonic() - alone_since)
                self._requeue_gone()
                self._send(fitting)
            except Exception as error:  # the client raises many kinds when its scheduler is gone
                self._give_up(f"the scheduler at {self._address} does not answer ({type(error).__name__}: {error})")
        self._give_up(f"its runner for {self._target!r} was closed")

    def _fitting(self) -> list[LentDevice]:
        """Return the units that can measure for the target. Each reason to leave one out is told once."""
        devices, reference = self._devices(), self._reference
        if self._judged[0] is devices and self._judged[1] is reference:
            return self._judged[2]
        fitting = []
        for device in asked_for(devices, self._label, self._part):
            why = device.misfit(self._identity, self._reference)
            if not why:
                fitting.append(device)
            else:
                self._tell(f"worker {device.worker} is left out: {why}")
        self._judged = devices, reference, fitting
        return fitting

    def _tell(self, sentence: str, key: str | None = None) -> None:
        if (key or sentence) not in self._noticed:
            self._noticed.add(key or sentence)
            self._notice(sentence)

    def _alone(self, secs: float) -> None:
        """Say that no worker fits; give up after a while."""
        if secs > self._open_secs:
            self._give_up(
                f"no worker that lends {self._target!r} and fits has come back in {self._open_secs:g} s; there are: "
                f"{self._lent()}"
            )
        elif secs > _WAITING_SECS:
            minutes = int(secs // _WAITING_AGAIN_SECS)
            self._tell(
                f"waiting for a worker that lends {self._target} and fits, at {self._address}; there are: {self._lent()}",
                f"alone {minutes}",
            )

    def _send(self, fitting: Sequence[LentDevice]) -> None:
        """Send waiting tasks, and tasks of workers that do not answer, to free workers."""
        now, silence = time.monotonic(), silence_of(len({d.address for d in self._devices()}))
        busy = {flight.device.address for flight in self._flying.values()}
        free = [
            d
            for d in fitting
            if d.address not in busy and d.silent_secs < silence and self._refused.get(d.address, 0.0) < now
        ]
        silent = {d.address: d.silent_secs for d in fitting if d.silent_secs >= silence}
        if not free or not (self._waiting or any(self._late(f, silent, now) for f in self._flying.values())):
            return
        foreign = self._foreign()
        free.sort(key=lambda d: (foreign.get(d.address, 0), d.address), reverse=True)
        late = [f for f in self._flying.values() if self._late(f, silent, now)]
        while free and (self._waiting or late):
            device = free.pop()
            ahead = foreign.get(device.address, 0)
            if not late:
                task = self._waiting.popleft()
            else:  # first, since a job that keeps all workers busy always has batches that wait
                flight = late.pop()
                flight.sent_on, task = True, flight.task
                reason = f"silent for {silent.get(flight.device.address, 0.0):.0f} s" * (
                    flight.device.address in silent
                )
                self._notice(
                    f"worker {flight.device.worker} is {reason or 'over the deadline of its batch'}; the batch goes to "
                    f"{device.worker} too"
                )
            if ahead:
                self._tell(f"waiting behind batches of other jobs, {ahead} on {device.worker}", "behind")
            self._launch(task, device, ahead)

    def _requeue_gone(self) -> None:
        """Count a worker that has left without an answer as lost. Dask keeps its task for it, and says nothing."""
        known, now = {device.address for device in self._devices()}, time.monotonic()
        for flight in list(self._flying.values()):
            here = flight.device.address in known
            flight.gone_since = 0.0 if here else flight.gone_since or now
            if not here and now - flight.gone_since > _GONE_SECS and not flight.sent_on:
                self._lost(flight)
                flight.task.job.finish()
                flight.sent_on = True

    def _foreign(self) -> dict[str, int]:
        """Count the batches of other jobs by worker. The scheduler is asked at most once in `_POLL_SECS`."""
        asked, found = self._others
        if time.monotonic() - asked >= _POLL_SECS:
            processing = self._client.processing()
            ours = {hidden_key(key) for key in (*self._flying, *self._landed)}
            found = {address: sum(key not in ours for key in keys) for address, keys in processing.items()}
            self._landed.clear()
            self._others = time.monotonic(), found
        return found

    def _late(self, flight: SentFlight, silent: dict[str, float], now: float) -> bool:
        open_ = not flight.sent_on and not flight.task.job.future.done()
        return open_ and (now > flight.give_up or flight.device.address in silent)

    def _launch(self, task: SentTask, device: LentDevice, ahead: int) -> None:
        future = self._client.submit(
            self._tasks.measure_batch,
            self._label,
            wanted_text(self._info, self._reference),
            encode_batch(task.requests),
            key=f"relax-tune-{uuid.uuid4().hex}",
            pure=False,
            retries=0,
            workers=[device.address],
            allow_other_workers=False,
        )
        deadline = sum(request.deadline_secs for request in task.requests) * (1 + ahead)
        self._flying[future.key] = SentFlight(task, future, device, time.monotonic() + deadline)
        future.add_done_callback(lambda done: self._fetching.submit(self._fetch, done))

    def _fetch(self, future: Any) -> None:
        """Fetch the answer of a worker, on a thread of its own: others need not wait for it."""
        try:
            answer = future.result() if future.status == "finished" else future.exception()
        except Exception as error:
            answer = error
        self._events.put(RunnerEvent(key=future.key, answer=answer))

    def _land(self, flight: SentFlight, answer: Any) -> None:
        task, future = flight.task, flight.future
        self._landed.add(future.key)
        if future.status == "finished":
            try:
                if isinstance(answer, Exception):
                    raise answer
                self._accept(flight, answer)
            except MeasureError as error:
                task.job.fail(error)
            except Exception as error:  # an answer that cannot even be read must not end this thread
                task.job.fail(MeasureError(f"wanted results from a worker, found {type(error).__name__}: {error}"))
        elif future.status == "error":
            reason = answer
            if isinstance(reason, self._distributed.KilledWorker):
                self._lost(flight)
            elif isinstance(reason, MeasureError):
                task.job.fail(reason)
            else:
                task.job.fail(
                    MeasureError(f"wanted results from a worker, found {type(reason).__name__}: {reason!s:.300}")
                )
        else:
            task.job.fail(
                FleetAway(
                    f"wanted results from a worker, found the scheduler at {self._address} lost (its task is "
                    f"{future.status}); start it again, what was measured is kept"
                )
            )
        future.release()
        task.job.finish()

    def _accept(self, flight: SentFlight, text: Any) -> None:
        """Take the results of a batch, or send a refused batch to another worker. Raises MeasureError for another answer."""
        task = flight.task
        if not isinstance(text, str):
            raise MeasureError(f"wanted results from a worker as text, found a {type(text).__name__}")
        raise_told(text)
        if text.startswith('{"refused":') and has_shape(refusal := json.loads(text), {"refused": str}):
            self._refused[flight.device.address] = time.monotonic() + _REFUSED_SECS
            self._tell(f"{refusal['refused']}; the batch goes to another worker")
            self._again(task)
            return
        wanted = {request.id for request in task.requests}
        for result in decode_results(text):
            if result.id in wanted:
                task.job.results.setdefault(result.id, result)
        missing = wanted - set(task.job.results)
        if missing:
            raise MeasureError(f"wanted a result for each request from the worker, found none for {missing}")

    def _again(self, task: SentTask) -> None:
        if not task.job.future.done():
            self._waiting.appendleft(task)

    def _lost(self, flight: SentFlight) -> None:
        task = flight.task
        if flight.sent_on or task.job.future.done():
            return
        losses = task.losses + 1
        if losses < self._attempts - 1 or (losses == self._attempts - 1 and len(task.requests) == 1):
            self._again(SentTask(task.job, task.requests, losses))
        elif losses == self._attempts - 1:
            for request in reversed(task.requests):
                self._again(SentTask(task.job, [request], losses))
        else:
            for request in task.requests:
                message = (
                    f"wanted a result from a worker that lends {self._target!r}, found {losses} workers lost while "
                    "they measured it; the request is given up"
                )
                task.job.results.setdefault(request.id, failed(request.id, "crash", message))

    def _give_up(self, reason: str) -> None:
        error = f"wanted to measure through {self._address}, found that {reason}"
        flying, self._flying = list(self._flying.values()), {}
        waiting, self._waiting = list(self._waiting), deque()
        for flight in flying:
            flight.future.release()
            flight.task.job.fail(FleetAway(error))
        for task in waiting:
            task.job.fail(FleetAway(error))
        if self._closed:
            while True:
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
                if event is not None and event.task is not None:
                    event.task.job.fail(FleetAway(error))
