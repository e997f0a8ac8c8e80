"""The database that a caller of the Python interface names. Tests: `tests/tuner/e2e/test_api.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from relax_tune.database.store import Store, open_records, open_store
from relax_tune.errors import UserError

Database = Store | str | Path | None


@contextlib.contextmanager
def opened_store(
    db: Database, read_only: bool = False, wait_secs: float | None = None
) -> Iterator[tuple[Store, tuple[str, ...]]]:
    """Open the store of a database, with notes about it; a store that the caller opened stays open."""
    if db is None or isinstance(db, (str, Path)):
        url = None if db is None else str(db)
        store, notes = open_records(url) if read_only else (open_store(url, wait_secs=wait_secs), ())
        with store:
            yield store, notes
    elif hasattr(db, "query"):
        yield db, ()
    else:
        raise UserError(f"db: expected an open store, a URL or the path of a file, got a {type(db).__name__}")
