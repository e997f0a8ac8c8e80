"""Schema 3: sketches and schedule primitives have the field's names, and variants the keys that follow.

A variant's key hashes its text. Each renamed variant becomes a new row, its measurements are pointed at it, and the old
row goes; two variants that become equal share one row. The tables stay as they are. Rows are read a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from relax_tune.database.records import VariantRecord
from relax_tune.database.stored_names import plan_set_of, rename_plans, rename_variant
from relax_tune.errors import DatabaseError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_CHUNK = 200
_ADD = sa.text(
    "INSERT INTO variants (key, kind, sketch, trace, parameters) VALUES (:key, :kind, :sketch, :trace, :parameters) "
    "ON CONFLICT (key) DO NOTHING"
)
_REPOINT = sa.text("UPDATE measurements SET variant = :key WHERE variant = :old")
_DROP = sa.text("DELETE FROM variants WHERE key = :old")
_PLAN = "FROM plans WHERE workload = :workload AND target = :target AND version = :version"
_PUT_PLAN = sa.text(
    "UPDATE plans SET entries = :entries WHERE workload = :workload AND target = :target AND version = :version"
)


def upgrade() -> None:
    """Upgrade schema 2 to schema 3."""
    connection = op.get_bind()
    for chunk in _variants(connection):
        renamed = [new for row in chunk if (new := _renamed(row)) is not None]
        for statement in (_ADD, _REPOINT, _DROP) if renamed else ():
            connection.execute(statement, renamed)
    for plans in _plan_sets(connection).values():
        _rename_set(connection, plans)


def _variants(connection: sa.Connection) -> Iterator[list[Any]]:
    """Yield all variants by key, in chunks. Rows added meanwhile may be among them; renaming again changes nothing."""
    after = ""
    query = sa.text(
        "SELECT key, kind, sketch, trace, parameters FROM variants WHERE key > :after ORDER BY key LIMIT :count"
    )
    while chunk := list(connection.execute(query, {"after": after, "count": _CHUNK}).mappings()):
        yield chunk
        after = chunk[-1]["key"]


def _renamed(row: Any) -> dict[str, str] | None:
    """Return the new row and the old key. None if nothing changes, or if the row was altered, which `db check` reports."""
    try:
        variant = VariantRecord(row["kind"], row["sketch"], row["trace"], row["parameters"])
    except DatabaseError:
        return None
    new = rename_variant(variant)
    if variant.key != row["key"] or new is variant:
        return None
    return {
        "old": variant.key,
        "key": new.key,
        "kind": new.kind,
        "sketch": new.sketch,
        "trace": new.trace,
        "parameters": new.parameters,
    }


def _plan_sets(connection: sa.Connection) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return the identities of the plans of each set, by target, model and name of the set."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    plans = connection.execute(sa.text("SELECT workload, target, version FROM plans")).mappings().all()
    for identity in map(dict, plans):
        text = connection.execute(sa.text(f"SELECT entries {_PLAN}"), identity).scalar_one()
        found.setdefault((identity["target"], *plan_set_of(text)), []).append(identity)
    return found


def _rename_set(connection: sa.Connection, plans: list[dict[str, Any]]) -> None:
    """Rename all versions of the plans of one set."""
    texts = [connection.execute(sa.text(f"SELECT entries {_PLAN}"), plan).scalar_one() for plan in plans]
    renamed = rename_plans([(plan["workload"], text) for plan, text in zip(plans, texts, strict=True)])
    changed = [{**plan, "entries": new} for plan, old, new in zip(plans, texts, renamed, strict=True) if new != old]
    if changed:
        connection.execute(_PUT_PLAN, changed)
