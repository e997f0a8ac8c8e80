"""Versions of the schema: a fresh database, an earlier one, one of another program, a newer one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from tests.database.records_made import ZEN, failure, filled, timing

from relax_tune.database import schema
from relax_tune.database.engine import make_engine, parse_url, sqlite_path
from relax_tune.database.jobs.tables import SubmittedJobRow
from relax_tune.database.store import SqlStore, open_store, upgrade_store
from relax_tune.errors import DatabaseError


def test_the_migrations_make_the_tables_of_the_models(sql_url: str) -> None:
    open_store(sql_url).close()
    engine = make_engine(parse_url(sql_url), read_only=True)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": False})
        assert compare_metadata(context, SubmittedJobRow.metadata) == []
    engine.dispose()


@pytest.mark.parametrize("version", ["0001", "0007"])
def test_schema_of_no_release_names_the_converter(sql_url: str, version: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        with store._engine.begin() as connection:
            connection.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
    for attempt in (open_store, upgrade_store, lambda url: open_store(url, read_only=True)):
        with pytest.raises(DatabaseError, match=r"python -m tools\.convert_database"):
            attempt(sql_url)


@pytest.mark.parametrize(("reads", "writes"), [("0009", "0009"), ("0009", "0010"), ("0010", "0010")])
def test_newer_schema_admits_older_readers_and_writers(sql_url: str, reads: str, writes: str) -> None:
    records = [timing("a", 1.0, measured_at=5.0), failure("c", "crash", tile=3)]
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        filled(store).add_measurements(records[:1])
        with store._engine.begin() as connection:
            connection.execute(text("ALTER TABLE measurements ADD COLUMN humidity FLOAT DEFAULT 0"))
            connection.execute(text("UPDATE alembic_version SET version_num = '0010'"))
            for name, value in (("reads_from", reads), ("writes_from", writes)):
                put = text("UPDATE about SET value = :value WHERE name = :name")
                connection.execute(put, {"name": name, "value": value})
    if reads == "0010":
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            open_store(sql_url, read_only=True)
    else:
        with open_store(sql_url, read_only=True) as store:
            assert store.query(ZEN.key) == records[:1]
    if writes == "0010":
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            open_store(sql_url)
        return
    with open_store(sql_url) as store:
        assert store.add_measurements(records) == 1


def test_upgrade_by_another_process_is_named_by_an_open_store(sql_url: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        filled(store).add_measurements([timing("a", 1.0)])
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '0010'"))
            connection.execute(text("ALTER TABLE points RENAME TO points_2"))
        for ask in (lambda: store.query(ZEN.key), lambda: store.add_measurements([timing("lost?", 1.0)])):
            with pytest.raises(DatabaseError, match="another process upgraded"):
                ask()


def test_a_newer_schema_asks_for_a_newer_tool(sql_url: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            connection.execute(text("UPDATE about SET value = '9999' WHERE name <> 'id'"))
    for attempt in (lambda: open_store(sql_url), lambda: upgrade_store(sql_url)):
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            attempt()


def test_a_database_of_something_else_is_left_alone(sql_url: str) -> None:
    if (path := sqlite_path(parse_url(sql_url))) is not None:
        path.touch()
    engine = make_engine(parse_url(sql_url), read_only=False)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE cats (name TEXT)"))
    before = path.read_bytes() if path is not None else b""
    for attempt in (
        lambda: open_store(sql_url),
        lambda: upgrade_store(sql_url),
        lambda: open_store(sql_url, read_only=True),
    ):
        with pytest.raises(DatabaseError, match="cats"):
            attempt()
    assert path is None or (path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name])
    with engine.begin() as connection:  # even one that uses Alembic too
        connection.execute(text("CREATE TABLE alembic_version (version_num TEXT)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('0002')"))
    with pytest.raises(DatabaseError, match="something else"):
        open_store(sql_url)
    engine.dispose()


def test_upgrade_makes_the_tables_of_an_empty_database_but_no_file(sql_url: str) -> None:
    with pytest.raises(DatabaseError, match=r"no file exists|is empty"):
        open_store(sql_url, create=False)
    if sql_url.startswith("sqlite:///"):
        with pytest.raises(DatabaseError, match="no file exists"):
            upgrade_store(sql_url)
        Path(sql_url.removeprefix("sqlite:///")).touch(exist_ok=False)
    assert upgrade_store(sql_url) == (None, schema.versions()[-1])
    with open_store(sql_url, create=False) as store:
        assert store.targets() == []


@pytest.mark.process
def test_processes_may_make_a_database_at_once(sql_url: str) -> None:
    code = f"from relax_tune.database.store import open_store; open_store({sql_url!r}).close()"
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd="/") for _ in range(2)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    with open_store(sql_url, create=False) as store:
        assert store.check() == []
