"""What reaches a terminal of texts that strangers wrote."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from relax_tune.printable import printable
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.cli.report.console import make_console, print_table, rich_table, say
from relax_tune.tuner.report.subject import table

TITLE = "\x1b]0;owned\x07"


def test_console_texts_with_control_characters_are_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", written := io.StringIO())
    console = make_console()
    console.print(rich_table(table(("name",), [[f"task{TITLE}\x9b2J"]])))
    say(console, f"text{TITLE}")
    console.print(f"token{TITLE}", end="", soft_wrap=True)
    found = written.getvalue()
    assert not set(found) & set("\x1b\x07\x9b")
    assert found.count(r"\x1b]0;owned\x07") == 3 and r"\x9b2J" in found


def test_piped_table_lines_have_no_spaces_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", written := io.StringIO())
    print_table(make_console(), table(("name", "result"), [["short", "x"], ["long", "y" * 300]]))
    _, _, rule, short, long, *_ = written.getvalue().splitlines()
    assert short == " short   x" and long == f" long    {'y' * 300}" and len(rule) == len(long)


def test_error_of_a_name_with_control_characters_is_shown_escaped() -> None:
    done = CliRunner().invoke(app, ["show", f"missing{TITLE}.rta"])
    assert done.exit_code == 2 and "owned" in done.output
    assert "\x1b]" not in done.output and "\x07" not in done.output


def test_printable_text_keeps_the_direction() -> None:
    assert printable("a\u202eb\u2066c") == "a\\u202eb\\u2066c"


@given(st.text())
def test_printable_any_text_has_no_control_characters(text: str) -> None:
    found = printable(text)
    assert all(c in "\t\n" or not (ord(c) < 32 or 127 <= ord(c) < 160) for c in found)
    turning = {0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    if not any(ord(c) < 32 or 127 <= ord(c) < 160 or ord(c) in turning for c in text):
        assert found == text
