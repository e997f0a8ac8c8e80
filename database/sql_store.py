"""`SqlStore`: the `Store` contract over SQLite and PostgreSQL, one code for both.

The store owns transactions, `models` owns queries, `rows` owns conversion. Writes go through bulk Core statements; rows
are inserted in the order of their keys, so that two PostgreSQL writers never deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, delete, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from relax_tune.database import rows, schema, sql_leases, sqlite_file
from relax_tune.database.engine import (
    asks_read_only,
    explained,
    make_engine,
    parse_url,
    patient,
    reader,
    shown,
    sqlite_path,
    use_wal,
    wait_for_server,
    writer,
)
from relax_tune.database.integrity import find_problems
from relax_tune.database.models import (
    Base,
    EnvironmentRow,
    HistogramRow,
    JobRow,
    LeaseRow,
    MeasurementRow,
    PlanRow,
    TargetRow,
    VariantRow,
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
    TargetStats,
    UnitStats,
    VariantKind,
    VariantRecord,
    Workload,
    symbols_text,
)
from relax_tune.database.rules import RefusedRecord, Spent, rank, verify_batch, verify_same_subjects
from relax_tune.errors import DatabaseError

T = TypeVar("T")
_CHUNK = 500


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
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        parsed = parse_url(url)
        self.where = shown(parsed)
        self.read_only = read_only or asks_read_only(parsed)
        self._path = sqlite_path(parsed)
        create = create and not self.read_only
        made = self._path is not None and sqlite_file.prepare(
            self._path, self.where, write=not self.read_only, create=create, make_folder=make_folder
        )
        self._identity = None if self._path is None else sqlite_file.identity_of(self._path)
        self._engine = make_engine(parsed, read_only=self.read_only)
        self.away_secs = wait_secs
        try:
            wait_for_server(lambda: self._open(create), wait_secs or 0.0, notice)
        except BaseException:
            self._engine.dispose()
            if made and self._path is not None:
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
                schema.verify(connection, self.where)
                postgres = connection.dialect.name == "postgresql"
                if postgres and not self.read_only and connection.scalar(text("SHOW transaction_read_only")) == "on":
                    raise DatabaseError(
                        f"{self.where}: wanted to write it, found the server read-only (a standby?); give the primary server"
                    )

    # Transactions

    def _verify_same(self) -> None:
        """Check that the file is still the one that was opened, since writes to a deleted one are lost."""
        if self._path is not None:
            sqlite_file.verify_same(self._path, self._identity, self.where)

    @contextlib.contextmanager
    def _read(self, doing: str) -> Iterator[Connection]:
        self._verify_same()
        with explained(self.where, doing, self._path), reader(self._engine).begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _write(self, doing: str) -> Iterator[Connection]:
        if self.read_only:
            raise DatabaseError(f"{self.where}: could not {doing}: it was opened read-only; open it for writing")
        self._verify_same()
        with explained(self.where, doing, self._path), writer(self._engine).begin() as connection:
            yield connection
            self._verify_same()

    def _insert(self, model: type[Base]) -> Any:
        """Return this engine's INSERT, which supports conflict clauses."""
        if self._engine.dialect.name == "postgresql":
            return postgresql.insert(model.__table__)  # type: ignore[arg-type]
        return sqlite.insert(model.__table__)  # type: ignore[arg-type]

    def _add(self, connection: Connection, model: type[Base], values: Sequence[Mapping[str, Any]]) -> int:
        """Insert the rows that are missing; return their number."""
        if not values:
            return 0
        statement = self._insert(model).on_conflict_do_nothing()
        if connection.dialect.name == "postgresql":  # its driver does not count the rows of many statements
            keys = connection.execute(statement.returning(*model.__table__.primary_key), list(values))
            return len(keys.all())
        return connection.execute(statement, list(values)).rowcount

    def _one(self, model: type[Base], make: Callable[[rows.Row], T], **keys: Any) -> T | None:
        with self._read(f"read {model.__tablename__}") as connection:
            row = connection.execute(select(*model.__table__.columns).filter_by(**keys)).mappings().first()
        return None if row is None else self._made(make, row)

    def _made(self, make: Callable[..., T], *row: Any) -> T:
        """Make a record of a stored row. An invalid row is an error that names the database."""
        try:
            return make(*row)
        except DatabaseError as error:
            raise DatabaseError(f"{self.where}: {error}; see `relax-tune db check`, restore a backup") from None

    def _all(self, model: type[Base], make: Callable[[rows.Row], T], *conditions: Any) -> list[T]:
        with self._read(f"read {model.__tablename__}") as connection:
            found = connection.execute(select(*model.__table__.columns).where(*conditions)).mappings().all()
        return [self._made(make, row) for row in found]

    # Targets, environments, workloads

    @patient
    def add_target(self, target: Target) -> str:
        with self._write("add a target") as connection:
            self._add(connection, TargetRow, [rows.target_values(target)])
            for column in (TargetRow.limits, TargetRow.reference):
                unknown = update(TargetRow).where((TargetRow.key == target.key) & (column == "{}"))
                connection.execute(unknown.values({column: rows.target_values(target)[column.key]}))
        return target.key

    @patient
    def add_environment(self, environment: Environment) -> str:
        with self._write("add an environment") as connection:
            self._add(connection, EnvironmentRow, [rows.environment_values(environment)])
        return environment.key

    @patient
    def add_workload(self, workload: Workload) -> str:
        with self._write("add a workload") as connection:
            self._add(connection, WorkloadRow, [rows.workload_values(workload)])
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
        measured = select(MeasurementRow.workload).where(MeasurementRow.target == target).distinct()
        conditions = [] if target is None else [WorkloadRow.key.in_(measured)]
        return sorted(self._all(WorkloadRow, rows.workload_of, *conditions), key=lambda workload: workload.key)

    # Measurements

    @patient
    def add_measurements(self, batch: Iterable[Measurement]) -> int:
        new = verify_batch(batch)
        if not new:
            return 0
        variants = {measurement.variant.key: measurement.variant for measurement in new.values()}
        with self._write("add measurements") as connection:
            self._verify_known(connection, TargetRow, {m.target for m in new.values()})
            self._verify_known(connection, WorkloadRow, {m.workload for m in new.values()})
            self._verify_known(connection, EnvironmentRow, {m.environment for m in new.values() if m.environment})
            self._add(connection, VariantRow, [rows.variant_values(variants[key]) for key in sorted(variants)])
            added = self._add(connection, MeasurementRow, [rows.measurement_values(new[id]) for id in sorted(new)])
            if added < len(new):
                verify_same_subjects(new, self._subjects(connection, new), self.where)
        return added

    def _verify_known(self, connection: Connection, model: Any, keys: set[str]) -> None:
        for chunk in _chunks(sorted(keys)):
            known = set(connection.execute(select(model.key).where(model.key.in_(chunk))).scalars())
            for key in chunk:
                if key not in known:
                    raise RefusedRecord(
                        f"{self.where}: wanted measurements whose {model.__tablename__} were added before, found the unknown "
                        f"key {key!r}; add it first"
                    )

    def _subjects(self, connection: Connection, ids: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        row = MeasurementRow
        columns = (row.id, row.workload, row.target, row.variant, row.symbols, row.regime)
        for chunk in _chunks(sorted(ids)):
            for found in connection.execute(select(*columns).where(row.id.in_(chunk))):
                yield found[0], tuple(found[1:])

    def _select(self, doing: str, conditions: Sequence[Any]) -> list[Measurement]:
        with self._read(doing) as connection:
            found = connection.execute(MeasurementRow.select_columns(conditions)).mappings().all()
            used = connection.execute(MeasurementRow.select_variants(conditions)).mappings().all()
        variants: dict[str, VariantRecord] = {row["key"]: self._made(rows.variant_of, row) for row in used}
        for row in found:
            if row["variant"] not in variants:
                raise DatabaseError(f"{self.where}: measurement {row['id']!r} has lost its variant; restore a backup")
        made = (self._made(rows.measurement_of, row, variants[row["variant"]]) for row in found)
        return sorted(made, key=lambda m: m.id)

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
        limit: int | None = None,
    ) -> list[Measurement]:
        point = None if symbols is None else symbols_text(symbols)
        conditions = MeasurementRow.matching(
            target, workload=workload, symbols=point, status=status, kinds=kinds, regime=regime
        )
        if limit is None:
            return self._select("read measurements", conditions)
        with self._read("read ids") as connection:  # sorted here: engines disagree on how text sorts
            ids = sorted(connection.execute(select(MeasurementRow.id).where(*conditions)).scalars())
        found: list[Measurement] = []
        for chunk in _chunks(ids[:limit]):
            found += self._select("read measurements", [MeasurementRow.id.in_(chunk)])
        return found

    @patient
    def count(
        self,
        target: str,
        workload: str | None = None,
        status: Status | None = None,
        regime: Regime | None = None,
    ) -> int:
        conditions = MeasurementRow.matching(target, workload=workload, status=status, regime=regime)
        with self._read("count measurements") as connection:
            return connection.execute(select(func.count()).where(*conditions)).scalar_one()

    def best(
        self, workload: str, target: str, symbols: Mapping[str, int], regime: Regime = "warm"
    ) -> Measurement | None:
        return next(iter(self.top(workload, target, symbols, 1, regime)), None)

    @patient
    def top(
        self, workload: str, target: str, symbols: Mapping[str, int], n: int, regime: Regime = "warm"
    ) -> list[Measurement]:
        conditions = MeasurementRow.matching(
            target, workload=workload, symbols=symbols_text(symbols), regime=regime, winners_only=True
        )
        with self._read("rank measurements") as connection:
            stored = connection.execute(MeasurementRow.select_ranking(conditions)).all()
        ranking = self._made(rank, ((row[0], row[1], row[2]) for row in stored), n)
        found = {}
        for chunk in _chunks(ranking):
            found.update({m.id: m for m in self._select("read the best", [*conditions, MeasurementRow.id.in_(chunk)])})
        return [found[id] for id in ranking if id in found]  # one pruned in between is gone

    @patient
    def stats(self, target: str) -> TargetStats | None:
        with self._read("read statistics") as connection:
            row = connection.execute(select(*TargetRow.__table__.columns).filter_by(key=target)).mappings().first()
            if row is None:
                return None
            totals = connection.execute(MeasurementRow.select_totals(target)).one()
            failures = [
                (str(stage), int(count)) for stage, count in connection.execute(MeasurementRow.select_failures(target))
            ]
            kinds = [(str(kind), int(count)) for kind, count in connection.execute(MeasurementRow.select_kinds(target))]
        workloads, measurements, ok, checked = (int(value) for value in totals)
        return TargetStats(
            self._made(rows.target_of, row),
            workloads,
            measurements,
            ok,
            checked,
            tuple(sorted(kinds)),
            tuple(sorted(failures)),
        )

    @patient
    def units(self, target: str) -> list[UnitStats]:
        with self._read("read units") as connection:
            found = connection.execute(MeasurementRow.select_units(target)).all()
        return sorted((UnitStats(*row) for row in found), key=lambda u: (u.worker, u.host, u.unit))

    # Plans

    @patient
    def put_plans(self, target: str, entries: Mapping[str, str]) -> list[PlanRecord]:
        firsts = [PlanRecord(workload, target, 1, entries[workload]) for workload in sorted(entries)]
        with self._write("put plans") as connection:
            if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
                connection.execute(text("LOCK TABLE plans IN SHARE ROW EXCLUSIVE MODE"))
            self._verify_known(connection, TargetRow, {target})
            self._verify_known(connection, WorkloadRow, set(entries))
            found, new = [], []
            for plan in firsts:
                row = connection.execute(PlanRow.select_for(plan.workload, target, None)).mappings().first()
                newest = None if row is None else self._made(rows.plan_of, row)
                if newest is not None and newest.entries == plan.entries:
                    found.append(newest)
                    continue
                new.append(plan if newest is None else replace(plan, version=newest.version + 1))
                found.append(new[-1])
            self._add(connection, PlanRow, [rows.plan_values(plan) for plan in new])
        return found

    @patient
    def add_plans(self, batch: Iterable[PlanRecord]) -> int:
        plans = sorted(batch, key=lambda plan: (plan.workload, plan.target, plan.version))
        with self._write("add plans") as connection:
            self._verify_known(connection, TargetRow, {plan.target for plan in plans})
            self._verify_known(connection, WorkloadRow, {plan.workload for plan in plans})
            return self._add(connection, PlanRow, [rows.plan_values(plan) for plan in plans])

    @patient
    def plan(self, workload: str, target: str, version: int | None = None) -> PlanRecord | None:
        with self._read("read a plan") as connection:
            row = connection.execute(PlanRow.select_for(workload, target, version)).mappings().first()
        return None if row is None else self._made(rows.plan_of, row)

    @patient
    def plans(self, target: str) -> list[PlanRecord]:
        found = self._all(PlanRow, rows.plan_of, PlanRow.target == target)
        return sorted(found, key=lambda plan: (plan.workload, plan.version))

    # Leases

    @patient
    def acquire_lease(self, workload: str, target: str, holder: str, *, secs: float) -> Lease | None:
        with self._write("acquire a lease") as connection:
            self._verify_known(connection, TargetRow, {target})
            self._verify_known(connection, WorkloadRow, {workload})
            return sql_leases.acquire(connection, self._insert(LeaseRow), (workload, target), holder, secs)

    @patient
    def renew_lease(self, lease: Lease, *, secs: float) -> Lease | None:
        with self._write("renew a lease") as connection:
            return sql_leases.renew(connection, lease, secs)

    @patient
    def release_lease(self, lease: Lease) -> bool:
        with self._write("release a lease") as connection:
            return sql_leases.release(connection, lease)

    @patient
    def claim_trials(
        self, lease: Lease, wanted: int, budget: int, spent: Mapping[str, Spent]
    ) -> tuple[Lease, int] | None:
        with self._write("claim trials") as connection:
            return sql_leases.claim(connection, lease, wanted, budget, spent)

    @patient
    def settle_trials(self, lease: Lease, trials: int) -> Lease:
        with self._write("settle trials") as connection:
            return sql_leases.settle(connection, lease, trials)

    @patient
    def lease(self, workload: str, target: str) -> Lease | None:
        return self._one(LeaseRow, rows.lease_of, workload=workload, target=target)

    # Jobs and histograms

    @patient
    def put_job(self, job: JobRecord) -> None:
        statement = self._insert(JobRow).values(rows.job_values(job))
        replaced = {"settings": job.settings, "state": job.state}
        with self._write("put a job") as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=replaced))

    @patient
    def job(self, id: str) -> JobRecord | None:
        return self._one(JobRow, rows.job_of, id=id)

    @patient
    def jobs(self, state: JobState | None = None) -> list[JobRecord]:
        found = self._all(JobRow, rows.job_of, *([] if state is None else [JobRow.state == state]))
        return sorted(found, key=lambda job: job.id)

    @patient
    def put_histogram(self, histogram: ShapeHistogram) -> None:
        insert = self._insert(HistogramRow).values(rows.histogram_values(histogram))
        statement = insert.on_conflict_do_update(index_elements=["task", "symbol"], set_={"counts": histogram.counts})
        with self._write("put a histogram") as connection:
            connection.execute(statement)

    @patient
    def histograms(self, task: str | None) -> list[ShapeHistogram]:
        found = self._all(HistogramRow, rows.histogram_of, *([] if task is None else [HistogramRow.task == task]))
        return sorted(found, key=lambda histogram: (histogram.task, histogram.symbol))

    # Care

    def prune(self, target: str, selection: Selection, *, dry_run: bool = False) -> int:
        conditions = MeasurementRow.selected_by(target, selection)
        if dry_run:
            with self._read("count what to prune") as connection:
                return connection.execute(select(func.count()).where(*conditions)).scalar_one()
        with self._write("prune") as connection:
            if connection.dialect.name == "postgresql":  # no writer may refer to a variant while we call it unused
                connection.execute(text("LOCK TABLE variants IN SHARE ROW EXCLUSIVE MODE"))
            removed = connection.execute(delete(MeasurementRow).where(*conditions)).rowcount
            used = select(MeasurementRow.variant).distinct()
            connection.execute(delete(VariantRow).where(VariantRow.key.not_in(used)))
        return removed

    def check(self) -> list[str]:
        with self._read("check it") as connection:
            return find_problems(connection)

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chunks(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), _CHUNK):
        yield keys[start : start + _CHUNK]
