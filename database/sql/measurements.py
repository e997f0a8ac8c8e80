"""Queries of measurements.

A filter names targets, workloads and points by text. Their numbers are looked up first, so that every statement on `measurements`
compares indexed numbers, and both engines find the index without statistics.

Tests: `tests/database/test_store_contract.py`, `tests/database/test_query_plans.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.sql import ColumnElement

from relax_tune.database.models import MeasurementRow, PointRow, VariantRow, WorkloadTaskRow
from relax_tune.database.records import REGIMES, VARIANT_KINDS, Measurement
from relax_tune.database.rules import chunks, median_of
from relax_tune.database.sql.codec import SAMPLES_BYTES, pack_id, text_key, unpack_id, unpack_samples
from relax_tune.database.sql.measurement_rows import measurement_columns, read_measurements
from relax_tune.database.sql.statements import RecordFilter, RowReader, integers
from relax_tune.errors import DatabaseError

_M = MeasurementRow


def select_measurements(connection: Connection, filter: RecordFilter, reader: RowReader) -> list[Measurement]:
    """Return the measurements that a filter admits, in no order."""
    conditions = _conditions(connection, filter)
    return [] if conditions is None else _select(connection, conditions, reader)


def select_by_ids(connection: Connection, ids: Sequence[str], reader: RowReader) -> list[Measurement]:
    """Return the measurements of up to `rules.CHUNK` ids, in no order."""
    return _select(connection, [_M.id.in_([pack_id(id) for id in ids])], reader)


def select_ids(connection: Connection, filter: RecordFilter, reader: RowReader) -> list[str]:
    """Return the ids of the measurements that a filter admits, in no order."""
    conditions = _conditions(connection, filter)
    if conditions is None:
        return []
    return reader("measurements", unpack_id, connection.execute(select(_M.id).where(*conditions)).scalars())


def select_medians(connection: Connection, filter: RecordFilter, reader: RowReader) -> list[tuple[str, str, float]]:
    """Return (id, variant key, median seconds) of the measurements that a filter admits, in no order."""
    conditions = _conditions(connection, filter)
    if conditions is None:
        return []
    samples = func.substr(_M.samples, 1, SAMPLES_BYTES + 1)
    rows = connection.execute(select(_M.id, _M.variant, samples).where(*conditions)).all()
    keys: dict[int, str] = {}
    for chunk in chunks(integers(row[1] for row in rows)):
        query = select(VariantRow.number, VariantRow.key).where(VariantRow.number.in_(chunk))
        keys |= {number: key.hex() for number, key in connection.execute(query)}

    def build(row: Any) -> tuple[str, str, float]:
        id = unpack_id(row[0])
        if row[1] not in keys:
            raise DatabaseError(f"measurements row {id!r:.80}: refers to variant {row[1]}, which does not exist")
        return id, keys[row[1]], median_of(id, unpack_samples(row[2]))

    return reader("measurements", build, rows)


def select_subjects(connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (id, `Measurement.subject`) of the stored ids among `ids`."""
    query = (
        select(_M.id, WorkloadTaskRow.workload, WorkloadTaskRow.target, VariantRow.key, PointRow.symbols, _M.regime)
        .join(WorkloadTaskRow, WorkloadTaskRow.number == _M.task)
        .join(VariantRow, VariantRow.number == _M.variant)
        .join(PointRow, PointRow.number == _M.point)
    )
    for chunk in chunks(sorted(ids)):
        rows = connection.execute(query.where(_M.id.in_([pack_id(id) for id in chunk])))
        for id, workload, target, key, symbols, regime in rows:
            yield unpack_id(id), (workload, target, key.hex(), symbols, REGIMES[regime])


def _select(connection: Connection, conditions: Sequence[ColumnElement[bool]], reader: RowReader) -> list[Measurement]:
    rows = connection.execute(select(*measurement_columns()).where(*conditions)).mappings().all()
    return read_measurements(connection, rows, reader)


def _conditions(connection: Connection, filter: RecordFilter) -> list[ColumnElement[bool]] | None:
    """Return the conditions of a filter; None if its workload or point has no measurements."""
    tasks = select(WorkloadTaskRow.number).where(WorkloadTaskRow.target == filter.target)
    if filter.workload is None:
        conditions: list[ColumnElement[bool]] = [_M.task.in_(tasks)]
    else:
        task = connection.execute(tasks.where(WorkloadTaskRow.workload == filter.workload)).scalar_one_or_none()
        if task is None:
            return None
        conditions = [_M.task == task]
    if filter.point is not None:
        query = select(PointRow.number).where(PointRow.key == text_key(filter.point))
        point = connection.execute(query).scalar_one_or_none()
        if point is None:
            return None
        conditions.append(_M.point == point)
    if filter.winners or filter.status == "ok":
        conditions.append(_M.stage == 0)
    if filter.status == "failed":
        conditions.append(_M.stage > 0)
    if filter.winners:
        conditions.append(_M.checked.is_(True))
    if filter.regime is not None:
        conditions.append(_M.regime == REGIMES.index(filter.regime))
    if filter.since is not None:
        conditions.append(_M.measured_at >= filter.since)
    if filter.kinds is not None:
        conditions.append(_M.kind.in_([VARIANT_KINDS.index(kind) for kind in filter.kinds]))
    return conditions
