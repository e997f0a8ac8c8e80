"""Copies of the measurements of schema 6 in tables of schema 7 under temporary names.

Any part of it may be repeated: what is copied already is left alone, so an upgrade that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, MetaData, Table, case, cast, delete, func, select

from relax_tune.database import rows
from relax_tune.database.models import (
    Base,
    MeasurementRow,
    TargetRow,
    UnreadableRow,
    VariantRow,
    WorkloadRow,
    WorkloadTaskRow,
)
from relax_tune.database.records import Measurement, VariantRecord, canonical_json
from relax_tune.database.rules import MISTYPED, chunks
from relax_tune.database.sql import plain
from relax_tune.database.sql.codec import pack_id, unpack_id
from relax_tune.database.sql.layout import add_missing, left_out
from relax_tune.database.sql.packed import PackedLayout
from relax_tune.database.sql.packed_writing import recount
from relax_tune.errors import DatabaseError

Task = tuple[str, str]
"""Target, workload."""


def _beside(model: type[Base], tables: MetaData) -> Table:
    table: Any = model.__table__
    return table.to_metadata(tables, name=f"packed_{table.name}")  # type: ignore[no-any-return]


_TABLES = MetaData()
PACKED = PackedLayout(_beside(MeasurementRow, _TABLES), _beside(VariantRow, _TABLES))


_LATEST = 2.0**40
"""Seconds since 1970 of times that are summed as whole numbers: the sum of a later one may have no room."""


def differing_tasks(connection: Connection) -> list[Task]:
    """Return the tasks whose copies are not complete: by number, newest time and sum of the times."""
    old, new = plain.MEASUREMENTS.c, PACKED.measurements.c

    def facts(time: Any) -> tuple[Any, ...]:
        return func.count(), func.max(time), func.sum(case((time < _LATEST, cast(time, BigInteger)), else_=0))

    query = select(old.target, old.workload, *facts(old.measured_at)).group_by(old.target, old.workload)
    wanted = {(target, workload): tuple(found) for target, workload, *found in connection.execute(query)}
    copied = select(WorkloadTaskRow.target, WorkloadTaskRow.workload, *facts(new.measured_at))
    copied = copied.join(PACKED.measurements, new.task == WorkloadTaskRow.number).group_by(
        WorkloadTaskRow.target, WorkloadTaskRow.workload
    )
    there = {(target, workload): tuple(found) for target, workload, *found in connection.execute(copied)}
    return sorted(task for task in wanted.keys() | there.keys() if wanted.get(task) != there.get(task))


def difference(connection: Connection, task: Task) -> tuple[list[str], list[bytes]]:
    """Return the ids of a task to copy, and the stored ids of copies whose originals were removed."""
    old, new = plain.MEASUREMENTS.c, PACKED.measurements.c
    originals = set(connection.execute(select(old.id).where(old.target == task[0], old.workload == task[1])).scalars())
    number = (
        select(WorkloadTaskRow.number)
        .where(WorkloadTaskRow.target == task[0], WorkloadTaskRow.workload == task[1])
        .scalar_subquery()
    )
    copies = {unpack_id(id) for id in connection.execute(select(new.id).where(new.task == number)).scalars()}
    missing = originals - copies
    for chunk in chunks(sorted(missing, key=repr)):
        missing -= set(connection.execute(select(UnreadableRow.id).where(UnreadableRow.id.in_(chunk))).scalars())
    return sorted(missing, key=repr), [pack_id(id) for id in sorted(copies - originals)]


def copy(connection: Connection, ids: Sequence[str]) -> None:
    """Copy measurements. One that cannot be read is kept as text in the table `unreadable`."""
    old = plain.MEASUREMENTS
    for chunk in chunks(ids):
        found = connection.execute(select(*old.c).where(old.c.id.in_(chunk))).mappings().all()
        variants = plain.PlainLayout.variants(connection, {row["variant"] for row in found}, left_out)
        known = {
            "target": _known(connection, TargetRow, {row["target"] for row in found}),
            "workload": _known(connection, WorkloadRow, {row["workload"] for row in found}),
        }
        made: dict[str, Measurement] = {}
        left: list[dict[str, str]] = []
        for row in found:
            try:
                made[row["id"]] = _made(row, variants, known)
            except (DatabaseError, *MISTYPED) as error:
                left.append({"id": row["id"], "why": str(error), "content": _content(connection, row)})
        PACKED.add(connection, made)
        add_missing(connection, UnreadableRow.__table__, left)


def _made(row: rows.Row, variants: dict[str, VariantRecord], known: dict[str, set[str]]) -> Measurement:
    for name, keys in known.items():
        if row[name] not in keys:
            raise DatabaseError(f"measurement {row['id']!r:.80}: wanted its {name}, found none")
    if row["variant"] not in variants:
        raise DatabaseError(f"measurement {row['id']!r:.80} has no variant that can be read")
    return rows.measurement_of(row, variants[row["variant"]])


def _content(connection: Connection, row: rows.Row) -> str:
    variant = connection.execute(select(*plain.VARIANTS.c).where(plain.VARIANTS.c.key == row["variant"]))
    return canonical_json({**_plain(row), "variant": [_plain(found) for found in variant.mappings()]})


def _plain(row: rows.Row) -> dict[str, Any]:
    """Return a row with what JSON has no form for as text."""
    return {name: x if x is None or type(x) in (str, int, bool) else repr(x) for name, x in row.items()}


def _known(connection: Connection, model: Any, keys: set[str]) -> set[str]:
    return set(connection.execute(select(model.key).where(model.key.in_(sorted(keys, key=repr)))).scalars())


def remove(connection: Connection, task: Task, ids: Sequence[bytes]) -> None:
    """Remove copies whose originals were removed meanwhile."""
    measurements = PACKED.measurements
    for chunk in chunks(ids):
        connection.execute(delete(measurements).where(measurements.c.id.in_(chunk)))
    number = select(WorkloadTaskRow.number).where(
        WorkloadTaskRow.target == task[0], WorkloadTaskRow.workload == task[1]
    )
    recount(connection, measurements, list(connection.execute(number).scalars()))


def parts(connection: Connection) -> Iterator[tuple[Task, list[str], list[bytes]]]:
    """Yield what is left to do, task by task: ids to copy, and stored ids of copies to remove."""
    for task in differing_tasks(connection):
        missing, gone = difference(connection, task)
        if missing or gone:
            yield task, missing, gone


def finish(connection: Connection) -> None:
    """Do what is left inside the caller's transaction."""
    for task, missing, gone in parts(connection):
        copy(connection, missing)
        if gone:
            remove(connection, task, gone)
