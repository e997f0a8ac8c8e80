"""Upgrade of a database to the newest schema, in parts that may be interrupted."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from relax_tune.database import schema, sqlite_file
from relax_tune.database.engine import (
    asks_read_only,
    explained,
    make_engine,
    parse_url,
    patient,
    reader,
    shown,
    sqlite_path,
    use_wal,
    writer,
)
from relax_tune.database.migrations.versions.rev_0007_packed import create_tables
from relax_tune.database.rules import chunks
from relax_tune.database.sql import leases, packing, plain
from relax_tune.errors import DatabaseError, TryAgainLater

_SAID_EACH = 100_000
"""Copied records between two sentences about it."""


class JobsAtWork(DatabaseError, TryAgainLater):
    """Jobs use the database, whose tables are about to change."""


def upgrade(url: str, notice: Callable[[str], None] = lambda _: None) -> tuple[str | None, str]:
    """Bring a database to the newest schema, or create it. Returns (version before or None, version now).

    Records are copied a few at a time, and the old tables serve others until the last moment. What was copied stays when
    this is interrupted. notice: receives a sentence now and then

    Raises:
        DatabaseError: it cannot be reached, is not ours, is newer than this code, or jobs are at work (`JobsAtWork`).
    """
    parsed = parse_url(url)
    where = shown(parsed)
    if asks_read_only(parsed):
        raise DatabaseError(f"{where}: wanted to upgrade it, found mode=ro in its URL; leave that out")
    path = sqlite_path(parsed)
    made = path is not None and sqlite_file.prepare(path, where, write=True, create=True, make_folder=False)
    engine = make_engine(parsed, read_only=False)
    try:
        with explained(where, "upgrade it", path):
            with reader(engine).begin() as connection:
                before = schema.current(connection, where)
            if before is not None and before < plain.VERSION:  # a newer one is refused below
                with writer(engine).begin() as connection:
                    _verify_idle(connection, where)
                    schema.migrate(connection, where, plain.VERSION)
            if before is not None and before <= plain.VERSION:
                _copy(engine, where, notice)
        found, after = _switch(engine, where, path, before)
        try:
            with explained(where, "give back the room of the old tables", path):
                use_wal(engine)
                if before is not None and before != after:
                    _tidy(engine, path, notice)
        except DatabaseError as error:  # the new schema is committed
            notice(f"upgraded to schema {after}; afterwards: {error}")
        return before if before is not None else found, after
    except BaseException:
        if made and path is not None:
            sqlite_file.remove_empty(path)
        raise
    finally:
        engine.dispose()


@patient
def _switch(engine: Engine, where: str, path: Path | None, before: str | None) -> tuple[str | None, str]:
    """Do what is left and put the new tables in the place of the old ones, at once.

    It is done again where the server ended it, as it does one of two that wait for each other. Returns what `schema.migrate` does
    """
    with explained(where, "upgrade it", path), writer(engine).begin() as connection:
        if before is not None and before <= plain.VERSION:
            _verify_idle(connection, where)
        return schema.migrate(connection, where)


def _verify_idle(connection: Connection, where: str) -> None:
    """Refuse while jobs hold leases: they would lose their tables."""
    if connection.dialect.name == "postgresql":  # none is acquired until the end
        connection.execute(text("LOCK TABLE leases IN EXCLUSIVE MODE"))
    now = {"now": leases.clock(connection)}
    held = list(connection.execute(text("SELECT DISTINCT holder FROM leases WHERE expires_at > :now"), now).scalars())
    if "submitted_jobs" in inspect(connection).get_table_names():
        at_work = "SELECT DISTINCT holder FROM submitted_jobs WHERE state = 'running' AND expires_at > :now"
        held += connection.execute(text(at_work), now).scalars()
    if held:
        raise JobsAtWork(
            f"{where}: wanted to change its tables with no job at work, found {', '.join(sorted(set(held))[:3])!r:.200}; nothing was "
            "changed: run the same command again when they have ended"
        )


def _copy(engine: Engine, where: str, notice: Callable[[str], None]) -> None:
    """Copy the records beside the old ones, each part in a transaction of its own."""
    with writer(engine).begin() as connection:
        _verify_idle(connection, where)
        create_tables(connection)
    with reader(engine).begin() as connection:
        tasks = packing.differing_tasks(connection)
    copied = said = 0
    for task in tasks:
        with reader(engine).begin() as connection:
            missing, gone = packing.difference(connection, task)
        for part in chunks(missing):
            with writer(engine).begin() as connection:
                packing.copy(connection, part)
            copied += len(part)
            if copied - said >= _SAID_EACH:
                said = copied
                notice(f"{copied} records copied; interrupt at will: what is copied stays")
        if gone:
            with writer(engine).begin() as connection:
                packing.remove(connection, task, gone)


def _tidy(engine: Engine, path: Path | None, notice: Callable[[str], None]) -> None:
    """Give the room of the old tables back, and let the engine count the new ones."""
    with contextlib.closing(engine.raw_connection()) as connection:
        if path is None:
            connection.cursor().execute("ANALYZE")
            connection.commit()
            return
        connection.cursor().execute("ANALYZE")
        if shutil.disk_usage(path.parent).free > 1.1 * path.stat().st_size:
            connection.cursor().execute("VACUUM")
        else:
            notice(
                f"{path}: kept the room of the old tables, since the disk has too little to give it back; run VACUUM later"
            )
