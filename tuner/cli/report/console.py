"""Consoles, and the terminal's renderer of subjects.

Tests: `tests/tuner/cli/test_console.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from relax_tune.printable import printable
from relax_tune.tuner.report.subject import Figure, Section, Table, table

# Wider than any table: readers of a pipe or a file need whole lines.
PLAIN_WIDTH = 10_000


class PlainConsole(Console):
    """Console that shows control characters instead of sending them to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console(*, stderr: bool = False) -> Console:
    """Make a console that prints text as it is: no markup, no emoji codes, no highlighting.

    Outside of a terminal, tables are as wide as they need. There are no styles then, unless FORCE_COLOR is set and
    NO_COLOR is not.
    """
    forced = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    stream = sys.stderr if stderr else sys.stdout
    styled = None if forced or (stream is not None and stream.isatty()) else False
    console = PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False, force_terminal=styled)
    if not on_terminal(console):
        console.width = PLAIN_WIDTH
    return console


def on_terminal(console: Console) -> bool:
    """Return True if output can be redrawn. FORCE_COLOR does not make a pipe a terminal."""
    try:
        watched = console.file.isatty()
    except (AttributeError, ValueError):  # no such method, or closed
        return False
    return watched and os.environ.get("TERM", "") not in ("dumb", "unknown")


def say(console: Console, text: str) -> None:
    """Print a sentence as it is, unfolded."""
    console.print(text, soft_wrap=True)


def warn(text: str | None) -> None:
    """Print a warning on standard error; nothing for None."""
    if text is not None:
        say(make_console(stderr=True), f"warning: {text}")


def rich_table(values: Table) -> RichTable:
    """Return a table of a subject for rich. On a narrow terminal cells are folded, never cut."""
    drawn = RichTable(title=values.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.caption, drawn.caption_justify = values.caption or None, "left"
    for name in values.columns:
        drawn.add_column(name, overflow="fold", justify="right" if name in values.numeric else "left")
    for row in values.rows:
        drawn.add_row(*map(str, row))
    return drawn


def print_table(console: Console, values: Table) -> None:
    """Print a table; outside of a terminal without spaces at the ends of lines, so that one long cell lengthens one line."""
    if on_terminal(console):
        console.print(rich_table(values))
        return
    with console.capture() as drawn:
        console.print(rich_table(values))
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    widest = max((len(line) for line in lines if line.strip(" ─")), default=0)
    console.out(*(line if line.strip(" ─") else line[:widest] for line in lines), sep="\n", highlight=False)


def print_sections(console: Console, *sections: Section) -> None:
    """Print sections one below the other: the terminal's renderer of a subject."""
    for section in sections:
        if section.title:
            say(console, f"\n{section.title}\n")
        for note in section.notes:
            say(console, note)
        if section.facts:
            print_table(console, table(("field", "value"), section.facts))
        for text in section.texts:
            say(console, text)
        _print_tables(console, section.tables)
        for figure in section.figures:
            _print_figure(console, figure)


def _print_figure(console: Console, figure: Figure) -> None:
    say(console, f"\n{figure.title}\n\n{figure.summary}")
    _print_tables(console, () if figure.table is None else (figure.table,))


def _print_tables(console: Console, tables: Iterable[Table]) -> None:
    for values in tables:
        print_table(console, values)
