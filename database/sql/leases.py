"""Leases of tasks: statements of `SqlStore`, inside its transactions.

Tests: `tests/database/test_store_contract.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, delete, not_, select, text, update
from sqlalchemy.sql import ColumnElement

from relax_tune.database import rows
from relax_tune.database.models import LeaseRow
from relax_tune.database.records import Lease
from relax_tune.database.rules import LEASE_SECS, Spent, grant
from relax_tune.database.sql.statements import RecordFilter
from relax_tune.database.sql.tallies import count_measurements


def clock(connection: Connection) -> float:
    """Return the Unix seconds of the database's clock."""
    return float(connection.execute(LeaseRow.clock(connection.dialect.name)).scalar_one())


def later_than(column: Any, limit: float) -> ColumnElement[bool]:
    """Return the condition that a stored moment is later than `limit`, or not a number: texts and NaN sort after numbers."""
    within: ColumnElement[bool] = column <= limit
    return not_(within)


def shorten(connection: Connection, secs: float, *conditions: ColumnElement[bool]) -> None:
    """Limit leases to `secs` from now.

    All jobs ask for the same time, so a later expiry is from an altered row or from a clock that was set back. A living holder
    renews its lease in time; see `tuner/job/task_leases.py`.
    """
    end = clock(connection) + secs
    connection.execute(update(LeaseRow).where(later_than(LeaseRow.expires_at, end), *conditions).values(expires_at=end))


def acquire(connection: Connection, insert: Any, task: tuple[str, str], holder: str, secs: float) -> Lease | None:
    """Insert a lease, or replace one of the same holder or an expired one. insert: the engine's INSERT"""
    shorten(connection, secs, LeaseRow.workload == task[0], LeaseRow.target == task[1], LeaseRow.holder != holder)
    now = clock(connection)
    lease = Lease(*task, holder, now + secs)
    # A single statement decides: of two jobs that ask at once, the second one meets the lease of the first and gets
    # no row.
    statement = insert.values(rows.lease_values(lease)).on_conflict_do_update(
        index_elements=["workload", "target"],
        set_={"holder": holder, "expires_at": lease.expires_at, "trials": 0},
        where=(LeaseRow.holder == holder) | (LeaseRow.expires_at <= now),
    )
    return None if connection.execute(statement.returning(LeaseRow.holder)).first() is None else lease


def renew(connection: Connection, lease: Lease, secs: float) -> Lease | None:
    """Extend a lease unless another holder has the task."""
    renewed = replace(lease, expires_at=clock(connection) + secs)
    statement = update(LeaseRow).where(*_of_holder(lease)).values(expires_at=renewed.expires_at)
    return renewed if connection.execute(statement).rowcount == 1 else None


def release(connection: Connection, lease: Lease) -> bool:
    """Delete a lease unless another holder has the task."""
    return connection.execute(delete(LeaseRow).where(*_of_holder(lease))).rowcount == 1


def claim(
    connection: Connection, lease: Lease, requested: int, budget: int, spent: Mapping[str, Spent]
) -> tuple[Lease, int] | None:
    """Claim candidates of a shared budget; see `Store.claim_trials`. The lock makes claims one after another."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(text("LOCK TABLE leases IN SHARE ROW EXCLUSIVE MODE"))
    for key, state in spent.items():
        # The budget was computed from these counts. If another job has added records since, the caller reads them and
        # asks again.
        if count_measurements(connection, RecordFilter(lease.target, key, regime=state.regime)) != state.records:
            return None
    others = (LeaseRow.target == lease.target, LeaseRow.workload.in_(list(spent)), LeaseRow.holder != lease.holder)
    shorten(connection, LEASE_SECS, *others)
    live = select(LeaseRow.workload, LeaseRow.trials).where(
        LeaseRow.target == lease.target,
        LeaseRow.workload.in_(list(spent)),
        (LeaseRow.holder == lease.holder) | (LeaseRow.expires_at > clock(connection)),
    )
    claims = {workload: rows.claimed(trials) for workload, trials in connection.execute(live)}
    granted = grant(lease.workload, requested, budget, spent, claims)
    trials = claims.get(lease.workload, 0) + granted
    # The lease was lost meanwhile, so nothing is granted.
    if connection.execute(update(LeaseRow).where(*_of_holder(lease)).values(trials=trials)).rowcount != 1:
        return lease, 0
    return replace(lease, trials=trials), granted


def settle(connection: Connection, lease: Lease, trials: int) -> Lease:
    """Reduce the candidates that a lease claims, since their records are stored."""
    left = max(0, lease.trials - trials)
    connection.execute(update(LeaseRow).where(*_of_holder(lease)).values(trials=left))
    return replace(lease, trials=left)


def _of_holder(lease: Lease) -> tuple[Any, ...]:
    return (LeaseRow.workload == lease.workload, LeaseRow.target == lease.target, LeaseRow.holder == lease.holder)
