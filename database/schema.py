"""The schema version of a database, and its migration to the newest one.

A fresh database runs the same migrations as an old one, so there is one tested way to a schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text

from relax_tune.database.models import AboutRow, Base
from relax_tune.database.sql import plain
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


def verify(connection: Connection, where: str, *, write: bool) -> str:
    """Check that this code may read the database, or write it; return the schema whose statements it understands.

    Databases of the schema before (`plain.VERSION`) are served as they are. A newer schema says which older code may read and
    write it.

    Raises:
        DatabaseError: empty, foreign, older (with the command that upgrades it) or newer than this code.
    """
    found = current(connection, where)
    known = versions()
    if found == plain.VERSION:
        _verify_columns(connection, where, _TABLES_BEFORE)
        return found
    if found == known[-1] or (found is not None and found not in known and _serves(connection, known[-1], write)):
        _verify_columns(connection, where, {name: set(table.c.keys()) for name, table in Base.metadata.tables.items()})
        return known[-1]
    if found is not None and found not in known and write and _serves(connection, known[-1], False):
        raise DatabaseError(
            f"{where}: wanted to write schema {known[-1]}, found {found[:40]!r} of a newer relax-tune, which this one may only read; "
            "upgrade the tool (`pip install --upgrade relax-tune`)"
        )
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
    raise _newer(found, known, where)


_NEW = {"traces", "tasks", "points", "places", "messages", "tallies", "unreadable", "about"}
_TABLES_BEFORE = {
    **{name: set(table.c.keys()) for name, table in Base.metadata.tables.items() if name not in _NEW},
    **{name: set(table.c.keys()) for name, table in plain.TABLES.tables.items()},
}


def _serves(connection: Connection, version: str, write: bool) -> bool:
    """Return True if a database of a newer schema lets the code of `version` read or write."""
    if "about" not in inspect(connection).get_table_names():
        return False
    name = "writes_from" if write else "reads_from"
    oldest = connection.execute(select(AboutRow.value).where(AboutRow.name == name)).scalar_one_or_none()
    return oldest is not None and oldest <= version


def _verify_columns(connection: Connection, where: str, wanted_tables: Mapping[str, set[str]]) -> None:
    """Check that every table and column of ours exists, and that nothing runs when they are read or written. Others are ignored."""
    looking = inspect(connection)
    if connection.dialect.name == "sqlite":
        triggers = "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
        computed = "SELECT t.name || '.' || c.name FROM sqlite_schema t, pragma_table_xinfo(t.name) c WHERE t.type = 'table' AND c.hidden"
        foreign = [*connection.exec_driver_sql(triggers).scalars(), *connection.exec_driver_sql(computed).scalars()]
        if foreign:
            raise DatabaseError(
                f"{where}: wanted tables without triggers and generated columns, found {', '.join(map(str, sorted(foreign)[:5]))!r:.200}: "
                "the database was altered; restore a backup"
            )
    tables = set(looking.get_table_names())
    for name, wanted in wanted_tables.items():
        missing = sorted(wanted - {str(c["name"]) for c in looking.get_columns(name)} if name in tables else wanted)
        if missing:
            what = f"the columns {', '.join(missing)} of {name}" if name in tables else f"the table {name}"
            raise DatabaseError(f"{where}: wanted {what}, found none: the database was altered; restore a backup")


def _newer(found: str, known: tuple[str, ...], where: str) -> DatabaseError:
    return DatabaseError(
        f"{where}: wanted schema version {known[-1]} or older, found {found[:40]!r}, which a newer relax-tune wrote; "
        "upgrade the tool (`pip install --upgrade relax-tune`) or give another database"
    )


def migrate(connection: Connection, where: str, to: str = "head") -> tuple[str | None, str]:
    """Bring the database to the newest schema inside the caller's transaction. Returns (version before, version after).

    to: an earlier version to stop at

    Two processes may do this at once: the transaction (SQLite) or an advisory lock (PostgreSQL) lets one do the work.

    Raises:
        DatabaseError: foreign, or newer than this code.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    found = current(connection, where)
    known = versions()
    if found is not None and found not in known:
        raise _newer(found, known, where)
    wanted = known[-1] if to == "head" else to
    if found is None or found < wanted:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, to)
    return found, wanted
