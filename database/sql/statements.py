"""What the statements of every table share: filters of measurements, conflict clauses of both engines, reading of untrusted rows.

Functions of this package run inside transactions of `SqlStore`.

Tests: `tests/database/test_store_contract.py`, `tests/database/test_query_plans.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, select
from sqlalchemy.dialects import postgresql, sqlite

from relax_tune.database.models import Base, truncated_columns
from relax_tune.database.records import Regime, Status, VariantKind
from relax_tune.database.rows import Row
from relax_tune.database.rules import ROW_TYPE_ERRORS, chunks
from relax_tune.errors import DatabaseError

RowReader = Callable[[str, Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Builds records of the rows of a table: `reader(table, build, rows)`. It decides what an invalid row does."""
_BATCH_ROWS = 2000
"""Rows in memory at a time while a whole table is read."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Conditions on the measurements of one target; None and False admit every value.

    Attributes:
        point: Canonical text of the symbols.
        winners: Admit only measurements that are ok and checked.
        since: Earliest `measured_at`, in Unix seconds.
    """

    target: str
    workload: str | None = None
    point: str | None = None
    status: Status | None = None
    kinds: tuple[VariantKind, ...] | None = None
    regime: Regime | None = None
    winners: bool = False
    since: float | None = None


def read_valid(
    table: str,
    build: Callable[[Any], Any],
    rows: Iterable[Any],
    report: Callable[[str, Exception], None] = lambda *_: None,
) -> list[Any]:
    """Build records of the rows of a table and skip invalid rows: a `RowReader` when `report` is bound.

    Args:
        report: Receives the table and the error of each invalid row.
    """
    records = []
    for row in rows:
        try:
            records.append(build(row))
        except (DatabaseError, *ROW_TYPE_ERRORS) as error:
            report(table, error)
    return records


def insert(connection: Connection, table: Any) -> Any:
    """Return this engine's INSERT, which supports conflict clauses."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def add_missing(connection: Connection, table: Any, values: Sequence[Mapping[str, Any]]) -> int:
    """Insert the rows whose keys are new; return their number."""
    if not values:
        return 0
    statement = insert(connection, table).on_conflict_do_nothing()
    if connection.dialect.name == "postgresql":  # psycopg reports no row count for many statements at once
        keys = connection.execute(statement.returning(*table.primary_key), list(values))
        return len(keys.all())
    return connection.execute(statement, list(values)).rowcount


def row_batches(connection: Connection, query: Select[Any]) -> Iterator[Sequence[Row]]:
    """Yield the rows of a query in batches, so that few of them are in memory."""
    result = connection.execute(query, execution_options={"yield_per": _BATCH_ROWS})
    yield from result.mappings().partitions()


def rows_by_number(connection: Connection, model: type[Base], numbers: Iterable[object]) -> dict[int, Row]:
    """Return the rows of a table with a `number` column, by number."""
    table: Any = model.__table__
    rows: dict[int, Row] = {}
    for chunk in chunks(integers(numbers)):
        query = select(*truncated_columns(table, *table.c.keys())).where(table.c.number.in_(chunk))
        rows |= {row["number"]: row for row in connection.execute(query).mappings()}
    return rows


def integers(values: Iterable[object]) -> list[int]:
    """Return the integers among values, sorted. SQLite stores values of any type in any column."""
    return sorted({value for value in values if isinstance(value, int)})
