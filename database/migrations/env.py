"""Alembic's entry: runs the revisions on the connection of `relax_tune.database.schema`.

Tests: `tests/database/test_schema.py`.
"""

from __future__ import annotations

from alembic import context

from relax_tune.database.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
