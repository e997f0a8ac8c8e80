"""Stores to run the contract on: a SQLite file, plain memory, and a PostgreSQL server the tests start themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from tests.support import postgres

from relax_tune.database.store import MemoryStore, SqlStore, open_store

_DATABASES = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a throw-away server, up to the database name."""
    if (why := postgres.missing()) is not None:
        pytest.skip(why)
    with postgres.server() as url:
        yield url


@contextmanager
def database(postgres_server: str, template: str = "template1") -> Iterator[str]:
    """The URL of a database that is a copy of another one."""
    name = f"contract_{next(_DATABASES)}"
    admin = create_engine(
        postgres_server.replace("postgresql:", "postgresql+psycopg:") + "postgres", isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield postgres_server + name
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    with database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_tables(postgres_server: str) -> Iterator[str]:
    """The name of a database with all tables: to copy it takes less time than to make them."""
    with database(postgres_server) as url:
        open_store(url).close()
        yield url.rpartition("/")[2]


@pytest.fixture
def postgres_store(postgres_server: str, postgres_tables: str) -> Iterator[str]:
    """The URL of a database with all tables and no rows."""
    with database(postgres_server, postgres_tables) as url:
        yield url


POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRES])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that does not exist yet (SQLite) or is empty (PostgreSQL)."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path / 'records.db'}"


@pytest.fixture(params=["sqlite", "memory", POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore | MemoryStore]:
    """An empty store of each kind."""
    url = "memory://"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'records.db'}"
    elif request.param == "postgres":
        url = str(request.getfixturevalue("postgres_store"))
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[], MemoryStore]]:
    """Opens more empty stores."""
    stores: list[MemoryStore] = []

    def open_another() -> MemoryStore:
        stores.append(MemoryStore())
        return stores[-1]

    yield open_another
    for store in stores:
        store.close()
