"""Two schemas in one fleet: what each version of the tool does with the database of the other, and the upgrade between them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text, update
from tests.database.conftest import make_before
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, failure, filled, timing

from relax_tune.database import schema
from relax_tune.database import upgrade as upgrading
from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.database.sql import packing, plain
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import open_store
from relax_tune.database.upgrade import JobsAtWork, upgrade
from relax_tune.errors import DatabaseError

RECORDS = [
    timing("a", 1.0, job="j", measured_at=5.0, samples_secs=(0.1, 0.2, 1e-300)),
    timing("b", 2.0, tile=2, n=16, workload=SOFTMAX, worker="w", host="h", unit="u", clock_mhz=1.5, celsius=40.0),
    failure("c", "crash", tile=3),
    failure("0" * 32 + ".f", "compile", tile=3),
]


def sql(store: object) -> SqlStore:
    assert isinstance(store, SqlStore)
    return store


def fill_before(url: str, records: list[Measurement]) -> str:
    """Make a database of schema 6 with these records."""
    with open_store(make_before(url)) as store:
        filled(store).add_measurements(records)
        store.put_plans(ZEN.key, {MATMUL.key: '["one"]'})
        store.put_plans(ZEN.key, {MATMUL.key: '["two"]'})
    return url


def all_records(url: str) -> list[Measurement]:
    with open_store(url, read_only=True) as store:
        assert store.check() == []
        return store.query(ZEN.key)


def test_database_of_the_schema_before_is_read_and_written(sql_url: str) -> None:
    fill_before(sql_url, RECORDS)
    with open_store(sql_url) as store:
        assert sql(store).layout.version == plain.VERSION
        lease = store.acquire_lease(MATMUL.key, ZEN.key, "me", secs=60.0)
        assert lease is not None and store.add_measurements([timing("new", 3.0)]) == 1 and store.release_lease(lease)
        with sql(store)._engine.connect() as connection:
            assert schema.current(connection, sql_url) == plain.VERSION
            assert "tallies" not in inspect(connection).get_table_names()
    assert len(all_records(sql_url)) == len(RECORDS) + 1


def test_tool_of_the_schema_before_is_told_to_upgrade_and_changes_nothing(
    sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What schema 6 does with a newer database: the version decides before any table is asked for a row."""
    with open_store(sql_url) as store:
        filled(store).add_measurements(RECORDS)
    known = schema.versions()
    with monkeypatch.context() as before:
        before.setattr(schema, "versions", lambda: known[:-1])
        before.setattr(schema, "_serves", lambda *_: False)
        for read_only in (False, True):
            with pytest.raises(DatabaseError, match="a newer relax-tune wrote; upgrade the tool"):
                open_store(sql_url, read_only=read_only)
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            upgrade(sql_url)
    assert all_records(sql_url) == sorted(RECORDS, key=lambda m: m.id)


@pytest.mark.parametrize(("reads", "writes"), [("0007", "0007"), ("0007", "0008"), ("0008", "0008")])
def test_newer_schema_names_readers_and_writers(sql_url: str, reads: str, writes: str) -> None:
    with open_store(sql_url) as store:
        filled(store).add_measurements(RECORDS[:1])
        with sql(store)._engine.begin() as connection:
            connection.execute(text("ALTER TABLE measurements ADD COLUMN humidity FLOAT DEFAULT 0"))
            connection.execute(text("UPDATE alembic_version SET version_num = '0008'"))
            for name, value in (("reads_from", reads), ("writes_from", writes)):
                put = text("UPDATE about SET value = :value WHERE name = :name")
                connection.execute(put, {"name": name, "value": value})
    if reads == "0008":
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            open_store(sql_url, read_only=True)
    else:
        assert all_records(sql_url) == RECORDS[:1]
    if writes == "0008":
        with pytest.raises(DatabaseError, match="upgrade the tool"):
            open_store(sql_url)
        return
    with open_store(sql_url) as store:
        assert store.add_measurements(RECORDS[1:]) == len(RECORDS) - 1


def test_upgrade_keeps_every_digit_and_the_current_plans(sql_url: str) -> None:
    fill_before(sql_url, RECORDS)
    assert upgrade(sql_url) == ("0006", "0007")
    assert all_records(sql_url) == sorted(RECORDS, key=lambda m: m.id)
    with open_store(sql_url) as store:
        assert [(p.version, p.origin, p.turn) for p in store.plans(ZEN.key)] == [(1, "", 1), (2, "", 2)]
        current = store.plan(MATMUL.key, ZEN.key)
        assert current is not None and current.entries == '["two"]' and len(store.id) == 32
        stats = store.stats(ZEN.key)
        assert stats is not None and (stats.measurements, stats.ok, dict(stats.failures)) == (
            4,
            2,
            {"crash": 1, "compile": 1},
        )
        assert store.add_measurements(RECORDS) == 0
        with sql(store)._engine.connect() as connection:
            assert not {n for n in inspect(connection).get_table_names() if n.startswith("packed_")}


def test_interrupted_upgrade_serves_others_and_goes_on(sql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [timing(f"m{i:04}", 1.0 + i, tile=i % 7, n=i % 3) for i in range(1200)]
    fill_before(sql_url, [*records, *RECORDS])
    copied: list[int] = []
    real = packing.copy

    def copy(connection: Any, ids: Any) -> None:
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(len(ids))
        real(connection, ids)

    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(packing, "copy", copy)
        upgrade(sql_url)
    with open_store(sql_url) as store:  # as before, and others go on
        assert sql(store).layout.version == plain.VERSION and store.count(ZEN.key) == 1204
        assert store.add_measurements([timing("later", 1.0)]) == 1
        with sql(store)._engine.begin() as connection:  # one that was copied is pruned
            connection.execute(text("DELETE FROM measurements WHERE id = 'm0000'"))
            number = connection.execute(text("SELECT count(*) FROM packed_measurements")).scalar_one()
            assert number == sum(copied) > 0
    again: list[int] = []
    monkeypatch.setattr(packing, "copy", lambda connection, ids: (again.append(len(ids)), real(connection, ids)))
    assert upgrade(sql_url) == ("0006", "0007")
    assert 0 < sum(again) < 1204 - sum(copied) + 3, "what was copied is not copied again"
    wanted = [*records[1:], *RECORDS, timing("later", 1.0)]
    assert all_records(sql_url) == sorted(wanted, key=lambda m: m.id)


def test_upgrade_is_refused_while_a_job_holds_a_lease(sql_url: str) -> None:
    fill_before(sql_url, RECORDS)
    with open_store(sql_url) as store:
        lease = store.acquire_lease(MATMUL.key, ZEN.key, "gpu1:tune", secs=1000.0)
        assert lease is not None
        with pytest.raises(JobsAtWork, match=r"gpu1:tune.*run the same command again"):
            upgrade(sql_url)
        assert store.add_measurements([timing("new", 1.0)]) == 1 and store.release_lease(lease)
    assert upgrade(sql_url) == ("0006", "0007")
    assert len(all_records(sql_url)) == len(RECORDS) + 1


def test_store_opened_before_the_upgrade_says_so(sql_url: str) -> None:
    fill_before(sql_url, RECORDS)
    with open_store(sql_url) as store:
        assert store.count(ZEN.key) == len(RECORDS)
        upgrade(sql_url)
        for ask in (lambda: store.query(ZEN.key), lambda: store.add_measurements([timing("lost?", 1.0)])):
            with pytest.raises(DatabaseError, match="upgraded meanwhile; run the same command again"):
                ask()
    assert len(all_records(sql_url)) == len(RECORDS)


def test_unreadable_row_is_kept_by_the_upgrade_and_named(sql_url: str) -> None:
    fill_before(sql_url, RECORDS)
    with open_store(sql_url) as store, sql(store)._engine.begin() as connection:
        change = update(plain.MEASUREMENTS).where(plain.MEASUREMENTS.c.id == "a").values(samples="[1e999]")
        connection.execute(change)
    upgrade(sql_url)
    with open_store(sql_url) as store:
        assert [m.id for m in store.query(ZEN.key)] == sorted(m.id for m in RECORDS[1:])
        (problem,) = store.check()
        assert "'a'" in problem and "could not be read" in problem


def test_rows_of_other_types_are_kept_by_the_upgrade(tmp_path: Path) -> None:
    """SQLite keeps anything in any column; none of it ends the upgrade."""
    url = fill_before(f"sqlite:///{tmp_path / 'records.db'}", [timing(f"m{i}", 1.0) for i in range(4)])
    with open_store(url) as store, sql(store)._engine.begin() as connection:
        for id, change in (("m0", "samples = x'ff'"), ("m1", "build_secs = x'00'"), ("m2", "id = x'ff'")):
            connection.execute(text(f"UPDATE measurements SET {change} WHERE id = '{id}'"))
    upgrade(url)
    with open_store(url) as store:
        assert [m.id for m in store.query(ZEN.key)] == ["m3"]
        assert len([p for p in store.check() if "could not be read" in p]) == 3


def test_late_times_are_upgraded(sql_url: str) -> None:
    late = [timing(f"m{i}", 1.0, measured_at=1e300) for i in range(3)]
    fill_before(sql_url, late)
    upgrade(sql_url)
    assert {m.measured_at for m in all_records(sql_url)} == {1e300}


def test_upgraded_file_gives_the_room_back(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    samples = tuple(1e-3 + i * 1e-9 for i in range(34))
    trace = "[" + ", ".join(["1"] * 500) + "]"
    made = [
        replace(timing(f"m{i}", 1.0, samples_secs=samples), variant=VariantRecord("tuned", "s", trace, f'{{"t":{i}}}'))
        for i in range(1500)
    ]
    fill_before(f"sqlite:///{path}", made)
    before = path.stat().st_size
    upgrade(str(path))
    assert path.stat().st_size < before / 3


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE tallies SET count = count + 1 WHERE stage = 7",
        "UPDATE tallies SET last = last + 1 WHERE stage = 7",
        "DELETE FROM tallies WHERE stage = 7",
        "DELETE FROM measurements WHERE stage = 7",
    ],
)
def test_altered_tallies_are_found_by_check(sql_url: str, change: str) -> None:
    with open_store(sql_url) as store:
        filled(store).add_measurements(RECORDS)
        with sql(store)._engine.begin() as connection:
            connection.execute(text(change))
        (problem,) = store.check()
        assert "tallies of task" in problem and ("latest time" in problem) == ("SET last" in change)


@pytest.mark.postgres
def test_upgrade_takes_locks_in_the_order_of_writers(postgres_url: str) -> None:
    """A writer of schema 6 has written its variants when the upgrade begins to wait, and writes its measurements then."""
    fill_before(postgres_url, RECORDS)
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    layout, new = plain.PlainLayout(), timing("late", 4.0, tile=9)
    with ThreadPoolExecutor(1) as others, engine.connect() as looking, engine.begin() as connection:
        connection.execute(
            text("SET deadlock_timeout = '10ms'")
        )  # of two that wait for each other, the writer is ended
        plain.add_missing(connection, plain.VARIANTS, [plain.rows.variant_values(new.variant)])
        upgraded = others.submit(upgrade, postgres_url)
        until = time.monotonic() + 60
        while looking.execute(waiting).scalar_one() == 0 and not upgraded.done():
            assert time.monotonic() < until
            looking.rollback()
            time.sleep(0.02)
        assert layout.add(connection, {new.id: new}) == 1
        connection.commit()
        assert upgraded.result(60) == ("0006", "0007")
    engine.dispose()
    assert new in all_records(postgres_url)


@pytest.mark.postgres
def test_upgrade_ended_by_a_deadlock_is_done_again(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_before(postgres_url, RECORDS)
    real, ended = schema.migrate, list[str]()

    def migrate(connection: Any, where: str, to: str = "head") -> Any:
        found = real(connection, where, to)
        if not ended:
            ended.append(where)
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END $$"))
        return found

    monkeypatch.setattr(schema, "migrate", migrate)
    assert upgrade(postgres_url) == ("0006", "0007") and len(ended) == 1
    assert all_records(postgres_url) == sorted(RECORDS, key=lambda m: m.id)


def test_failure_after_a_committed_upgrade_is_told_beside(sql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_before(sql_url, RECORDS)

    def tidy(*_: object) -> None:
        raise OSError("no room for a copy of the file")

    monkeypatch.setattr(upgrading, "_tidy", tidy)
    told: list[str] = []
    assert upgrade(sql_url, told.append) == ("0006", "0007")
    (line,) = told
    assert line.startswith("upgraded to schema 0007; afterwards: ") and "no room for a copy" in line
    assert len(all_records(sql_url)) == len(RECORDS)
