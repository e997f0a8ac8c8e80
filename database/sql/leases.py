"""Leases in SQL: statements of `SqlStore`, inside its transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, delete, select, text, update

from relax_tune.database import rows
from relax_tune.database.models import LeaseRow
from relax_tune.database.records import Lease
from relax_tune.database.rules import Spent, grant
from relax_tune.database.sql.layout import RecordQuestion, TableLayout


def clock(connection: Connection) -> float:
    """Return the Unix seconds of the database's clock."""
    return float(connection.execute(LeaseRow.clock(connection.dialect.name)).scalar_one())


def acquire(connection: Connection, insert: Any, task: tuple[str, str], holder: str, secs: float) -> Lease | None:
    """Insert a lease, or take over one that is the holder's or has expired. insert: the engine's INSERT"""
    now = clock(connection)
    lease = Lease(*task, holder, now + secs)
    statement = insert.values(rows.lease_values(lease)).on_conflict_do_update(
        index_elements=["workload", "target"],
        set_={"holder": holder, "expires_at": lease.expires_at, "trials": 0},
        where=(LeaseRow.holder == holder) | (LeaseRow.expires_at <= now),
    )
    return None if connection.execute(statement.returning(LeaseRow.holder)).first() is None else lease


def renew(connection: Connection, lease: Lease, secs: float) -> Lease | None:
    """Extend a lease that is still its holder's."""
    renewed = replace(lease, expires_at=clock(connection) + secs)
    statement = update(LeaseRow).where(*_held(lease)).values(expires_at=renewed.expires_at)
    return renewed if connection.execute(statement).rowcount == 1 else None


def release(connection: Connection, lease: Lease) -> bool:
    """Delete a lease that is still its holder's."""
    return connection.execute(delete(LeaseRow).where(*_held(lease))).rowcount == 1


def claim(
    connection: Connection, layout: TableLayout, lease: Lease, wanted: int, budget: int, spent: Mapping[str, Spent]
) -> tuple[Lease, int] | None:
    """Claim candidates of a shared budget; see `Store.claim_trials`. The lock makes claims one after another."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(text("LOCK TABLE leases IN SHARE ROW EXCLUSIVE MODE"))
    for key, seen in spent.items():
        if layout.count(connection, RecordQuestion(lease.target, key, regime=seen.regime)) != seen.records:
            return None
    live = select(LeaseRow.workload, LeaseRow.trials).where(
        LeaseRow.target == lease.target,
        LeaseRow.workload.in_(list(spent)),
        (LeaseRow.holder == lease.holder) | (LeaseRow.expires_at > clock(connection)),
    )
    claims = {workload: trials for workload, trials in connection.execute(live)}
    granted = grant(lease.workload, wanted, budget, spent, claims)
    trials = claims.get(lease.workload, 0) + granted
    if connection.execute(update(LeaseRow).where(*_held(lease)).values(trials=trials)).rowcount != 1:
        return lease, 0
    return replace(lease, trials=trials), granted


def settle(connection: Connection, lease: Lease, trials: int) -> Lease:
    """Reduce the candidates that a lease claims, since their records are stored."""
    left = max(0, lease.trials - trials)
    connection.execute(update(LeaseRow).where(*_held(lease)).values(trials=left))
    return replace(lease, trials=left)


def _held(lease: Lease) -> tuple[Any, ...]:
    return (LeaseRow.workload == lease.workload, LeaseRow.target == lease.target, LeaseRow.holder == lease.holder)
