"""Tallies: `db check` compares them with the measurements they count."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.database.records_made import ZEN, failure, filled, timing

from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import open_store
from relax_tune.printable import CONTROL


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


@pytest.mark.parametrize("column", ["worker", "host", "unit"])
def test_units_of_rows_with_bytes_have_names_of_text(tmp_path: Path, column: str) -> None:
    with open_store(f"sqlite:///{tmp_path / 't.db'}") as store:
        assert isinstance(store, SqlStore)
        filled(store).add_measurements([timing("a", 1.0)])
        with store._engine.begin() as connection:
            connection.execute(text(f"UPDATE places SET {column} = x'6634'"))
        assert all(isinstance(name, str) for u in store.units(ZEN.key) for name in (u.worker, u.host, u.unit))


def test_notice_of_a_hostile_row_has_no_control_characters(tmp_path: Path) -> None:
    """For any receiver: commands and warnings also replace them."""
    notices: list[str] = []
    with open_store(f"sqlite:///{tmp_path / 't.db'}", notice=notices.append) as store:
        filled(store).add_measurements([timing("a", 1.0)])
        with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
            connection.execute("UPDATE variants SET trace = char(27) || '[2J'")
            connection.commit()
        store.query(ZEN.key)
    assert notices and not any(CONTROL.search(notice) for notice in notices)
