"""From a URL to a working SQLAlchemy engine, and from a driver's complaint to an error a person can act on.

`sqlite:///relative.db`, `sqlite:////absolute.db`, a plain path ending in .db, .sqlite or .sqlite3, and
`postgresql://user@host/name` (through psycopg) are understood. SQLite runs in WAL mode with synchronous=NORMAL, foreign
keys enforced, and a writer that waits for its turn.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from relax_tune.errors import DatabaseError

BUSY_SECS = 60
"""How long a SQLite connection waits for another process's write, and PostgreSQL for a connection (a sixth of it)."""

_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_KINDS = "wanted sqlite:///FILE, postgresql://USER@HOST/NAME or memory://"


def default_url() -> str:
    """The database of this user on this machine: `records.db` in the user data folder."""
    return f"sqlite:///{Path(platformdirs.user_data_dir('relax-tune')) / 'records.db'}"


def parse_url(text: str) -> URL:
    """The URL with our drivers filled in.

    Raises:
        DatabaseError: not a URL, or a kind of database we do not support.
    """
    if "://" not in text and text.endswith(_SUFFIXES):
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        raise DatabaseError(
            f"{_KINDS}, found a malformed database URL {_without_password(text)!r}; correct it"
        ) from None
    if backend == "sqlite" and url.drivername in ("sqlite", "sqlite+pysqlite"):
        if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
            raise DatabaseError(
                f"wanted a file in {text!r}, found none; give sqlite:///FILE, or memory:// for a database that is not kept"
            )
        if url.host:
            raise DatabaseError(
                f"wanted three slashes before a file name, found {text!r}; give sqlite:///{url.host}/..."
            )
        return url.set(drivername="sqlite+pysqlite")
    if backend == "postgresql" and url.drivername in ("postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    raise DatabaseError(
        f"{_KINDS}, found the unsupported kind {url.drivername!r} in {_without_password(text)!r}; choose one of these"
    )


def _without_password(text: str) -> str:
    scheme, slashes, rest = text.partition("://")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{slashes}***@{host}" if at else text


def shown(url: URL) -> str:
    """The URL as it may be printed: no driver, no password."""
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


def sqlite_path(url: URL) -> Path | None:
    """The file of a SQLite URL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def make_engine(url: URL, *, read_only: bool) -> Engine:
    """An engine that connects lazily. Thread-safe; not to be carried across a fork.

    Raises:
        DatabaseError: the driver is not installed.
    """
    try:
        if url.get_backend_name() == "sqlite":
            return _sqlite_engine(url, read_only)
        options = "-c default_transaction_read_only=on" if read_only else ""
        arguments = {"connect_timeout": BUSY_SECS // 6, **({"options": options} if options else {})}
        return create_engine(url, pool_pre_ping=True, connect_args=arguments)
    except (ImportError, NoSuchModuleError):
        raise DatabaseError(
            f"{shown(url)}: wanted the psycopg driver for PostgreSQL, found it missing; run `pip install 'relax-tune[postgres]'`"
        ) from None


def _sqlite_engine(url: URL, read_only: bool) -> Engine:
    path = Path(str(url.database)).absolute()
    mode = "ro" if read_only else "rwc"
    # A file on read-only media cannot get WAL's side files; nobody can be writing it either.
    still = read_only and not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    address = f"{path.as_uri()}?mode={mode}" + ("&immutable=1" if still else "")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA synchronous=NORMAL")
            if not read_only:
                _use_wal(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite+pysqlite://", creator=connect, pool_size=5, max_overflow=20, poolclass=QueuePool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its turn at once: upgrading a reader to a writer half-way is what fails under contention.
        immediate = connection.get_execution_options().get("relax_tune_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """WAL is a property of the file; switching to it does not wait for other openers, so we do."""
    deadline = time.monotonic() + BUSY_SECS
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                return
            # A file system without shared memory keeps its rollback journal: slower and as safe.
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def writer(engine: Engine) -> Engine:
    """The same engine for transactions that write."""
    return engine.execution_options(relax_tune_write=True)


def reader(engine: Engine) -> Engine:
    """The same engine for transactions that read: each sees one state of the database."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="REPEATABLE READ")
    return engine


_ADVICE = (
    ("unable to open database file", "check that the folder exists and may be written"),
    ("readonly database", "the file or its folder is read-only: fix its permissions, or open it read-only"),
    ("read-only transaction", "it was opened read-only: open it for writing"),
    ("not a database", "the file is something else: give another path"),
    (
        "disk image is malformed",
        "the file is damaged: restore a backup, or export what `relax-tune db check` can still read",
    ),
    ("disk is full", "free some space; everything committed before is safe"),
    ("No space left", "free some space; everything committed before is safe"),
    ("database is locked", f"another process has been writing for over {BUSY_SECS} s: wait for it or stop it"),
    ("onnection refused", "check that the server runs and that host and port are right"),
    ("could not translate host", "check the host name"),
    ("resolve host", "check the host name"),
    ("imeout expired", "check that the server can be reached"),
    ("password authentication failed", "check user and password (or ~/.pgpass)"),
    ("does not exist", "create the database and the user on the server first"),
    ("no such table", "a table is missing: run `relax-tune db check`"),
)


def explain(error: BaseException, where: str, doing: str) -> DatabaseError:
    """One paragraph for a driver's error: where, what failed, what the driver said, what to do."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    said = "; ".join(lines[:2])[:300] or type(cause).__name__
    if isinstance(error, IntegrityError):
        advice = (
            "the records break a rule of the database (a record they refer to is missing?): run `relax-tune db check`"
        )
    else:
        advice = next((text for part, text in _ADVICE if part in str(cause)), "run `relax-tune db check` and try again")
    return DatabaseError(f"{where}: could not {doing}: {said}; {advice}")


@contextlib.contextmanager
def explained(where: str, doing: str) -> Iterator[None]:
    """Turn whatever the driver raises inside into one `DatabaseError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise explain(error, where, doing) from None
