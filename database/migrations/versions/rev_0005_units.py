"""Schema 5: the unit of a measurement, the reference times of a target's units, the trials of a lease.

Earlier records name no unit, and earlier targets have no reference times.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade schema 4 to schema 5."""
    op.add_column("targets", sa.Column("reference", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("leases", sa.Column("trials", sa.Integer(), nullable=False, server_default="0"))
    for name in ("worker", "host", "unit"):
        op.add_column("measurements", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    for name in ("clock_mhz", "celsius"):
        op.add_column("measurements", sa.Column(name, sa.Double(), nullable=True))
