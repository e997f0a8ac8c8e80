"""Versions of the schema: a fresh database, a frozen old file, a foreign one, a newer one."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from tests.database.records_made import MATMUL, ZEN, ZEN_OLD, timing

from relax_tune.database import schema
from relax_tune.database.engine import make_engine, parse_url, sqlite_path
from relax_tune.database.models import Base
from relax_tune.database.sql import plain
from relax_tune.database.store import SqlStore, open_store
from relax_tune.database.upgrade import upgrade
from relax_tune.errors import DatabaseError

FROZEN = sorted((Path(__file__).parent / "frozen").glob("schema_*.db"))


def test_every_older_schema_has_a_frozen_file() -> None:
    assert [path.stem.removeprefix("schema_") for path in FROZEN] == list(schema.versions()[:-1])


def test_the_migrations_make_the_tables_of_the_models(sql_url: str) -> None:
    open_store(sql_url).close()
    engine = make_engine(parse_url(sql_url), read_only=True)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": False})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.stem)
def test_old_file_is_upgraded_and_refused_before_unless_served(frozen: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    shutil.copy(frozen, path)
    url = f"sqlite:///{path}"
    before = path.read_bytes()
    for read_only in (False, True) if frozen.stem[-4:] != plain.VERSION else ():
        with pytest.raises(DatabaseError, match=f"relax-tune db upgrade --db {url}"):
            open_store(url, read_only=read_only)
    assert sqlite3.connect(path).execute("SELECT version_num FROM alembic_version").fetchone() == (frozen.stem[-4:],)
    assert len(path.read_bytes()) == len(before), "refusing changes nothing but the journal mode"
    assert upgrade(url) == (frozen.stem[-4:], schema.versions()[-1])
    assert upgrade(url) == (schema.versions()[-1], schema.versions()[-1])
    with open_store(url) as store:
        assert store.check() == []
        assert store.targets() == sorted([ZEN, ZEN_OLD], key=lambda target: target.key)
        found = store.query(ZEN.key, MATMUL.key)
        assert [m.id for m in found] == ["bad", "library", "ok-16", "ok-8", "raw"]
        assert found[2] == timing("ok-16", 1e-5, tile=16)
        assert (found[0].stage, found[0].message, found[0].measured_at) == ("wrong-result", "off by 3 at [0, 1]", 0.0)
        best = store.best(MATMUL.key, ZEN.key, {"n": 8})
        assert best is not None and best.id == "ok-16"
        plan, job = store.plan(MATMUL.key, ZEN.key), store.job("job-1")
        assert plan is not None and plan.entries == '[["n<=8","ok-16"]]'
        assert job is not None and job.state == "done"
        assert store.histograms("minilm")[0].by_value == {128: 3}
        assert store.add_measurements([timing("new", 1e-7, measured_at=5.0)]) == 1


def test_a_newer_schema_asks_for_a_newer_tool(sql_url: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            connection.execute(text("UPDATE about SET value = '9999' WHERE name <> 'id'"))
    for attempt in (lambda: open_store(sql_url), lambda: upgrade(sql_url)):
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            attempt()


def test_a_database_of_something_else_is_left_alone(sql_url: str) -> None:
    if (path := sqlite_path(parse_url(sql_url))) is not None:
        path.touch()
    engine = make_engine(parse_url(sql_url), read_only=False)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE cats (name TEXT)"))
    before = path.read_bytes() if path is not None else b""
    for attempt in (lambda: open_store(sql_url), lambda: upgrade(sql_url), lambda: open_store(sql_url, read_only=True)):
        with pytest.raises(DatabaseError, match="cats"):
            attempt()
    assert path is None or (path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name])
    with engine.begin() as connection:  # even one that uses Alembic too
        connection.execute(text("CREATE TABLE alembic_version (version_num TEXT)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('0002')"))
    with pytest.raises(DatabaseError, match="something else"):
        open_store(sql_url)
    engine.dispose()


def test_upgrade_makes_a_database_and_opening_can_refuse_to(sql_url: str) -> None:
    with pytest.raises(DatabaseError, match=r"no file|empty one"):
        open_store(sql_url, create=False)
    assert upgrade(sql_url) == (None, schema.versions()[-1])
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
