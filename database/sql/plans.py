"""Versions of plans: statements of `SqlStore`, inside its transactions.

Tests: `tests/database/test_store_contract.py`, `tests/database/exchange/test_plan_origins.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select, text

from relax_tune.database import rows
from relax_tune.database.models import PlanRow
from relax_tune.database.records import PlanRecord
from relax_tune.database.rules import plan_after, plan_to_add, same_version
from relax_tune.database.sql.statements import RowReader, insert


def lock_plans(connection: Connection) -> None:
    """Make other writers of plans wait until the transaction ends."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(text("LOCK TABLE plans IN SHARE ROW EXCLUSIVE MODE"))


def select_plans(connection: Connection, target: str, workload: str | None, reader: RowReader) -> list[PlanRecord]:
    """Return the plans of a target or of one task, in no order."""
    query = select(*PlanRow.columns()).where(PlanRow.target == target)
    query = query if workload is None else query.where(PlanRow.workload == workload)
    return reader("plans", rows.plan_of, connection.execute(query).mappings())


def put_plans(connection: Connection, plans: Iterable[PlanRecord], reader: RowReader) -> list[PlanRecord]:
    """Make plans current in their tasks; return them with their versions."""
    current = []
    for plan in plans:
        stored = select_plans(connection, plan.target, plan.workload, reader)
        current.append(plan_after(stored, plan))
        if current[-1] not in stored:
            _put(connection, current[-1])
    return current


def add_plans(connection: Connection, plans: Iterable[PlanRecord], reader: RowReader) -> int:
    """Add plans under their own origins and versions; return the number of new ones."""
    count = 0
    for plan in plans:
        stored = select_plans(connection, plan.target, plan.workload, reader)
        added = plan_to_add(stored, plan)
        if added is not None:
            _put(connection, added)
            count += not any(same_version(added, other) for other in stored)
    return count


def _put(connection: Connection, plan: PlanRecord) -> None:
    """Insert a plan, or replace the plan of its task, origin and version."""
    statement = insert(connection, PlanRow.__table__).values(rows.plan_values(plan))
    replaced = {"entries": plan.entries, "turn": plan.turn}
    keys = ["workload", "target", "origin", "version"]
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced))
