"""The service `relax-tune jobs work`: takes submitted jobs from a database and runs each in a process of its own."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relax_tune.database.jobs.queue import JobQueue, LogPart
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import MESSAGE_LIMIT
from relax_tune.errors import DatabaseError, RelaxTuneError, TryAgainLater
from relax_tune.tuner.job.job_names import lives, new_holder
from relax_tune.tuner.service.job_process import COMMAND, JobProcess
from relax_tune.tuner.service.work_order import (
    BROKEN,
    DONE,
    INTERRUPTED,
    NOTHING_MEASURED,
    TRY_LATER,
    USER_ERROR,
    work_order,
)

Event = Literal["taken", "done", "failed", "cancelled", "put-back", "crashed", "lost"]
"""What becomes of a job here: taken, ended in a state, back in the queue, its process dead, or another service's now."""
HOLD_SECS = 60.0
"""A service that has not been heard of for so long loses its job."""
BEAT_SECS = 3.0
IDLE_SECS = 2.0
_LATER_SECS, _LATEST_SECS = 30.0, 600.0
# After so many runs, most of them in vain and minutes apart, a job is not tried again.
_MOST_RUNS = 100
# What a job may take beyond its time: loading, the last batches, the self-test, the artifact.
_OVER_SECS = 900.0


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of a service.

    own: its settings for every job, such as database and scheduler; files: where models and artifacts are
    labels: classes of device that it measures on, None for all
    hold_secs, beat_secs, idle_secs: how long a job is held, how often that is said, and how often jobs are looked for
    command: the program that runs a job
    """

    own: Mapping[str, Any]
    files: str
    labels: Collection[str] | None = None
    hold_secs: float = HOLD_SECS
    beat_secs: float = BEAT_SECS
    idle_secs: float = IDLE_SECS
    command: Sequence[str] = COMMAND


class Service:
    """Runs submitted jobs, one at a time for each caller of `serve`. Told to stop, it ends its job and puts it back.

    report: receives a sentence when a job begins and ends; observe: receives what became of a job, for counting
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

    def serve(self, until_empty: bool = False) -> int:
        """Take and run jobs until told to stop, or until no job waits. Returns how many ended here.

        A database that is away is waited for. Raises DatabaseError for one that cannot be used."""
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
            elif until_empty:
                break
            else:
                self.stop.wait(self.options.idle_secs * random.uniform(0.8, 1.2))
        return count

    def _take(self) -> SubmittedJob | None:
        dead = [holder for holder in self.queue.holders() if lives(holder) is False]
        return self.queue.take(new_holder(), self.options.hold_secs, self.options.labels, dead)

    def _run(self, job: SubmittedJob) -> bool:
        """Run a job that was taken. Returns True if it ended and this service said so."""
        self.report(f"job {job.id}: {job.name} for {job.label}, run {job.runs}")
        self.observe("taken")
        try:
            try:
                return self._work(job)
            except DatabaseError as error:
                self.report(f"job {job.id}: given up here, another service will take it: {error}")
                self.observe("lost")
                return False
        except BaseException:  # each way to an end tells its event last, so none was told
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
        said = message if len(message) <= MESSAGE_LIMIT else message[:MESSAGE_LIMIT]
        ours = self.queue.finish(job, state, said, code, spent, result or {}, log)
        self.report(
            f"job {job.id}: {state}{': ' * bool(said)}{said:.300}" if ours else f"job {job.id}: was lost to another"
        )
        self.observe(state if ours else "lost")
        return ours


class _Run:
    """One run of a job under way."""

    def __init__(self, service: Service, job: SubmittedJob, process: JobProcess) -> None:
        self._service, self._job, self._process = service, job, process
        self._queue, self._options = service.queue, service.options
        self._began = time.monotonic()
        self._number = 0

    def watch(self) -> bool:
        """Hold the job while it runs, and end it as its process ends. Returns True if it ended here."""
        job, process = self._job, self._process
        limit = None if job.max_secs is None else 2 * max(job.max_secs - job.spent_secs, 0.0) + _OVER_SECS
        log: list[LogPart] = []
        while (code := process.wait(self._options.beat_secs)) is None:
            if self._service.stop.is_set():
                process.tell("the service was told to end; the job goes back to the queue")
                process.stop()
                return self._put_back("its service was told to end", 0.0, log)
            log += self._log()
            try:
                hold = self._queue.beat(job, self._options.hold_secs, self._spent(), process.progress, log)
            except TryAgainLater:
                continue  # the log is kept; another may take the job meanwhile, which the next beat tells
            log = []
            if hold == "lost":
                process.stop()
                self._service.report(f"job {job.id}: was lost to another service, and is ended here")
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
        if code == DONE and process.result:
            return self._end("done", "", DONE, process.result, log)
        if code == TRY_LATER and job.runs < _MOST_RUNS:
            wait = min(_LATER_SECS * 2 ** min(job.runs - 1, 10), _LATEST_SECS)
            return self._put_back(process.error, wait, log)
        if code in (BROKEN, USER_ERROR, NOTHING_MEASURED, TRY_LATER):
            return self._end("failed", process.error or "it gave no reason; see its log", code, log=log)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        state = self._queue.lose(job, f"the process that ran it {how}", self._spent(), log)
        self._service.report(f"job {job.id}: the process that ran it {how}; it is {state or 'lost to another'} now")
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
        """Number the new parts of the log."""
        parts = [(self._job.runs, self._number + n, text) for n, text in enumerate(self._process.log())]
        self._number += len(parts)
        return parts
