"""Schema 9: the contention for processors during a measurement. Code of schema 8 reads and writes such a database, ignoring it.

Tests: `tests/database/test_schema.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is unknown for the measurements that are there."""
    op.add_column("measurements", sa.Column("contention", sa.Double(), nullable=True))
