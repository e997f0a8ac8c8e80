"""Upgrade of a database to the newest schema."""

from __future__ import annotations

from relax_tune.database import schema, sqlite_file
from relax_tune.database.engine import (
    asks_read_only,
    explained,
    make_engine,
    parse_url,
    reader,
    shown,
    sqlite_path,
    use_wal,
    writer,
)
from relax_tune.errors import DatabaseError


def upgrade(url: str) -> tuple[str | None, str]:
    """Bring a database to the newest schema, or create it. Returns (version before or None, version now).

    Raises:
        DatabaseError: it cannot be reached, is not ours, or is newer than this code.
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
                schema.current(connection, where)
            with writer(engine).begin() as connection:
                versions = schema.migrate(connection, where)
            use_wal(engine)
            return versions
    except BaseException:
        if made and path is not None:
            sqlite_file.remove_empty(path)
        raise
    finally:
        engine.dispose()
