"""The schema version of a database, and its migration to the newest one.

A fresh database runs the same migrations as an old one, so there is one tested way to a schema.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from relax_tune.database.models import Base
from relax_tune.errors import DatabaseError

VERSION_TABLE = "alembic_version"
_LOCK = 0x72656C6178  # names our advisory lock on a PostgreSQL server


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def versions() -> tuple[str, ...]:
    """Return every schema version this code knows, oldest first."""
    return tuple(revision.revision for revision in ScriptDirectory.from_config(_config()).walk_revisions())[::-1]


def current(connection: Connection, where: str) -> str | None:
    """Return the database's schema version, or None when it is empty; `where` names the database in errors.

    Raises:
        DatabaseError: there are tables, but not ours.
    """
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if not tables:
            return None
        raise DatabaseError(
            f"{where}: wanted a relax-tune database or an empty one, found the tables {', '.join(sorted(tables)[:5])} of "
            "something else; give another URL"
        )
    found = [str(row[0]) for row in connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))]
    if len(found) > 1 or (found and not tables.issuperset({"measurements", "variants"})):
        raise DatabaseError(
            f"{where}: wanted one relax-tune schema version, found {found} with the tables {', '.join(sorted(tables)[:5])}; "
            "it belongs to something else or was damaged: give another URL or restore a backup"
        )
    return found[0] if found else None


def verify(connection: Connection, where: str) -> None:
    """Check that the database has the newest schema.

    Raises:
        DatabaseError: empty, foreign, older (with the command that upgrades it) or newer than this code.
    """
    found = current(connection, where)
    known = versions()
    if found == known[-1]:
        _verify_columns(connection, where)
        return
    if found is None:
        raise DatabaseError(
            f"{where}: wanted a relax-tune database, found an empty one; tune into it, or create it with "
            f"`relax-tune db upgrade --db {where}`"
        )
    if found in known:
        raise DatabaseError(
            f"{where}: wanted schema version {known[-1]}, found the older {found}; back it up, then run "
            f"`relax-tune db upgrade --db {where}`"
        )
    _refuse_newer(found, known, where)


def _verify_columns(connection: Connection, where: str) -> None:
    """Check that every table and column of ours exists. Others are ignored."""
    looking = inspect(connection)
    tables = set(looking.get_table_names())
    for name, table in Base.metadata.tables.items():
        wanted = {column.name for column in table.columns}
        missing = sorted(wanted - {str(c["name"]) for c in looking.get_columns(name)} if name in tables else wanted)
        if missing:
            what = f"the columns {', '.join(missing)} of {name}" if name in tables else f"the table {name}"
            raise DatabaseError(f"{where}: wanted {what}, found none: the database was altered; restore a backup")


def _refuse_newer(found: str, known: tuple[str, ...], where: str) -> None:
    raise DatabaseError(
        f"{where}: wanted schema version {known[-1]} or older, found {found[:40]!r}, which a newer relax-tune wrote; "
        "upgrade the tool (`pip install --upgrade relax-tune`) or give another database"
    )


def migrate(connection: Connection, where: str) -> tuple[str | None, str]:
    """Bring the database to the newest schema inside the caller's transaction. Returns (version before, version after).

    Two processes may do this at once: the transaction (SQLite) or an advisory lock (PostgreSQL) lets one do the work.

    Raises:
        DatabaseError: foreign, or newer than this code.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    found = current(connection, where)
    known = versions()
    if found is not None and found not in known:
        _refuse_newer(found, known, where)
    if found != known[-1]:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return found, known[-1]
