"""The PostgreSQL server of the database tests."""

from tests.database.conftest import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]
