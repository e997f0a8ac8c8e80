"""Stores to run the contract on: a SQLite file, plain memory, and a PostgreSQL server the tests start themselves."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from relax_tune.database.store import MemoryStore, SqlStore, open_store

_DATABASES = itertools.count()


def _postgres_tool(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a throw-away server, up to the database name; PostgreSQL refuses to run as root, so root steps down."""
    initdb, ctl = _postgres_tool("initdb"), _postgres_tool("pg_ctl")
    if initdb is None or ctl is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    as_user: list[str] = []
    if os.getuid() == 0:
        if shutil.which("setpriv") is None or subprocess.run(["id", "postgres"], capture_output=True).returncode:
            pytest.skip("PostgreSQL does not run as root, and there is no setpriv or no user postgres to step down to")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    folder = Path(tempfile.mkdtemp(prefix="relax-tune-pg-"))
    folder.chmod(0o777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"

    def run(*command: str) -> None:
        done = subprocess.run([*as_user, *command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"

    try:
        run(initdb, "-D", str(data), "-A", "trust", "-U", "relax", "--no-sync", "--locale=C.UTF-8")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run(ctl, "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://relax@127.0.0.1:{port}/"
        finally:
            run(ctl, "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    name = f"contract_{next(_DATABASES)}"
    admin = create_engine(
        postgres_server.replace("postgresql:", "postgresql+psycopg:") + "postgres", isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield postgres_server + name
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


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
        url = str(request.getfixturevalue("postgres_url"))
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[], MemoryStore]]:
    """Makes more empty stores."""
    made: list[MemoryStore] = []

    def make() -> MemoryStore:
        made.append(MemoryStore())
        return made[-1]

    yield make
    for opened in made:
        opened.close()
