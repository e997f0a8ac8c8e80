"""Changes of measurements in the layout of schema 7: what they share is looked up or added, and tallies are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, select, text, tuple_
from sqlalchemy.sql import ColumnElement

from relax_tune.database.models import (
    Base,
    MessageRow,
    PlaceRow,
    PointRow,
    TallyRow,
    TraceRow,
    WorkloadTaskRow,
)
from relax_tune.database.records import REGIMES, STAGES, VARIANT_KINDS, Measurement, Selection, symbols_text
from relax_tune.database.rules import chunks
from relax_tune.database.sql.codec import pack_id, pack_samples, text_key
from relax_tune.database.sql.layout import insert

Tally = tuple[int, int, int, int, int, bool]
"""Task, place, kind, stage, regime, checked."""
_TALLY = ("task", "place", "kind", "stage", "regime", "checked")


def add(connection: Connection, measurements: Table, variants: Table, new: Mapping[str, Measurement]) -> int:
    """Insert the measurements that are missing, and count them; return their number."""
    if connection.dialect.name == "postgresql":  # a pruner waits for us, and we for it, before any number is looked up
        connection.execute(text(f"LOCK TABLE {measurements.name} IN ROW EXCLUSIVE MODE"))
    packed = {pack_id(id): m for id, m in new.items()}
    m = measurements.c
    for chunk in chunks(sorted(packed)):
        for id in connection.execute(select(m.id).where(m.id.in_(chunk))).scalars():
            del packed[id]
    if not packed:
        return 0
    values = _rows(connection, variants, packed)
    statement = insert(connection, measurements).on_conflict_do_nothing()
    if connection.dialect.name == "postgresql":  # another writer may have been first
        added = set(connection.execute(statement.returning(m.id), values).scalars())
        values = [row for row in values if row["id"] in added]
    else:
        connection.execute(statement, values)
    count_in(connection, values)
    return len(values)


def _rows(connection: Connection, variants: Table, packed: Mapping[bytes, Measurement]) -> list[dict[str, Any]]:
    """Return the rows of measurements, by id, with the numbers of what they refer to."""
    found = packed.values()
    tasks = _tasks(connection, {(m.target, m.workload) for m in found})
    points = intern(
        connection, PointRow, {text_key(t): {"symbols": t} for t in {symbols_text(m.symbols) for m in found}}
    )
    places = intern(connection, PlaceRow, {_place_key(m): _place(m) for m in found})
    messages = intern(connection, MessageRow, {text_key(m.message): {"text": m.message} for m in found if m.message})
    distinct = {m.variant.key: m.variant for m in found}.values()
    keys = {v.key: text_key(v.kind, v.sketch, v.trace) for v in distinct}
    traces = intern(
        connection,
        TraceRow,
        {keys[v.key]: {"kind": VARIANT_KINDS.index(v.kind), "sketch": v.sketch, "trace": v.trace} for v in distinct},
    )
    numbers = intern(
        connection,
        variants,
        {bytes.fromhex(v.key): {"trace": traces[keys[v.key]], "parameters": v.parameters} for v in distinct},
    )
    return [
        {
            "id": id,
            "measured_at": m.measured_at,
            "build_secs": m.build_secs,
            "clock_mhz": m.clock_mhz,
            "celsius": m.celsius,
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
        for id, m in sorted(packed.items())
    ]


def _place(m: Measurement) -> dict[str, str]:
    return {"job": m.job, "environment": m.environment, "worker": m.worker, "host": m.host, "unit": m.unit}


def _place_key(m: Measurement) -> bytes:
    return text_key(m.job, m.environment, m.worker, m.host, m.unit)


def intern(
    connection: Connection, model: type[Base] | Table, wanted: Mapping[bytes, Mapping[str, Any]]
) -> dict[bytes, int]:
    """Return the numbers of texts by key. Missing ones are added, in the order of their keys."""
    table: Any = model if isinstance(model, Table) else model.__table__
    found = _numbers(connection, table, wanted)
    missing = [{"key": key, **wanted[key]} for key in sorted(wanted.keys() - found.keys())]
    if missing:
        connection.execute(insert(connection, table).on_conflict_do_nothing(), missing)
        found |= _numbers(connection, table, [row["key"] for row in missing])
    return found


def _numbers(connection: Connection, table: Any, keys: Iterable[bytes]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for chunk in chunks(sorted(keys)):
        rows = connection.execute(select(table.c.key, table.c.number).where(table.c.key.in_(chunk)))
        found |= {key: number for key, number in rows}
    return found


def _tasks(connection: Connection, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
    row = WorkloadTaskRow
    found: dict[tuple[str, str], int] = {}

    def look(pairs: Sequence[tuple[str, str]]) -> None:
        for chunk in chunks(pairs):
            known = select(row.target, row.workload, row.number).where(tuple_(row.target, row.workload).in_(chunk))
            found.update({(target, workload): number for target, workload, number in connection.execute(known)})

    look(sorted(wanted))
    missing = sorted(wanted - found.keys())
    if missing:
        statement = insert(connection, row.__table__).on_conflict_do_nothing()
        connection.execute(statement, [{"target": target, "workload": workload} for target, workload in missing])
        look(missing)
    return found


def count_in(connection: Connection, values: Sequence[Mapping[str, Any]]) -> None:
    """Add rows of measurements to the tallies."""
    counts: Counter[Tally] = Counter()
    last: dict[Tally, float] = {}
    for row in values:
        key: Tally = tuple(row[name] for name in _TALLY)
        counts[key] += 1
        last[key] = max(last.get(key, 0.0), row["measured_at"])
    statement = insert(connection, TallyRow.__table__)
    newest = func.greatest if connection.dialect.name == "postgresql" else func.max
    statement = statement.on_conflict_do_update(
        index_elements=list(_TALLY),
        set_={
            "count": TallyRow.count + statement.excluded["count"],
            "last": newest(TallyRow.last, statement.excluded["last"]),
        },
    )
    tallies = [
        {**dict(zip(_TALLY, key, strict=True)), "count": counts[key], "last": last[key]} for key in sorted(counts)
    ]
    if tallies:
        connection.execute(statement, tallies)


def recount(connection: Connection, measurements: Table, tasks: Sequence[int]) -> None:
    """Count the measurements of tasks anew."""
    m = measurements.c
    for chunk in chunks(sorted(tasks)):
        connection.execute(delete(TallyRow).where(TallyRow.task.in_(chunk)))
        keys = [m[name] for name in _TALLY]
        counted = select(*keys, func.count(), func.max(m.measured_at)).where(m.task.in_(chunk)).group_by(*keys)
        columns = [*_TALLY, "count", "last"]
        connection.execute(insert(connection, TallyRow.__table__).from_select(columns, counted))


def wrong_tallies(connection: Connection, measurements: Table) -> Iterator[str]:
    """Yield a sentence for each tally that is not the number of its measurements, or not their latest time."""
    m, t = measurements.c, TallyRow.__table__.c
    keys = [m[name] for name in _TALLY]
    counted = select(*keys, func.count(), func.max(m.measured_at)).group_by(*keys)
    wanted = {tuple(key): (count, last) for *key, count, last in connection.execute(counted)}
    kept = select(*(t[name] for name in _TALLY), t["count"], t["last"])
    found = {tuple(key): (count, last) for *key, count, last in connection.execute(kept)}
    for key in sorted(wanted.keys() | found.keys(), key=repr):
        if wanted.get(key) != found.get(key):
            told = ", ".join(f"{name} {value!r:.40}" for name, value in zip(_TALLY, key, strict=True))
            (count, last), (stored, newest) = wanted.get(key, (0, 0.0)), found.get(key, (0, 0.0))
            if count == stored:
                what, there = f"{last!r}, the latest time of these measurements", newest
            else:
                what, there = f"{count}, the number of these measurements", stored
            yield f"tallies of {told}: wanted {what}, found {there!r:.40}; the rows were altered"


def prune(
    connection: Connection, measurements: Table, variants: Table, target: str, selection: Selection, dry_run: bool
) -> int:
    """Remove or count the selected measurements of a target, with the variants and messages that nothing else refers to."""
    conditions = _selected(measurements, target, selection)
    m, v = measurements.c, variants.c
    if dry_run:
        return connection.execute(select(func.count()).select_from(measurements).where(*conditions)).scalar_one()
    if connection.dialect.name == "postgresql":  # no writer may refer to a variant while we call it unused
        connection.execute(text(f"LOCK TABLE {measurements.name} IN SHARE ROW EXCLUSIVE MODE"))
    going = {
        name: list(connection.execute(select(m[name]).where(*conditions).distinct()).scalars()) for name in _NUMBERS
    }
    removed = connection.execute(delete(measurements).where(*conditions)).rowcount
    recount(connection, measurements, going["task"])
    for chunk in chunks(sorted(going["variant"])):
        used = select(m.id).where(m.variant == v.number).exists()
        connection.execute(delete(variants).where(and_(v.number.in_(chunk), ~used)))
    if any(going["message"]):
        used_messages = select(m.message).where(m.message > 0)
        for chunk in chunks(sorted(going["message"])):
            unused = MessageRow.number.in_(chunk) & MessageRow.number.not_in(used_messages)
            connection.execute(delete(MessageRow).where(unused))
    return removed


_NUMBERS = ("task", "variant", "message")


def _selected(measurements: Table, target: str, selection: Selection) -> list[ColumnElement[bool]]:
    m = measurements.c
    conditions: list[ColumnElement[bool]] = [
        m.task.in_(select(WorkloadTaskRow.number).where(WorkloadTaskRow.target == target))
    ]
    if selection.failed:
        conditions.append(m.stage > 0)
    if selection.older_than is not None:
        conditions += [m.measured_at > 0, m.measured_at < selection.older_than]
    if selection.since is not None:
        conditions.append(m.measured_at >= selection.since)
    if selection.job is not None:
        conditions.append(m.place.in_(select(PlaceRow.number).where(PlaceRow.job == selection.job)))
    if (name := selection.worker) is not None:
        named = (PlaceRow.worker == name) | (PlaceRow.host == name) | (PlaceRow.unit == name)
        conditions.append(m.place.in_(select(PlaceRow.number).where(named)))
    return conditions
