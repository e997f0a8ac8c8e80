"""What the commands do when nobody watches, or nobody listens any more: real processes, pipes and terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.database.records_made import ZEN, filled, timing
from tests.support.effort import thinned

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.report.console import make_console, on_terminal, rich_table, say
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.report.subject import table

COMMAND = [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()"]
TOP = ("db", "top", "--db", "r.db", "--on", ZEN.key)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database whose tables are long and wide."""
    folder = tmp_path_factory.mktemp("pipes")
    with open_store(f"sqlite:///{folder / 'r.db'}") as store:
        filled(store).add_measurements(
            [timing(f"m{n}-{tile}", 1e-3 * tile, tile=tile, n=n) for n in range(1, 120) for tile in (1, 2)]
        )
    return folder


def environment(place: Path, **variables: str) -> dict[str, str]:
    left = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED")}
    return {**left, "XDG_DATA_HOME": str(place / "data"), **variables}


def shell(place: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `RT` is the program; the exit code of a pipe is that of its first part."""
    text = f'RT() {{ {" ".join(map(_quoted, COMMAND))} "$@"; }}\n{line}'
    return subprocess.run(
        ["bash", "-c", text],
        cwd=place,
        env=environment(place, **variables),
        capture_output=True,
        text=True,
        check=False,
    )


def _quoted(part: str) -> str:
    return "'" + part.replace("'", "'\\''") + "'"


@pytest.mark.process
@pytest.mark.parametrize("more", thinned(["", "--json"]))
def test_closed_pipe_ends_the_program_quietly(place: Path, more: str) -> None:
    # `head` leaves long before a table or a document of this size has passed through the pipe's buffer
    done = shell(place, f"RT {' '.join(TOP)} {more} | head -1; exit ${{PIPESTATUS[0]}}")
    assert done.stderr == "" and done.returncode in (0, 1)
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.process
def test_help_and_errors_into_a_closed_pipe(place: Path) -> None:
    for line in ("RT --help | true", "RT db top --db none.db 2>&1 | true"):
        done = shell(place, line)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.process
def test_closed_standard_streams(place: Path) -> None:
    done = shell(place, f"RT {' '.join(TOP)} >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(place, "RT db export --db r.db out.jsonl >&- 2>&- <&-")
    assert done.returncode == 0
    # nothing that would have been printed went into a file which took the closed stream's number
    assert all(isinstance(json.loads(line), dict) for line in (place / "out.jsonl").read_text().splitlines())
    assert "nothing wrong" in shell(place, "RT db check --db r.db").stdout


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", thinned(["", "--json"]))
def test_a_full_disk_behind_the_output_is_one_sentence(place: Path, more: str) -> None:
    done = shell(place, f"RT {' '.join(TOP)} {more} > /dev/full")
    assert done.returncode == 4
    assert done.stderr.startswith("error: the output could not be written") and len(done.stderr.splitlines()) == 1


@pytest.mark.process
@pytest.mark.parametrize("variables", thinned([{}, {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "40"}]))
def test_tables_in_a_pipe_are_plain_and_whole(place: Path, variables: dict[str, str]) -> None:
    done = shell(place, f"RT {' '.join(TOP)}", **variables)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\r" not in done.stdout and "…" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if " ms " in line or " s " in line]
    assert len(rows) == 2 * 119 and all("tuned" in row and "(t=" in row for row in rows)


@pytest.mark.heavy
@pytest.mark.process
def test_output_in_ascii_is_still_output(place: Path) -> None:
    done = shell(place, f"RT {' '.join(TOP)}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii() and "tuned" in done.stdout


@pytest.mark.process
@pytest.mark.heavy
def test_a_terminal_gets_bold_headings_and_no_colours(place: Path) -> None:
    for variables, bold in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False)):
        ours, theirs = pty.openpty()
        try:
            with subprocess.Popen(
                [*COMMAND, "db", "stats", "--db", "r.db"], cwd=place, env=environment(place, **variables), stdout=theirs
            ) as process:
                os.close(theirs)
                text = _read(ours)
            assert process.returncode == 0
        finally:
            os.close(ours)
        assert re.search(r"\x1b\[[\d;]*[349]\dm", text) is None and "kind" in text
        assert ("\x1b[1m" in text) is bold, text[:300]


def _read(number: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(number, 1 << 16)
        except OSError:  # how Linux says that the other end was closed
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


# -- progress -------------------------------------------------------------------------------------------------------------

PROGRESS = TuningProgress("matmul", 0, 1, 5, 1, 1e-3, 2e-3, 4e-3)


def test_progress_in_a_pipe_is_plain_lines_at_once() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, os.fdopen(reading) as other:
        console = make_console()
        console.file = file
        with ProgressView([("matmul", 3)], console) as view:
            view.report(PROGRESS)
            line = other.readline()  # there although nothing was closed or flushed by us
    assert line == "[1/1] matmul: 5 trials, 1 failed, best tuned 1.00 ms (2.00x library, 4.00x generic)\n"


def test_force_color_does_not_make_a_pipe_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert not on_terminal(console)
    with ProgressView([("matmul", 3)], console) as view:
        view.report(PROGRESS)
    assert "\x1b" not in capsys.readouterr().out


def test_text_is_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    values = table(("[bold]name", "number"), [("[red]a[/red] :package: [/]", "1")], ("number",))
    say(console, "[link=x] :warning: " + "long " * 100)
    console.print(rich_table(values))
    shown = capsys.readouterr().out
    assert "[red]a[/red] :package: [/]" in shown and "[bold]name" in shown
    assert shown.splitlines()[0] == "[link=x] :warning: " + "long " * 100


def test_a_narrow_terminal_folds_cells_and_cuts_none() -> None:
    console = Console(width=40, markup=False, emoji=False, record=True, force_terminal=True, file=io.StringIO())
    console.print(rich_table(table(("name", "what"), [("a" * 50, "b" * 30)])))
    text = console.export_text()
    assert text.count("a") == 50 + "name".count("a") + "what".count("a") and text.count("b") == 30
