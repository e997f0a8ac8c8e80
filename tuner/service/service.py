"""The service `relax-tune jobs work`: takes submitted jobs from a database and runs each in a child process.

Tests: `tests/tuner/service/test_service.py`.
"""

from __future__ import annotations

import contextlib
import platform
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relax_tune.database.jobs.queue import HOLD_SECS, MAX_DELAY_SECS, JobQueue, LogPart
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import MESSAGE_LIMIT
from relax_tune.database.reference import Reference
from relax_tune.errors import DatabaseError, RelaxTuneError, TryAgainLater
from relax_tune.tuner.job.job_names import lives, new_holder
from relax_tune.tuner.service.job_process import COMMAND, JobProcess
from relax_tune.tuner.service.work_order import (
    DONE,
    INTERRUPTED,
    NOTHING_MEASURED,
    OTHER_UNIT,
    TRY_LATER,
    USER_ERROR,
    work_order,
)

Event = Literal["taken", "done", "failed", "cancelled", "put-back", "crashed", "lost"]
"""An event of a job: taken, ended in a state, put back into the queue, its process crashed, or lost to another service."""
BEAT_SECS = 3.0
IDLE_SECS = 2.0
_LATER_SECS = 30.0
# A job that asks to be tried later fails after this number of runs, with at least _LATER_SECS between two.
_MOST_RUNS = 100
# Seconds for which a service leaves a class of device to others after its unit was refused for the first time; twice as many after each
# further time, up to MAX_DELAY_SECS. The unit may have been busy.
_ASIDE_SECS = 60.0
# Seconds beyond its time limit that a job may take for loading, the last batches, the self-test and the artifact.
_OVER_SECS = 900.0


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of a service.

    Attributes:
        own: Settings of the service for every job, such as database and scheduler.
        files: Folder or URL of models and artifacts.
        labels: Classes of device that it measures on; None for all.
        hold_secs: Seconds of a hold on a job.
        beat_secs: Seconds between extensions of the hold.
        idle_secs: Seconds between looks for a job.
        command: The program that runs a job.
    """

    own: Mapping[str, Any]
    files: str
    labels: Collection[str] | None = None
    hold_secs: float = HOLD_SECS
    beat_secs: float = BEAT_SECS
    idle_secs: float = IDLE_SECS
    command: Sequence[str] = COMMAND


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The unit of a class of device is not as fast as the units that measured the records of a target.

    Attributes:
        reference: Reference times of the target; after a change the unit is tried again.
        until: Moment of the monotonic clock at which it is tried again in any case.
        count: Refusals in a row.
    """

    target: str
    reference: Reference
    until: float
    count: int
    reason: str


class Service:
    """Runs submitted jobs, one at a time for each caller of `serve`. When `stop` is set, it puts its job back into the queue.

    A job that the unit may not measure, since its reference times disagree with the records', is left to other services.

    Args:
        report: Receives a sentence when a job begins and ends.
        observe: Receives the events of jobs, for counting.
    """

    def __init__(
        self,
        queue: JobQueue,
        options: ServiceOptions,
        stop: threading.Event,
        report: Callable[[str], None] = lambda _: None,
        observe: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.queue, self.options, self.stop, self.report, self.observe = queue, options, stop, report, observe
        self._refusals: dict[str, _Refusal] = {}

    def serve(self, until_empty: bool = False) -> int:
        """Take and run jobs until `stop` is set or, with `until_empty`, no job is queued; return the number of jobs that ended.

        Queued jobs that are left to other services do not count. While the database cannot be reached, and for queued jobs that were
        put back for later, this waits.

        Raises:
            DatabaseError: The database cannot be used.
        """
        count, away = 0, False
        while not self.stop.is_set():
            try:
                job = self._take()
                away = False
            except TryAgainLater as error:
                if not away:
                    self.report(f"waiting for the database: {error}")
                away = True
                self.stop.wait(self.options.idle_secs)
                continue
            if job is not None:
                count += self._run(job)
            elif until_empty and self.queue.next_secs(self.options.labels, self._refused()) is None:
                break
            else:
                # Services that were started together do not ask the database together for ever.
                self.stop.wait(self.options.idle_secs * random.uniform(0.8, 1.2))
        return count

    def _take(self) -> SubmittedJob | None:
        dead = [holder for holder in self.queue.holders() if lives(holder) is False]
        return self.queue.take(new_holder(), self.options.hold_secs, self.options.labels, dead, self._refused())

    def _refused(self) -> list[str]:
        """Return the classes of device whose jobs are left to other services now."""
        now = time.monotonic()
        return [
            label
            for label, refusal in list(self._refusals.items())
            if now < refusal.until and self._reference(refusal.target) == refusal.reference
        ]

    def _reference(self, target: str) -> Reference:
        stored = self.queue.target(target)
        return {} if stored is None else dict(stored.reference)

    def refuse(self, job: SubmittedJob, target: str, reason: str) -> None:
        """Leave the jobs for a class of device to other services, until the reference times change or a while has passed."""
        before = self._refusals.get(job.label)
        count = 1 if before is None else before.count + 1
        secs = min(_ASIDE_SECS * 2 ** min(count - 1, 10), MAX_DELAY_SECS)
        self._refusals[job.label] = _Refusal(target, self._reference(target), time.monotonic() + secs, count, reason)
        self.report(
            f"takes no jobs for {job.label} for {secs:.0f} s, or until the reference times of target {target:.12} are renewed"
        )

    def accept(self, job: SubmittedJob) -> None:
        """Take jobs for a class of device again, since one of them was measured."""
        self._refusals.pop(job.label, None)

    def left_to_others(self) -> str:
        """Return why queued jobs are left to other services; empty if none are."""
        waiting = (r.reason for label, r in self._refusals.items() if self.queue.next_secs([label]) is not None)
        return next(waiting, "")

    def _run(self, job: SubmittedJob) -> bool:
        """Run a taken job. Returns True if it ended and the database has its end from this service."""
        self.report(f"job {job.id}: {job.name} for {job.label}, run {job.runs}")
        self.observe("taken")
        try:
            try:
                return self._work(job)
            except DatabaseError as error:
                self.report(f"job {job.id}: abandoned, another service will take it: {error}")
                self.observe("lost")
                return False
        except BaseException:  # events are observed at the very end, so this job has none yet
            self.observe("lost")
            raise

    def _work(self, job: SubmittedJob) -> bool:
        try:
            order = work_order(job, self.options.own, self.options.files)
        except RelaxTuneError as error:
            return self._end(job, "failed", str(error), USER_ERROR, job.spent_secs)
        with contextlib.closing(JobProcess(order, self.options.command)) as process:
            return _Run(self, job, process).watch()

    def _end(
        self,
        job: SubmittedJob,
        state: Any,
        message: str,
        code: int,
        spent: float,
        result: Mapping[str, Any] | None = None,
        log: Sequence[LogPart] = (),
    ) -> bool:
        stored = message[:MESSAGE_LIMIT]
        is_ours = self.queue.finish(job, state, stored, code, spent, result or {}, log)
        reason = f": {stored:.300}" if stored else ""
        self.report(f"job {job.id}: {state}{reason}" if is_ours else f"job {job.id}: another service has it")
        self.observe(state if is_ours else "lost")
        return is_ours


class _Run:
    """One run of a job."""

    def __init__(self, service: Service, job: SubmittedJob, process: JobProcess) -> None:
        self._service, self._job, self._process = service, job, process
        self._queue, self._options = service.queue, service.options
        self._began = time.monotonic()
        self._number = 0

    def watch(self) -> bool:
        """Hold the job while its process runs, then store its end. Returns True if the job ended."""
        job, process = self._job, self._process
        limit = None if job.max_secs is None else 2 * max(job.max_secs - job.spent_secs, 0.0) + _OVER_SECS
        log: list[LogPart] = []
        while (code := process.wait(self._options.beat_secs)) is None:
            if self._service.stop.is_set():
                process.tell("the service stops; the job goes back into the queue")
                process.stop()
                return self._put_back("its service stopped", 0.0, log)
            log += self._log()
            try:
                hold = self._queue.beat(job, self._options.hold_secs, self._spent(), process.progress, log)
            except TryAgainLater:
                continue  # `log` is sent with the next beat, which also reports whether another service has the job by now
            log = []
            if hold == "lost":
                process.stop()
                self._service.report(f"job {job.id}: was lost to another service; its process is stopped")
                self._service.observe("lost")
                return False
            if hold == "cancel":
                process.tell("cancelled")
                process.stop()
                return self._end("cancelled", "cancelled", INTERRUPTED)
            if limit is not None and time.monotonic() - self._began > limit:
                process.stop()
                return self._end("failed", f"killed: it ran for {limit:.0f} s, far over its --max-minutes", TRY_LATER)
        return self._ended(code, log)

    def _ended(self, code: int, log: list[LogPart]) -> bool:
        process, job = self._process, self._job
        log += self._log()
        if code == OTHER_UNIT:
            self._service.refuse(job, process.target, process.error)
            return self._put_back(f"{platform.node()}: {process.error}", 0.0, log)  # other services need not wait
        if code == DONE and process.result:
            self._service.accept(job)
            return self._end("done", "", DONE, process.result, log)
        if code == TRY_LATER and job.runs < _MOST_RUNS:
            wait = min(_LATER_SECS * 2 ** min(job.runs - 1, 10), MAX_DELAY_SECS)
            return self._put_back(process.error, wait, log)
        if code in (USER_ERROR, NOTHING_MEASURED, TRY_LATER):
            return self._end("failed", process.error or "its process gave no reason; see its log", code, log=log)
        # An unexpected end may be the fault of a machine or a network, so the job is tried again.
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason += f" ({process.error:.300})" if process.error else ""
        state = self._queue.lose(job, f"the process that ran it {reason}", self._spent(), log)
        self._service.report(
            f"job {job.id}: the process that ran it {reason}; it is now {state or 'lost to another service'}"
        )
        self._service.observe("crashed")
        return state in ("failed", "cancelled")

    def _end(
        self, state: Any, message: str, code: int, result: Mapping[str, Any] | None = None, log: Sequence[LogPart] = ()
    ) -> bool:
        return self._service._end(self._job, state, message, code, self._spent(), result, [*log, *self._log()])

    def _put_back(self, message: str, after_secs: float, log: Sequence[LogPart] = ()) -> bool:
        self._queue.put_back(self._job, message[:MESSAGE_LIMIT], after_secs, self._spent(), [*log, *self._log()])
        self._service.report(f"job {self._job.id}: back in the queue: {message:.300}")
        self._service.observe("put-back")
        return False

    def _spent(self) -> float:
        return self._job.spent_secs + time.monotonic() - self._began

    def _log(self) -> list[LogPart]:
        """Return the new parts of the log with their numbers."""
        parts = [(self._job.runs, self._number + n, text) for n, text in enumerate(self._process.log())]
        self._number += len(parts)
        return parts
