"""`JobQueue`: the submitted jobs of a database, which services on any number of machines take and run.

A service holds a job until a moment by the database's clock, and extends the hold regularly. If it stops, another service takes the
job, and the store refuses later reports of the first one. So each job ends once, even if services are killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, cast

from sqlalchemy import Connection, Select, and_, func, or_, select, update
from sqlalchemy.sql import ColumnElement

from relax_tune.database.engine import default_url, patient
from relax_tune.database.jobs.submitted import SubmittedJob, SubmittedState
from relax_tune.database.jobs.tables import JobLogRow, SubmittedJobRow
from relax_tune.database.records import MESSAGE_LIMIT, canonical_json
from relax_tune.database.sql import leases
from relax_tune.database.sql.statements import add_missing
from relax_tune.database.sql_store import SqlStore
from relax_tune.errors import DatabaseError, warn

Hold = Literal["extended", "cancel", "lost"]
"""Result of `JobQueue.beat`."""
LogPart = tuple[int, int, str]
"""Run, number within the run, text."""
_COLUMNS = tuple(getattr(SubmittedJobRow, field.name) for field in fields(SubmittedJob))
_MEMORY = "memory://"
HOLD_SECS = 60.0
"""Default seconds for which a service holds a job."""
_CLOCK_SECS = 1e-3
"""Resolution of the database's clock; SQLite's is the coarsest."""
MAX_DELAY_SECS = 600.0
"""Longest delay of a job that was put back."""


class JobQueue(SqlStore):
    """A store of records that also has the submitted jobs of its database.

    Each run of a job has a `holder`, a name unique among all runs. Every method may be called again after a lost connection: the
    second call finds the effect of the first and returns the same result.
    """

    def _job(self, row: Any) -> SubmittedJob:
        return self._build(lambda values: SubmittedJob(**values), dict(row._mapping))

    def _select(self, connection: Connection, query: Select[Any]) -> list[SubmittedJob]:
        """Return the jobs of a query. Raises `DatabaseError` for an invalid row."""
        return [self._job(row) for row in connection.execute(query)]

    @patient
    def submit(self, job: SubmittedJob) -> SubmittedJob:
        """Queue a job unless its id is stored; return it as stored."""
        with self._write("submit a job") as connection:
            values = {field.name: getattr(job, field.name) for field in fields(job)}
            values["submitted_at"] = self._next_time(connection)
            add_missing(connection, SubmittedJobRow.__table__, [values])
            (stored,) = self._select(connection, select(*_COLUMNS).where(SubmittedJobRow.id == job.id))
        return stored

    def _next_time(self, connection: Connection) -> float:
        """Return the present by the database's clock, later than any submission within the clock's resolution.

        Equal times would let the ids decide whose turn comes first.
        """
        now = leases.clock(connection)
        time = SubmittedJobRow.submitted_at
        last = connection.execute(select(func.max(time)).where(time < now + _CLOCK_SECS)).scalar_one()
        return now if last is None else max(now, math.nextafter(last, math.inf))

    @patient
    def submitted(
        self,
        states: Collection[SubmittedState] | None = None,
        owner: str | None = None,
        limit: int | None = None,
    ) -> list[SubmittedJob]:
        """List jobs, the newest first, at most `limit`. Invalid rows are skipped."""
        row = SubmittedJobRow
        conditions: list[ColumnElement[bool]] = [] if states is None else [row.state.in_(list(states))]
        conditions += [] if owner is None else [row.owner == owner]
        query = select(*_COLUMNS).where(*conditions).order_by(row.submitted_at.desc(), row.id).limit(limit)
        with self._read("list jobs") as connection:
            rows = [dict(row._mapping) for row in connection.execute(query)]
            return self._read_valid("submitted_jobs", lambda values: SubmittedJob(**values), rows)

    @patient
    def find(self, start: str) -> list[SubmittedJob]:
        """List the jobs whose id starts with `start`, at most twenty, by id."""
        query = select(*_COLUMNS).where(SubmittedJobRow.id.startswith(start, autoescape=True))
        with self._read("look for a job") as connection:
            return self._select(connection, query.order_by(SubmittedJobRow.id).limit(20))

    @patient
    def holders(self) -> list[str]:
        """List the holders of running jobs."""
        with self._read("list running jobs") as connection:
            rows = connection.execute(select(SubmittedJobRow.holder).where(SubmittedJobRow.state == "running"))
            return sorted(holder for holder in rows.scalars() if isinstance(holder, str))

    @patient
    def take(
        self,
        holder: str,
        secs: float,
        labels: Collection[str] | None = None,
        dead: Collection[str] = (),
        without: Collection[str] = (),
    ) -> SubmittedJob | None:
        """Take the next job for `secs` seconds. Concurrent calls get different jobs.

        Jobs go by priority, then age. A job with an invalid row is ended as failed, and the next one is taken.

        Args:
            labels: Classes of device that the service has; None for all.
            dead: Holders whose processes have ended. Their jobs are queued again at once.
            without: Classes of device whose jobs are left to other services.

        Returns:
            The job; None if no job waits.
        """
        row = SubmittedJobRow
        with self._write("take a job") as connection:
            own = select(row.id).where(row.state == "running", row.holder == holder)
            id = connection.execute(own).scalar_one_or_none()  # of an earlier call whose answer was lost
            if id is None:
                _shorten_holds(connection, max(secs, HOLD_SECS))
                now = leases.clock(connection)
                # No process watches for lost services: the next `take` of any service queues their jobs again.
                self._requeue(connection, or_(row.expires_at <= now, row.holder.in_(list(dead))), now)
                id = self._next_id(connection, _of_classes(labels, without), now)
                if id is None:
                    return None
                values = {
                    "state": "running",
                    "holder": holder,
                    "expires_at": now + secs,
                    "runs": row.runs + 1,
                    "message": "",
                }
                started = func.coalesce(row.started_at, now)
                connection.execute(update(row).where(row.id == id).values(**values, started_at=started))
            (job,) = self._select(connection, select(*_COLUMNS).where(row.id == id))
        return job

    @patient
    def next_secs(self, labels: Collection[str] | None = None, without: Collection[str] = ()) -> float | None:
        """Return the seconds until the next queued job may be taken, 0 for now; None if no job is queued.

        Args:
            labels, without: As of `take`.
        """
        row = SubmittedJobRow
        conditions = [row.state == "queued", *_of_classes(labels, without)]
        with self._read("look for the next job") as connection:
            moment = connection.execute(select(func.min(row.not_before)).where(*conditions)).scalar_one()
            return None if moment is None else max(float(moment) - leases.clock(connection), 0.0)

    def _next_id(self, connection: Connection, classes: Sequence[ColumnElement[bool]], now: float) -> str | None:
        """Return the id of the next job. Jobs before it with invalid rows are ended as failed."""
        row = SubmittedJobRow
        waiting = [row.state == "queued", row.not_before <= now, *classes]
        order = (row.priority.desc(), row.submitted_at, row.id)
        # Services that take at once skip each other's rows in PostgreSQL. SQLite has no row locks; there, writers
        # take turns.
        query = select(*_COLUMNS).where(*waiting).order_by(*order).limit(1).with_for_update(skip_locked=True)
        while (first := connection.execute(query).first()) is not None:
            try:
                return self._job(first).id
            except DatabaseError as error:
                ended = {"state": "failed", "ended_at": now, "message": f"{error}"[:MESSAGE_LIMIT]}
                self._notice(f"job {first.id!r:.80} cannot be run: {error}")
                connection.execute(update(row).where(row.id == first.id).values(**ended))
        return None

    def _requeue(
        self,
        connection: Connection,
        condition: ColumnElement[bool],
        now: float,
        reason: str = "the service that ran it was lost",
    ) -> None:
        """Queue lost jobs again. Cancelled jobs, and jobs that have lost `attempts` services, end instead."""
        row = SubmittedJobRow
        lost = select(row.id, row.losses, row.attempts, row.cancel).where(row.state == "running", condition)
        for id, *counts, cancel in connection.execute(lost.with_for_update(skip_locked=True)).all():
            # SQLite stores values of any type in any column.
            losses, attempts = (count if type(count) is int else 0 for count in counts)
            values: dict[str, Any] = {"state": "queued", "holder": "", "losses": losses + 1}
            if cancel:
                values |= {"state": "cancelled", "ended_at": now, "message": f"cancelled; {reason}"}
            elif losses + 1 >= attempts:
                values |= {
                    "state": "failed",
                    "ended_at": now,
                    "message": f"{reason}, as {losses} times before; see its log and the logs of the services",
                }
            else:
                values["message"] = f"{reason} (loss {losses + 1}; {attempts} end the job)"
            connection.execute(update(row).where(row.id == id).values(**values))

    @patient
    def beat(
        self,
        job: SubmittedJob,
        secs: float,
        spent_secs: float,
        progress: Mapping[str, Any] | None = None,
        log: Sequence[LogPart] = (),
    ) -> Hold:
        """Extend the hold of a job to `secs` from now, and store its progress and log.

        Args:
            job: The job as `take` returned it.
            log: New parts of the log; a part that is stored already is ignored.

        Returns:
            "extended", "cancel" if somebody asked to end the job, or "lost" if another run has the job.
        """
        row = SubmittedJobRow
        with self._write("hold a job") as connection:
            values: dict[str, Any] = {"expires_at": leases.clock(connection) + secs, "spent_secs": spent_secs}
            if progress is not None:
                values["progress"] = canonical_json(dict(progress))
            updated = connection.execute(
                # The condition is part of the update, so a run that has lost its job changes nothing.
                update(row).where(*_of_holder(job)).values(**values).returning(row.cancel)
            ).first()
            if updated is None:
                return "lost"
            self._store_log(connection, job, log)
        return "cancel" if updated[0] else "extended"

    def _store_log(self, connection: Connection, job: SubmittedJob, log: Sequence[LogPart]) -> None:
        parts = [{"job": job.id, "run": run, "number": number, "text": text} for run, number, text in log]
        add_missing(connection, JobLogRow.__table__, parts)

    @patient
    def finish(
        self,
        job: SubmittedJob,
        state: Literal["done", "failed", "cancelled"],
        message: str,
        exit_code: int,
        spent_secs: float,
        result: Mapping[str, Any],
        log: Sequence[LogPart] = (),
    ) -> bool:
        """End a job. Returns False and stores nothing if another run has the job."""
        row = SubmittedJobRow
        with self._write("end a job") as connection:
            values = {
                "state": state,
                "message": message,
                "exit_code": exit_code,
                "spent_secs": spent_secs,
                "result": canonical_json(dict(result)),
                "ended_at": leases.clock(connection),
            }
            if connection.execute(update(row).where(*_of_holder(job)).values(**values)).rowcount == 1:
                self._store_log(connection, job, log)
                return True
            ended = select(row.id).where(row.id == job.id, row.holder == job.holder, row.state == state)
            return connection.execute(ended).first() is not None  # by an earlier call whose answer was lost

    @patient
    def put_back(
        self, job: SubmittedJob, message: str, after_secs: float, spent_secs: float, log: Sequence[LogPart] = ()
    ) -> bool:
        """Queue a job again, to be taken after `after_secs`. Returns False if another run has the job."""
        row = SubmittedJobRow
        with self._write("put a job back") as connection:
            not_before = leases.clock(connection) + after_secs
            values = {"state": "queued", "holder": "", "not_before": not_before, "message": message}
            changed = update(row).where(*_of_holder(job)).values(**values, spent_secs=spent_secs)
            if connection.execute(changed).rowcount != 1:
                return False
            self._store_log(connection, job, log)
        return True

    @patient
    def lose(
        self, job: SubmittedJob, reason: str, spent_secs: float, log: Sequence[LogPart] = ()
    ) -> SubmittedState | None:
        """Treat a job as lost with its service, with a reason. Returns its new state; None if another run has the job."""
        row = SubmittedJobRow
        with self._write("lose a job") as connection:
            changed = update(row).where(*_of_holder(job)).values(spent_secs=spent_secs)
            if connection.execute(changed).rowcount != 1:
                return None
            self._store_log(connection, job, log)
            self._requeue(connection, and_(*_of_holder(job)), leases.clock(connection), reason)
            state = connection.execute(select(row.state).where(row.id == job.id)).scalar_one()
        return cast(SubmittedState, state)

    @patient
    def cancel(self, id: str) -> SubmittedState | None:
        """End a queued job, or ask the service of a running one to end it. Returns the new state; None for an unknown id."""
        row = SubmittedJobRow
        with self._write("cancel a job") as connection:
            ended = {"state": "cancelled", "message": "cancelled", "ended_at": leases.clock(connection)}
            connection.execute(update(row).where(row.id == id, row.state == "queued").values(**ended))
            connection.execute(update(row).where(row.id == id, row.state == "running").values(cancel=True))
            state = connection.execute(select(row.state).where(row.id == id)).scalar_one_or_none()
        return cast(SubmittedState | None, state)

    @patient
    def retry(self, id: str) -> SubmittedState | None:
        """Queue an ended job again, with its time and losses reset. Returns the state before; None for an unknown id."""
        row = SubmittedJobRow
        reset = {
            "state": "queued",
            "holder": "",
            "ended_at": None,
            "not_before": 0.0,
            "losses": 0,
            "cancel": False,
            "spent_secs": 0.0,
            "message": "",
            "exit_code": None,
        }
        with self._write("retry a job") as connection:
            query = select(row.state).where(row.id == id).with_for_update()
            before = connection.execute(query).scalar_one_or_none()
            if before in ("done", "failed", "cancelled"):
                connection.execute(update(row).where(row.id == id).values(**reset))
        return cast(SubmittedState | None, before)

    @patient
    def log(self, id: str, after: tuple[int, int] = (0, -1)) -> list[LogPart]:
        """Return the parts of a job's log that come after (run, number), in order."""
        row = JobLogRow
        later = (row.run > after[0]) | ((row.run == after[0]) & (row.number > after[1]))
        query = select(row.run, row.number, row.text).where(row.job == id, later).order_by(row.run, row.number)
        with self._read("read a log") as connection:
            return [(int(run), int(number), str(text)) for run, number, text in connection.execute(query)]


def _of_classes(labels: Collection[str] | None, without: Collection[str]) -> list[ColumnElement[bool]]:
    """Return the conditions that a job is for one of these classes of device, and for none of the others."""
    label = SubmittedJobRow.label
    return [*([] if labels is None else [label.in_(list(labels))]), *([label.not_in(list(without))] if without else [])]


def _of_holder(job: SubmittedJob) -> tuple[ColumnElement[bool], ...]:
    row = SubmittedJobRow
    return (row.id == job.id, row.holder == job.holder, row.state == "running")


def _shorten_holds(connection: Connection, secs: float) -> None:
    """Limit holds of jobs to `secs` from now, and delays to MAX_DELAY_SECS.

    Later moments come from altered rows or from a clock that was set back; without a limit such a job would never run. A service
    that is alive extends its hold every few seconds, which restores a longer time.
    """
    row = SubmittedJobRow
    now = leases.clock(connection)
    for state, moment, longest in (("running", row.expires_at, secs), ("queued", row.not_before, MAX_DELAY_SECS)):
        late = leases.later_than(moment, now + longest)
        connection.execute(update(row).where(row.state == state, late).values({moment: now + longest}))


def open_queue(
    url: str | None,
    *,
    create: bool = False,
    read_only: bool = False,
    wait_secs: float | None = None,
    notice: Callable[[str], None] = warn,
) -> JobQueue:
    """Open the jobs of a database. `open_store` describes the arguments.

    Raises:
        DatabaseError: As `open_store`, and for a database in memory, which no service can reach.
    """
    if url == _MEMORY:
        raise DatabaseError(
            "expected a database that services can reach, got memory://; give sqlite:///FILE or postgresql://"
        )
    return JobQueue(
        default_url() if url is None else url,
        create=create,
        read_only=read_only,
        make_folder=url is None,
        wait_secs=wait_secs,
        notice=notice,
    )
