"""The layout of schema 6: every measurement is a row of texts, and plans of all databases share their versions.

Databases of this schema are read and written as they are, so that jobs of the version before can use them meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Boolean, Column, Connection, Integer, MetaData, Select, Table, case, delete, func, select, text
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import Double, Text

from relax_tune.database import rows
from relax_tune.database.counts import UnitStats
from relax_tune.database.records import (
    TEXT_LIMIT,
    Measurement,
    PlanRecord,
    Selection,
    VariantRecord,
    parse_json,
)
from relax_tune.database.rules import chunks, median_of
from relax_tune.database.sql.layout import Count, Readable, RecordQuestion, add_missing, insert, left_out
from relax_tune.errors import DatabaseError

VERSION = "0006"
TABLES = MetaData()


def _table(name: str, **columns: Any) -> Table:
    return Table(name, TABLES, *(Column(column, kind, primary_key=key) for column, (kind, key) in columns.items()))


_TEXT, _KEY, _NUMBER = (Text, False), (Text, True), (Double, False)
VARIANTS = _table("variants", key=_KEY, kind=_TEXT, sketch=_TEXT, trace=_TEXT, parameters=_TEXT)
MEASUREMENTS = _table(
    "measurements",
    id=_KEY,
    **dict.fromkeys(("workload", "target", "variant", "symbols", "status", "stage", "message", "samples"), _TEXT),
    regime=_TEXT,
    checked=(Boolean, False),
    build_secs=_NUMBER,
    job=_TEXT,
    environment=_TEXT,
    measured_at=_NUMBER,
    worker=_TEXT,
    host=_TEXT,
    unit=_TEXT,
    clock_mhz=_NUMBER,
    celsius=_NUMBER,
)
PLANS = _table("plans", workload=_KEY, target=_KEY, version=(Integer, True), entries=_TEXT)
_M = MEASUREMENTS.c


def columns(table: Table) -> list[ColumnElement[Any]]:
    """Return all columns, texts cut as by `Base.columns`."""
    cut = TEXT_LIMIT + 1
    return [
        func.substr(c, 1, cut).label(c.name) if isinstance(c.type, Text) and not c.primary_key else c for c in table.c
    ]


def _matching(question: RecordQuestion) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [_M.target == question.target]
    if question.workload is not None:
        conditions.append(_M.workload == question.workload)
    if question.point is not None:
        conditions.append(_M.symbols == question.point)
    if question.status is not None:
        conditions.append(_M.status == question.status)
    if question.regime is not None:
        conditions.append(_M.regime == question.regime)
    if question.winners:
        conditions += [_M.status == "ok", _M.checked.is_(True)]
    if question.since is not None:
        conditions.append(_M.measured_at >= question.since)
    if question.kinds is not None:  # correlated, so that no engine reads all variants
        same = (VARIANTS.c.key == _M.variant) & VARIANTS.c.kind.in_(question.kinds)
        conditions.append(select(VARIANTS.c.key).where(same).exists())
    return conditions


def _selected(target: str, selection: Selection) -> list[ColumnElement[bool]]:
    conditions = _matching(RecordQuestion(target, status="failed" if selection.failed else None, since=selection.since))
    if selection.older_than is not None:
        conditions += [_M.measured_at > 0, _M.measured_at < selection.older_than]
    if selection.job is not None:
        conditions.append(_M.job == selection.job)
    if (name := selection.worker) is not None:
        conditions.append((_M.worker == name) | (_M.host == name) | (_M.unit == name))
    return conditions


def _text_id(id: object) -> str:
    if not isinstance(id, str):
        raise DatabaseError(f"measurements row {id!r:.80}: wanted a text as its id, found something else")
    return id


class PlainLayout:
    """A `relax_tune.database.sql.layout.TableLayout`."""

    version = VERSION
    named_origins = False

    def add(self, connection: Connection, new: Mapping[str, Measurement]) -> int:
        variants = {m.variant.key: m.variant for m in new.values()}
        add_missing(connection, VARIANTS, [rows.variant_values(variants[key]) for key in sorted(variants)])
        return add_missing(connection, MEASUREMENTS, [rows.measurement_values(new[id]) for id in sorted(new)])

    def subjects(self, connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        query = select(_M.id, _M.workload, _M.target, _M.variant, _M.symbols, _M.regime)
        for chunk in chunks(sorted(ids)):
            for found in connection.execute(query.where(_M.id.in_(chunk))):
                yield found[0], tuple(found[1:])

    def ids(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[str]:
        return readable(
            "measurements", _text_id, connection.execute(select(_M.id).where(*_matching(question))).scalars()
        )

    def select(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[Measurement]:
        return self._select(connection, _matching(question), readable)

    def by_ids(self, connection: Connection, ids: Sequence[str], readable: Readable) -> list[Measurement]:
        return self._select(connection, [_M.id.in_(ids)], readable)

    def _select(
        self, connection: Connection, conditions: Sequence[ColumnElement[bool]], readable: Readable
    ) -> list[Measurement]:
        found = connection.execute(select(*columns(MEASUREMENTS)).where(*conditions)).mappings().all()
        variants = self.variants(connection, {row["variant"] for row in found}, readable)

        def make(row: rows.Row) -> Measurement:
            if row["variant"] not in variants:
                raise DatabaseError(f"measurement {row['id']!r:.80} has no variant that can be read")
            return rows.measurement_of(row, variants[row["variant"]])

        return readable("measurements", make, found)

    def ranking(
        self, connection: Connection, question: RecordQuestion, readable: Readable
    ) -> list[tuple[str, str, float]]:
        query = select(_M.id, _M.variant, func.substr(_M.samples, 1, TEXT_LIMIT + 1)).where(*_matching(question))

        def scored(row: Any) -> tuple[str, str, float]:
            return row[0], row[1], median_of(row[0], parse_json(row[2], f"measurements row {row[0]!r:.80} samples"))

        return readable("measurements", scored, connection.execute(query).all())

    def count(self, connection: Connection, question: RecordQuestion) -> int:
        return connection.execute(select(func.count(_M.id)).where(*_matching(question))).scalar_one()

    def counts(self, connection: Connection, target: str) -> tuple[int, list[Count]]:
        workloads = select(func.count(func.distinct(_M.workload))).where(_M.target == target)
        query = (
            select(VARIANTS.c.kind, _M.stage, _M.checked, func.count())
            .select_from(MEASUREMENTS.join(VARIANTS, VARIANTS.c.key == _M.variant))
            .where(_M.target == target)
            .group_by(VARIANTS.c.kind, _M.stage, _M.checked)
        )
        return connection.execute(workloads).scalar_one(), [
            (str(kind), stage, bool(checked), int(count)) for kind, stage, checked, count in connection.execute(query)
        ]

    def units(self, connection: Connection, target: str) -> list[UnitStats]:
        place = (_M.worker, _M.host, _M.unit)
        failed = func.sum(case((_M.status == "failed", 1), else_=0))
        query = select(*place, func.count(), failed, func.max(_M.measured_at)).where(_M.target == target)
        return [UnitStats(*row) for row in connection.execute(query.group_by(*place))]

    def workloads(self, connection: Connection, target: str, since: float | None) -> list[str]:
        conditions = _matching(RecordQuestion(target, since=since))
        return list(connection.execute(select(_M.workload).where(*conditions).distinct()).scalars())

    def prune(self, connection: Connection, target: str, selection: Selection, dry_run: bool) -> int:
        conditions = _selected(target, selection)
        if dry_run:
            return connection.execute(select(func.count(_M.id)).where(*conditions)).scalar_one()
        if connection.dialect.name == "postgresql":  # no writer may refer to a variant while we call it unused
            connection.execute(text("LOCK TABLE variants IN SHARE ROW EXCLUSIVE MODE"))
        removed = connection.execute(delete(MEASUREMENTS).where(*conditions)).rowcount
        used = select(_M.id).where(_M.variant == VARIANTS.c.key).exists()
        connection.execute(delete(VARIANTS).where(~used))
        return removed

    def problems(self, connection: Connection) -> Iterator[str]:
        for chunk in self.in_chunks(connection, select(*columns(VARIANTS))):
            for row in chunk:
                try:
                    rows.variant_of(row)
                except DatabaseError as error:
                    yield str(error)
        for chunk in self.in_chunks(connection, select(*columns(MEASUREMENTS))):
            variants = self.variants(connection, {row["variant"] for row in chunk}, left_out)
            for row in chunk:
                try:
                    if row["variant"] in variants:
                        rows.measurement_of(row, variants[row["variant"]])
                except DatabaseError as error:
                    yield str(error)

    @staticmethod
    def variants(connection: Connection, keys: set[str], readable: Readable) -> dict[str, VariantRecord]:
        """Return the variants of these keys that can be read."""
        found: dict[str, VariantRecord] = {}
        for chunk in chunks(sorted(keys)):
            used = connection.execute(select(*columns(VARIANTS)).where(VARIANTS.c.key.in_(chunk))).mappings()
            found |= {v.key: v for v in readable("variants", rows.variant_of, used)}
        return found

    @staticmethod
    def in_chunks(connection: Connection, query: Select[Any]) -> Iterator[Sequence[rows.Row]]:
        """Yield the rows of a query, a few at a time."""
        found = connection.execute(query, execution_options={"yield_per": 500})
        yield from found.mappings().partitions()

    def plans(self, connection: Connection, target: str, workload: str | None, readable: Readable) -> list[PlanRecord]:
        query = select(*columns(PLANS)).where(PLANS.c.target == target)
        query = query if workload is None else query.where(PLANS.c.workload == workload)
        return readable("plans", rows.plan_of, connection.execute(query).mappings())

    def put_plan(self, connection: Connection, plan: PlanRecord) -> None:
        values = {name: value for name, value in rows.plan_values(plan).items() if name in PLANS.c}
        statement = insert(connection, PLANS).values(values)
        replaced = {"entries": plan.entries}
        connection.execute(statement.on_conflict_do_update(index_elements=list(PLANS.primary_key), set_=replaced))
