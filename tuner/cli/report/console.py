"""Consoles of reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_tune.tuner.printable import printable

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


def make_table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table; the columns named in `right` hold numbers. On a narrow terminal cells are folded, never cut."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in right else "left")
    return table
