"""Schema 1: targets, environments, workloads, variants, measurements, plans, jobs, leases, histograms."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create schema 1 in an empty database. Above 60 lines, since it is one list of tables."""
    op.create_table(
        "targets",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
    )
    op.create_table(
        "environments",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("facts", sa.Text(), nullable=False),
    )
    op.create_table(
        "workloads",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("format_version", sa.Integer(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
    )
    op.create_table(
        "variants",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("sketch", sa.Text(), nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.CheckConstraint("kind IN ('tuned', 'library', 'generic')", name="variants_kind"),
    )
    op.create_table(
        "measurements",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("workload", sa.Text(), sa.ForeignKey("workloads.key"), nullable=False),
        sa.Column("target", sa.Text(), sa.ForeignKey("targets.key"), nullable=False),
        sa.Column("variant", sa.Text(), sa.ForeignKey("variants.key"), nullable=False),
        sa.Column("symbols", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("samples", sa.Text(), nullable=False),
        sa.Column("regime", sa.Text(), nullable=False),
        sa.Column("checked", sa.Boolean(), nullable=False),
        sa.Column("build_secs", sa.Double(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), sa.ForeignKey("environments.key"), nullable=True),
        sa.CheckConstraint("status IN ('ok', 'failed')", name="measurements_status"),
        sa.CheckConstraint("regime IN ('warm', 'flushed')", name="measurements_regime"),
        sa.CheckConstraint(
            "(status = 'ok' AND stage IS NULL) OR (status = 'failed' AND stage IN ('constraint', 'compile', 'launch', "
            "'runtime', 'wrong-result', 'timeout', 'crash', 'device-lost'))",
            name="measurements_stage",
        ),
    )
    op.create_index("measurements_by_point", "measurements", ["target", "workload", "symbols"])
    op.create_index("measurements_by_variant", "measurements", ["variant"])
    op.create_table(
        "plans",
        sa.Column("workload", sa.Text(), sa.ForeignKey("workloads.key"), primary_key=True),
        sa.Column("target", sa.Text(), sa.ForeignKey("targets.key"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("entries", sa.Text(), nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'interrupted')", name="jobs_state"),
    )
    op.create_table(
        "leases",
        sa.Column("workload", sa.Text(), sa.ForeignKey("workloads.key"), primary_key=True),
        sa.Column("target", sa.Text(), sa.ForeignKey("targets.key"), primary_key=True),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "histograms",
        sa.Column("task", sa.Text(), primary_key=True),
        sa.Column("symbol", sa.Text(), primary_key=True),
        sa.Column("counts", sa.Text(), nullable=False),
    )
