"""`SqlStore`: the `Store` contract over SQLite and PostgreSQL, with one code for both.

The store owns transactions, `sql` owns statements, and `rows` converts. Writes are bulk Core statements. Rows are inserted in the
order of their keys, so that two PostgreSQL writers never deadlock.

Tests: `tests/database/test_store_contract.py`, `tests/database/test_opening.py`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, select, text, update

from relax_tune.database import rows, schema, sqlite_file
from relax_tune.database.counts import TargetStats, TaskStats, UnitStats
from relax_tune.database.engine import (
    asks_read_only,
    explained,
    make_engine,
    parse_url,
    patient,
    reader,
    shown,
    sqlite_path,
    typed_rows,
    use_wal,
    wait_for_server,
    weaknesses,
    writer,
)
from relax_tune.database.models import (
    AboutRow,
    Base,
    EnvironmentRow,
    HistogramRow,
    JobRow,
    LeaseRow,
    TargetRow,
    WorkloadRow,
)
from relax_tune.database.records import (
    Environment,
    JobRecord,
    JobState,
    Lease,
    Measurement,
    PlanRecord,
    Regime,
    Selection,
    ShapeHistogram,
    Status,
    Target,
    VariantKind,
    Workload,
    canonical_json,
    symbols_text,
)
from relax_tune.database.reference import Reference
from relax_tune.database.roles import role_statements
from relax_tune.database.rules import (
    RefusedRecord,
    Spent,
    choose_plan,
    chunks,
    rank,
    stats_of,
    verify_batch,
    verify_same_subjects,
)
from relax_tune.database.sql import leases, measurement_changes, measurements, plans, tallies
from relax_tune.database.sql.integrity import find_problems
from relax_tune.database.sql.statements import RecordFilter, add_missing, insert, read_valid
from relax_tune.errors import DatabaseError, TryAgainLater, warn
from relax_tune.printable import of_printable

T = TypeVar("T")


class SqlStore:
    """A `relax_tune.database.store.Store` over SQLite or PostgreSQL."""

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        read_only: bool = False,
        make_folder: bool = False,
        wait_secs: float | None = None,
        notice: Callable[[str], None] = warn,
    ) -> None:
        notice = of_printable(notice)  # messages quote rows, which are untrusted
        parsed = parse_url(url)
        self.where = shown(parsed)
        self.read_only = read_only or asks_read_only(parsed)
        self._path = sqlite_path(parsed)
        create = create and not self.read_only
        created = self._path is not None and sqlite_file.prepare(
            self._path, self.where, write=not self.read_only, create=create, make_folder=make_folder
        )
        self._identity = None if self._path is None else sqlite_file.identity_of(self._path)
        self._engine = make_engine(parsed, read_only=self.read_only)
        self.away_secs = wait_secs
        self.invalid_rows = Counter[str]()
        """Number of invalid rows that reads skipped, by table."""
        self._notice = notice
        for weak in weaknesses(parsed):
            notice(weak)
        if created and self._path is not None and (like := sqlite_file.similar_databases(self._path)):
            notice(f"{self.where} is new; if you meant {' or '.join(map(str, like))}, correct the name")
        try:
            wait_for_server(lambda: self._open(create), wait_secs or 0.0, notice)
        except BaseException:
            self._engine.dispose()
            if created and self._path is not None:
                sqlite_file.remove_empty(self._path)
            raise

    def _open(self, create: bool) -> None:
        with explained(self.where, "open it", self._path):
            with reader(self._engine).begin() as connection:
                empty = schema.current(connection, self.where) is None
            if empty and create:
                with writer(self._engine).begin() as connection:
                    schema.migrate(connection, self.where)
            if not self.read_only and (create or not empty):
                use_wal(self._engine)
            with reader(self._engine).begin() as connection:
                self._verify_schema(connection)
                postgres = connection.dialect.name == "postgresql"
                if postgres and not self.read_only and connection.scalar(text("SHOW transaction_read_only")) == "on":
                    raise DatabaseError(
                        f"{self.where}: expected to write it, got the server read-only (a standby?); give the primary server"
                    )

    def _verify_schema(self, connection: Connection) -> None:
        schema.verify(connection, self.where, write=not self.read_only)
        self._version = schema.current(connection, self.where)
        id = connection.execute(select(AboutRow.value).where(AboutRow.name == "id")).scalar_one_or_none()
        if not isinstance(id, str) or not id:
            raise DatabaseError(
                f"{self.where}: the row `id` of about is missing: the database was altered; restore a backup"
            )
        self.id = id

    def create_roles(self) -> None:
        """Create the roles of `database.roles` and their rights on the server. The user of this store owns the tables.

        Raises:
            DatabaseError: The database is no server's, or the user may not do this.
        """
        if self._path is not None:
            raise DatabaseError(
                f"{self.where}: expected a database on a PostgreSQL server, got a file, which has no roles"
            )
        with self._write("create the roles") as connection:
            for statement in role_statements():
                connection.exec_driver_sql(statement)

    # Transactions

    @contextlib.contextmanager
    def _explaining_upgrade(self) -> Iterator[None]:
        """Replace an error by a clear one if another process has upgraded the database since it was opened."""
        try:
            yield
        except RefusedRecord:
            raise
        except DatabaseError as error:
            if isinstance(error, TryAgainLater) or not self._is_upgraded():
                raise
            raise DatabaseError(
                f"{self.where}: another process upgraded the database from schema {self._version} since it was opened; run the same "
                "command again"
            ) from None

    def _is_upgraded(self) -> bool:
        with contextlib.suppress(Exception), reader(self._engine).begin() as connection:
            return schema.current(connection, self.where) != self._version
        return False

    def _verify_same(self) -> None:
        """Check that the file is still the one that was opened, since writes to a deleted one are lost."""
        if self._path is not None:
            sqlite_file.verify_same(self._path, self._identity, self.where)

    @contextlib.contextmanager
    def _read(self, doing: str) -> Iterator[Connection]:
        self._verify_same()
        with (
            self._explaining_upgrade(),
            explained(self.where, doing, self._path),
            reader(self._engine).begin() as connection,
            typed_rows(self.where, doing),
        ):
            yield connection

    @contextlib.contextmanager
    def _write(self, doing: str) -> Iterator[Connection]:
        if self.read_only:
            raise DatabaseError(f"{self.where}: could not {doing}: it was opened read-only; open it for writing")
        self._verify_same()
        with (
            self._explaining_upgrade(),
            explained(self.where, doing, self._path),
            writer(self._engine).begin() as connection,
        ):
            yield connection
            # Again before the commit, which a file that was deleted meanwhile would lose.
            self._verify_same()

    def _one(self, model: type[Base], build: Callable[[rows.Row], T], **keys: Any) -> T | None:
        with self._read(f"read {model.__tablename__}") as connection:
            row = connection.execute(select(*model.columns()).filter_by(**keys)).mappings().first()
        return None if row is None else self._build(build, row)

    def _build(self, build: Callable[..., T], *row: Any) -> T:
        """Build a record of a stored row. An invalid row is an error that names the database."""
        try:
            return build(*row)
        except DatabaseError as error:
            raise DatabaseError(f"{self.where}: {error}; see `relax-tune db check`, restore a backup") from None

    def _all(self, model: type[Base], build: Callable[[rows.Row], T], *conditions: Any) -> list[T]:
        with self._read(f"read {model.__tablename__}") as connection:
            result = connection.execute(select(*model.columns()).where(*conditions)).mappings()
            return self._read_valid(model.__tablename__, build, result)

    def _read_valid(self, table: str, build: Callable[..., T], result: Iterable[Any]) -> list[T]:
        """Build records of stored rows: a `RowReader` that skips and counts invalid rows, with a notice of the first of a table."""
        return read_valid(table, build, result, self._count_invalid)

    def _count_invalid(self, table: str, error: Exception) -> None:
        if not self.invalid_rows[table]:
            self._notice(f"{self.where}: skipped an invalid row: {error}; see `relax-tune db check`")
        self.invalid_rows[table] += 1

    def _read_strictly(self, _: str, build: Callable[[Any], Any], result: Iterable[Any]) -> list[Any]:
        """Build records of stored rows: a `RowReader` that raises for an invalid row."""
        return [self._build(build, row) for row in result]

    # Targets, environments, workloads

    @patient
    def add_target(self, target: Target) -> str:
        with self._write("add a target") as connection:
            add_missing(connection, TargetRow.__table__, [rows.target_values(target)])
            for column in (TargetRow.limits, TargetRow.reference):
                unknown = update(TargetRow).where((TargetRow.key == target.key) & (column == "{}"))
                connection.execute(unknown.values({column: rows.target_values(target)[column.key]}))
        return target.key

    @patient
    def set_reference(self, target: str, reference: Reference) -> None:
        with self._write("set reference times") as connection:
            values = {"reference": canonical_json(dict(reference))}
            connection.execute(update(TargetRow).where(TargetRow.key == target).values(values))

    @patient
    def add_environment(self, environment: Environment) -> str:
        with self._write("add an environment") as connection:
            add_missing(connection, EnvironmentRow.__table__, [rows.environment_values(environment)])
        return environment.key

    @patient
    def add_workload(self, workload: Workload) -> str:
        with self._write("add a workload") as connection:
            add_missing(connection, WorkloadRow.__table__, [rows.workload_values(workload)])
        return workload.key

    @patient
    def target(self, key: str) -> Target | None:
        return self._one(TargetRow, rows.target_of, key=key)

    @patient
    def targets(self) -> list[Target]:
        return sorted(self._all(TargetRow, rows.target_of), key=lambda target: target.key)

    @patient
    def environment(self, key: str) -> Environment | None:
        return self._one(EnvironmentRow, rows.environment_of, key=key)

    @patient
    def environments(self) -> list[Environment]:
        return sorted(self._all(EnvironmentRow, rows.environment_of), key=lambda environment: environment.key)

    @patient
    def workload(self, key: str) -> Workload | None:
        return self._one(WorkloadRow, rows.workload_of, key=key)

    @patient
    def workloads(self, target: str | None) -> list[Workload]:
        if target is None:
            return sorted(self._all(WorkloadRow, rows.workload_of), key=lambda workload: workload.key)
        return self.known_workloads(self.measured(target))

    @patient
    def measured(self, target: str, since: float | None = None) -> list[str]:
        with self._read("read the measured workloads") as connection:
            return sorted(tallies.measured_workloads(connection, target, since))

    @patient
    def known_workloads(self, keys: Iterable[str]) -> list[Workload]:
        workloads: list[Workload] = []
        for chunk in chunks(sorted(set(keys))):
            workloads += self._all(WorkloadRow, rows.workload_of, WorkloadRow.key.in_(chunk))
        return sorted(workloads, key=lambda workload: workload.key)

    # Measurements

    @patient
    def add_measurements(self, batch: Iterable[Measurement]) -> int:
        new = verify_batch(batch)
        if not new:
            return 0
        with self._write("add measurements") as connection:
            self._verify_known(connection, TargetRow, {m.target for m in new.values()})
            self._verify_known(connection, WorkloadRow, {m.workload for m in new.values()})
            self._verify_known(connection, EnvironmentRow, {m.environment for m in new.values() if m.environment})
            added = measurement_changes.add_measurements(connection, new)
            # Inside the transaction, so that an error takes back the whole batch.
            if added < len(new):
                verify_same_subjects(new, measurements.select_subjects(connection, list(new)), self.where)
        return added

    def _verify_known(self, connection: Connection, model: Any, keys: set[str]) -> None:
        for chunk in chunks(sorted(keys)):
            known = set(connection.execute(select(model.key).where(model.key.in_(chunk))).scalars())
            for key in chunk:
                if key not in known:
                    raise RefusedRecord(
                        f"{self.where}: expected measurements whose {model.__tablename__} were added before, got the unknown "
                        f"key {key!r}; add it first"
                    )

    @patient
    def query(
        self,
        target: str,
        workload: str | None = None,
        *,
        status: Status | None = None,
        kinds: Sequence[VariantKind] | None = None,
        symbols: Mapping[str, int] | None = None,
        regime: Regime | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> list[Measurement]:
        point = None if symbols is None else symbols_text(symbols)
        filter = RecordFilter(
            target, workload, point, status, None if kinds is None else tuple(kinds), regime, since=since
        )
        with self._read("read measurements") as connection:
            if limit is None:
                return sorted(
                    measurements.select_measurements(connection, filter, self._read_valid), key=lambda m: m.id
                )
            ids = measurements.select_ids(connection, filter, self._read_valid)
            return self._by_ids(connection, sorted(ids)[:limit])  # sorted in Python: engines order texts differently

    def _by_ids(self, connection: Connection, ids: Sequence[str]) -> list[Measurement]:
        records: list[Measurement] = []
        for chunk in chunks(ids):
            records += measurements.select_by_ids(connection, chunk, self._read_valid)
        return sorted(records, key=lambda m: m.id)

    @patient
    def measurements(self, ids: Iterable[str]) -> list[Measurement]:
        with self._read("read measurements") as connection:
            return self._by_ids(connection, sorted(set(ids)))

    @patient
    def count(
        self,
        target: str,
        workload: str | None = None,
        status: Status | None = None,
        regime: Regime | None = None,
    ) -> int:
        with self._read("count measurements") as connection:
            return tallies.count_measurements(connection, RecordFilter(target, workload, status=status, regime=regime))

    def best(
        self, workload: str, target: str, symbols: Mapping[str, int], regime: Regime = "warm"
    ) -> Measurement | None:
        return next(iter(self.top(workload, target, symbols, 1, regime)), None)

    @patient
    def top(
        self, workload: str, target: str, symbols: Mapping[str, int], n: int, regime: Regime = "warm"
    ) -> list[Measurement]:
        filter = RecordFilter(target, workload, symbols_text(symbols), regime=regime, winners=True)
        with self._read("rank measurements") as connection:
            ranking = rank(measurements.select_medians(connection, filter, self._read_valid), n)
            by_id = {m.id: m for m in self._by_ids(connection, ranking)}
        return [by_id[id] for id in ranking if id in by_id]

    @patient
    def stats(self, target: str) -> TargetStats | None:
        with self._read("read statistics") as connection:
            row = connection.execute(select(*TargetRow.columns()).filter_by(key=target)).mappings().first()
            if row is None:
                return None
            workloads, counts = self._build(tallies.count_by_result, connection, target)
        return stats_of(self._build(rows.target_of, row), workloads, counts)

    @patient
    def units(self, target: str) -> list[UnitStats]:
        with self._read("read units") as connection:
            return sorted(
                self._build(tallies.count_by_unit, connection, target), key=lambda u: (u.worker, u.host, u.unit)
            )

    @patient
    def tasks(self, target: str, jobs: Collection[str] | None = None) -> list[TaskStats]:
        with self._read("read tasks") as connection:
            counts = self._build(tallies.count_by_task, connection, target, jobs)
            return sorted(counts, key=lambda t: (-t.last, t.workload))

    # Plans

    @patient
    def put_plans(self, target: str, entries: Mapping[str, str]) -> list[PlanRecord]:
        firsts = [PlanRecord(workload, target, 1, entries[workload]) for workload in sorted(entries)]
        with self._write("put plans") as connection:
            # Versions follow from the stored ones, so no other writer may come between reading and writing them.
            plans.lock_plans(connection)
            self._verify_known(connection, TargetRow, {target})
            self._verify_known(connection, WorkloadRow, set(entries))
            return plans.put_plans(connection, firsts, self._read_strictly)

    @patient
    def add_plans(self, batch: Iterable[PlanRecord]) -> int:
        records = sorted(batch, key=lambda plan: (plan.workload, plan.target, plan.origin, plan.version))
        with self._write("add plans") as connection:
            plans.lock_plans(connection)
            self._verify_known(connection, TargetRow, {plan.target for plan in records})
            self._verify_known(connection, WorkloadRow, {plan.workload for plan in records})
            return plans.add_plans(connection, records, self._read_valid)

    @patient
    def plan(self, workload: str, target: str, version: int | None = None) -> PlanRecord | None:
        with self._read("read a plan") as connection:
            return choose_plan(plans.select_plans(connection, target, workload, self._read_strictly), version)

    @patient
    def plans(self, target: str) -> list[PlanRecord]:
        with self._read("read plans") as connection:
            records = plans.select_plans(connection, target, None, self._read_valid)
        return sorted(records, key=lambda plan: (plan.workload, plan.origin, plan.version))

    # Leases

    @patient
    def acquire_lease(self, workload: str, target: str, holder: str, *, secs: float) -> Lease | None:
        with self._write("acquire a lease") as connection:
            self._verify_known(connection, TargetRow, {target})
            self._verify_known(connection, WorkloadRow, {workload})
            return leases.acquire(connection, insert(connection, LeaseRow.__table__), (workload, target), holder, secs)

    @patient
    def renew_lease(self, lease: Lease, *, secs: float) -> Lease | None:
        with self._write("renew a lease") as connection:
            return leases.renew(connection, lease, secs)

    @patient
    def release_lease(self, lease: Lease) -> bool:
        with self._write("release a lease") as connection:
            return leases.release(connection, lease)

    @patient
    def claim_trials(
        self, lease: Lease, requested: int, budget: int, spent: Mapping[str, Spent]
    ) -> tuple[Lease, int] | None:
        with self._write("claim trials") as connection:
            return leases.claim(connection, lease, requested, budget, spent)

    @patient
    def settle_trials(self, lease: Lease, trials: int) -> Lease:
        with self._write("settle trials") as connection:
            return leases.settle(connection, lease, trials)

    @patient
    def lease(self, workload: str, target: str) -> Lease | None:
        records = self._all(LeaseRow, rows.lease_of, LeaseRow.workload == workload, LeaseRow.target == target)
        return records[0] if records else None

    # Jobs and histograms

    @patient
    def put_job(self, job: JobRecord) -> None:
        replaced = {"settings": job.settings, "state": job.state}
        with self._write("put a job") as connection:
            statement = insert(connection, JobRow.__table__).values(rows.job_values(job))
            connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=replaced))

    @patient
    def job(self, id: str) -> JobRecord | None:
        return self._one(JobRow, rows.job_of, id=id)

    @patient
    def jobs(self, state: JobState | None = None) -> list[JobRecord]:
        records = self._all(JobRow, rows.job_of, *([] if state is None else [JobRow.state == state]))
        return sorted(records, key=lambda job: job.id)

    @patient
    def put_histogram(self, histogram: ShapeHistogram) -> None:
        with self._write("put a histogram") as connection:
            statement = insert(connection, HistogramRow.__table__).values(rows.histogram_values(histogram))
            replaced = {"counts": histogram.counts}
            connection.execute(statement.on_conflict_do_update(index_elements=["task", "symbol"], set_=replaced))

    @patient
    def histograms(self, task: str | None) -> list[ShapeHistogram]:
        records = self._all(HistogramRow, rows.histogram_of, *([] if task is None else [HistogramRow.task == task]))
        return sorted(records, key=lambda histogram: (histogram.task, histogram.symbol))

    # Maintenance

    def prune(self, target: str, selection: Selection, *, dry_run: bool = False) -> int:
        if dry_run:
            with self._read("count what to prune") as connection:
                return measurement_changes.prune_measurements(connection, target, selection, True)
        with self._write("prune") as connection:
            return measurement_changes.prune_measurements(connection, target, selection, False)

    def check(self) -> list[str]:
        with self._read("check it") as connection:
            return sorted(find_problems(connection))

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
