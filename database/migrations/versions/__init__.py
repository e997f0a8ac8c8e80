"""One file per schema version, never edited once released; Alembic loads them by path."""
