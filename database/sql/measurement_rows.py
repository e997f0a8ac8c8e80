"""Conversion of rows of `measurements` and `variants`, with the rows they refer to, to records.

Rows are untrusted: SQLite stores values of any type in any column, and anybody may have written the file.

Tests: `tests/database/test_opening.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.sql import ColumnElement

from relax_tune.database.models import (
    Base,
    MeasurementRow,
    MessageRow,
    PlaceRow,
    PointRow,
    TraceRow,
    VariantRow,
    WorkloadTaskRow,
    truncated_columns,
)
from relax_tune.database.records import (
    KEY_LIMIT,
    REGIMES,
    SAMPLES_LIMIT,
    STAGES,
    VARIANT_KINDS,
    Measurement,
    VariantRecord,
    parse_json,
)
from relax_tune.database.rows import Row
from relax_tune.database.rules import chunks
from relax_tune.database.sql.codec import SAMPLES_BYTES, unpack_id, unpack_samples
from relax_tune.database.sql.statements import RowReader, integers, rows_by_number
from relax_tune.errors import DatabaseError

_REFERENCES: tuple[tuple[str, type[Base]], ...] = (
    ("task", WorkloadTaskRow),
    ("point", PointRow),
    ("place", PlaceRow),
    ("message", MessageRow),
)
References = Mapping[str, Mapping[int, Row]]
"""Rows that measurements refer to, by column and number."""


def measurement_columns() -> list[ColumnElement[Any]]:
    """Return the columns of `measurements`, with samples truncated just above the limit of records."""
    columns = MeasurementRow.__table__.c
    samples = func.substr(columns.samples, 1, SAMPLES_BYTES + 1).label("samples")
    return [*(c for c in columns if c.name != "samples"), samples]


def variant_columns() -> list[ColumnElement[Any]]:
    """Return the columns of `variants`, long texts truncated."""
    return truncated_columns(VariantRow.__table__, "number", "key", "trace", "parameters")


def read_references(connection: Connection, rows: Sequence[Row]) -> References:
    """Read the rows that measurements refer to, except variants."""
    return {name: rows_by_number(connection, model, {row[name] for row in rows}) for name, model in _REFERENCES}


def read_variants(connection: Connection, numbers: Iterable[object], reader: RowReader) -> dict[int, VariantRecord]:
    """Read variants by number; `reader` decides what an invalid row does."""
    variants: dict[int, VariantRecord] = {}
    for chunk in chunks(integers(numbers)):
        rows = connection.execute(select(*variant_columns()).where(VariantRow.number.in_(chunk))).mappings().all()
        traces = rows_by_number(connection, TraceRow, {row["trace"] for row in rows})
        variants |= dict(reader("variants", partial(_numbered_variant, traces), rows))
    return variants


def read_measurements(connection: Connection, rows: Sequence[Row], reader: RowReader) -> list[Measurement]:
    """Return the measurements of rows; `reader` decides what an invalid row does."""
    references = read_references(connection, rows)
    variants = read_variants(connection, {row["variant"] for row in rows}, reader)

    def build(row: Row) -> Measurement:
        if row["variant"] not in variants:
            raise DatabaseError(f"measurement {row['id']!r:.80} has no valid variant")
        return measurement_of(row, references, variants[row["variant"]])

    return reader("measurements", build, rows)


def _numbered_variant(traces: Mapping[int, Row], row: Row) -> tuple[int, VariantRecord]:
    return row["number"], variant_of(row, traces)


def variant_of(row: Row, traces: Mapping[int, Row]) -> VariantRecord:
    """Return the variant of a row.

    Raises:
        DatabaseError: The row is malformed, refers to no trace, or its key is not the hash of its content.
    """
    where = f"variants row {row['key'].hex()}"
    if row["trace"] not in traces:
        raise DatabaseError(f"{where}: refers to trace {row['trace']}, which does not exist")
    trace = traces[row["trace"]]
    kind = _choice(VARIANT_KINDS, trace["kind"], f"{where} kind")
    variant = VariantRecord(kind, trace["sketch"], trace["trace"], row["parameters"])
    if variant.key != row["key"].hex():
        raise DatabaseError(f"{where}: expected the hash of its content, {variant.key!r}; the row was altered")
    return variant


def measurement_of(row: Row, references: References, variant: VariantRecord) -> Measurement:
    """Return the measurement of a row.

    Raises:
        DatabaseError: The row is malformed or refers to a row that does not exist.
    """
    id = unpack_id(row["id"])
    where = f"measurements row {id!r:.80}"
    for name, _ in _REFERENCES:
        if row[name] not in references[name] and not (name == "message" and not row[name]):
            raise DatabaseError(f"{where}: refers to {name} {row[name]}, which does not exist")
    task, place = references["task"][row["task"]], references["place"][row["place"]]
    # The kind is stored twice, so that counts by kind need no join; both must agree.
    if _choice(VARIANT_KINDS, row["kind"], f"{where} kind") != variant.kind:
        raise DatabaseError(f"{where} kind: expected the kind of its variant, got another; the row was altered")
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
        symbols=parse_json(references["point"][row["point"]]["symbols"], f"{where} symbols"),
        status="ok" if stage is None else "failed",
        stage=stage,
        message=references["message"][row["message"]]["text"] if row["message"] else "",
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
        contention=row["contention"],
    )


def is_valid(row: Row, kind: int | None) -> bool:
    """Return True if `measurement_of` accepts a row whose references exist.

    `SqlStore.check` reads every row. Testing the columns instead of building a `Measurement` of each makes it several times faster.

    Args:
        kind: Stored kind of the row's variant.
    """
    try:
        samples = unpack_samples(row["samples"])
        id = unpack_id(row["id"])
    except DatabaseError:
        return False
    seconds = (row["measured_at"], row["build_secs"], *samples)
    sensors = [x for x in (row["clock_mhz"], row["celsius"], row["contention"]) if x is not None]
    stage = row["stage"]
    codes = (stage, row["regime"], row["kind"], row["message"])
    if not all(isinstance(x, (int, float)) for x in (*seconds, *sensors)):
        return False
    if not all(isinstance(x, int) for x in codes):
        return False
    return (
        0 < len(id) <= KEY_LIMIT
        and "\0" not in id
        and kind == row["kind"]
        and 0 <= stage <= len(STAGES)
        and 0 <= row["regime"] < len(REGIMES)
        and row["checked"] in (0, 1)
        # A measurement has samples, or a failure has a stage and a message.
        and bool(samples) == (stage == 0) == (row["message"] == 0)
        # one test for all: a NaN or an infinity anywhere makes the sum one
        and math.isfinite(sum(seconds) + sum(sensors))
        and 0 <= (row["contention"] or 0) <= 1
        and min(seconds) >= 0
        and len(samples) <= SAMPLES_LIMIT
    )


def stage_of(number: int) -> str | None:
    """Return the stage of a stored number.

    Raises:
        DatabaseError: No stage has the number.
    """
    if not isinstance(number, int):
        raise DatabaseError(f"stage: expected a number, got {number!r:.80}")
    return None if number == 0 else str(_choice(STAGES, number - 1, "stage"))


def kind_of(number: int, where: str) -> str:
    """Return the variant kind of a stored number.

    Raises:
        DatabaseError: No kind has the number.
    """
    return str(_choice(VARIANT_KINDS, number, where))


def _choice(names: Sequence[Any], number: int, where: str) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise DatabaseError(f"{where}: expected a number below {len(names)}, got {number!r:.80}")
    return names[number]
