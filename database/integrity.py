"""A check of every row of a database for damage and alteration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, select

from relax_tune.database import rows
from relax_tune.database.models import (
    Base,
    EnvironmentRow,
    HistogramRow,
    JobRow,
    LeaseRow,
    MeasurementRow,
    PlanRow,
    TargetRow,
    VariantRow,
    WorkloadRow,
)
from relax_tune.database.records import VariantRecord
from relax_tune.errors import DatabaseError

_PLAIN: tuple[tuple[type[Base], Callable[[rows.Row], object]], ...] = (
    (TargetRow, rows.target_of),
    (EnvironmentRow, rows.environment_of),
    (WorkloadRow, rows.workload_of),
    (PlanRow, rows.plan_of),
    (JobRow, rows.job_of),
    (LeaseRow, rows.lease_of),
    (HistogramRow, rows.histogram_of),
)


def find_problems(connection: Connection) -> list[str]:
    """Return a sentence for each problem, sorted.

    Problems are a damaged file, a row whose content does not match its key, an unreadable record, and a dangling
    reference.
    """
    problems: list[str] = []
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars()
        problems += [f"the file is damaged: {line}" for line in found if line != "ok"]
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            problems.append(f"{table} row {row} refers to a row of {parent} that is not there")
    variants: dict[str, VariantRecord] = {}
    for values in connection.execute(select(*VariantRow.__table__.columns)).mappings():
        with _collected(problems):
            variants[values["key"]] = rows.variant_of(values)
    for model, make in _PLAIN:
        for values in connection.execute(select(*model.__table__.columns)).mappings():
            with _collected(problems):
                make(values)
    for values in connection.execute(MeasurementRow.select_columns([])).mappings():
        if values["variant"] in variants:
            with _collected(problems):
                rows.measurement_of(values, variants[values["variant"]])
    return sorted(problems)


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        problems.append(str(error))
