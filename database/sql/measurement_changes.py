"""Insertion and removal of measurements, with the rows they share and their tallies.

Tests: `tests/database/test_store_contract.py`, `tests/database/test_processes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, delete, func, select, text, tuple_, update
from sqlalchemy.sql import ColumnElement

from relax_tune.database.models import (
    Base,
    MeasurementRow,
    MessageRow,
    PlaceRow,
    PointRow,
    TargetRow,
    TraceRow,
    VariantRow,
    WorkloadTaskRow,
)
from relax_tune.database.records import REGIMES, STAGES, VARIANT_KINDS, Measurement, Selection, symbols_text
from relax_tune.database.rules import chunks
from relax_tune.database.sql.codec import pack_id, pack_samples, text_key
from relax_tune.database.sql.statements import insert
from relax_tune.database.sql.tallies import add_to_tallies, recount

_M = MeasurementRow


def add_measurements(connection: Connection, batch: Mapping[str, Measurement]) -> int:
    """Insert the measurements of a batch whose ids are new, and count them; return their number."""
    if connection.dialect.name == "postgresql":
        # `prune_measurements` removes unused variants. It and writers exclude each other before a writer looks up numbers.
        connection.execute(text("LOCK TABLE measurements IN ROW EXCLUSIVE MODE"))
    by_id = {pack_id(id): m for id, m in batch.items()}
    for chunk in chunks(sorted(by_id)):
        for id in connection.execute(select(_M.id).where(_M.id.in_(chunk))).scalars():
            del by_id[id]
    if not by_id:
        return 0
    rows = _rows(connection, by_id)
    statement = insert(connection, _M.__table__).on_conflict_do_nothing()
    # A concurrent writer may have inserted some of the ids since the look-up.
    if connection.dialect.name == "postgresql":
        inserted = set(connection.execute(statement.returning(_M.id), rows).scalars())
        rows = [row for row in rows if row["id"] in inserted]
    else:
        connection.execute(statement, rows)
    add_to_tallies(connection, rows)
    return len(rows)


def _rows(connection: Connection, by_id: Mapping[bytes, Measurement]) -> list[dict[str, Any]]:
    """Return the rows of measurements by id, with the numbers of the rows they refer to."""
    measurements = by_id.values()
    tasks = _task_numbers(connection, {(m.target, m.workload) for m in measurements})
    shapes = {symbols_text(m.symbols) for m in measurements}
    points = intern(connection, PointRow, {text_key(shape): {"symbols": shape} for shape in shapes})
    places = intern(connection, PlaceRow, {_place_key(m): _place(m) for m in measurements})
    texts = {m.message for m in measurements if m.message}
    messages = intern(connection, MessageRow, {text_key(message): {"text": message} for message in texts})
    variants = {m.variant.key: m.variant for m in measurements}.values()
    keys = {v.key: text_key(v.kind, v.sketch, v.trace) for v in variants}
    trace_rows = {
        keys[v.key]: {"kind": VARIANT_KINDS.index(v.kind), "sketch": v.sketch, "trace": v.trace} for v in variants
    }
    traces = intern(connection, TraceRow, trace_rows)
    variant_rows = {bytes.fromhex(v.key): {"trace": traces[keys[v.key]], "parameters": v.parameters} for v in variants}
    # Last, since variants refer to the numbers of traces.
    numbers = intern(connection, VariantRow, variant_rows)
    return [
        {
            "id": id,
            "measured_at": m.measured_at,
            "build_secs": m.build_secs,
            "clock_mhz": m.clock_mhz,
            "celsius": m.celsius,
            "contention": m.contention,
            "task": tasks[m.target, m.workload],
            "point": points[text_key(symbols_text(m.symbols))],
            "variant": numbers[bytes.fromhex(m.variant.key)],
            "place": places[_place_key(m)],
            "message": messages[text_key(m.message)] if m.message else 0,
            "kind": VARIANT_KINDS.index(m.variant.kind),
            "stage": 0 if m.stage is None else 1 + STAGES.index(m.stage),
            "regime": REGIMES.index(m.regime),
            "checked": m.checked,
            "samples": pack_samples(m.samples_secs),
        }
        # In the order of ids, so that writers of the same ids wait for each other in one direction.
        for id, m in sorted(by_id.items())
    ]


def _place(m: Measurement) -> dict[str, str]:
    return {"job": m.job, "environment": m.environment, "worker": m.worker, "host": m.host, "unit": m.unit}


def _place_key(m: Measurement) -> bytes:
    return text_key(m.job, m.environment, m.worker, m.host, m.unit)


def intern(connection: Connection, model: type[Base], rows: Mapping[bytes, Mapping[str, Any]]) -> dict[bytes, int]:
    """Return the numbers of shared rows by key. Missing rows are inserted in the order of their keys, which prevents deadlocks."""
    table: Any = model.__table__
    numbers = _numbers(connection, table, rows)
    missing = [{"key": key, **rows[key]} for key in sorted(rows.keys() - numbers.keys())]
    if missing:
        connection.execute(insert(connection, table).on_conflict_do_nothing(), missing)
        # Looked up again, since the statement returns no numbers of rows that another writer inserted meanwhile.
        numbers |= _numbers(connection, table, [row["key"] for row in missing])
    return numbers


def _numbers(connection: Connection, table: Any, keys: Iterable[bytes]) -> dict[bytes, int]:
    numbers: dict[bytes, int] = {}
    for chunk in chunks(sorted(keys)):
        rows = connection.execute(select(table.c.key, table.c.number).where(table.c.key.in_(chunk)))
        numbers |= {key: number for key, number in rows}
    return numbers


def _task_numbers(connection: Connection, tasks: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
    row = WorkloadTaskRow
    numbers: dict[tuple[str, str], int] = {}

    def look_up(pairs: Sequence[tuple[str, str]]) -> None:
        for chunk in chunks(pairs):
            query = select(row.target, row.workload, row.number).where(tuple_(row.target, row.workload).in_(chunk))
            numbers.update({(target, workload): number for target, workload, number in connection.execute(query)})

    look_up(sorted(tasks))
    missing = sorted(tasks - numbers.keys())
    if missing:
        statement = insert(connection, row.__table__).on_conflict_do_nothing()
        connection.execute(statement, [{"target": target, "workload": workload} for target, workload in missing])
        look_up(missing)
    return numbers


def prune_measurements(connection: Connection, target: str, selection: Selection, dry_run: bool) -> int:
    """Remove or count the selected measurements of a target.

    Variants and messages that no other measurement refers to are removed too, and with the last measurement the reference times.
    """
    conditions = _selected(target, selection)
    if dry_run:
        return connection.execute(select(func.count()).select_from(_M).where(*conditions)).scalar_one()
    if connection.dialect.name == "postgresql":  # no writer may begin to refer to a variant that is about to be removed
        connection.execute(text("LOCK TABLE measurements IN SHARE ROW EXCLUSIVE MODE"))
    columns = (_M.task, _M.variant, _M.message)
    tasks, variants, messages = (
        list(connection.execute(select(column).where(*conditions).distinct()).scalars()) for column in columns
    )
    removed = connection.execute(delete(_M).where(*conditions)).rowcount
    # Counted again for these tasks, since a subtraction would need every removed row.
    recount(connection, tasks)
    remaining = select(_M.id).where(_M.task.in_(select(WorkloadTaskRow.number).where(WorkloadTaskRow.target == target)))
    if removed and connection.execute(remaining.limit(1)).first() is None:
        connection.execute(update(TargetRow).where(TargetRow.key == target).values(reference="{}"))
    for chunk in chunks(sorted(variants)):
        used = select(_M.id).where(_M.variant == VariantRow.number).exists()
        connection.execute(delete(VariantRow).where(and_(VariantRow.number.in_(chunk), ~used)))
    if any(messages):
        used_messages = select(_M.message).where(_M.message > 0)
        for chunk in chunks(sorted(messages)):
            unused = MessageRow.number.in_(chunk) & MessageRow.number.not_in(used_messages)
            connection.execute(delete(MessageRow).where(unused))
    return removed


def _selected(target: str, selection: Selection) -> list[ColumnElement[bool]]:
    tasks = select(WorkloadTaskRow.number).where(WorkloadTaskRow.target == target)
    conditions: list[ColumnElement[bool]] = [_M.task.in_(tasks)]
    if selection.failed:
        conditions.append(_M.stage > 0)
    if selection.older_than is not None:
        # 0 means that the time is unknown, not that the record is old.
        conditions += [_M.measured_at > 0, _M.measured_at < selection.older_than]
    if selection.since is not None:
        conditions.append(_M.measured_at >= selection.since)
    if selection.job is not None:
        conditions.append(_M.place.in_(select(PlaceRow.number).where(PlaceRow.job == selection.job)))
    if (name := selection.worker) is not None:
        named = (PlaceRow.worker == name) | (PlaceRow.host == name) | (PlaceRow.unit == name)
        conditions.append(_M.place.in_(select(PlaceRow.number).where(named)))
    return conditions
