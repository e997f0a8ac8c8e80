"""The schema version of a database, and its migration to the newest one.

An empty database and one of an earlier release run the same migrations, so there is one tested way to a schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text

from relax_tune.database.jobs.tables import SubmittedJobRow
from relax_tune.database.models import AboutRow
from relax_tune.errors import DatabaseError

TABLES: Mapping[str, Any] = SubmittedJobRow.metadata.tables
"""All tables of the newest schema, by name: of records and of submitted jobs."""
VERSION_TABLE = "alembic_version"
_LOCK = 0x72656C6178  # number of the advisory lock on a PostgreSQL server: "relax" in ASCII


def _config() -> Config:
    config = Config()
    # The configuration parser interpolates `%`.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def versions() -> tuple[str, ...]:
    """Return the schema versions that this code knows, oldest first."""
    return tuple(revision.revision for revision in ScriptDirectory.from_config(_config()).walk_revisions())[::-1]


def current(connection: Connection, where: str) -> str | None:
    """Return the database's schema version, or None when it is empty.

    Args:
        where: The database's name in errors.

    Raises:
        DatabaseError: The database has tables of another program.
    """
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if not tables:
            return None
        raise DatabaseError(
            f"{where}: expected a relax-tune database or an empty one, got the tables {', '.join(sorted(tables)[:5])} of "
            "something else; give another URL"
        )
    stored = [str(row[0]) for row in connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))]
    if len(stored) > 1 or (stored and not tables.issuperset({"measurements", "variants"})):
        raise DatabaseError(
            f"{where}: expected one relax-tune schema version, got {stored} with the tables {', '.join(sorted(tables)[:5])}; "
            "the database belongs to something else or was damaged: give another URL or restore a backup"
        )
    return stored[0] if stored else None


def verify(connection: Connection, where: str, *, write: bool) -> None:
    """Check that this code may read the database, or write it.

    A database of a newer schema states in `about` which older code may read and write it.

    Raises:
        DatabaseError: The database is empty, belongs to another program, is older (the message names the command that upgrades
            or converts it), or is newer than this code and does not admit it.
    """
    version = current(connection, where)
    known = versions()
    newest = known[-1]
    if version is None:
        raise DatabaseError(
            f"{where}: this database is empty; tune into it, or create the tables with `relax-tune db upgrade --db {where}`"
        )
    if version < known[0]:
        raise _unreleased(version, where)
    if version in known[:-1]:
        raise DatabaseError(
            f"{where}: expected schema version {newest}, got the older {version}; back it up, then run "
            f"`relax-tune db upgrade --db {where}`"
        )
    if version != newest and not _admits(connection, newest, write):
        if write and _admits(connection, newest, False):
            raise DatabaseError(
                f"{where}: expected to write schema {newest}, got {version[:40]!r} of a newer relax-tune, which this one may only "
                "read; upgrade the tool (`pip install --upgrade relax-tune`)"
            )
        raise _newer(version, newest, where)
    _verify_columns(connection, where)


def _unreleased(version: str, where: str) -> DatabaseError:
    return DatabaseError(
        f"{where}: schema version {version} is from before the first release, 0.2; convert the database to a new one: "
        f"`python -m tools.convert_database {where} NEW.db` in a checkout of the repository"
    )


def _admits(connection: Connection, version: str, write: bool) -> bool:
    """Return True if a database of a newer schema lets the code of `version` read or write."""
    if "about" not in inspect(connection).get_table_names():
        return False
    name = "writes_from" if write else "reads_from"
    oldest = connection.execute(select(AboutRow.value).where(AboutRow.name == name)).scalar_one_or_none()
    return oldest is not None and oldest <= version


def _verify_columns(connection: Connection, where: str) -> None:
    """Check that every table and column exists, and that the file defines no code that runs when rows are read or written.

    Other tables and columns are ignored.
    """
    inspector = inspect(connection)
    if connection.dialect.name == "sqlite":
        triggers = "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
        # Generated columns are among the hidden ones (SQLite's reference, PRAGMA table_xinfo).
        computed = "SELECT t.name || '.' || c.name FROM sqlite_schema t, pragma_table_xinfo(t.name) c WHERE t.type = 'table' AND c.hidden"
        names = [*connection.exec_driver_sql(triggers).scalars(), *connection.exec_driver_sql(computed).scalars()]
        if names:
            raise DatabaseError(
                f"{where}: expected tables without triggers and generated columns, got {', '.join(map(str, sorted(names)[:5]))!r:.200}: "
                "the database was altered; restore a backup"
            )
    existing = set(inspector.get_table_names())
    for name, table in TABLES.items():
        if name not in existing:
            raise DatabaseError(f"{where}: the table {name} is missing: the database was altered; restore a backup")
        columns = {str(column["name"]) for column in inspector.get_columns(name)}
        missing = sorted(set(table.c.keys()) - columns)
        if missing:
            raise DatabaseError(
                f"{where}: the columns {', '.join(missing)} of {name} are missing: the database was altered; restore a backup"
            )


def _newer(version: str, newest: str, where: str) -> DatabaseError:
    return DatabaseError(
        f"{where}: expected schema version {newest} or older, got {version[:40]!r}, which a newer relax-tune wrote; "
        "upgrade the tool (`pip install --upgrade relax-tune`) or give another database"
    )


def migrate(connection: Connection, where: str) -> tuple[str | None, str]:
    """Bring the database to the newest schema inside the caller's transaction.

    Two processes may do this at once: the transaction (SQLite) or an advisory lock (PostgreSQL) makes one wait for the other.

    Returns:
        The version before, None for an empty database, and the version after.

    Raises:
        DatabaseError: The database belongs to another program, is from before the first release, or is newer than this code.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    version = current(connection, where)
    known = versions()
    if version is not None and version not in known:
        raise _unreleased(version, where) if version < known[0] else _newer(version, known[-1], where)
    if version != known[-1]:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return version, known[-1]
