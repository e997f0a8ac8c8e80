"""A check of every row of a database for damage and alteration, with few rows in memory at a time.

Tests: `tests/database/test_opening.py`, `tests/database/test_tallies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, select

from relax_tune.database import rows
from relax_tune.database.models import (
    Base,
    EnvironmentRow,
    HistogramRow,
    JobRow,
    LeaseRow,
    MessageRow,
    PlaceRow,
    PointRow,
    TargetRow,
    TraceRow,
    VariantRow,
    WorkloadRow,
    truncated_columns,
)
from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.database.rows import Row
from relax_tune.database.rules import chunks
from relax_tune.database.sql.codec import text_key
from relax_tune.database.sql.measurement_rows import (
    References,
    is_valid,
    measurement_columns,
    measurement_of,
    read_references,
    read_variants,
    variant_columns,
    variant_of,
)
from relax_tune.database.sql.plans import select_plans
from relax_tune.database.sql.statements import integers, read_valid, row_batches, rows_by_number
from relax_tune.database.sql.tallies import wrong_tallies
from relax_tune.errors import DatabaseError

_MAX_PROBLEMS = 1000
"""Number of problems that are listed; the rest are counted."""
_RECORDS: tuple[tuple[type[Base], Callable[[Row], object]], ...] = (
    (TargetRow, rows.target_of),
    (EnvironmentRow, rows.environment_of),
    (WorkloadRow, rows.workload_of),
    (JobRow, rows.job_of),
    (LeaseRow, rows.lease_of),
    (HistogramRow, rows.histogram_of),
)
_HASHED: tuple[tuple[type[Base], tuple[str, ...]], ...] = (
    (PointRow, ("symbols",)),
    (PlaceRow, ("job", "environment", "worker", "host", "unit")),
    (MessageRow, ("text",)),
)


def find_problems(connection: Connection) -> list[str]:
    """Return a sentence for each problem, up to a thousand, and one with the number of others.

    Problems are a damaged file, a row whose content does not match its key, an invalid record, and a dangling reference.
    """
    listed: list[str] = []
    unlisted = 0
    for problem in _problems(connection):
        if len(listed) < _MAX_PROBLEMS:
            listed.append(problem)
        else:
            unlisted += 1
    return [*listed, *([f"and {unlisted} problems more"] if unlisted else [])]


def _problems(connection: Connection) -> Iterator[str]:
    if connection.dialect.name == "sqlite":
        lines = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars()
        yield from [f"the file is damaged: {line}" for line in lines if line != "ok"]
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            yield f"{table} row {row} refers to a row of {parent} that does not exist"
    for model, build in _RECORDS:
        for batch in row_batches(connection, select(*model.columns())):
            yield from _errors(build, batch)
    for target in connection.execute(select(TargetRow.key)).scalars().all():
        problems: list[str] = []

        def judge(_: str, build: Callable[[Any], Any], batch: Iterable[Any], into: list[str] = problems) -> list[Any]:
            into += _errors(build, batch)
            return []

        select_plans(connection, target, None, judge)
        yield from problems
    yield from _altered_texts(connection)
    yield from _variant_problems(connection)
    yield from _measurement_problems(connection)
    yield from wrong_tallies(connection)


def _errors(build: Callable[[Row], object], batch: Iterable[Row]) -> Iterator[str]:
    """Yield the errors of building records of rows."""
    for row in batch:
        try:
            build(row)
        except DatabaseError as error:
            yield str(error)


def _altered_texts(connection: Connection) -> Iterator[str]:
    """Yield a sentence for each shared row whose key is not the hash of its texts."""
    for model, names in _HASHED:
        table: Any = model.__table__
        for batch in row_batches(connection, select(*truncated_columns(table, "number", "key", *names))):
            for row in batch:
                texts = [row[name] for name in names]
                if not all(isinstance(text, str) for text in texts) or row["key"] != text_key(*texts):
                    yield f"{table.name} row {row['number']}: its key is not the hash of its text; the row was altered"


def _variant_problems(connection: Connection) -> Iterator[str]:
    for batch in row_batches(connection, select(*variant_columns())):
        traces = rows_by_number(connection, TraceRow, {row["trace"] for row in batch})

        def build(row: Row, traces: Mapping[int, Row] = traces) -> VariantRecord:
            return variant_of(row, traces)

        yield from _errors(build, batch)


def _measurement_problems(connection: Connection) -> Iterator[str]:
    """Yield a sentence for each invalid measurement whose variant is valid; `_variant_problems` names the variants."""
    for batch in row_batches(connection, select(*measurement_columns())):
        kinds = _variant_kinds(connection, {row["variant"] for row in batch})
        messages = {0, *rows_by_number(connection, MessageRow, {row["message"] for row in batch if row["message"]})}
        # Records are built of doubtful rows only, for the sentence that says what is wrong.
        doubtful = [r for r in batch if r["message"] not in messages or not is_valid(r, kinds.get(r["variant"]))]
        references = read_references(connection, doubtful)
        variants = read_variants(connection, {row["variant"] for row in doubtful}, read_valid)

        def build(
            row: Row, references: References = references, variants: Mapping[int, VariantRecord] = variants
        ) -> Measurement | None:
            variant = variants.get(row["variant"])
            return None if variant is None else measurement_of(row, references, variant)

        yield from _errors(build, doubtful)


def _variant_kinds(connection: Connection, numbers: set[int]) -> dict[int, int]:
    """Return the stored kinds of variants by number."""
    kinds: dict[int, int] = {}
    for chunk in chunks(integers(numbers)):
        query = select(VariantRow.number, TraceRow.kind).join(TraceRow, TraceRow.number == VariantRow.trace)
        kinds |= {number: kind for number, kind in connection.execute(query.where(VariantRow.number.in_(chunk)))}
    return kinds
