"""Schema 2: the time of a measurement, by which old ones can be pruned; 0 if unknown."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade schema 1 to schema 2."""
    op.add_column("measurements", sa.Column("measured_at", sa.Double(), nullable=False, server_default="0"))
