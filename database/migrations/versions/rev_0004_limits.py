"""Schema 4: the limits of a target's device, from which a cost model reads the machine; `{}` if unknown."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade schema 3 to schema 4."""
    op.add_column("targets", sa.Column("limits", sa.Text(), nullable=False, server_default="{}"))
