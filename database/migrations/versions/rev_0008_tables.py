"""Schema 8, of relax-tune 0.2: all tables.

Numbers 1 to 7 name schemas from before the first release; `tools/convert_database.py` converts them. Tables are spelled out here and
not taken from `relax_tune.database.models`, which follow the newest schema.

Tests: `tests/database/test_schema.py`.
"""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.Integer(), sa.Identity(), primary_key=True)


def _key() -> sa.Column[bytes]:
    return sa.Column("key", sa.LargeBinary(), nullable=False, unique=True)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _text_keys(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), primary_key=True) for name in names]


def _refers(name: str, to: str, kind: Any = sa.Integer, primary: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind(), sa.ForeignKey(to), nullable=False, primary_key=primary, autoincrement=False)


def _column(name: str, kind: Any, nullable: bool = False, primary: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind(), nullable=nullable, primary_key=primary, autoincrement=False)


def upgrade() -> None:
    """Create the tables of an empty database."""
    _create_identities()
    _create_measurements()
    _create_work()
    about = {"id": secrets.token_hex(16), "reads_from": revision, "writes_from": revision}
    put = sa.text("INSERT INTO about (name, value) VALUES (:name, :value)")
    op.get_bind().execute(put, [{"name": name, "value": value} for name, value in about.items()])


def _create_identities() -> None:
    """Create the tables of what is measured and where."""
    op.create_table("about", *_text_keys("name"), *_texts("value"))
    op.create_table(
        "targets",
        *_text_keys("key"),
        *_texts("kind", "name", "fingerprint"),
        *(sa.Column(name, sa.Text(), nullable=False, server_default="{}") for name in ("limits", "reference")),
    )
    op.create_table("environments", *_text_keys("key"), *_texts("facts"))
    op.create_table(
        "workloads", *_text_keys("key"), *_texts("text"), _column("format_version", sa.Integer), *_texts("hint")
    )
    op.create_table(
        "tasks",
        _number(),
        _refers("target", "targets.key", sa.Text),
        _refers("workload", "workloads.key", sa.Text),
        sa.UniqueConstraint("target", "workload", name="tasks_by_target"),
    )


def _create_measurements() -> None:
    """Create the tables of measurements, of the rows they share, and of their counts."""
    op.create_table(
        "traces",
        _number(),
        _key(),
        _column("kind", sa.SmallInteger),
        *_texts("sketch", "trace"),
        sa.CheckConstraint("kind BETWEEN 0 AND 2", name="traces_kind"),
    )
    op.create_table("variants", _number(), _key(), _refers("trace", "traces.number"), *_texts("parameters"))
    op.create_table("points", _number(), _key(), *_texts("symbols"))
    op.create_table("places", _number(), _key(), *_texts("job", "environment", "worker", "host", "unit"))
    op.create_table("messages", _number(), _key(), *_texts("text"))
    op.create_table(
        "measurements",
        _column("id", sa.LargeBinary, primary=True),
        *(_column(name, sa.Double) for name in ("measured_at", "build_secs")),
        *(_column(name, sa.Double, nullable=True) for name in ("clock_mhz", "celsius")),
        *(_refers(name, f"{name}s.number") for name in ("task", "point", "variant", "place")),
        # No foreign key: 0 says that there is no message.
        _column("message", sa.Integer),
        *(_column(name, sa.SmallInteger) for name in ("kind", "stage", "regime")),
        _column("checked", sa.Boolean),
        _column("samples", sa.LargeBinary),
        sa.CheckConstraint("kind BETWEEN 0 AND 2", name="measurements_kind"),
        sa.CheckConstraint("stage BETWEEN 0 AND 8", name="measurements_stage"),
        sa.CheckConstraint("regime BETWEEN 0 AND 1", name="measurements_regime"),
        sa.CheckConstraint("(stage = 0) = (message = 0)", name="measurements_message"),
    )
    op.create_index("measurements_by_task", "measurements", ["task", "point"])
    op.create_index("measurements_by_variant", "measurements", ["variant"])
    op.create_table(
        "tallies",
        *(_refers(name, f"{name}s.number", primary=True) for name in ("task", "place")),
        *(_column(name, sa.SmallInteger, primary=True) for name in ("kind", "stage", "regime")),
        _column("checked", sa.Boolean, primary=True),
        _column("count", sa.BigInteger),
        _column("last", sa.Double),
    )


def _create_work() -> None:
    """Create the tables of plans, runs, leases, served shapes and submitted jobs."""
    op.create_table(
        "plans",
        _refers("workload", "workloads.key", sa.Text, primary=True),
        _refers("target", "targets.key", sa.Text, primary=True),
        *_text_keys("origin"),
        _column("version", sa.Integer, primary=True),
        *_texts("entries"),
        _column("turn", sa.Integer),
    )
    op.create_table(
        "jobs",
        *_text_keys("id"),
        *_texts("settings", "state"),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'interrupted')", name="jobs_state"),
    )
    op.create_table(
        "leases",
        _refers("workload", "workloads.key", sa.Text, primary=True),
        _refers("target", "targets.key", sa.Text, primary=True),
        *_texts("holder"),
        _column("expires_at", sa.Double),
        sa.Column("trials", sa.Integer(), nullable=False, server_default="0"),
    )
    op.create_table("histograms", *_text_keys("task", "symbol"), *_texts("counts"))
    states = "state IN ('queued', 'running', 'done', 'failed', 'cancelled')"
    op.create_table(
        "submitted_jobs",
        *_text_keys("id"),
        *_texts("model", "name", "settings", "label"),
        _column("priority", sa.Integer),
        *_texts("owner", "note"),
        _column("max_secs", sa.Double, nullable=True),
        _column("attempts", sa.Integer),
        *_texts("state"),
        _column("submitted_at", sa.Double),
        *(_column(name, sa.Double, nullable=True) for name in ("started_at", "ended_at")),
        _column("not_before", sa.Double),
        *_texts("holder"),
        _column("expires_at", sa.Double),
        *(_column(name, sa.Integer) for name in ("runs", "losses")),
        _column("cancel", sa.Boolean),
        _column("spent_secs", sa.Double),
        *_texts("progress", "message"),
        _column("exit_code", sa.Integer, nullable=True),
        *_texts("result"),
        sa.CheckConstraint(states, name="submitted_jobs_state"),
    )
    op.create_index("submitted_jobs_by_turn", "submitted_jobs", ["state", "priority", "submitted_at"])
    op.create_table(
        "job_logs",
        _refers("job", "submitted_jobs.id", sa.Text, primary=True),
        *(_column(name, sa.Integer, primary=True) for name in ("run", "number")),
        *_texts("text"),
    )
