"""The processor as a device, and databases and stores of every kind, as the tests of the database open them."""

from tests.database.conftest import postgres_server, postgres_store, postgres_tables, postgres_url, sql_url, store
from tests.support.built_modules import device

__all__ = ["device", "postgres_server", "postgres_store", "postgres_tables", "postgres_url", "sql_url", "store"]
