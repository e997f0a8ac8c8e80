"""The remote runner: Dask Distributed sends batches to workers that own devices (extra `cluster`)."""

from __future__ import annotations

import importlib
import json
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address
from relax_tune.tuner.measure.cluster.tls import ANSWER_SECS, check_files, check_scheduler
from relax_tune.tuner.measure.codec import decode_device, decode_results, encode_batch
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, distinct_requests, failed

_POLL_SECS = 1.0


@dataclass(slots=True)
class _Job:
    """One caller's batch. Results are kept by request id, so an answer that comes twice changes nothing."""

    requests: list[MeasureRequest]
    future: Future[list[MeasureResult]]
    results: dict[str, MeasureResult]

    def finish(self) -> None:
        if not self.future.done() and all(request.id in self.results for request in self.requests):
            self.future.set_result([self.results[request.id] for request in self.requests])

    def fail(self, error: MeasureError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True)
class _Task:
    """Requests of a job that a worker is running, and the number of workers lost while running them."""

    job: _Job
    requests: list[MeasureRequest]
    losses: int = 0


@dataclass(frozen=True, slots=True)
class _Event:
    key: str | None = None
    task: _Task | None = None


class DaskRunner:
    """A `Runner` on the workers that carry `device_label` as a resource.

    At most one batch is under way per such worker; with several workers, several batches are measured at a time, each
    on one worker. Dask's own retries are off. When a worker is lost, its batch is sent again, at most `attempts` times in all.
    The last time it is sent request by request, so that a request that kills workers costs only itself.

    device_spec: device that the worker opens (default: the label). tls: needed unless the scheduler is on loopback.
    open_secs: seconds to wait for the scheduler (at most `ANSWER_SECS`), for a worker with the label, and its device.

    A holder of a certificate of the authority may run programs on the workers; their answers are still checked.

    Raises MeasureError when any of these does not come within `open_secs`, when certificates do not fit, or when Dask is
    not installed.
    """

    def __init__(
        self,
        scheduler_address: str,
        device_label: str,
        *,
        device_spec: str | None = None,
        tls: TlsFiles | None = None,
        open_secs: float = 60.0,
        attempts: int = 3,
    ) -> None:
        check_address(scheduler_address, tls)
        self._distributed, self._tasks = _import_dask()
        self._address = scheduler_address
        self._label = device_label
        self._spec = device_label if device_spec is None else device_spec
        self._open_secs = open_secs
        self._attempts = attempts
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._waiting: deque[_Task] = deque()
        self._flying: dict[str, tuple[_Task, Any]] = {}
        self._lock = threading.Lock()
        self._closed = False
        give_up = time.monotonic() + open_secs
        if tls is not None:
            check_files(tls)
        check_scheduler(scheduler_address, tls, min(open_secs, ANSWER_SECS))
        # Our errors replace Dask's long log messages.
        self._hushed, self._hush = logging.getLogger("distributed.client"), _hush()
        self._hushed.addFilter(self._hush)
        try:
            self._client = self._connect(tls)
        except BaseException:
            self._hushed.removeFilter(self._hush)
            raise
        try:
            self._wait_for_worker(give_up)
            self._client.register_plugin(self._tasks.DevicePlugin())
            self._info = self._describe(give_up)
        except BaseException:
            self._client.close()
            self._hushed.removeFilter(self._hush)
            raise
        self._thread = threading.Thread(target=self._dispatch, name=f"dask-{device_label}", daemon=True)
        self._thread.start()

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """Submit a batch; see `Runner.submit`. Raises MeasureError when the runner is closed."""
        distinct = distinct_requests(batch)
        job = _Job(distinct, Future(), {})
        job.finish()  # an empty batch is already answered
        with self._lock:
            if self._closed:
                raise MeasureError(f"wanted to measure on {self._label!r}, found its runner closed; open a new one")
            if distinct:
                self._events.put(_Event(task=_Task(job, distinct)))
        return job.future

    def device_info(self) -> DeviceInfo:
        """Describe the measured device; see `Runner.device_info`."""
        return self._info

    def close(self) -> None:
        """Close the runner; see `Runner.close`. The workers stay up, and the result of a running batch is dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._events.put(None)
        self._thread.join()
        self._client.close()
        self._hushed.removeFilter(self._hush)

    def __enter__(self) -> DaskRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Opening.

    def _connect(self, tls: TlsFiles | None) -> Any:
        security = None
        if tls is not None:
            security = self._distributed.Security(
                tls_ca_file=tls.ca,
                tls_client_cert=tls.certificate,
                tls_client_key=tls.key,
                require_encryption=True,
            )
        try:
            return self._distributed.Client(
                self._address, timeout=self._open_secs, security=security, set_as_default=False
            )
        except (OSError, TimeoutError) as error:
            raise MeasureError(
                f"wanted a Dask scheduler at {self._address} within {self._open_secs:g} s, found none ({error}); "
                "start one, or check address and certificates"
            ) from error

    def _workers(self) -> dict[str, list[str]]:
        """Return the resources of each worker, by address."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {address: sorted(worker.get("resources") or {}) for address, worker in workers.items()}

    def _wait_for_worker(self, give_up: float) -> None:
        while self._slots() == 0:
            if time.monotonic() > give_up:
                found = self._workers()
                raise MeasureError(
                    f"wanted a worker with the resource {self._label!r} at {self._address} within "
                    f"{self._open_secs:g} s, found {found or 'no workers'}; start one with `relax-tune worker`"
                )
            time.sleep(0.1)

    def _slots(self) -> int:
        return sum(self._label in resources for resources in self._workers().values())

    def _submit(self, function: Any, *arguments: Any) -> Any:
        key = f"relax-tune-{uuid.uuid4().hex}"
        return self._client.submit(
            function,
            *arguments,
            key=key,
            pure=False,
            retries=0,
            resources={self._label: 1},
        )

    def _describe(self, give_up: float) -> DeviceInfo:
        # The answer gets two seconds more than the worker, whose refusal says more than our timeout.
        future = self._submit(self._tasks.describe_device, self._spec, self._open_secs)
        try:
            text = future.result(timeout=max(give_up - time.monotonic(), 0.0) + 2.0)
        except TimeoutError as error:
            raise MeasureError(
                f"wanted the device {self._spec!r} of a worker with the label {self._label!r} within "
                f"{self._open_secs:g} s, found it busy or hanging; free it, or allow more time"
            ) from error
        except MeasureError:
            raise
        except Exception as error:  # an error of the worker arrives under its own type
            raise MeasureError(
                f"wanted the device {self._spec!r} of a worker with the label {self._label!r}, found that asking "
                f"for it failed: {type(error).__name__}: {error}"
            ) from error
        return _device_info(text)

    # What follows runs on the dispatcher thread.

    def _dispatch(self) -> None:
        alone_since: float | None = None
        while True:
            try:
                event = self._events.get(timeout=_POLL_SECS)
            except queue.Empty:
                event = _Event()
            if event is None:
                break
            if event.task is not None:
                self._waiting.append(event.task)
            if event.key is not None and event.key in self._flying:
                self._land(*self._flying.pop(event.key))
            if not self._waiting and not self._flying:
                alone_since = None
                continue
            try:
                slots = self._slots()
            except Exception as error:  # the client raises many kinds when its scheduler is gone
                self._give_up(f"the scheduler at {self._address} does not answer ({type(error).__name__}: {error})")
                continue
            alone_since = None if slots else (alone_since or time.monotonic())
            if alone_since is not None and time.monotonic() - alone_since > self._open_secs:
                self._give_up(f"no worker with the resource {self._label!r} has come back in {self._open_secs:g} s")
                continue
            while self._waiting and len(self._flying) < slots:
                self._launch(self._waiting.popleft())
        self._give_up(f"its runner for {self._label!r} was closed")

    def _launch(self, task: _Task) -> None:
        future = self._submit(self._tasks.measure_batch, self._spec, self._open_secs, encode_batch(task.requests))
        self._flying[future.key] = (task, future)
        future.add_done_callback(lambda done: self._events.put(_Event(key=done.key)))

    def _land(self, task: _Task, future: Any) -> None:
        if future.status == "finished":
            try:
                wanted = {request.id for request in task.requests}
                text = future.result()
                if not isinstance(text, str):
                    raise MeasureError(f"wanted results from a worker as text, found a {type(text).__name__}")
                for result in decode_results(text):
                    if result.id in wanted:
                        task.job.results.setdefault(result.id, result)
                missing = wanted - set(task.job.results)
                if missing:
                    raise MeasureError(f"wanted a result for each request from the worker, found none for {missing}")
            except MeasureError as error:
                task.job.fail(error)
            except Exception as error:  # an answer that cannot even be read must not end this thread
                task.job.fail(MeasureError(f"wanted results from a worker, found {type(error).__name__}: {error}"))
        elif future.status == "error":
            reason = future.exception()
            if isinstance(reason, self._distributed.KilledWorker):
                self._lost(task)
            elif isinstance(reason, MeasureError):
                task.job.fail(reason)
            else:
                task.job.fail(MeasureError(f"wanted results from a worker, found {type(reason).__name__}: {reason}"))
        else:
            task.job.fail(
                MeasureError(
                    f"wanted results from a worker, found the scheduler at {self._address} lost (its task is "
                    f"{future.status}); start it again, what was measured is kept"
                )
            )
        future.release()
        task.job.finish()

    def _lost(self, task: _Task) -> None:
        losses = task.losses + 1
        if losses < self._attempts - 1 or (losses == self._attempts - 1 and len(task.requests) == 1):
            self._waiting.appendleft(_Task(task.job, task.requests, losses))
        elif losses == self._attempts - 1:
            self._waiting.extendleft(_Task(task.job, [request], losses) for request in reversed(task.requests))
        else:
            for request in task.requests:
                message = (
                    f"wanted a result from a worker with the label {self._label!r}, found {losses} workers lost while "
                    "they measured it; the request is given up"
                )
                task.job.results.setdefault(request.id, failed(request.id, "crash", message))

    def _give_up(self, reason: str) -> None:
        error = f"wanted to measure through {self._address}, found that {reason}"
        flying, self._flying = list(self._flying.values()), {}
        waiting, self._waiting = list(self._waiting), deque()
        for task, future in flying:
            future.release()
            task.job.fail(MeasureError(error))
        for task in waiting:
            task.job.fail(MeasureError(error))
        if self._closed:
            while True:
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
                if event is not None and event.task is not None:
                    event.task.job.fail(MeasureError(error))


def _hush() -> Callable[[logging.LogRecord], bool]:
    """Return a log filter that drops everything. Each call returns a new one, so that each runner removes its own."""
    return lambda _: False


def _device_info(text: Any) -> DeviceInfo:
    """Check the answer of `task.describe_device`. Raises MeasureError for anything else."""
    try:
        return decode_device(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise MeasureError(
            f"wanted the description of a device from a worker, found {type(error).__name__}: {error} in {text!r:.120}; "
            "the two sides must run the same version of relax-tune"
        ) from None


def _import_dask() -> tuple[Any, Any]:
    try:
        return (
            importlib.import_module("distributed"),
            importlib.import_module("relax_tune.tuner.measure.cluster.task"),
        )
    except ImportError as error:
        raise MeasureError(
            f"wanted Dask Distributed for a far runner, found {error}; pip install 'relax-tune[cluster]'"
        ) from error
