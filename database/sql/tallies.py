"""Counts of measurements, which `tallies` has by task, place, kind, stage, regime and check.

Statistics of ten million records take milliseconds this way; counting the records takes seconds.

Tests: `tests/database/test_tallies.py`, `tests/database/test_query_plans.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import Connection, case, delete, func, select
from sqlalchemy.sql import ColumnElement

from relax_tune.database.counts import TaskStats, UnitStats
from relax_tune.database.models import MeasurementRow, PlaceRow, TallyRow, WorkloadRow, WorkloadTaskRow
from relax_tune.database.records import REGIMES, TEXT_LIMIT
from relax_tune.database.rules import chunks
from relax_tune.database.sql.measurement_rows import kind_of, stage_of
from relax_tune.database.sql.statements import RecordFilter, insert, rows_by_number
from relax_tune.errors import DatabaseError

Count = tuple[str, str | None, bool, int]
"""Kind of variant, stage of failure, whether checked, number of measurements."""
TallyKey = tuple[int, int, int, int, int, bool]
"""Task, place, kind, stage, regime, checked."""
_KEY = ("task", "place", "kind", "stage", "regime", "checked")


def count_measurements(connection: Connection, filter: RecordFilter) -> int:
    """Return the number of measurements that a filter of target, workload, status and regime admits."""
    conditions: list[ColumnElement[bool]] = [WorkloadTaskRow.target == filter.target]
    if filter.workload is not None:
        conditions.append(WorkloadTaskRow.workload == filter.workload)
    if filter.status is not None:
        conditions.append(TallyRow.stage == 0 if filter.status == "ok" else TallyRow.stage > 0)
    if filter.regime is not None:
        conditions.append(TallyRow.regime == REGIMES.index(filter.regime))
    query = select(func.coalesce(func.sum(TallyRow.count), 0))
    query = query.join(WorkloadTaskRow, WorkloadTaskRow.number == TallyRow.task)
    return int(connection.execute(query.where(*conditions)).scalar_one())


def count_by_result(connection: Connection, target: str) -> tuple[int, list[Count]]:
    """Return the number of measured workloads of a target, and its counts by kind, stage and check."""
    of_target = WorkloadTaskRow.target == target
    measured = select(TallyRow.task).where(TallyRow.task == WorkloadTaskRow.number).exists()
    workloads = select(func.count()).where(of_target, measured)
    query = select(TallyRow.kind, TallyRow.stage, TallyRow.checked, func.sum(TallyRow.count))
    query = query.join(WorkloadTaskRow, WorkloadTaskRow.number == TallyRow.task).where(of_target)
    rows = connection.execute(query.group_by(TallyRow.kind, TallyRow.stage, TallyRow.checked))
    return connection.execute(workloads).scalar_one(), [
        (kind_of(kind, "tallies kind"), stage_of(stage), bool(checked), _integer(count))
        for kind, stage, checked, count in rows
    ]


def count_by_unit(connection: Connection, target: str) -> list[UnitStats]:
    """Return the counts of a target by worker, host and unit, in no order."""
    query = select(TallyRow.place, TallyRow.stage, func.sum(TallyRow.count), func.max(TallyRow.last))
    query = query.join(WorkloadTaskRow, WorkloadTaskRow.number == TallyRow.task)
    query = query.where(WorkloadTaskRow.target == target).group_by(TallyRow.place, TallyRow.stage)
    rows = connection.execute(query).all()
    places = rows_by_number(connection, PlaceRow, {row[0] for row in rows})
    units: dict[tuple[str, ...], tuple[int, int, float]] = {}
    for number, stage, count, last in rows:
        if number not in places:
            raise DatabaseError(f"tallies: a row refers to place {number!r:.80}, which does not exist")
        # SQLite stores values of any type in any column.
        unit = tuple(str(places[number][name]) for name in ("worker", "host", "unit"))
        measured, failed, newest = units.get(unit, (0, 0, 0.0))
        units[unit] = (measured + _integer(count), failed + _integer(count) * (stage > 0), max(newest, last))
    return [UnitStats(worker, host, unit, *counts) for (worker, host, unit), counts in units.items()]


def count_by_task(connection: Connection, target: str, jobs: Collection[str] | None) -> list[TaskStats]:
    """Return the counts of a target by workload, of these jobs or of all, in no order."""
    failed = func.sum(case((TallyRow.stage > 0, TallyRow.count), else_=0))
    hint = func.substr(func.min(WorkloadRow.hint), 1, TEXT_LIMIT)
    query = select(WorkloadTaskRow.workload, hint, func.sum(TallyRow.count), failed, func.max(TallyRow.last))
    query = query.join(TallyRow, WorkloadTaskRow.number == TallyRow.task).where(WorkloadTaskRow.target == target)
    query = query.join(WorkloadRow, WorkloadRow.key == WorkloadTaskRow.workload)
    if jobs is not None:
        query = query.where(TallyRow.place.in_(select(PlaceRow.number).where(PlaceRow.job.in_(sorted(jobs)))))
    rows = connection.execute(query.group_by(WorkloadTaskRow.workload))
    return [TaskStats(key, str(hint), _integer(count), _integer(bad), last) for key, hint, count, bad, last in rows]


def measured_workloads(connection: Connection, target: str, since: float | None) -> list[str]:
    """Return the keys of the workloads with measurements on a target, or with measurements since a moment."""
    measured = select(TallyRow.task).where(TallyRow.task == WorkloadTaskRow.number)
    measured = measured if since is None else measured.where(TallyRow.last >= since)
    query = select(WorkloadTaskRow.workload).where(WorkloadTaskRow.target == target, measured.exists())
    return list(connection.execute(query).scalars())


def add_to_tallies(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Count inserted rows of measurements."""
    counts: Counter[TallyKey] = Counter()
    last: dict[TallyKey, float] = {}
    for row in rows:
        key: TallyKey = tuple(row[name] for name in _KEY)
        counts[key] += 1
        last[key] = max(last.get(key, 0.0), row["measured_at"])
    if not counts:
        return
    statement = insert(connection, TallyRow.__table__)
    # SQLite's MAX of two arguments is PostgreSQL's GREATEST.
    newest = func.greatest if connection.dialect.name == "postgresql" else func.max
    statement = statement.on_conflict_do_update(
        index_elements=list(_KEY),
        set_={
            "count": TallyRow.count + statement.excluded["count"],
            "last": newest(TallyRow.last, statement.excluded["last"]),
        },
    )
    # In the order of keys, so that two PostgreSQL writers lock rows in one order.
    tallies = [{**dict(zip(_KEY, key, strict=True)), "count": counts[key], "last": last[key]} for key in sorted(counts)]
    connection.execute(statement, tallies)


def recount(connection: Connection, tasks: Sequence[int]) -> None:
    """Replace the tallies of tasks by counts of their measurements."""
    m = MeasurementRow.__table__.c
    for chunk in chunks(sorted(tasks)):
        connection.execute(delete(TallyRow).where(TallyRow.task.in_(chunk)))
        keys = [m[name] for name in _KEY]
        counts = select(*keys, func.count(), func.max(m.measured_at)).where(m.task.in_(chunk)).group_by(*keys)
        statement = insert(connection, TallyRow.__table__).from_select([*_KEY, "count", "last"], counts)
        connection.execute(statement)


def wrong_tallies(connection: Connection) -> Iterator[str]:
    """Yield a sentence for each tally that disagrees with its measurements."""
    m, t = MeasurementRow.__table__.c, TallyRow.__table__.c
    keys = [m[name] for name in _KEY]
    counted = select(*keys, func.count(), func.max(m.measured_at)).group_by(*keys)
    actual = {tuple(key): (count, last) for *key, count, last in connection.execute(counted)}
    tallied = select(*(t[name] for name in _KEY), t["count"], t["last"])
    stored = {tuple(key): (count, last) for *key, count, last in connection.execute(tallied)}
    for key in sorted(actual.keys() | stored.keys(), key=repr):
        if actual.get(key) == stored.get(key):
            continue
        names = ", ".join(f"{name} {value!r:.40}" for name, value in zip(_KEY, key, strict=True))
        (count, last), (stored_count, stored_last) = actual.get(key, (0, 0.0)), stored.get(key, (0, 0.0))
        if count == stored_count:
            difference = f"{last!r}, the latest time of these measurements, got {stored_last!r:.40}"
        else:
            difference = f"{count}, the number of these measurements, got {stored_count!r:.40}"
        yield f"tallies of {names}: expected {difference}; the rows were altered"


def _integer(count: object) -> int:
    """Return a sum of counts, a Decimal from PostgreSQL. Raises `DatabaseError` for a value that is not a number."""
    if not isinstance(count, (int, float, Decimal)):
        raise DatabaseError(f"tallies count: expected a number, got {count!r:.80}")
    return int(count)
