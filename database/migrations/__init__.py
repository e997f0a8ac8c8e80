"""Alembic's environment of the database's schema. `relax_tune.database.schema` runs it; nothing else imports it."""
