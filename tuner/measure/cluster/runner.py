"""The remote runner: Dask Distributed sends batches to workers that own devices (extra `cluster`).

Tests: `tests/tuner/measure/cluster/test_cluster.py`, `tests/tuner/measure/cluster/test_partition.py`.
"""

from __future__ import annotations

import json
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

from relax_tune.errors import FleetUnavailable, MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.base import OtherUnit
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.client import (
    FETCH_LOST,
    Outage,
    SchedulerConnection,
    SchedulerLost,
    device_info_of,
    import_dask,
    raise_worker_error,
)
from relax_tune.tuner.measure.cluster.fleet import (
    LentDevice,
    is_usable,
    label_and_part,
    lent_text,
    listing,
    usual_identity,
    usual_reference,
)
from relax_tune.tuner.measure.cluster.fleet_view import POLL_SECS, FleetView
from relax_tune.tuner.measure.cluster.flights import SentFlight
from relax_tune.tuner.measure.cluster.identity import identity_of, requirement_text
from relax_tune.tuner.measure.cluster.trust.expiry import expiry_warnings
from relax_tune.tuner.measure.codec import decode_results, encode_batch
from relax_tune.tuner.measure.ledger import Batch, Blame, Group, Ledger, RetryPolicy
from relax_tune.tuner.measure.reference import Reference
from relax_tune.tuner.measure.supervised import Ended, SupervisedRunner

Notice = Callable[[str], None]
_FETCHES = 8
# A batch is given up after this number of lost connections.
_MOST_DISCONNECTS = 10
# Time before the first notice about waiting, and interval of further notices.
_WAITING_SECS, _WAITING_AGAIN_SECS = 5.0, 60.0


class DaskTransport:
    """The transport of a `DaskRunner`, with its arguments. The constructor connects to the scheduler and chooses the device."""

    def __init__(
        self, address: str, target: str, tls: TlsFiles | None, open_secs: float, attempts: int, notice: Notice
    ) -> None:
        self._distributed, self._tasks = import_dask()
        self._address = address
        self._label, self._part = label_and_part(target)
        self.name = target
        self.policy = RetryPolicy(attempts, bisects=False, most_disconnects=_MOST_DISCONNECTS)
        self._open_secs = open_secs
        self._notice = notice
        self._noticed: set[str] = set()
        for line in expiry_warnings(tls):
            notice(line)
        self._answers: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._flying: dict[str, SentFlight] = {}
        self._ended: list[Ended] = []
        self._fetching = ThreadPoolExecutor(_FETCHES, "dask-fetch")
        give_up = time.monotonic() + open_secs
        self._outage = Outage(address, open_secs, self._tell)
        self._outage_since: float | None = None
        self._unserved_since: float | None = None
        self._connection = SchedulerConnection(address, tls, open_secs, notice)
        self._fleet = FleetView(self._connection, self._label, self._part, self._tell)
        try:
            self._info, self._reference = self._choose(give_up)
            self._identity = identity_of(self._info)
        except BaseException:
            self._connection.close()
            raise

    def open(self) -> DeviceInfo:
        """Describe the device chosen by the constructor, which the main thread may interrupt."""
        return self._info

    def slots(self) -> int:
        """Return the number of suitable workers, plus a quarter if there are several, so that the next batch of a worker is ready.

        During an outage of the scheduler it is 1; the submitted batch then waits, or fails with the error of the outage.
        """
        try:
            count = len(self._fleet.fitting(self._identity, self._reference))
        except SchedulerLost:
            return 1
        return count + count // 4 if count > 1 else 1

    def calibrate(self, reference: Reference) -> Reference:
        """Measure only on units with these reference times; see `Runner.calibrate`."""
        if not reference:
            # names the units of another speed
            self._outage.retry(self._connection, lambda: self._fleet.fitting(self._identity, self._reference))
            return self._reference
        devices = [d for d in self._outage.retry(self._connection, self._fleet.asked) if d.identity == self._identity]
        misfits = {d.worker: why for d in devices if (why := d.misfit(self._identity, reference))}
        if devices and len(misfits) == len(devices):
            raise OtherUnit(
                f"expected a unit of {self._info.name!r} as fast as in the records, got: {listing(misfits)}; "
                "lend another unit, tune into another database, or renew the stored times (`relax-tune db reference --renew`)"
            )
        self._reference = reference
        return reference

    def wake(self) -> None:
        """End a wait of `poll`."""
        self._answers.put(None)

    stop = wake  # the results of running batches are dropped

    def close(self) -> None:
        """Disconnect from the scheduler. The workers stay up."""
        self._drop_flights()
        self._fetching.shutdown(cancel_futures=True)
        self._connection.close()

    def poll(self) -> Sequence[Ended]:
        """Wait for an answer, at most `POLL_SECS`, and return the ends of all answered and lost flights."""
        with suppress(queue.Empty):
            answer = self._answers.get(timeout=0.0 if self._ended else POLL_SECS)
            while True:
                if answer is not None and answer[0] in self._flying:
                    self._land(self._flying.pop(answer[0]), answer[1])
                answer = self._answers.get_nowait()
        ended, self._ended = self._ended, []
        return ended

    def send(self, ledger: Ledger) -> None:
        """Bring the flights up to date with the fleet, and send what can be sent."""
        try:
            fitting = self._fleet.fitting(self._identity, self._reference)
            if self._outage_since is not None:
                self._outage_since = None
                self._notice(f"the scheduler at {self._address} is back")
            self._check_served(fitting)
            self._report_gone()
            self._send_free(fitting, ledger)
        except SchedulerLost as error:
            self._unserved_since = None
            self._await_scheduler(str(error))
        except FleetUnavailable:
            raise
        except Exception as error:
            raise self._unavailable(
                f"the scheduler at {self._address} does not answer ({type(error).__name__}: {error})"
            ) from error

    def end_batch(self, batch: Batch) -> None:
        """Restart the wait for a suitable worker."""
        self._unserved_since = None

    # Opening.

    def _choose(self, give_up: float) -> tuple[DeviceInfo, Reference]:
        """Choose the device to measure on, and its reference times, when a worker lends one."""
        began = time.monotonic()
        while not (devices := [d for d in self._outage.retry(self._connection, self._fleet.asked) if is_usable(d)]):
            if time.monotonic() > give_up:
                raise FleetUnavailable(
                    f"expected a worker that lends {self.name!r} at {self._address} within {self._open_secs:g} s, got "
                    f"{lent_text(self._fleet.devices())}; start one with `relax-tune worker`"
                )
            if time.monotonic() - began > _WAITING_SECS:
                self._tell(f"waiting for a worker that lends {self.name} at {self._address}")
            time.sleep(0.1)
        identity = usual_identity(devices)
        chosen = [d for d in devices if d.identity == identity]
        info = self._describe(min(chosen, key=lambda d: d.silent_secs), give_up)
        if len(chosen) < len(devices):
            others = ", ".join(sorted({d.about.strip(" |") for d in devices} - {chosen[0].about.strip(" |")}))
            facts = {fact for d in devices for fact in d.facts.split(" | ")} - set(chosen[0].facts.split(" | "))
            self._notice(
                f"measuring on {info.name}, which {len(chosen)} of {len(devices)} workers lend as {self.name}; others: "
                f"{others or ', '.join(sorted(facts))[:300] or 'the same device'}; --target {self._label}:PART selects by a part of "
                "the name or of a fact, such as threads=8"
            )
        return info, usual_reference(chosen)

    def _describe(self, device: LentDevice, give_up: float) -> DeviceInfo:
        """Ask a worker to describe a device that it lends. Raises MeasureError for any other answer."""
        within = max(give_up - time.monotonic(), 0.0) + 2.0
        ask, options = self._tasks.describe_device, {"workers": [device.address], "callback_timeout": within}
        try:
            answers = self._connection.ask(lambda client: client.run(ask, self._label, **options))
        except SchedulerLost as error:
            raise FleetUnavailable(
                f"expected the worker {device.worker} to describe {self.name!r} within {within:.0f} s, got no answer ({error}); "
                "start it again"
            ) from error
        except MeasureError as error:
            raise MeasureError(
                f"expected the device {self.name!r} of the worker {device.worker}, but asking for it failed: {error}"
            ) from error
        return device_info_of(answers.get(device.address))

    # The methods below run on the dispatcher thread.

    def _await_scheduler(self, why: str) -> None:
        """End all flights, and try to reconnect. Raises FleetUnavailable when the outage exceeds its time limit."""
        since = self._outage_since = self._outage_since or time.monotonic()
        for flight in reversed(self._drop_flights()):
            self._lose(flight, "disconnected")
        try:
            self._outage.wait(since, why)
        except FleetUnavailable as error:
            raise self._unavailable(str(error)) from None
        if not self._connection.restore():
            self._fleet.forget()

    def _drop_flights(self) -> list[SentFlight]:
        flying, self._flying = list(self._flying.values()), {}
        for flight in flying:
            flight.release()
        return flying

    def _unavailable(self, reason: str) -> FleetUnavailable:
        """Drop all flights, and return the error of their batches."""
        self._drop_flights()
        self._ended.clear()
        self._outage_since = None
        return FleetUnavailable(f"expected to measure through {self._address}, but {reason}")

    def _tell(self, sentence: str, key: str | None = None) -> None:
        if (key or sentence) not in self._noticed:
            self._noticed.add(key or sentence)
            self._notice(sentence)

    def _check_served(self, fitting: Sequence[LentDevice]) -> None:
        """Report that no suitable worker is connected. Raises FleetUnavailable after `open_secs`."""
        now = time.monotonic()
        self._unserved_since = None if fitting else (self._unserved_since or now)
        secs = 0.0 if self._unserved_since is None else now - self._unserved_since
        if secs > self._open_secs:
            raise self._unavailable(
                f"no suitable worker that lends {self.name!r} has connected in {self._open_secs:g} s; connected: "
                f"{lent_text(self._fleet.devices())}"
            )
        if secs > _WAITING_SECS:
            minutes = int(secs // _WAITING_AGAIN_SECS)
            self._tell(
                f"waiting for a suitable worker that lends {self.name}, at {self._address}; connected: "
                f"{lent_text(self._fleet.devices())}",
                f"no worker {minutes}",
            )

    def _send_free(self, fitting: Sequence[LentDevice], ledger: Ledger) -> None:
        """Send groups to free workers: the late ones of other workers first, then the waiting ones."""
        heard, silent = self._fleet.split_silent(fitting)
        free = self._fleet.free(heard, {flight.device.address for flight in self._flying.values()})
        now = time.monotonic()
        late = [flight for flight in self._flying.values() if flight.is_late(silent, now)]
        if not free or not (ledger or late):
            return
        foreign = self._fleet.foreign(self._flying)
        for device in sorted(free, key=lambda d: (foreign.get(d.address, 0), d.address)):
            # late groups first, since a job that uses all workers always has waiting groups
            group = self._supersede(late.pop(), device, silent) if late else ledger.take()
            if group is None:
                break
            if ahead := foreign.get(device.address, 0):
                self._tell(f"waiting behind batches of other jobs, {ahead} on {device.worker}", "behind")
            self._launch(group, ledger, device, ahead)

    def _supersede(self, flight: SentFlight, device: LentDevice, silent: Mapping[str, float]) -> Group:
        """Return the group of a late flight, to send it to another worker, too."""
        flight.superseded = True
        secs = silent.get(flight.device.address)
        reason = "over the deadline of its batch" if secs is None else f"silent for {secs:.0f} s"
        self._notice(f"worker {flight.device.worker} is {reason}; the batch is also sent to {device.worker}")
        return flight.group

    def _report_gone(self) -> None:
        """Count a worker that disconnected without an answer as lost. Dask keeps the task assigned to it, without an event."""
        connected, now = {device.address for device in self._fleet.devices()}, time.monotonic()
        for flight in self._flying.values():
            if flight.is_gone(connected, now) and not flight.superseded:
                self._lose(flight)
                flight.superseded = True

    def _launch(self, group: Group, ledger: Ledger, device: LentDevice, ahead: int) -> None:
        batch = requirement_text(self._info, self._reference), encode_batch(group.requests)
        options: dict[str, Any] = {"pure": False, "retries": 0, "allow_other_workers": False}
        options["workers"] = [device.address]
        key, measure = f"relax-tune-{uuid.uuid4().hex}", self._tasks.measure_batch
        try:
            future = self._connection.ask(lambda c: c.submit(measure, self._label, *batch, key=key, **options))
        except SchedulerLost:
            ledger.put_back(group)
            raise
        deadline = sum(request.deadline_secs for request in group.requests) * (1 + ahead)
        self._flying[future.key] = SentFlight(group, future, device, time.monotonic() + deadline)
        future.add_done_callback(lambda done: self._fetching.submit(self._fetch, done))

    def _fetch(self, future: Any) -> None:
        """Fetch the answer of a worker. Runs on a thread pool, since a large answer must not delay others."""
        try:
            answer = future.result() if future.status == "finished" else future.exception()
        except Exception as error:
            answer = error
        self._answers.put((future.key, answer))

    def _land(self, flight: SentFlight, answer: Any) -> None:
        """Report the end of a flight whose task has ended."""
        status = flight.future.status
        self._fleet.land(flight.future.key)
        flight.release()
        # Dask cancels all futures when the connection breaks.
        if status not in ("finished", "error") or (status == "finished" and isinstance(answer, FETCH_LOST)):
            self._lose(flight, "disconnected")
        elif isinstance(answer, self._distributed.KilledWorker):
            self._lose(flight)
        else:
            self._ended.append(Ended(flight.group, self._accept(flight, answer)))

    def _accept(self, flight: SentFlight, answer: Any) -> Blame | MeasureError | None:
        """Store the results of a batch, and return how it ended."""
        try:
            if isinstance(answer, Exception):
                raise answer
            if not isinstance(answer, str):
                raise MeasureError(f"expected results from a worker as text, got a {type(answer).__name__}")
            raise_worker_error(answer)
            if answer.startswith('{"refused":') and has_shape(refusal := json.loads(answer), {"refused": str}):
                self._fleet.refuse(flight.device.address)
                self._tell(f"{refusal['refused']}; the batch is sent to another worker")
                return Blame("departed", (), "")
            flight.group.batch.store(decode_results(answer), flight.group.requests)
        except MeasureError as error:
            return error
        except Exception as error:  # a malformed answer must not end this thread
            return MeasureError(f"expected results from a worker, got {type(error).__name__}: {error!s:.300}")
        return None

    def _lose(self, flight: SentFlight, kind: Literal["crash", "disconnected"] = "crash") -> None:
        """Report a flight without an answer, unless the group was sent to another worker. `crash` means a lost worker."""
        if flight.superseded:
            return
        message = (
            f"expected a result from a worker that lends {self.name!r}, got {flight.group.losses + 1} workers lost while "
            "they measured it; the request is not tried again"
        )
        if kind == "disconnected":
            message = (
                f"the connection to the scheduler at {self._address} was lost {_MOST_DISCONNECTS} times before a worker "
                "sent its results; check the network, then try again"
            )
        self._ended.append(Ended(flight.group, Blame(kind, (), message)))


class DaskRunner(SupervisedRunner):
    """A `Runner` on the workers of a scheduler that lend a device of one class, such as `cuda`.

    If workers lend several kinds of device of this class, the most common one is chosen. Each batch names this device, its libraries
    and its reference times, and is sent only to units that match; a worker whose device differs rejects it.

    Each worker measures one batch at a time. Dask's own retries are disabled: when a worker is lost, its batch is sent again, at most
    `attempts` times in all, the last time request by request, so that a request that kills workers fails without the rest of its
    batch. A batch whose worker is silent, or which exceeds the sum of the deadlines of its requests, is also sent to another worker;
    the first answer counts. During an outage of the scheduler batches wait for at most `open_secs` and are then sent again.

    Only text and a few functions are read from Dask's messages (`trust.unpickle`), so a malicious worker can do no more than report
    false results.

    Args:
        target: class of the device, or `CLASS:PART` with a part of its name or platform.
        tls: certificate of a job; on loopback it defaults to the certificate generated by the scheduler of the same user.
        open_secs: seconds to wait for the scheduler (at the start at most `ANSWER_SECS`) and for a worker.
        attempts: how often a batch is sent whose workers are lost.
        notice: receives a sentence when a worker is excluded, or when the runner waits.

    Raises:
        MeasureError: the scheduler or a worker is not connected in time, the certificates are not accepted, or Dask is not installed.
    """

    def __init__(
        self,
        scheduler_address: str,
        target: str,
        *,
        tls: TlsFiles | None = None,
        open_secs: float = 60.0,
        attempts: int = 3,
        notice: Notice = lambda _: None,
    ) -> None:
        self._fleet = DaskTransport(scheduler_address, target, tls, open_secs, attempts, notice)
        super().__init__(self._fleet)

    def calibrate(self, reference: Reference) -> Reference:
        """Compare the reference times that the workers report; see `Runner.calibrate`."""
        return self._fleet.calibrate(reference)
