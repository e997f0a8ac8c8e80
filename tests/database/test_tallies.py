"""Tallies: `db check` compares them with the measurements they count."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from tests.database.records_made import failure, filled, timing

from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import open_store


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE tallies SET count = count + 1 WHERE stage = 7",
        "UPDATE tallies SET last = last + 1 WHERE stage = 7",
        "DELETE FROM tallies WHERE stage = 7",
        "DELETE FROM measurements WHERE stage = 7",
    ],
)
def test_check_names_altered_tallies(sql_url: str, change: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        filled(store).add_measurements([timing("a", 1.0, measured_at=5.0), failure("c", "crash", tile=3)])
        with store._engine.begin() as connection:
            connection.execute(text(change))
        (problem,) = store.check()
        assert "tallies of task" in problem and ("latest time" in problem) == ("SET last" in change)
