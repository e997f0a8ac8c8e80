"""The layout of schema 7: measurements are short rows of numbers, and what many of them share is kept once.

Questions name numbers, which are looked up first. So every statement has a plan that any engine finds: by an index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, Table, func, select
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import Text

from relax_tune.database import rows
from relax_tune.database.counts import UnitStats
from relax_tune.database.models import (
    Base,
    MessageRow,
    PlaceRow,
    PlanRow,
    PointRow,
    TallyRow,
    TraceRow,
    UnreadableRow,
    WorkloadTaskRow,
)
from relax_tune.database.records import (
    KEY_LIMIT,
    REGIMES,
    SAMPLES_LIMIT,
    STAGES,
    TEXT_LIMIT,
    VARIANT_KINDS,
    Measurement,
    PlanRecord,
    Selection,
    VariantRecord,
    parse_json,
)
from relax_tune.database.rules import chunks, median_of
from relax_tune.database.sql import packed_writing
from relax_tune.database.sql.codec import SAMPLES_BYTES, pack_id, text_key, unpack_id, unpack_samples
from relax_tune.database.sql.layout import Count, Readable, RecordQuestion, insert, left_out
from relax_tune.errors import DatabaseError

VERSION = "0007"
_STREAMED = 2000
"""Rows in memory at a time when all are read."""


def cut(table: Table, *names: str) -> list[ColumnElement[Any]]:
    """Return columns of a table; a longer text than any record has is cut, so that its row takes little memory."""
    limit = TEXT_LIMIT + 1
    return [
        func.substr(c, 1, limit).label(c.name) if isinstance(c.type, Text) else c for c in (table.c[n] for n in names)
    ]


class PackedLayout:
    """A `relax_tune.database.sql.layout.TableLayout`.

    measurements, variants: the tables, which have other names while an upgrade fills them
    """

    version = VERSION
    named_origins = True

    def __init__(
        self,
        measurements: Table = Base.metadata.tables["measurements"],
        variants: Table = Base.metadata.tables["variants"],
    ) -> None:
        self.measurements, self.variants = measurements, variants

    # Questions

    def _conditions(self, connection: Connection, question: RecordQuestion) -> list[ColumnElement[bool]] | None:
        """Return the conditions on the columns; None where no measurement meets them."""
        m = self.measurements.c
        tasks = select(WorkloadTaskRow.number).where(WorkloadTaskRow.target == question.target)
        if question.workload is None:
            conditions: list[ColumnElement[bool]] = [m.task.in_(tasks)]
        else:
            task = connection.execute(tasks.where(WorkloadTaskRow.workload == question.workload)).scalar_one_or_none()
            if task is None:
                return None
            conditions = [m.task == task]
        if question.point is not None:
            known = select(PointRow.number).where(PointRow.key == text_key(question.point))
            point = connection.execute(known).scalar_one_or_none()
            if point is None:
                return None
            conditions.append(m.point == point)
        if question.winners or question.status == "ok":
            conditions.append(m.stage == 0)
        if question.status == "failed":
            conditions.append(m.stage > 0)
        if question.winners:
            conditions.append(m.checked.is_(True))
        if question.regime is not None:
            conditions.append(m.regime == REGIMES.index(question.regime))
        if question.since is not None:
            conditions.append(m.measured_at >= question.since)
        if question.kinds is not None:
            conditions.append(m.kind.in_([VARIANT_KINDS.index(kind) for kind in question.kinds]))
        return conditions

    def ids(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[str]:
        conditions = self._conditions(connection, question)
        if conditions is None:
            return []
        found = connection.execute(select(self.measurements.c.id).where(*conditions)).scalars()
        return readable("measurements", unpack_id, found)

    def select(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[Measurement]:
        conditions = self._conditions(connection, question)
        return [] if conditions is None else self._select(connection, conditions, readable)

    def by_ids(self, connection: Connection, ids: Sequence[str], readable: Readable) -> list[Measurement]:
        return self._select(connection, [self.measurements.c.id.in_([pack_id(id) for id in ids])], readable)

    def _columns(self) -> list[ColumnElement[Any]]:
        samples = func.substr(self.measurements.c.samples, 1, SAMPLES_BYTES + 1).label("samples")
        return [*(c for c in self.measurements.c if c.name != "samples"), samples]

    def _select(
        self, connection: Connection, conditions: Sequence[ColumnElement[bool]], readable: Readable
    ) -> list[Measurement]:
        found = connection.execute(select(*self._columns()).where(*conditions)).mappings().all()
        return self._made(connection, found, readable)

    def _made(self, connection: Connection, found: Sequence[rows.Row], readable: Readable) -> list[Measurement]:
        texts = self._texts(connection, found)
        variants = self.known_variants(connection, {row["variant"] for row in found}, readable)

        def make(row: rows.Row) -> Measurement:
            if row["variant"] not in variants:
                raise DatabaseError(f"measurement {row['id']!r:.80} has no variant that can be read")
            return measurement_of(row, texts, variants[row["variant"]])

        return readable("measurements", make, found)

    def _texts(self, connection: Connection, found: Sequence[rows.Row]) -> dict[str, dict[int, rows.Row]]:
        """Return the rows that measurements refer to, by column and number."""
        wanted: tuple[tuple[str, type[Base]], ...] = (
            ("task", WorkloadTaskRow),
            ("point", PointRow),
            ("place", PlaceRow),
            ("message", MessageRow),
        )
        return {name: _by_number(connection, model, {row[name] for row in found}) for name, model in wanted}

    def known_variants(self, connection: Connection, numbers: set[int], readable: Readable) -> dict[int, VariantRecord]:
        """Return the variants of these numbers that can be read."""
        found: dict[int, VariantRecord] = {}
        for chunk in chunks(_whole(numbers)):
            v = self.variants
            query = select(*cut(v, "number", "key", "trace", "parameters")).where(v.c.number.in_(chunk))
            used = connection.execute(query).mappings().all()
            traces = _by_number(connection, TraceRow, {row["trace"] for row in used})
            found |= dict(readable("variants", partial(_numbered_variant, traces), used))
        return found

    def subjects(self, connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        m, v = self.measurements.c, self.variants.c
        query = select(
            m.id, WorkloadTaskRow.workload, WorkloadTaskRow.target, v.key, PointRow.symbols, m.regime
        ).select_from(
            self.measurements.join(WorkloadTaskRow, WorkloadTaskRow.number == m.task)
            .join(self.variants, v.number == m.variant)
            .join(PointRow, PointRow.number == m.point)
        )
        for chunk in chunks(sorted(ids)):
            for id, workload, target, key, symbols, regime in connection.execute(
                query.where(m.id.in_([pack_id(i) for i in chunk]))
            ):
                yield unpack_id(id), (workload, target, key.hex(), symbols, REGIMES[regime])

    def ranking(
        self, connection: Connection, question: RecordQuestion, readable: Readable
    ) -> list[tuple[str, str, float]]:
        conditions = self._conditions(connection, question)
        if conditions is None:
            return []
        m = self.measurements.c
        samples = func.substr(m.samples, 1, SAMPLES_BYTES + 1)
        found = connection.execute(select(m.id, m.variant, samples).where(*conditions)).all()
        keys: dict[int, str] = {}
        for chunk in chunks(_whole({row[1] for row in found})):
            query = select(self.variants.c.number, self.variants.c.key).where(self.variants.c.number.in_(chunk))
            keys |= {number: key.hex() for number, key in connection.execute(query)}

        def scored(row: Any) -> tuple[str, str, float]:
            id = unpack_id(row[0])
            if row[1] not in keys:
                raise DatabaseError(f"measurements row {id!r:.80}: wanted a variant, found none of its number")
            return id, keys[row[1]], median_of(id, unpack_samples(row[2]))

        return readable("measurements", scored, found)

    # Counts

    def count(self, connection: Connection, question: RecordQuestion) -> int:
        tally = TallyRow
        conditions: list[ColumnElement[bool]] = [WorkloadTaskRow.target == question.target]
        if question.workload is not None:
            conditions.append(WorkloadTaskRow.workload == question.workload)
        if question.status is not None:
            conditions.append(tally.stage == 0 if question.status == "ok" else tally.stage > 0)
        if question.regime is not None:
            conditions.append(tally.regime == REGIMES.index(question.regime))
        query = select(func.coalesce(func.sum(tally.count), 0)).join(
            WorkloadTaskRow, WorkloadTaskRow.number == tally.task
        )
        return int(connection.execute(query.where(*conditions)).scalar_one())

    def counts(self, connection: Connection, target: str) -> tuple[int, list[Count]]:
        tally = TallyRow
        of_target = WorkloadTaskRow.target == target
        tasks = select(func.count()).where(
            of_target, select(tally.task).where(tally.task == WorkloadTaskRow.number).exists()
        )
        query = select(tally.kind, tally.stage, tally.checked, func.sum(tally.count))
        query = query.join(WorkloadTaskRow, WorkloadTaskRow.number == tally.task).where(of_target)
        found = connection.execute(query.group_by(tally.kind, tally.stage, tally.checked))
        return connection.execute(tasks).scalar_one(), [
            (_choice(VARIANT_KINDS, kind, "tallies kind"), stage_of(stage), bool(checked), _tallied(count))
            for kind, stage, checked, count in found
        ]

    def units(self, connection: Connection, target: str) -> list[UnitStats]:
        tally = TallyRow
        query = select(tally.place, tally.stage, func.sum(tally.count), func.max(tally.last))
        query = query.join(WorkloadTaskRow, WorkloadTaskRow.number == tally.task).where(
            WorkloadTaskRow.target == target
        )
        found = connection.execute(query.group_by(tally.place, tally.stage)).all()
        places = _by_number(connection, PlaceRow, {row[0] for row in found})
        units: dict[tuple[str, ...], tuple[int, int, float]] = {}
        for number, stage, count, last in found:
            if number not in places:
                raise DatabaseError(f"tallies: wanted their place, found none of number {number!r:.80}")
            place = tuple(places[number][name] for name in ("worker", "host", "unit"))
            made, bad, newest = units.get(place, (0, 0, 0.0))
            units[place] = (made + _tallied(count), bad + _tallied(count) * (stage > 0), max(newest, last))
        return [UnitStats(worker, host, unit, *counts) for (worker, host, unit), counts in units.items()]

    def workloads(self, connection: Connection, target: str, since: float | None) -> list[str]:
        measured = select(TallyRow.task).where(TallyRow.task == WorkloadTaskRow.number)
        measured = measured if since is None else measured.where(TallyRow.last >= since)
        query = select(WorkloadTaskRow.workload).where(WorkloadTaskRow.target == target, measured.exists())
        return list(connection.execute(query).scalars())

    # Changes

    def add(self, connection: Connection, new: Mapping[str, Measurement]) -> int:
        return packed_writing.add(connection, self.measurements, self.variants, new)

    def prune(self, connection: Connection, target: str, selection: Selection, dry_run: bool) -> int:
        return packed_writing.prune(connection, self.measurements, self.variants, target, selection, dry_run)

    # Care

    def problems(self, connection: Connection) -> Iterator[str]:
        yield from self._altered_texts(connection)
        v = self.variants
        for chunk in in_chunks(connection, select(*cut(v, "number", "key", "trace", "parameters"))):
            traces = _by_number(connection, TraceRow, {row["trace"] for row in chunk})
            yield from _faults(partial(_numbered_variant, traces), chunk)
        for chunk in in_chunks(connection, select(*self._columns())):
            variants = self._kinds(connection, {row["variant"] for row in chunk})
            messages = {0, *_by_number(connection, MessageRow, {row["message"] for row in chunk if row["message"]})}
            doubtful = [
                row
                for row in chunk
                if row["message"] not in messages or not is_sound(row, variants.get(row["variant"]))
            ]
            texts = self._texts(connection, doubtful)
            known = self.known_variants(connection, {row["variant"] for row in doubtful}, left_out)
            yield from _faults(partial(_if_variant, texts, known), doubtful)
        yield from packed_writing.wrong_tallies(connection, self.measurements)
        for id in connection.execute(select(UnreadableRow.id).limit(20)).scalars():
            yield f"unreadable row {id!r:.80}: a measurement of an earlier schema that could not be read; delete it if it is of no use"

    @staticmethod
    def _altered_texts(connection: Connection) -> Iterator[str]:
        """Yield a sentence for each shared text that is not what its key hashes."""
        hashed: tuple[tuple[type[Base], tuple[str, ...]], ...] = (
            (PointRow, ("symbols",)),
            (PlaceRow, ("job", "environment", "worker", "host", "unit")),
            (MessageRow, ("text",)),
        )
        for model, names in hashed:
            table: Any = model.__table__
            for row in streamed(connection, select(*cut(table, "number", "key", *names))):
                if not all(isinstance(row[name], str) for name in names) or row["key"] != text_key(
                    *(row[name] for name in names)
                ):
                    yield f"{table.name} row {row['number']}: wanted a text that its key hashes, found another; the row was altered"

    def _kinds(self, connection: Connection, numbers: set[int]) -> dict[int, int]:
        """Return the kinds of variants by number."""
        found: dict[int, int] = {}
        v = self.variants.c
        for chunk in chunks(_whole(numbers)):
            query = (
                select(v.number, TraceRow.kind).join(TraceRow, TraceRow.number == v.trace).where(v.number.in_(chunk))
            )
            found |= {number: kind for number, kind in connection.execute(query)}
        return found

    # Plans

    def plans(self, connection: Connection, target: str, workload: str | None, readable: Readable) -> list[PlanRecord]:
        query = select(*PlanRow.columns()).where(PlanRow.target == target)
        query = query if workload is None else query.where(PlanRow.workload == workload)
        return readable("plans", rows.plan_of, connection.execute(query).mappings())

    def put_plan(self, connection: Connection, plan: PlanRecord) -> None:
        statement = insert(connection, PlanRow.__table__).values(rows.plan_values(plan))
        replaced = {"entries": plan.entries, "turn": plan.turn}
        keys = ["workload", "target", "origin", "version"]
        connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced))


def _numbered_variant(traces: Mapping[int, rows.Row], row: rows.Row) -> tuple[int, VariantRecord]:
    return row["number"], variant_of(row, traces)


def is_sound(row: rows.Row, kind: int | None) -> bool:
    """Return True if `measurement_of` makes a measurement of a row whose references exist.

    kind: of its variant
    """
    try:
        samples = unpack_samples(row["samples"])
        id = unpack_id(row["id"])
    except DatabaseError:
        return False
    numbers = (row["measured_at"], row["build_secs"], *samples)
    told = [x for x in (row["clock_mhz"], row["celsius"]) if x is not None]
    stage = row["stage"]
    whole = (stage, row["regime"], row["kind"], row["message"])
    if not all(isinstance(x, (int, float)) for x in (*numbers, *told)) or not all(isinstance(x, int) for x in whole):
        return False
    return (
        0 < len(id) <= KEY_LIMIT
        and "\0" not in id
        and kind == row["kind"]
        and 0 <= stage <= len(STAGES)
        and 0 <= row["regime"] < len(REGIMES)
        and row["checked"] in (0, 1)
        and bool(samples) == (stage == 0) == (row["message"] == 0)
        and math.isfinite(sum(numbers) + sum(told))
        and min(numbers) >= 0
        and len(samples) <= SAMPLES_LIMIT
    )


def _tallied(count: object) -> int:
    """Return a tally of records, a Decimal from PostgreSQL. Raises `DatabaseError` for what is no number."""
    if not isinstance(count, (int, float, Decimal)):
        raise DatabaseError(f"tallies count: wanted a number, found {count!r:.80}")
    return int(count)


def _whole(numbers: Iterable[object]) -> list[int]:
    """Return the whole numbers in order: SQLite keeps anything in any column."""
    return sorted(n for n in numbers if isinstance(n, int))


def _faults(make: Callable[[rows.Row], object], found: Iterable[rows.Row]) -> Iterator[str]:
    """Yield what is wrong with rows."""
    for row in found:
        try:
            make(row)
        except DatabaseError as error:
            yield str(error)


def _if_variant(
    texts: Mapping[str, Mapping[int, rows.Row]], variants: Mapping[int, VariantRecord], row: rows.Row
) -> Measurement | None:
    """Return the measurement of a row whose variant can be read; what is wrong with others is said of the variant."""
    variant = variants.get(row["variant"])
    return None if variant is None else measurement_of(row, texts, variant)


def in_chunks(connection: Connection, query: Select[Any]) -> Iterator[Sequence[rows.Row]]:
    """Yield the rows of a query, a few at a time."""
    found = connection.execute(query, execution_options={"yield_per": _STREAMED})
    yield from found.mappings().partitions()


def streamed(connection: Connection, query: Select[Any]) -> Iterator[rows.Row]:
    """Yield the rows of a query, with few in memory."""
    for chunk in in_chunks(connection, query):
        yield from chunk


def _by_number(connection: Connection, model: type[Base], numbers: set[int]) -> dict[int, rows.Row]:
    table: Any = model.__table__
    found: dict[int, rows.Row] = {}
    for chunk in chunks(_whole(numbers)):
        query = select(*cut(table, *table.c.keys())).where(table.c.number.in_(chunk))
        found |= {row["number"]: row for row in connection.execute(query).mappings()}
    return found


def stage_of(number: int) -> str | None:
    """Return the stage of a stored number. Raises `DatabaseError` for another number."""
    if not isinstance(number, int):
        raise DatabaseError(f"stage: wanted a number, found {number!r:.80}")
    return None if number == 0 else str(_choice(STAGES, number - 1, "stage"))


def _choice(names: Sequence[Any], number: int, what: str) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise DatabaseError(f"{what}: wanted a number below {len(names)}, found {number}")
    return names[number]


def variant_of(row: rows.Row, traces: Mapping[int, rows.Row]) -> VariantRecord:
    """Return the variant of a row. Raises `DatabaseError` where it is malformed, or its key is another's."""
    where = f"variants row {row['key'].hex()}"
    if row["trace"] not in traces:
        raise DatabaseError(f"{where}: wanted its trace, found none of number {row['trace']}")
    trace = traces[row["trace"]]
    made = VariantRecord(
        _choice(VARIANT_KINDS, trace["kind"], f"{where} kind"), trace["sketch"], trace["trace"], row["parameters"]
    )
    if made.key != row["key"].hex():
        raise DatabaseError(f"{where}: wanted the hash of its content, {made.key!r}; the row was altered")
    return made


def measurement_of(row: rows.Row, texts: Mapping[str, Mapping[int, rows.Row]], variant: VariantRecord) -> Measurement:
    """Return the measurement of a row. Raises `DatabaseError` where it is malformed, or refers to nothing."""
    id = unpack_id(row["id"])
    where = f"measurements row {id!r:.80}"
    for name in ("task", "point", "place"):
        if row[name] not in texts[name]:
            raise DatabaseError(f"{where}: wanted its {name}, found none of number {row[name]}")
    if row["message"] and row["message"] not in texts["message"]:
        raise DatabaseError(f"{where}: wanted its message, found none of number {row['message']}")
    task, place = texts["task"][row["task"]], texts["place"][row["place"]]
    if _choice(VARIANT_KINDS, row["kind"], f"{where} kind") != variant.kind:
        raise DatabaseError(f"{where} kind: wanted that of its variant, found another; the row was altered")
    try:
        samples = unpack_samples(row["samples"])
        stage: Any = stage_of(row["stage"])
    except DatabaseError as error:
        raise DatabaseError(f"{where} {error}") from None
    return Measurement(
        id=id,
        workload=task["workload"],
        target=task["target"],
        variant=variant,
        symbols=parse_json(texts["point"][row["point"]]["symbols"], f"{where} symbols"),
        status="ok" if stage is None else "failed",
        stage=stage,
        message=texts["message"][row["message"]]["text"] if row["message"] else "",
        samples_secs=samples,
        regime=_choice(REGIMES, row["regime"], f"{where} regime"),
        checked=row["checked"],
        build_secs=row["build_secs"],
        job=place["job"],
        environment=place["environment"],
        measured_at=row["measured_at"],
        worker=place["worker"],
        host=place["host"],
        unit=place["unit"],
        clock_mhz=row["clock_mhz"],
        celsius=row["celsius"],
    )
