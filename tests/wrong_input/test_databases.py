"""Databases that cannot be used: one paragraph, exit code 2, nothing changed on disk, no password printed."""

from __future__ import annotations

import lzma
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.database.records_made import MATMUL, ZEN, timing
from tests.support.effort import examples
from tests.tuner.cli.cli_model import make_bert
from tests.wrong_input.storage_cases import commands, files, inside, made_database, paragraph_of, refused
from tools.convert_database import main

from relax_tune.database import engine
from relax_tune.database.exchange.jsonl import export_lines
from relax_tune.database.records import Selection
from relax_tune.database.store import SqlStore, Store, open_store
from relax_tune.errors import DatabaseError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(200)
URLS = [
    ("postgresql://me:hunter2@no-such-host.invalid/x", "check the host name"),
    ("postgresql://me:hunter2@127.0.0.1:1/x", "check that the server runs"),
    ("postgresql://me:hunter2@127.0.0.1:99999/x", "a port between 1 and 65535"),
    ("postgresql://me@127.0.0.1:1/x?password=hunter2", "check that the server runs"),
    ("postgresql://me:hunter2@127.0.0.1:1/x?color=red", "leave this option out"),
    ("postgresql://me:one@hunter2@127.0.0.1/x", "%40"),
    ("postgresql://me:hunter2@[::1/x", "malformed"),
    ("postgresql:///x?host=/nowhere", "check that the server runs"),
    ("postgres://me:hunter2@127.0.0.1/x", "write postgresql://"),
    ("postgresql+asyncpg://me:hunter2@127.0.0.1/x", "unsupported kind"),
    ("mysql://me:hunter2@127.0.0.1/x", "unsupported kind 'mysql'"),
    ("host=127.0.0.1 password=hunter2 dbname=x", "malformed"),
    ("nonsense", "malformed"),
    ("picture.png", "malformed"),
    ("", "malformed"),
    ("sqlite:///a\0.db", "malformed"),
    ("sqlite:///a\ud800.db", "malformed"),
    ("sqlite:///", "give sqlite:///FILE"),
    ("sqlite:///:memory:", "memory://"),
    ("sqlite://folder/a.db", "three slashes"),
    ("sqlite:///a.db?cache=shared", "mode=ro"),
    ("sqlite:///a?.db", "mode=ro"),
    (f"sqlite:///{'a' * 300}.db", "File name too long"),
    ("nowhere/a.db", "create it first"),
    ("sqlite:////proc/a.db", "choose another path"),
]


@pytest.mark.parametrize(("url", "says"), URLS)
def test_open_store_of_unreachable_url_is_refused(
    tmp_path: Path, url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for read_only in (False, True):
        with pytest.raises(DatabaseError) as error:
            open_store(url, read_only=read_only)
        assert "hunter2" not in str(error.value) and "\n" not in str(error.value)
        assert read_only or says in str(error.value), error.value
    said = refused(tmp_path, "db", "import", "records.jsonl", "--db", url) if "\ud800" not in url else ""
    assert "hunter2" not in said and not files(tmp_path)


@pytest.mark.slow
def test_open_store_of_silent_server_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CONNECT_SECS", 2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        with pytest.raises(DatabaseError, match=r"\*\*\*@127.*timeout expired.*check host, port and network"):
            open_store(f"postgresql://me:hunter2@127.0.0.1:{silent.getsockname()[1]}/x")


def test_the_driver_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    said = refused(tmp_path, "db", "stats", "--db", "postgresql://me@127.0.0.1/x")
    assert "pip install 'relax-tune[postgres]'" in said


# Files that are something else


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()


NOT_OURS: list[tuple[str, Callable[[Path], object], str]] = [
    ("folder", lambda path: path.mkdir(), "got a folder"),
    ("pipe", lambda path: os.mkfifo(path), "got a device or pipe"),
    ("text", lambda path: path.write_text("not a database, only words\n" * 9), "another kind of file"),
    ("picture", lambda path: path.write_bytes(PNG), "a PNG image"),
    ("a zip", lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "an artifact?"),
    ("one byte", lambda path: path.write_bytes(b"S"), "another kind of file"),
    ("half a header", lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(9)), "cut short"),
    ("another program's", _foreign, "got the tables cats"),
]


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in NOT_OURS], ids=[case[0] for case in NOT_OURS])
def test_open_store_of_foreign_file_leaves_file_unchanged(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    make(tmp_path / "x.db")
    (tmp_path / "x.jsonl").write_text("")
    before = files(tmp_path)
    for arguments in (
        ("db", "stats"),
        ("db", "check"),
        ("db", "upgrade"),
        ("db", "import", "x.jsonl"),
        ("db", "prune", "--failed"),
        ("jobs", "runs"),
        ("jobs", "list"),
    ):
        assert says in refused(tmp_path, *arguments, "--db", "x.db")
    assert says in refused(tmp_path, "db", "merge", "x.db", "--db", "memory://")
    assert files(tmp_path) == before


def _uses(store: Store) -> Iterator[Callable[[], object]]:
    yield store.targets
    yield lambda: store.workloads(None)
    yield lambda: store.query(ZEN.key)
    yield lambda: store.stats(ZEN.key)
    yield lambda: store.top(MATMUL.key, ZEN.key, {"n": 1}, 3)
    yield store.jobs
    yield store.check
    yield lambda: list(export_lines(store))
    if not store.read_only:  # type: ignore[attr-defined]
        yield lambda: store.put_plans(ZEN.key, {MATMUL.key: "[2]"})
        yield lambda: store.add_measurements([timing("new", 1.0)])
        yield lambda: store.prune(ZEN.key, Selection(failed=True))


def _one_family(path: Path, read_only: bool) -> int:
    """Use a database in every way; how often it was refused."""
    refusals = 0
    try:
        store = open_store(str(path), read_only=read_only)
    except DatabaseError as error:
        assert path.name in str(error) and "\n" not in str(error)
        return 1
    with store:
        for use in _uses(store):
            try:
                use()
            except DatabaseError as error:
                assert path.name in str(error) and "\n" not in str(error) and len(str(error)) < 1200, error
                refusals += 1
    return refusals


@pytest.mark.slow
def test_open_store_of_truncated_file_is_refused(tmp_path: Path) -> None:
    data = made_database(tmp_path / "whole.db").read_bytes()
    sizes = {1, 50, 100, 4096, 8192, len(data) // 2, len(data) - 4096, len(data) - 1}
    for size in sorted(sizes):
        cut = tmp_path / f"cut{size}.db"
        cut.write_bytes(data[:size])
        assert "error: " in refused(tmp_path, "db", "stats", "--db", cut.name)
        with pytest.raises(DatabaseError, match=r"cut short|another kind"):
            open_store(str(cut))
        assert cut.read_bytes() == data[:size]


@pytest.mark.slow
def test_a_damaged_file_only_ever_raises_database_errors(tmp_path: Path) -> None:
    data = made_database(tmp_path / "whole.db").read_bytes()
    generator = random.Random(7)
    noticed = 0
    for number in range(examples(180)):
        changed = bytearray(data)
        if number % 3 == 0:
            for _ in range(generator.choice([1, 5, 40])):
                changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        elif number % 3 == 1:  # the pages of the schema and the header
            at = generator.randrange(100 if number % 2 else 8192)
            changed[at : at + 8] = generator.randbytes(8)
        else:
            at = generator.randrange(len(data) - 4096)
            changed[at : at + generator.choice([64, 4096])] = generator.randbytes(64)
        path = tmp_path / f"damaged{number}.db"
        path.write_bytes(changed)
        noticed += bool(_one_family(path, read_only=True)) + bool(_one_family(path, read_only=False))
    assert noticed > number / 2


ODD_VALUES = [b"\xff\xfe", "", "abc", -1, 1e300, 2**63 - 1, "[" * 5000, '{"n":1e999}', "a\x1b[31m\nb", "9" * 5000]


@pytest.mark.heavy
@pytest.mark.slow
def test_store_with_impossible_rows_is_refused(tmp_path: Path) -> None:
    made_database(tmp_path / "whole.db", 8)
    connection = sqlite3.connect(tmp_path / "whole.db")
    columns = [
        (table, column[1])
        for (table,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall()
        for column in connection.execute(f"PRAGMA table_info({table})")
    ]
    connection.close()
    generator = random.Random(3)
    for number, (table, column) in enumerate(columns):
        path = tmp_path / f"row{number}.db"
        shutil.copy(tmp_path / "whole.db", path)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA ignore_check_constraints=1")
        with suppress(sqlite3.IntegrityError):  # a key that is a number refuses others by itself
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (generator.choice(ODD_VALUES),))
        connection.close()
        _one_family(path, read_only=bool(number % 2))


# Schemas


def _altered(path: Path, *statements: str) -> Path:
    with sqlite3.connect(made_database(path, 4)) as connection:
        for statement in statements:
            connection.executescript(statement)
    connection.close()
    return path


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "UPDATE alembic_version SET version_num = '9999'; UPDATE about SET value = '9999' WHERE name LIKE '%s_from'",
            "pip install --upgrade relax-tune",
        ),
        ("DROP TABLE leases", "the table leases is missing"),
        ("ALTER TABLE measurements DROP COLUMN build_secs", "the columns build_secs of measurements are missing"),
        ("ALTER TABLE jobs RENAME COLUMN state TO status", "the columns state of jobs are missing"),
        ("DROP TABLE measurements", "belongs to something else or was damaged"),
        ("DROP TABLE alembic_version", "of something else"),
        ("INSERT INTO alembic_version VALUES ('0001')", "expected one relax-tune schema version"),
    ],
)
def test_store_with_unknown_schema_is_refused(tmp_path: Path, statement: str, says: str) -> None:
    path = _altered(tmp_path / "x.db", statement)
    before = files(tmp_path)
    for read_only in (False, True):
        with pytest.raises(DatabaseError, match=says):
            open_store(str(path), read_only=read_only)
    assert says in refused(tmp_path, "db", "stats", "--db", "x.db")
    assert files(tmp_path) == before


def test_store_of_unreleased_schema_names_the_converter(tmp_path: Path) -> None:
    frozen = Path(__file__).parents[1] / "tools" / "frozen" / "schema_0001.db.xz"
    (tmp_path / "old.db").write_bytes(lzma.decompress(frozen.read_bytes()))
    for command in (("db", "stats"), ("db", "upgrade")):
        assert "python -m tools.convert_database sqlite:///old.db NEW.db" in refused(
            tmp_path, *command, "--db", "old.db"
        )
    assert main([str(tmp_path / "old.db"), str(tmp_path / "new.db")]) == 0
    assert inside(tmp_path, "db", "stats", "--db", "new.db").exit_code == 0


def test_more_tables_and_columns_than_ours_are_no_harm(tmp_path: Path) -> None:
    path = _altered(
        tmp_path / "x.db", "CREATE TABLE notes (text TEXT)", "ALTER TABLE measurements ADD COLUMN comment TEXT"
    )
    with open_store(str(path)) as store:
        assert store.add_measurements([timing("new", 1.0)]) == 1 and store.check() == []


# Read-only


@pytest.mark.ccompiler
def test_a_read_only_database_serves_readers_and_refuses_tune_before_measuring(tmp_path: Path) -> None:
    """Without the privilege that lets root write what nobody may."""
    bert = make_bert(tmp_path / "bert")
    lines: list[tuple[object, ...]] = []
    places = {kind: tmp_path / kind for kind in ("file", "folder", "mode")}
    for kind, place in places.items():
        place.mkdir()
        path = made_database(place / "records.db")
        path.chmod(0o444 if kind == "file" else 0o644)
        url = f"sqlite:///{path}" + ("?mode=ro" if kind == "mode" else "")
        model = (bert, "--bound", "b=1:2", "--bound", "n=1:24", "--target", "c", "--db", url)
        lines += [
            ("tune", *model, "--out", f"tuned-{kind}.rta"),
            ("db", "prune", "--failed", "--on", ZEN.key, "--db", url),
            ("db", "stats", "--db", url),
            ("db", "check", "--db", url),
            ("build", *model, "--policy", "generic", "--out", f"built-{kind}.rta"),
        ]
    before = {kind: files(place) for kind, place in places.items()}
    out = tmp_path / "out"
    out.mkdir()
    places["folder"].chmod(0o555)
    try:
        ended = commands(out, *lines, unprivileged=True)
    finally:
        places["folder"].chmod(0o755)
    for kind in places:
        tuned, pruned, stats, checked, built = ended[:5]
        ended = ended[5:]
        for code, told, said in (tuned, pruned):
            assert "read-only" in paragraph_of(code, said) and "measurements" not in told
        assert stats[0] == checked[0] == built[0] == 0, (stats, checked, built)
        assert "zen4" in stats[1] and (out / f"built-{kind}.rta").is_file()
        assert files(places[kind]) == before[kind], "no side file stays"
    assert not list(out.glob("tuned*"))


@pytest.mark.process
def test_changes_beside_a_database_on_a_read_only_folder_are_not_overlooked(tmp_path: Path) -> None:
    """A copy made while its writer was at work: the side file holds records that the file does not have yet."""
    live, copied = tmp_path / "live", tmp_path / "copied"
    live.mkdir()
    copied.mkdir()
    with open_store(str(live / "r.db")) as store:
        store.add_target(ZEN)
        for name in ("r.db", "r.db-wal"):
            shutil.copy(live / name, copied / name)
    copied.chmod(0o555)
    try:
        ((code, told, said),) = commands(copied, ("db", "stats", "--db", "r.db"), unprivileged=True)
    finally:
        copied.chmod(0o755)
    assert code == 2 and "r.db-wal" in paragraph_of(code, said), (told, said)
    (done,) = commands(copied, ("db", "stats", "--db", "r.db"))
    assert done[0] == 0 and "zen4" in done[1]


# Held, deleted and replaced


def _holding(path: Path) -> subprocess.Popen[str]:
    code = (
        "import sqlite3, sys, time\n"
        f"held = sqlite3.connect({str(path)!r}, isolation_level=None)\n"
        "held.execute('BEGIN IMMEDIATE'); held.execute('DELETE FROM leases')\n"
        "print('held', flush=True); sys.stdin.readline()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.process
def test_locked_database_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_database(tmp_path / "x.db")
    (tmp_path / "one.jsonl").write_text("\n".join(export_lines(open_store(str(path)))))
    monkeypatch.setattr(engine, "BUSY_SECS", 1)
    process = _holding(path)
    try:
        said = refused(tmp_path, "db", "import", "one.jsonl", "--db", "x.db")
        assert "locked" in said and "wait for it or stop it" in said
        if Path("/proc/locks").exists():
            assert f"by process {process.pid}" in said
        assert inside(tmp_path, "db", "stats", "--db", "x.db").exit_code == 0, "readers never wait"
    finally:
        process.communicate("go on\n")
    assert inside(tmp_path, "db", "import", "one.jsonl", "--db", "x.db").exit_code == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_database_deleted_or_replaced_while_open_is_an_error(tmp_path: Path, replaced: bool) -> None:
    path = made_database(tmp_path / "x.db")
    with open_store(str(path)) as store:
        assert isinstance(store, SqlStore)
        store.add_measurements([timing("before", 1.0)])
        for place in tmp_path.glob("x.db*"):
            place.unlink()
        if replaced:
            made_database(path, 4)
        for use in (store.targets, lambda: store.add_measurements([timing("after", 1.0)])):
            with pytest.raises(DatabaseError, match=r"was (deleted|replaced) after it was opened"):
                use()
    assert path.exists() == replaced


def test_failed_database_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("relax_tune.database.schema.migrate", full)
    for act in (lambda: open_store(str(tmp_path / "x.db")), lambda: inside(tmp_path, "db", "upgrade", "--db", "x.db")):
        try:
            act()
        except DatabaseError as error:
            assert "free some space" in str(error)
        assert not files(tmp_path)
