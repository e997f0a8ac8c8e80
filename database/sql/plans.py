"""Versions of plans: statements of `SqlStore`, inside its transactions."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, text

from relax_tune.database.records import PlanRecord
from relax_tune.database.rules import plan_after, plan_to_add, same_version
from relax_tune.database.sql.layout import Readable, TableLayout


def lock(connection: Connection) -> None:
    """Let other writers of plans wait."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(text("LOCK TABLE plans IN SHARE ROW EXCLUSIVE MODE"))


def put(
    connection: Connection, layout: TableLayout, plans: Iterable[PlanRecord], readable: Readable
) -> list[PlanRecord]:
    """Make plans the current ones of their tasks; return them with their versions."""
    found = []
    for plan in plans:
        known = layout.plans(connection, plan.target, plan.workload, readable)
        found.append(plan_after(known, plan))
        if found[-1] not in known:
            layout.put_plan(connection, found[-1])
    return found


def add(connection: Connection, layout: TableLayout, plans: Iterable[PlanRecord], readable: Readable) -> int:
    """Add plans under their own versions; return the number of new ones."""
    new = 0
    for plan in plans:
        known = layout.plans(connection, plan.target, plan.workload, readable)
        added = plan_to_add(known, plan, layout.named_origins)
        if added is not None:
            layout.put_plan(connection, added)
            new += not any(same_version(added, other) for other in known)
    return new
