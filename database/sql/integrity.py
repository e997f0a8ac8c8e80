"""A check of every row of a database for damage and alteration, with few rows in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection, select

from relax_tune.database import rows
from relax_tune.database.models import Base, EnvironmentRow, HistogramRow, JobRow, LeaseRow, TargetRow, WorkloadRow
from relax_tune.database.sql.layout import TableLayout
from relax_tune.errors import DatabaseError

_KEPT = 1000
"""The most problems that are listed; the rest are counted."""
_PLAIN: tuple[tuple[type[Base], Callable[[rows.Row], object]], ...] = (
    (TargetRow, rows.target_of),
    (EnvironmentRow, rows.environment_of),
    (WorkloadRow, rows.workload_of),
    (JobRow, rows.job_of),
    (LeaseRow, rows.lease_of),
    (HistogramRow, rows.histogram_of),
)


def find_problems(connection: Connection, layout: TableLayout) -> list[str]:
    """Return a sentence for each problem, up to a thousand and one for the others.

    Problems are a damaged file, a row whose content does not match its key, an unreadable record, and a dangling
    reference.
    """
    problems: list[str] = []
    more = 0

    def tell(problem: str) -> None:
        nonlocal more
        if len(problems) < _KEPT:
            problems.append(problem)
        else:
            more += 1

    def judge_all(_: str, make: Callable[[Any], Any], found: Iterable[Any]) -> list[Any]:
        for row in found:
            _judge(make, row, tell)
        return []

    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars()
        problems += [f"the file is damaged: {line}" for line in found if line != "ok"]
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            tell(f"{table} row {row} refers to a row of {parent} that is not there")
    for model, make in _PLAIN:
        streamed = connection.execute(select(*model.columns()), execution_options={"yield_per": 500})
        for values in streamed.mappings():
            _judge(make, values, tell)
    for target in connection.execute(select(TargetRow.key)).scalars().all():
        layout.plans(connection, target, None, judge_all)
    for problem in layout.problems(connection):
        tell(problem)
    return [*problems, *([f"and {more} problems more"] if more else [])]


def _judge(make: Callable[[rows.Row], object], row: rows.Row, tell: Callable[[str], None]) -> None:
    try:
        make(row)
    except DatabaseError as error:
        tell(str(error))
