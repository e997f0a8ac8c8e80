"""Schema 7: measurements are short rows of numbers and bytes; what many of them share is kept once; plans have an origin.

The new tables are filled beside the old ones under other names (`relax_tune.database.sql.packing`), in parts where
`relax_tune db upgrade` does it. What is left is done here, at once, and the new tables take the place of the old ones.
"""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa
from alembic import op

from relax_tune.database.sql import packing

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TABLES = sa.MetaData()
for _name in ("targets", "workloads"):
    sa.Table(_name, _TABLES, sa.Column("key", sa.Text(), primary_key=True))


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.Integer(), sa.Identity(), primary_key=True)


def _key() -> sa.Column[bytes]:
    return sa.Column("key", sa.LargeBinary(), nullable=False, unique=True)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _refers(name: str, to: str, kind: Any = sa.Integer) -> sa.Column[Any]:
    return sa.Column(name, kind(), sa.ForeignKey(to), nullable=False)


def _small(name: str, primary: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.SmallInteger(), nullable=False, primary_key=primary, autoincrement=False)


sa.Table(
    "traces",
    _TABLES,
    _number(),
    _key(),
    _small("kind"),
    *_texts("sketch", "trace"),
    sa.CheckConstraint("kind BETWEEN 0 AND 2", name="traces_kind"),
)
sa.Table(
    "tasks",
    _TABLES,
    _number(),
    _refers("target", "targets.key", sa.Text),
    _refers("workload", "workloads.key", sa.Text),
    sa.UniqueConstraint("target", "workload", name="tasks_by_target"),
)
sa.Table("points", _TABLES, _number(), _key(), *_texts("symbols"))
sa.Table("places", _TABLES, _number(), _key(), *_texts("job", "environment", "worker", "host", "unit"))
sa.Table("messages", _TABLES, _number(), _key(), *_texts("text"))
sa.Table("packed_variants", _TABLES, _number(), _key(), _refers("trace", "traces.number"), *_texts("parameters"))
sa.Table(
    "packed_measurements",
    _TABLES,
    sa.Column("id", sa.LargeBinary(), primary_key=True),
    sa.Column("measured_at", sa.Double(), nullable=False),
    sa.Column("build_secs", sa.Double(), nullable=False),
    sa.Column("clock_mhz", sa.Double(), nullable=True),
    sa.Column("celsius", sa.Double(), nullable=True),
    _refers("task", "tasks.number"),
    _refers("point", "points.number"),
    _refers("variant", "packed_variants.number"),
    _refers("place", "places.number"),
    sa.Column("message", sa.Integer(), nullable=False),
    _small("kind"),
    _small("stage"),
    _small("regime"),
    sa.Column("checked", sa.Boolean(), nullable=False),
    sa.Column("samples", sa.LargeBinary(), nullable=False),
    sa.CheckConstraint("kind BETWEEN 0 AND 2", name="measurements_kind"),
    sa.CheckConstraint("stage BETWEEN 0 AND 8", name="measurements_stage"),
    sa.CheckConstraint("regime BETWEEN 0 AND 1", name="measurements_regime"),
    sa.CheckConstraint("(stage = 0) = (message = 0)", name="measurements_message"),
    sa.Index("measurements_by_task", "task", "point"),
    sa.Index("measurements_by_number", "variant"),
)
sa.Table(
    "tallies",
    _TABLES,
    sa.Column("task", sa.Integer(), sa.ForeignKey("tasks.number"), primary_key=True, autoincrement=False),
    sa.Column("place", sa.Integer(), sa.ForeignKey("places.number"), primary_key=True, autoincrement=False),
    *(_small(name, primary=True) for name in ("kind", "stage", "regime")),
    sa.Column("checked", sa.Boolean(), primary_key=True),
    sa.Column("count", sa.BigInteger(), nullable=False),
    sa.Column("last", sa.Double(), nullable=False),
)
sa.Table("unreadable", _TABLES, sa.Column("id", sa.Text(), primary_key=True), *_texts("why", "content"))
sa.Table("about", _TABLES, sa.Column("name", sa.Text(), primary_key=True), *_texts("value"))
sa.Table(
    "packed_plans",
    _TABLES,
    sa.Column("workload", sa.Text(), sa.ForeignKey("workloads.key"), primary_key=True),
    sa.Column("target", sa.Text(), sa.ForeignKey("targets.key"), primary_key=True),
    sa.Column("origin", sa.Text(), primary_key=True),
    sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
    *_texts("entries"),
    sa.Column("turn", sa.Integer(), nullable=False),
)
_NEW = [table for name, table in _TABLES.tables.items() if name not in ("targets", "workloads")]


def create_tables(connection: sa.Connection) -> None:
    """Create the new tables beside those of schema 6, where an interrupted upgrade has not."""
    _TABLES.create_all(connection, tables=_NEW, checkfirst=True)


def upgrade() -> None:
    """Upgrade schema 6 to schema 7."""
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":  # others read until the end, and nobody writes; in the order of writers
        connection.execute(sa.text("LOCK TABLE variants, measurements, plans, leases IN EXCLUSIVE MODE"))
    create_tables(connection)
    packing.finish(connection)
    connection.execute(
        sa.text(
            "INSERT INTO packed_plans (workload, target, origin, version, entries, turn) "
            "SELECT workload, target, '', version, entries, version FROM plans"
        )
    )
    about = {"id": secrets.token_hex(16), "reads_from": revision, "writes_from": revision}
    put = sa.text("INSERT INTO about (name, value) VALUES (:name, :value)")
    connection.execute(put, [{"name": name, "value": value} for name, value in about.items()])
    for name in ("measurements", "variants", "plans"):
        op.drop_table(name)
        op.rename_table(f"packed_{name}", name)
