"""Stores of every kind, as the tests of the database make them."""

from tests.database.conftest import postgres_server, postgres_url, sql_url, store

__all__ = ["postgres_server", "postgres_url", "sql_url", "store"]
