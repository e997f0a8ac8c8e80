"""Which errors are temporary: the failed system call at their root decides, however the error was raised."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from relax_tune.database.engine import explained
from relax_tune.errors import (
    DatabaseError,
    MeasureError,
    RelaxTuneError,
    RelaxTuneWarning,
    TryAgainLater,
    UnexpectedErrorWarning,
    UserError,
    is_temporary,
    warn,
)
from relax_tune.printable import CONTROL
from relax_tune.tuner.service.content import FilesAway


def test_warning_of_a_hostile_text_has_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(RelaxTuneWarning) as seen:
        warn("row \x1b[2J\x9b31m\u202e")
    assert not CONTROL.search(str(seen[0].message)) and not CONTROL.search(caplog.text)


CAUSES = {
    errno.ENOSPC: True,
    errno.EDQUOT: True,
    errno.EMFILE: True,
    errno.ENOMEM: True,
    errno.ECONNREFUSED: True,
    errno.ECONNRESET: True,
    errno.ETIMEDOUT: True,
    errno.EACCES: False,
    errno.EPERM: False,
    errno.EROFS: False,
    errno.ENOENT: False,
    errno.EIO: False,
}


def raised(number: int, kind: type[RelaxTuneError], explicit: bool) -> RelaxTuneError:
    try:
        try:
            raise OSError(number, os.strerror(number), "place")
        except OSError as error:
            raise kind("cannot be written") from (error if explicit else None)
    except RelaxTuneError as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("kind", [MeasureError, UserError, FilesAway])
@pytest.mark.parametrize(("number", "temporary"), CAUSES.items(), ids=errno.errorcode.get)
def test_failed_system_call_decides_for_every_class_of_error(
    number: int, temporary: bool, kind: type[RelaxTuneError], explicit: bool
) -> None:
    assert is_temporary(raised(number, kind, explicit)) is temporary


def test_number_of_a_tls_error_is_no_system_error() -> None:
    error = UserError("another key")
    error.__cause__ = ssl.SSLError(errno.ESTALE, "key values mismatch")
    assert not is_temporary(error)


def test_without_a_failed_system_call_the_class_decides() -> None:
    assert is_temporary(TryAgainLater("busy")) and not is_temporary(UserError("wrong"))


def database_error(statement: str, path: Path, mode: str = "rwc") -> DatabaseError:
    engine = create_engine(f"sqlite:///file:{path}?mode={mode}&uri=true")
    with pytest.raises(DatabaseError) as caught, explained("db", "write"), engine.begin() as connection:
        connection.execute(text("PRAGMA max_page_count=4"))
        connection.execute(text(statement))
    assert isinstance(caught.value.__context__, OperationalError)
    return caught.value


def test_full_database_is_temporary_and_a_read_only_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    assert is_temporary(database_error("INSERT INTO t VALUES (zeroblob(100000))", path))
    assert not is_temporary(database_error("INSERT INTO t VALUES (1)", path, "ro"))
    assert not is_temporary(database_error("INSERT INTO missing VALUES (1)", path))


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 4), (errno.EACCES, 2)])
def test_command_ends_with_one_line_and_the_code_of_the_cause(tmp_path: Path, number: int, code: int) -> None:
    program = (
        "import sys; from relax_tune.tuner.cli import app\n"
        f"def fail(name): raise OSError({number}, 'reason', 'place')\n"
        "app.load_command = fail\nsys.argv[1:] = ['doctor']\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (code, "error: place: reason\n")


def test_warning_names_the_line_of_the_caller_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "relax_tune"), pytest.warns(RelaxTuneWarning, match="an old clock") as caught:
        warn("an old clock \x1b[2J")
    assert caught[0].filename == __file__ and "\x1b" not in str(caught[0].message)
    assert [r.getMessage() for r in caplog.records] == [str(caught[0].message)]
    assert issubclass(UnexpectedErrorWarning, RelaxTuneWarning)


@pytest.mark.process
@pytest.mark.parametrize("logs", ["", "logging.basicConfig(format='LOG %(message)s'); "])
def test_warning_is_shown_once_and_logged_where_logs_are_read(logs: str) -> None:
    program = f"import logging; from relax_tune.errors import warn; {logs}warn('an old clock')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("RelaxTuneWarning: an old clock") == 1
    assert done.stderr.count("an old clock") == (2 if logs else 1)
