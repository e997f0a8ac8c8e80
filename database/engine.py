"""SQLAlchemy engines of URLs, and readable errors from the errors of drivers.

`sqlite:///relative.db`, `sqlite:////absolute.db`, a plain path ending in .db, .sqlite or .sqlite3, and
`postgresql://user@host/name` (through psycopg) are understood. SQLite runs in WAL mode with synchronous=NORMAL, foreign
keys enforced, and a writer that waits for its turn; `?mode=ro` after the file makes it read-only.

Every wait is bounded. A server has CONNECT_SECS to answer, for each address of its name. A silent connection is given
up after SILENT_SECS. A writer waits BUSY_SECS for another's transaction, and an open store AWAY_SECS for a server that
restarts.

Tests: `tests/database/test_opening.py`, `tests/database/test_transport.py`, `tests/database/test_server_away.py`.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

import platformdirs
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import QueuePool

from relax_tune.database import sqlite_file
from relax_tune.database.rules import ROW_TYPE_ERRORS
from relax_tune.errors import DatabaseError, TryAgainLater, system_reason
from relax_tune.printable import masked, masked_words

BUSY_SECS = 60
"""Time limit of a writer that waits for another write transaction."""
MAX_VALUE = 64 * 2**20
"""Bytes of the longest value and row that SQLite reads or writes."""
CONNECT_SECS = 10
"""Time limit of a PostgreSQL server to answer a new connection."""
SILENT_SECS = 30
"""Time limit of a PostgreSQL server to acknowledge sent data."""
AWAY_SECS = 30
"""Time limit of an open store that waits for a lost PostgreSQL server."""
# Parts of messages of a server that is starting or stopping, or of the system if no server listens yet: waiting may help.
_COMING = (
    "starting up",
    "shutting down",
    "recovery mode",
    "onnection refused",
    "server closed the connection",
    "imeout expired",
)
# Shut down by its administrator, crashed, starting up; one of several transactions that wait for each other.
_AWAY = ("57P01", "57P02", "57P03", "40P01")

P = ParamSpec("P")
T = TypeVar("T")

_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_KINDS = "expected sqlite:///FILE, a path ending in .db, postgresql://USER@HOST/NAME or memory://"


def default_file() -> Path:
    """Return the database of this user on this machine: `records.db` in the user data folder."""
    return Path(platformdirs.user_data_dir("relax-tune")) / "records.db"


def default_url() -> str:
    """Return the URL of `default_file`."""
    return f"sqlite:///{default_file()}"


def parse_url(text: str) -> URL:
    """Return the URL with the drivers that this package uses.

    Raises:
        DatabaseError: not a URL, or a kind of database we do not support.
    """
    plain = "://" not in text and text.endswith(_SUFFIXES)
    malformed = DatabaseError(f"{_KINDS}, got a malformed database URL {masked(text)!r:.200}; correct it")
    # Error messages show the text; control characters could rewrite a terminal.
    if not text.isprintable():
        raise malformed
    if plain:
        return URL.create("sqlite+pysqlite", database=text)
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        raise malformed from None
    if backend == "sqlite" and url.drivername in ("sqlite", "sqlite+pysqlite"):
        return _sqlite_url(url, text).set(drivername="sqlite+pysqlite")
    if backend == "postgresql" and url.drivername in ("postgresql", "postgresql+psycopg"):
        # A password with an unescaped @ ends up as part of the host, which messages show.
        if "@" in (url.host or ""):
            raise DatabaseError(
                f"expected one @ before the host, got several in {masked(text)!r:.200}; write an @ in a password as %40"
            )
        return url.set(drivername="postgresql+psycopg")
    hint = "; write postgresql://" if backend in ("postgres", "pgsql", "psql") else ""
    raise DatabaseError(
        f"{_KINDS}, got the unsupported kind {url.drivername!r:.60} in {masked(text)!r:.200}{hint or '; choose one of these'}"
    )


def _sqlite_url(url: URL, text: str) -> URL:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise DatabaseError(
            f"{masked(text)!r:.200} names no file; give sqlite:///FILE, or memory:// for a database in memory"
        )
    if url.host:
        raise DatabaseError(
            f"expected three slashes before a file name, got {masked(text)!r:.200}; give sqlite:///{url.host}/..."
        )
    if text.partition("?")[2] not in ("", "mode=ro"):
        raise DatabaseError(
            f"expected no option but mode=ro after a SQLite file, got {masked(text)!r:.200}; leave the others out (a ? in a "
            "file's name is written %3F)"
        )
    return url


def shown(url: URL) -> str:
    """Return the URL for display: without driver and password."""
    plain = url.set(drivername=url.get_backend_name())
    return masked_words(plain.render_as_string(hide_password=True))


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a SQLite URL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def asks_read_only(url: URL) -> bool:
    """Return True if the URL itself forbids writing."""
    return dict(url.query) == {"mode": "ro"} and url.get_backend_name() == "sqlite"


def is_far(url: URL) -> bool:
    """Return True for a PostgreSQL server on another machine: a host or its address is neither a socket nor loopback.

    A service that cannot be read counts as far.
    """
    if url.get_backend_name() != "postgresql":
        return False
    service = _service(url)
    if service is None:
        return True
    hosts = _setting(url, "host", service, url.host)
    addresses = _setting(url, "hostaddr", service)
    # Without any host libpq uses a socket of this machine. Several hosts are tried in turn, so each of them counts.
    return not all(map(_is_near, [*(hosts or ("",)), *addresses]))


def _setting(url: URL, name: str, service: Mapping[str, str], in_url: str | None = None) -> tuple[str, ...]:
    """Return a setting as libpq finds it, as a list: in the URL, in the service, in the environment."""
    given = url.query.get(name) or in_url or service.get(name) or os.environ.get(_VARIABLES[name], "")
    return tuple(part for text in ([given] if isinstance(given, str) else given) for part in text.split(",") if part)


_VARIABLES = {"host": "PGHOST", "hostaddr": "PGHOSTADDR", "sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT"}
_MOST_SERVICE_BYTES = 1 << 20


def _service(url: URL) -> Mapping[str, str] | None:
    """Return the settings of the service that the URL or PGSERVICE names, as libpq reads them; None where it cannot be read."""
    name = str(url.query.get("service") or os.environ.get("PGSERVICE", ""))
    if not name:
        return {}
    own = os.environ.get("PGSERVICEFILE") or Path.home() / ".pg_service.conf"
    folders = os.environ.get("PGSYSCONFDIR") or "/etc/postgresql-common"
    for file in (Path(own), Path(folders) / "pg_service.conf"):
        try:
            with file.open("rb") as opened:
                lines = opened.read(_MOST_SERVICE_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        settings, inside, known = dict[str, str](), False, False
        for line in map(str.strip, lines):
            if line.startswith("["):
                inside = line == f"[{name}]"
                known |= inside
            elif inside and line and not line.startswith("#"):
                key, equals, value = line.partition("=")
                if not equals:
                    return None  # settings of a directory server
                settings.setdefault(key.strip(), value.strip())
        if known:
            return settings
    return None


def _is_near(host: str) -> bool:
    if host in ("", "localhost") or host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def transport(url: URL) -> dict[str, str]:
    """Return libpq's TLS options for a server on another machine: verify its certificate and name, unless other options are given."""
    if not is_far(url):
        return {}
    service = _service(url) or {}
    if _setting(url, "sslmode", service):
        return {}
    options = {"sslmode": "verify-full"}
    own = Path.home() / ".postgresql" / "root.crt"
    # libpq looks for authorities only in this file, and `verify-full` fails without it; "system" means the
    # authorities of the machine.
    if not _setting(url, "sslrootcert", service) and not own.exists():
        options["sslrootcert"] = "system"
    return options


def weaknesses(url: URL) -> Iterator[str]:
    """Yield a warning if the identity of the server is not verified."""
    mode = ",".join(_setting(url, "sslmode", _service(url) or {})) if is_far(url) else ""
    if mode not in ("", "verify-full"):
        yield (
            f"{shown(url)}: sslmode={mode:.20} does not verify the server, so others on the network may read and alter records; leave "
            "it out, or give verify-full"
        )


def make_engine(url: URL, *, read_only: bool) -> Engine:
    """Make an engine that connects lazily, to a SQLite file that exists. Thread-safe, but not across a fork.

    Raises:
        DatabaseError: the driver is not installed.
    """
    try:
        if url.get_backend_name() == "sqlite":
            return _sqlite_engine(url, read_only)
        options = f"-c lock_timeout={BUSY_SECS}s" + (" -c default_transaction_read_only=on" if read_only else "")
        given = url.query.get("options")
        arguments: dict[str, int | str] = {
            "connect_timeout": CONNECT_SECS,
            "keepalives_idle": SILENT_SECS // 3,
            "keepalives_interval": SILENT_SECS // 3,
            "keepalives_count": 2,
            "tcp_user_timeout": SILENT_SECS * 1000,
        }
        # Options in the URL go before these.
        arguments = {**transport(url), **{name: value for name, value in arguments.items() if name not in url.query}}
        all_arguments = {**arguments, "options": f"{given} {options}" if isinstance(given, str) else options}
        # The ping replaces pooled connections whose server has restarted since their last use.
        return create_engine(url, pool_pre_ping=True, connect_args=all_arguments)
    except (ImportError, NoSuchModuleError):
        raise DatabaseError(
            f"{shown(url)}: the psycopg driver for PostgreSQL is not installed; run `pip install 'relax-tune[postgres]'`"
        ) from None


def _sqlite_engine(url: URL, read_only: bool) -> Engine:
    path = Path(str(url.database)).absolute()

    def connect() -> sqlite3.Connection:
        address = sqlite_file.address(path, read_only=read_only, strictly=asks_read_only(url))
        # isolation_level=None turns off the driver's implicit transactions, which begin only at the first write;
        # `begin` below starts them. The pool lends a connection to one thread at a time, which need not be the one
        # that opened it.
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            # The file is untrusted: its schema may call no functions, and no value may be larger than readers can afford.
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
            # Off by default in SQLite, for each connection.
            connection.execute("PRAGMA foreign_keys=ON")
            # In WAL mode NORMAL keeps the file consistent; only a loss of power may undo the last commits (SQLite's
            # reference).
            connection.execute("PRAGMA synchronous=NORMAL")
            if read_only:
                connection.execute("PRAGMA query_only=ON")
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


def use_wal(engine: Engine) -> None:
    """Set a SQLite file of ours to WAL mode, which is permanent. Switching does not wait for other openers, so this
    does.
    """
    if engine.dialect.name != "sqlite":
        return
    deadline = time.monotonic() + BUSY_SECS
    with contextlib.closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        while True:
            try:
                if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    # A file system without shared memory keeps its rollback journal: slower and as safe.
                    cursor.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def writer(engine: Engine) -> Engine:
    """Return the same engine for transactions that write."""
    return engine.execution_options(relax_tune_write=True)


def reader(engine: Engine) -> Engine:
    """Return the same engine for transactions that read: each sees one state of the database."""
    if engine.dialect.name == "postgresql":
        # At PostgreSQL's default, READ COMMITTED, each statement of a transaction may see another state.
        return engine.execution_options(isolation_level="REPEATABLE READ")
    return engine


_BUSY = ("database is locked", "lock timeout", "too many clients")
_ADVICE = (
    (
        "certificate verify failed",
        "the authority of its certificate is unknown on this machine: give its file by sslrootcert=FILE in the URL",
    ),
    (
        "does not support SSL",
        "beyond this machine TLS is expected: let the server offer it (ssl = on); sslmode=disable in the URL goes without",
    ),
    ("does not match host name", "give the host by the name that its certificate has"),
    ("unable to open database file", "check that the file and its folder may be read and written"),
    ("readonly database", "the file or its folder is read-only: fix its permissions, or open it read-only"),
    ("read-only transaction", "it was opened read-only: open it for writing"),
    ("not a database", "the file is something else: give another path"),
    (
        "disk image is malformed",
        "the file is damaged: restore a backup, or import what `relax-tune db export` can still read into a new database",
    ),
    ("malformed database schema", "the file is damaged: restore a backup"),
    ("codec can't decode", "the file is damaged: restore a backup"),
    ("not decode to UTF-8", "the file is damaged: restore a backup, or see `relax-tune db check`"),
    ("disk is full", "free some space; everything committed before is safe"),
    ("o space left", "free some space; everything committed before is safe"),
    ("disk I/O error", "check the disk (full? unplugged?); everything committed before is safe"),
    ("file too large", "the file may not grow (a limit of this process?); everything committed before is safe"),
    ("database is locked", f"another process has been writing for over {BUSY_SECS} s: wait for it or stop it"),
    ("lock timeout", f"another session holds a lock for over {BUSY_SECS} s: see pg_stat_activity on the server"),
    ("Is the server running", "check that the server runs and that host and port are right"),
    ("invalid port", "give a port between 1 and 65535"),
    ("onnection refused", "check that the server runs and that host and port are right"),
    ("could not translate host", "check the host name"),
    ("resolve host", "check the host name"),
    ("ame or service not known", "check the host name"),
    ("imeout expired", f"the server gave no answer within {CONNECT_SECS} s: check host, port and network"),
    ("authentication failed", "check user and password (or ~/.pgpass)"),
    ("no password supplied", "give a password in the URL, in PGPASSWORD or in ~/.pgpass"),
    ("invalid connection option", "leave this option out of the URL"),
    ("invalid URI query parameter", "leave this option out of the URL"),
    ('role "', "create the user on the server first"),
    ("no such table", "a table is missing: it was altered; restore a backup"),
    ("no such column", "a column is missing: it was altered; restore a backup"),
    ("does not exist", "create it on the server first"),
    ("ermission denied", "fix the permissions, or choose another place with --db"),
    ("ead-only file system", "choose a place that may be written with --db"),
    ("ot a directory", "part of the path is a file: choose another place with --db"),
    ("ile exists", "part of the path is a file: choose another place with --db"),
    ("ile name too long", "give a shorter name"),
    ("erminating connection", "the server was stopped: start it, then run the same command again"),
    ("server closed the connection", "the server went away: when it is back, run the same command again"),
    ("starting up", "the server is starting: try again in a moment"),
    ("shutting down", "the server is stopping or restarting: try again in a moment"),
    ("too many clients", "close other sessions, or let the server take more"),
)


def explain(error: BaseException, where: str, doing: str, path: Path | None = None) -> DatabaseError:
    """Describe a driver's error in one paragraph: where, what failed, the driver's message, what to do.

    Args:
        path: The SQLite file, to name the process that holds its lock.
    """
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    reason = system_reason(cause)
    lines = [line.strip() for line in masked(reason).splitlines() if line.strip()]
    message = "; ".join(lines[:2])[:300] or type(cause).__name__
    if isinstance(error, IntegrityError):
        advice = (
            "the records break a rule of the database (a record they refer to is missing?): run `relax-tune db check`"
        )
    else:
        advice = next((text for part, text in _ADVICE if part in reason), "run `relax-tune db check` and try again")
    if "disk I/O error" in reason and path is not None and sqlite_file.is_full(path):
        advice = "the disk is full: free some space; everything committed before is safe"
    if "database is locked" in reason and path is not None and (holder := sqlite_file.holder(path)):
        message += f" by {holder}"
    message = f"{where}: could not {doing}: {message}; {advice}"
    if _lost(error):
        return LostConnection(message, has_answered=_ended(error))
    return BusyDatabase(message) if any(part in reason for part in _BUSY) else DatabaseError(message)


class LostConnection(DatabaseError, TryAgainLater):
    """The server cannot be reached, or ended a transaction; trying again may succeed.

    Attributes:
        has_answered: The server ended a connection that it had accepted, so that address and password are right.
    """

    def __init__(self, message: str, has_answered: bool = False) -> None:
        super().__init__(message)
        self.has_answered = has_answered


class BusyDatabase(DatabaseError, TryAgainLater):
    """A limit of waiting or of connections was reached, since others use the database."""


@contextlib.contextmanager
def typed_rows(where: str, doing: str) -> Iterator[None]:
    """Turn the exceptions of reading a row with values of wrong types into a `DatabaseError`."""
    try:
        yield
    except ROW_TYPE_ERRORS as error:
        raise DatabaseError(
            f"{where}: could not {doing}: a row holds a value of another type ({error!s:.80}); see `relax-tune db check`, restore a backup"
        ) from error


def _lost(error: BaseException) -> bool:
    if not isinstance(error, DBAPIError) or isinstance(error.orig, sqlite3.Error):
        return False
    # An error without a state comes from the driver, not from the server: the connection failed.
    state = getattr(error.orig, "sqlstate", None)
    return _ended(error) or (state is None and isinstance(error, OperationalError))


def _ended(error: BaseException) -> bool:
    """Return whether a connection failed that had been open."""
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _AWAY
    )


def patient(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of a store retry while its server is away.

    It retries for up to `away_secs` of the store; None stands for AWAY_SECS. The method must be safe to call again.
    """

    @functools.wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        own = getattr(arguments[0], "away_secs", None)
        deadline = time.monotonic() + (AWAY_SECS if own is None else own)
        while True:
            try:
                return method(*arguments, **named)
            except LostConnection:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    return call


def wait_for_server(open_it: Callable[[], None], secs: float, notice: Callable[[str], None]) -> None:
    """Open a database whose server may be starting, stopping or not listening yet, for up to `secs`.

    A mistake, such as a wrong host name or password, is raised at once.

    Args:
        notice: Receives one sentence when this waits.
    """
    deadline, noticed = time.monotonic() + secs, False
    while True:
        try:
            return open_it()
        except LostConnection as error:
            # A wrong host name or password does not get better by waiting.
            if not error.has_answered and not any(part in str(error) for part in _COMING):
                raise DatabaseError(str(error)) from None
            if time.monotonic() > deadline:
                raise
            if not noticed:
                notice(f"waiting up to {secs:g} s for the database server: {error}")
                noticed = True
        time.sleep(0.5)


@contextlib.contextmanager
def explained(where: str, doing: str, path: Path | None = None) -> Iterator[None]:
    """Turn every driver error inside into one `DatabaseError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise explain(error, where, doing, path) from None
