"""`JobQueue`: the submitted jobs of a database, which services on any number of machines take and run.

A service holds a job for a while by the database's clock, and says regularly that it is alive. One that does not loses the
job to another, and then nothing that it says about the job counts. So whoever is killed, each job is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, cast

from sqlalchemy import Connection, Select, and_, func, or_, select, update
from sqlalchemy.sql import ColumnElement

from relax_tune.database.engine import default_url, patient
from relax_tune.database.jobs.submitted import SubmittedJob, SubmittedState
from relax_tune.database.models import JobLogRow, SubmittedJobRow
from relax_tune.database.records import canonical_json
from relax_tune.database.sql import leases
from relax_tune.database.sql.layout import add_missing
from relax_tune.database.sql_store import SqlStore
from relax_tune.errors import DatabaseError

Hold = Literal["held", "cancel", "lost"]
LogPart = tuple[int, int, str]
"""Run, number within the run, text."""
_COLUMNS = tuple(getattr(SubmittedJobRow, field.name) for field in fields(SubmittedJob))
_MEMORY = "memory://"


class JobQueue(SqlStore):
    """A store of records whose database also has submitted jobs.

    A run names itself by a holder, unique among all runs. Every method may be called again after a lost connection.
    """

    def _job(self, row: Any) -> SubmittedJob:
        return self._made(lambda values: SubmittedJob(**values), dict(row._mapping))

    def _found(self, connection: Connection, query: Select[Any]) -> list[SubmittedJob]:
        return [self._job(row) for row in connection.execute(query)]

    @patient
    def submit(self, job: SubmittedJob) -> SubmittedJob:
        """Queue a job, by its id once; return it as stored."""
        with self._write("submit a job") as connection:
            values = {field.name: getattr(job, field.name) for field in fields(job)}
            values["submitted_at"] = leases.clock(connection)
            add_missing(connection, SubmittedJobRow.__table__, [values])
            (stored,) = self._found(connection, select(*_COLUMNS).where(SubmittedJobRow.id == job.id))
        return stored

    @patient
    def submitted(
        self,
        states: Collection[SubmittedState] | None = None,
        owner: str | None = None,
        limit: int | None = None,
    ) -> list[SubmittedJob]:
        """List jobs, the newest first. limit: the most to return"""
        row = SubmittedJobRow
        conditions: list[ColumnElement[bool]] = [] if states is None else [row.state.in_(list(states))]
        conditions += [] if owner is None else [row.owner == owner]
        query = select(*_COLUMNS).where(*conditions).order_by(row.submitted_at.desc(), row.id).limit(limit)
        with self._read("list jobs") as connection:
            return self._found(connection, query)

    @patient
    def find(self, start: str) -> list[SubmittedJob]:
        """List the jobs whose id starts with `start`, at most twenty, by id."""
        query = select(*_COLUMNS).where(SubmittedJobRow.id.startswith(start, autoescape=True))
        with self._read("look for a job") as connection:
            return self._found(connection, query.order_by(SubmittedJobRow.id).limit(20))

    @patient
    def holders(self) -> list[str]:
        """List the holders of running jobs."""
        with self._read("list running jobs") as connection:
            found = connection.execute(select(SubmittedJobRow.holder).where(SubmittedJobRow.state == "running"))
            return sorted(found.scalars())

    @patient
    def take(
        self, holder: str, secs: float, labels: Collection[str] | None = None, dead: Collection[str] = ()
    ) -> SubmittedJob | None:
        """Take the job whose turn it is, for `secs`; None when none waits. Of concurrent calls, each gets another job.

        labels: classes of device of the service, None for all. dead: holders that have ended, whose jobs are freed at once
        """
        row = SubmittedJobRow
        with self._write("take a job") as connection:
            now = leases.clock(connection)
            held = select(row.id).where(row.state == "running", row.holder == holder)
            id = connection.execute(held).scalar_one_or_none()  # taken by an earlier call whose answer was lost
            if id is None:
                self._free(connection, or_(row.expires_at <= now, row.holder.in_(list(dead))), now)
                waiting = [row.state == "queued", row.not_before <= now]
                waiting += [] if labels is None else [row.label.in_(list(labels))]
                turn = select(row.id).where(*waiting).order_by(row.priority.desc(), row.submitted_at, row.id).limit(1)
                id = connection.execute(turn.with_for_update(skip_locked=True)).scalar_one_or_none()
                if id is None:
                    return None
                taken = {
                    "state": "running",
                    "holder": holder,
                    "expires_at": now + secs,
                    "runs": row.runs + 1,
                    "message": "",
                }
                started = func.coalesce(row.started_at, now)
                connection.execute(update(row).where(row.id == id).values(**taken, started_at=started))
            (job,) = self._found(connection, select(*_COLUMNS).where(row.id == id))
        return job

    def _free(
        self,
        connection: Connection,
        condition: ColumnElement[bool],
        now: float,
        how: str = "the service that ran it was lost",
    ) -> None:
        """Queue lost jobs again; end the cancelled ones among them, and the ones lost too often."""
        row = SubmittedJobRow
        lost = select(row.id, row.losses, row.attempts, row.cancel).where(row.state == "running", condition)
        for id, losses, attempts, cancel in connection.execute(lost.with_for_update(skip_locked=True)).all():
            values: dict[str, Any] = {"state": "queued", "holder": "", "losses": losses + 1}
            if cancel:
                values |= {"state": "cancelled", "ended_at": now, "message": f"cancelled; {how}"}
            elif losses + 1 >= attempts:
                values |= {
                    "state": "failed",
                    "ended_at": now,
                    "message": f"{how}, as {losses} times before; see its log and those of the services",
                }
            else:
                values["message"] = f"{how} (loss {losses + 1}; {attempts} end the job)"
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
        """Hold a job for `secs` from now and store its state and log; say whether it is still the holder's, or to be ended.

        job: as `take` returned it; log: parts that are stored once, however often they are given
        """
        row = SubmittedJobRow
        with self._write("hold a job") as connection:
            values: dict[str, Any] = {"expires_at": leases.clock(connection) + secs, "spent_secs": spent_secs}
            if progress is not None:
                values["progress"] = canonical_json(dict(progress))
            held = update(row).where(*_held(job)).values(**values).returning(row.cancel)
            found = connection.execute(held).first()
            if found is None:
                return "lost"
            self._keep_log(connection, job, log)
        return "cancel" if found[0] else "held"

    def _keep_log(self, connection: Connection, job: SubmittedJob, log: Sequence[LogPart]) -> None:
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
        """End a job. Returns False, and stores nothing, if the holder had lost it."""
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
            if connection.execute(update(row).where(*_held(job)).values(**values)).rowcount == 1:
                self._keep_log(connection, job, log)
                return True
            before = select(row.id).where(row.id == job.id, row.holder == job.holder, row.state == state)
            return connection.execute(before).first() is not None  # by an earlier call whose answer was lost

    @patient
    def put_back(
        self, job: SubmittedJob, message: str, after_secs: float, spent_secs: float, log: Sequence[LogPart] = ()
    ) -> bool:
        """Queue a held job again, to be taken after a while. Returns False if the holder had lost it."""
        row = SubmittedJobRow
        with self._write("put a job back") as connection:
            not_before = leases.clock(connection) + after_secs
            values = {"state": "queued", "holder": "", "not_before": not_before, "message": message}
            changed = update(row).where(*_held(job)).values(**values, spent_secs=spent_secs)
            if connection.execute(changed).rowcount != 1:
                return False
            self._keep_log(connection, job, log)
        return True

    @patient
    def lose(
        self, job: SubmittedJob, how: str, spent_secs: float, log: Sequence[LogPart] = ()
    ) -> SubmittedState | None:
        """Count a held job as lost, as if its service were, and say how. Returns its state then; None if the holder had lost it."""
        row = SubmittedJobRow
        with self._write("lose a job") as connection:
            changed = update(row).where(*_held(job)).values(spent_secs=spent_secs)
            if connection.execute(changed).rowcount != 1:
                return None
            self._keep_log(connection, job, log)
            self._free(connection, and_(*_held(job)), leases.clock(connection), how)
            state = connection.execute(select(row.state).where(row.id == job.id)).scalar_one()
        return cast(SubmittedState, state)

    @patient
    def cancel(self, id: str) -> SubmittedState | None:
        """End a queued job, and ask the service of a running one to end it. Returns the state now; None for an unknown id."""
        row = SubmittedJobRow
        with self._write("cancel a job") as connection:
            ended = {"state": "cancelled", "message": "cancelled", "ended_at": leases.clock(connection)}
            connection.execute(update(row).where(row.id == id, row.state == "queued").values(**ended))
            connection.execute(update(row).where(row.id == id, row.state == "running").values(cancel=True))
            found = connection.execute(select(row.state).where(row.id == id)).scalar_one_or_none()
        return cast(SubmittedState | None, found)

    @patient
    def retry(self, id: str) -> SubmittedState | None:
        """Queue an ended job again, with its time and attempts anew. Returns the state before; None for an unknown id."""
        row = SubmittedJobRow
        anew = {
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
                connection.execute(update(row).where(row.id == id).values(**anew))
        return cast(SubmittedState | None, before)

    @patient
    def log(self, id: str, after: tuple[int, int] = (0, -1)) -> list[LogPart]:
        """Return the parts of a job's log that come after (run, number), in order."""
        row = JobLogRow
        later = (row.run > after[0]) | ((row.run == after[0]) & (row.number > after[1]))
        query = select(row.run, row.number, row.text).where(row.job == id, later).order_by(row.run, row.number)
        with self._read("read a log") as connection:
            return [(int(run), int(number), str(text)) for run, number, text in connection.execute(query)]


def _held(job: SubmittedJob) -> tuple[ColumnElement[bool], ...]:
    row = SubmittedJobRow
    return (row.id == job.id, row.holder == job.holder, row.state == "running")


def open_queue(
    url: str | None,
    *,
    create: bool = False,
    read_only: bool = False,
    wait_secs: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> JobQueue:
    """Open the jobs of a database; None is this user's on this machine. Arguments as of `open_store`.

    Raises:
        DatabaseError: as `open_store`, and for a database in memory, which no service can reach.
    """
    if url == _MEMORY:
        raise DatabaseError(
            "wanted a database that services can reach, found memory://; give sqlite:///FILE or postgresql://"
        )
    return JobQueue(
        default_url() if url is None else url,
        create=create,
        read_only=read_only,
        make_folder=url is None,
        wait_secs=wait_secs,
        notice=notice,
    )
