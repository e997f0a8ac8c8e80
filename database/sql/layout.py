"""`TableLayout`: how the measurements of a database are stored. Each schema that is served has one.

A layout runs inside transactions of `SqlStore`, which owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from relax_tune.database.counts import UnitStats
from relax_tune.database.records import Measurement, PlanRecord, Regime, Selection, Status, VariantKind
from relax_tune.database.rules import MISTYPED
from relax_tune.errors import DatabaseError

Readable = Callable[[str, Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Makes records of the rows of a table; malformed rows are left out, counted and told."""
Count = tuple[str, str | None, bool, int]
"""Kind of variant, stage of failure, whether checked, number of measurements."""


@dataclass(frozen=True, slots=True)
class RecordQuestion:
    """Conditions of measurements of one target; None and False stand for any.

    point: canonical text of the symbols; winners: only ok and checked ones; since: Unix seconds of the earliest
    """

    target: str
    workload: str | None = None
    point: str | None = None
    status: Status | None = None
    kinds: tuple[VariantKind, ...] | None = None
    regime: Regime | None = None
    winners: bool = False
    since: float | None = None


class TableLayout(Protocol):
    """The statements of one schema."""

    version: str
    named_origins: bool
    """True if plans of other databases are kept apart."""

    def add(self, connection: Connection, new: Mapping[str, Measurement]) -> int:
        """Insert the measurements that are missing; return their number."""
        ...

    def subjects(self, connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield (id, subject) of the ids that are there."""
        ...

    def ids(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[str]:
        """Return the ids, in no order."""
        ...

    def select(self, connection: Connection, question: RecordQuestion, readable: Readable) -> list[Measurement]:
        """Return the measurements, in no order."""
        ...

    def by_ids(self, connection: Connection, ids: Sequence[str], readable: Readable) -> list[Measurement]:
        """Return the measurements of up to CHUNK ids, in no order."""
        ...

    def ranking(
        self, connection: Connection, question: RecordQuestion, readable: Readable
    ) -> list[tuple[str, str, float]]:
        """Return (id, variant key, median) of the winners."""
        ...

    def count(self, connection: Connection, question: RecordQuestion) -> int:
        """Return the number of measurements."""
        ...

    def counts(self, connection: Connection, target: str) -> tuple[int, list[Count]]:
        """Return the number of workloads, and the numbers of measurements by kind, stage and check."""
        ...

    def units(self, connection: Connection, target: str) -> list[UnitStats]:
        """Return the counts by worker, host and unit."""
        ...

    def workloads(self, connection: Connection, target: str, since: float | None) -> list[str]:
        """Return the keys of the workloads measured on a target, or measured there from a moment on."""
        ...

    def prune(self, connection: Connection, target: str, selection: Selection, dry_run: bool) -> int:
        """Remove or count the selected measurements."""
        ...

    def problems(self, connection: Connection) -> Iterator[str]:
        """Yield a sentence for each problem of variants and measurements."""
        ...

    def plans(self, connection: Connection, target: str, workload: str | None, readable: Readable) -> list[PlanRecord]:
        """Return the plans of a target, or of one task."""
        ...

    def put_plan(self, connection: Connection, plan: PlanRecord) -> None:
        """Insert a plan, or replace the one of its task, origin and version."""
        ...


def left_out(
    table: str,
    make: Callable[[Any], Any],
    found: Iterable[Any],
    tell: Callable[[str, Exception], None] = lambda *_: None,
) -> list[Any]:
    """Make records of the rows of a table, a `Readable`. Malformed rows are left out. tell: receives the table and what one raised"""
    made = []
    for row in found:
        try:
            made.append(make(row))
        except (DatabaseError, *MISTYPED) as error:
            tell(table, error)
    return made


def insert(connection: Connection, table: Any) -> Any:
    """Return this engine's INSERT, which supports conflict clauses."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def add_missing(connection: Connection, table: Any, values: Sequence[Mapping[str, Any]]) -> int:
    """Insert the rows that are missing; return their number."""
    if not values:
        return 0
    statement = insert(connection, table).on_conflict_do_nothing()
    if connection.dialect.name == "postgresql":  # its driver does not count the rows of many statements
        keys = connection.execute(statement.returning(*table.primary_key), list(values))
        return len(keys.all())
    return connection.execute(statement, list(values)).rowcount
