"""Revisions of the schema, one module each; Alembic imports them."""
