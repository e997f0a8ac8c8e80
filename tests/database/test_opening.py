"""What can go wrong with a database is one `DatabaseError` that says where, what and what to do."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from tests.database.records_made import MATMUL, ZEN, ZEN_OLD, failure, filled, timing

from relax_tune.database.engine import parse_url, shown
from relax_tune.database.records import JobRecord, Measurement, VariantRecord, Workload
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import DatabaseError


def explained(error: pytest.ExceptionInfo[DatabaseError]) -> str:
    """The message, after checking that it is one short paragraph with no driver's wall of text behind it."""
    message = str(error.value)
    assert len(message) < 700 and "sqlalche.me" not in message and "[SQL" not in message
    assert error.value.__cause__ is None and (error.value.__context__ is None or error.value.__suppress_context__)
    return message


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("nonsense", "malformed"),
        ("", "malformed"),
        ("http://[", "unsupported kind"),
        ("postgresql://host:port/x", "malformed"),
        ("sqlite:///", "file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://folder/records.db", "three slashes"),
        ("mysql://root@localhost/x", "unsupported kind 'mysql'"),
        ("postgresql+asyncpg://localhost/x", "unsupported kind"),
        ("oracle://scott:tiger@localhost/x", "unsupported kind"),
    ],
)
def test_a_url_we_cannot_use(url: str, part: str) -> None:
    with pytest.raises(DatabaseError) as error:
        open_store(url)
    assert part in explained(error) and "tiger" not in str(error.value)


def test_passwords_are_never_shown() -> None:
    assert shown(parse_url("postgresql://me:secret@host:1/db")) == "postgresql://me:***@host:1/db"
    with pytest.raises(DatabaseError) as error:
        open_store("postgresql://me:secret@127.0.0.1:1/db")
    assert "refused" in explained(error) and "server runs" in str(error.value) and "secret" not in str(error.value)


def test_a_path_is_a_url_and_memory_is_a_store(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "plain.db")) as store:
        assert store.where == f"sqlite:///{tmp_path}/plain.db"
    assert isinstance(open_store("memory://"), MemoryStore)


def test_the_default_is_in_the_user_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_store() as store:
        assert isinstance(store, SqlStore) and str(tmp_path) in store.where and "relax-tune" in store.where


def test_sqlite_is_opened_as_promised(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'a b%20#.db'}") as store:
        assert isinstance(store, SqlStore)
        with store._engine.connect() as connection:
            found = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys")
            ]
            assert found == ["wal", 1, 1]
            assert int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()) >= 1000


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError) as error:
        open_store(f"sqlite:///{tmp_path}/no/records.db")
    assert "create it first" in explained(error) and not (tmp_path / "no").exists()


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_bytes(b"this is only a text, and long enough to be seen as one\n" * 100)
    with pytest.raises(DatabaseError) as error:
        open_store(f"sqlite:///{path}")
    assert "not a database" in explained(error) and "another path" in str(error.value)
    with pytest.raises(DatabaseError) as error:
        open_store(f"sqlite:///{tmp_path}")
    assert "got a folder" in explained(error)


def test_read_only_reads_and_refuses_to_write(sql_url: str) -> None:
    with open_store(sql_url) as store:
        filled(store).add_measurements([timing("a", 1.0)])
    with open_store(sql_url, read_only=True) as store:
        assert store.count(ZEN.key) == 1
        with pytest.raises(DatabaseError) as error:
            store.add_measurements([timing("b", 1.0)])
        assert "read-only" in explained(error)
        assert isinstance(store, SqlStore)
        with pytest.raises(Exception, match=r"readonly|read-only"), store._engine.begin() as connection:
            connection.execute(text("DELETE FROM measurements"))


@pytest.mark.process
def test_a_read_only_file_on_disk(tmp_path: Path) -> None:
    """As a user who may not write; root may write everything, so it steps down."""
    path = tmp_path / "shared" / "records.db"
    path.parent.mkdir()
    with open_store(f"sqlite:///{path}") as store:
        filled(store).add_measurements([timing("a", 1.0)])
    path.chmod(0o444)
    path.parent.chmod(0o555)
    code = (
        "import os, sys\n"
        "from relax_tune.database.store import open_store\n"
        "from relax_tune.errors import DatabaseError\n"
        "os.getuid() or os.setuid(65534)\n"
        f"print(open_store('sqlite:///{path}', read_only=True).count('{ZEN.key}'))\n"
        "try:\n"
        f"    open_store('sqlite:///{path}')\n"
        "except DatabaseError as error:\n"
        "    print(error)\n"
    )
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o111)
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    finally:
        path.parent.chmod(0o755)
    assert done.returncode == 0, done.stderr
    counted, refused = done.stdout.splitlines()
    assert counted == "1" and "read-only" in refused and "permissions" in refused


def test_full_disk_keeps_committed_records(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'small.db'}"
    with open_store(url) as store:
        assert isinstance(store, SqlStore)
        filled(store).add_measurements([timing("first", 1.0)])

        @event.listens_for(store._engine, "begin")
        def limit(connection: object) -> None:
            connection.exec_driver_sql("PRAGMA max_page_count=80")  # type: ignore[attr-defined]

        batch = [failure(f"f{i}", "compile", str(i) + "x" * 5000, tile=i) for i in range(100)]
        with pytest.raises(DatabaseError) as error:
            store.add_measurements(batch)
        assert "full" in explained(error) and "free some space" in str(error.value)
        assert store.count(ZEN.key) == 1
        assert store.add_measurements([timing("second", 1.0)]) == 1
    with open_store(url) as store:
        assert store.count(ZEN.key) == 2 and store.check() == []


def test_altered_rows_are_found_and_never_believed(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    url = f"sqlite:///{path}"
    with open_store(url) as store:
        filled(store).add_measurements([timing("a", 1.0), timing("b", 2.0), failure("c", "crash", tile=7)])
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA foreign_keys=OFF")
    for change in (
        "UPDATE measurements SET samples = x'66ff' WHERE id = x'0161'",
        """UPDATE variants SET parameters = '{"t":2}' WHERE parameters = '{"t":1}'""",
        f"DELETE FROM targets WHERE key = '{ZEN_OLD.key}'",
        "UPDATE measurements SET task = 99 WHERE id = x'0163'",
        "UPDATE workloads SET text = '' WHERE key = 'w-softmax'",
    ):
        raw.execute(change)
    raw.commit()
    raw.close()
    with open_store(url) as store:
        problems = "\n".join(store.check())
        for part in ("variants row", "refers to a row of tasks", "workload text"):
            assert part in problems
        assert store.query(ZEN.key, MATMUL.key) == [] and store.best(MATMUL.key, ZEN.key, {}) is None


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("samples_secs", (), "at least one sample"),
        ("samples_secs", (float("inf"),), "finite"),
        ("samples_secs", (10**400,), "finite"),
        ("samples_secs", (-1.0,), "finite"),
        ("samples_secs", ("1",), "finite"),
        ("status", "great", "ok, failed"),
        ("stage", "crash", "no stage"),
        ("regime", "cold", "warm, flushed"),
        ("checked", 1, "true or false"),
        ("symbols", {"n": True}, "integer"),
        ("symbols", {"n": 2**63}, "integer"),
        ("symbols", {3: 4}, "text as names"),
        ("symbols", {"n" * 150 + str(i): i for i in range(9)}, "characters in all"),
        ("id", "", "1 to 200"),
        ("id", "x" * 201, "at most 200"),
        ("id", "a\0b", "NUL"),
        ("job", "\ud800", "surrogate"),
        ("variant", "tuned", "Variant"),
    ],
)
def test_a_malformed_measurement_cannot_be_made(field: str, value: object, part: str) -> None:
    good = timing("id", 1.0)
    values = {name: getattr(good, name) for name in ("id", "workload", "target", "variant", "symbols", "samples_secs")}
    with pytest.raises(DatabaseError, match=part):
        Measurement(**{**values, field: value})  # type: ignore[arg-type]


def test_a_failure_has_a_stage_and_a_message_and_no_time() -> None:
    with pytest.raises(DatabaseError, match="message"):
        failure("f", "crash", "")
    with pytest.raises(DatabaseError, match="stage"):
        failure("f", "tired", "slept")  # type: ignore[arg-type]
    with pytest.raises(DatabaseError, match="no samples"):
        Measurement(
            "f", "w", "t", timing("a", 1.0).variant, status="failed", stage="crash", message="m", samples_secs=(1e9,)
        )
    with pytest.raises(DatabaseError, match="no time"):
        _ = failure("f", "crash").median_secs
    logged = failure("f", "compile", "a\0\ud800" + "x" * 100_000 + "end")
    assert "\0" not in logged.message and logged.message.endswith("end") and len(logged.message) <= 16_000


def test_new_database_is_for_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with open_store(None):
        pass
    folder = tmp_path / "relax-tune"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("targets", f"UPDATE targets SET fingerprint = '[1' WHERE key = '{ZEN_OLD.key}'"),
        ("workloads", "UPDATE workloads SET text = '' WHERE key = 'w-softmax'"),
        ("workloads", "UPDATE workloads SET text = printf('%.2000000c', 'x') WHERE key = 'w-softmax'"),
        ("jobs", "UPDATE jobs SET settings = '{' WHERE id = 'bad'"),
        ("plans", "UPDATE plans SET entries = 'NaN' WHERE workload = 'w-softmax'"),
        ("measurements", "UPDATE measurements SET samples = x'7b7d' WHERE id = x'0162'"),
        ("measurements", "UPDATE measurements SET samples = CAST('f' || printf('%.2000000c', ' ') AS BLOB) WHERE id = x'0162'"),
        ("measurements", "UPDATE measurements SET samples = x'660000c07f' WHERE id = x'0162'"),
        ("measurements", "UPDATE measurements SET point = 99 WHERE id = x'0162'"),
        ("measurements", "UPDATE measurements SET kind = 1 WHERE id = x'0162'"),
        ("variants", """UPDATE variants SET parameters = '{"t":2}' WHERE number = (SELECT variant FROM measurements WHERE id = x'0162')"""),
        ("variants", "UPDATE variants SET trace = 99 WHERE number = (SELECT variant FROM measurements WHERE id = x'0162')"),
    ],
)  # fmt: skip
def test_malformed_row_is_left_out_and_counted(tmp_path: Path, table: str, change: str) -> None:
    path = tmp_path / "records.db"
    with open_store(f"sqlite:///{path}") as store:
        filled(store).add_measurements([timing("a", 1.0), timing("b", 2.0, tile=7)])
        store.put_plans(ZEN.key, {MATMUL.key: "{}", "w-softmax": "{}"})
        for job in ("good", "bad"):
            store.put_job(JobRecord(job))
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(change)
    raw.close()
    told: list[str] = []
    with open_store(f"sqlite:///{path}", notice=told.append) as store:
        lists = [
            store.targets(), store.workloads(None), store.jobs(), store.plans(ZEN.key), store.query(ZEN.key),
            store.top(MATMUL.key, ZEN.key, timing("a", 1.0).symbols, 9),
        ]  # fmt: skip
        assert store.check() and isinstance(store, SqlStore) and store.invalid_rows[table] >= 1
        left = {"targets": 0, "workloads": 1, "jobs": 2, "plans": 3, "measurements": 4, "variants": 4}[table]
        assert len(lists[left]) == 1 and all(lists)
    assert sum("see `relax-tune db check`" in line for line in told) == len(store.invalid_rows)


@pytest.mark.parametrize(
    "change",
    ["UPDATE measurements SET id = x'0562' WHERE id = x'0162'", "UPDATE measurements SET id = 7 WHERE id = x'0162'"],
)
def test_malformed_id_is_left_out_of_a_limited_query(tmp_path: Path, change: str) -> None:
    path = tmp_path / "records.db"
    with open_store(f"sqlite:///{path}") as store:
        filled(store).add_measurements([timing("a", 1.0), timing("b", 2.0, tile=7)])
    with sqlite3.connect(path) as raw:
        raw.execute(change)
    raw.close()
    with open_store(f"sqlite:///{path}", notice=lambda _: None) as store:
        assert [m.id for m in store.query(ZEN.key, limit=5)] == ["a"]
        assert isinstance(store, SqlStore) and store.invalid_rows["measurements"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "UPDATE tallies SET place = 99 WHERE place = (SELECT min(place) FROM tallies)",
            "place 99, which does not exist",
        ),
        ("UPDATE tallies SET last = 'late'", "holds a value of another type"),
    ],
)
def test_units_of_altered_tallies_are_one_error(tmp_path: Path, change: str, says: str) -> None:
    path = tmp_path / "records.db"
    with open_store(f"sqlite:///{path}") as store:
        filled(store).add_measurements([timing("a", 1.0), timing("b", 2.0, worker="w")])
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(change)
    raw.close()
    with open_store(f"sqlite:///{path}") as store, pytest.raises(DatabaseError, match=says):
        store.units(ZEN.key)


def test_plans_after_the_last_version_are_still_put(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    last = 2**31 - 1
    with open_store(f"sqlite:///{path}") as store:
        filled(store).put_plans(ZEN.key, {MATMUL.key: "[]"})
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE plans SET version = ?", (last,))
    raw.close()
    with open_store(f"sqlite:///{path}") as store:
        assert [p.version for p in store.put_plans(ZEN.key, {MATMUL.key: "[1]"})] == [last]
        assert [p.entries for p in store.plans(ZEN.key)] == ["[1]"]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER evil AFTER INSERT ON measurements BEGIN DELETE FROM plans; END",
        "ALTER TABLE jobs ADD COLUMN more TEXT AS (hex(zeroblob(1000000)))",
    ],
)
def test_database_with_triggers_or_generated_columns_is_refused(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "records.db"
    open_store(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as raw:
        raw.execute(statement)
    raw.close()
    with pytest.raises(DatabaseError, match="expected tables without triggers and generated columns"):
        open_store(f"sqlite:///{path}")


def test_records_have_limits_of_text_and_samples() -> None:
    long = "x" * 2**20
    assert Workload("w", long, 1).text == long
    with pytest.raises(DatabaseError, match="workload text: expected at most 1048576 characters"):
        Workload("w", long + "x", 1)
    with pytest.raises(DatabaseError, match="variant trace"):
        VariantRecord("tuned", trace=f'["{long}"]')
    with pytest.raises(DatabaseError, match="samples: expected at most 100000, got 100001"):
        replace(timing("a", 1.0), samples_secs=(1.0,) * 100_001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "failed"},
        {"status": "failed", "stage": "compile"},
        {"status": "failed", "stage": "slow", "message": "m"},
        {"status": "failed", "stage": "compile", "message": "m", "samples_secs": (1e30,)},
        {"status": "ok", "samples_secs": ()},
        {"status": "ok", "stage": "compile", "samples_secs": (1.0,)},
        {"status": "ok", "samples_secs": (float("inf"),)},
        {"status": "ok", "samples_secs": (float("nan"),)},
        {"status": "ok", "samples_secs": (-1.0,)},
    ],
)
def test_inconsistent_results_cannot_be_constructed(wrong: dict[str, Any]) -> None:
    with pytest.raises(DatabaseError):
        Measurement("id", MATMUL.key, ZEN.key, timing("x", 1.0).variant, **wrong)


def test_altered_results_are_refused_or_skipped(sql_url: str) -> None:
    with open_store(sql_url) as store:
        filled(store).add_measurements([timing("a", 1.0), failure("b", "compile")])
    engine = create_engine(sql_url.replace("postgresql:", "postgresql+psycopg:"))
    for change in (
        "stage = 2 WHERE stage = 0",
        "stage = 9 WHERE stage = 2",
        "stage = 0 WHERE stage = 2",
        "regime = 2",
    ):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(text(f"UPDATE measurements SET {change}"))
    # alterations that the tables admit are named, counted and never used
    left = {"a", "b"}
    samples = "x'660000807f'" if sql_url.startswith("sqlite") else r"'\x660000807f'"  # infinity
    for change, id in (("message = 99 WHERE stage = 2", "b"), (f"samples = {samples} WHERE stage = 0", "a")):
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE measurements SET {change}"))
        left.remove(id)
        notices: list[str] = []
        with open_store(sql_url, notice=notices.append) as store:
            assert store.check()
            assert {m.id for m in store.query(ZEN.key)} == left
            assert (
                isinstance(store, SqlStore)
                and store.invalid_rows == {"measurements": 2 - len(left)}
                and len(notices) == 1
                and repr(id) in notices[0] + repr(store.check())
            )
    engine.dispose()
