"""Short descriptions of large objects: a few lines in a terminal, a table in a notebook.

Tests: `tests/tuner/e2e/test_summary.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from html import escape

from relax_tune.printable import printable

_WIDTH = 160
Facts = Sequence[tuple[str, str]]


class Summarised:
    """An object whose `repr` is a title and a line for each fact."""

    __slots__ = ()

    @abstractmethod
    def _summary(self) -> tuple[str, Facts]:
        """Return the title, and facts by name."""

    def __repr__(self) -> str:
        title, facts = self._summary()
        return "\n".join([_short(title), *(_short(f"  {name}: {text}") for name, text in facts)])

    def _repr_html_(self) -> str:
        title, facts = self._summary()
        rows = "".join(
            f"<tr><th style='text-align: left'>{escape(printable(name))}</th>"
            f"<td style='text-align: left'>{escape(printable(text))}</td></tr>"
            for name, text in facts
        )
        return f"<table><caption>{escape(printable(title))}</caption>{rows}</table>"


def listed(texts: Sequence[str], most: int = 4) -> str:
    """Return texts in one line: the first ones, and the number of others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(name: str, lower: int, upper: int | None) -> str:
    """Return the bounds of a symbol."""
    return f"{name} from {lower}" + ("" if upper is None else f" to {upper}")


def bounds_advice(name: str, low: object, high: object) -> str:
    """Return how bounds of a symbol are given, in Python and to commands."""
    return f"bounds={{{name!r}: ({low}, {high})}}, or --bound {name}={low}:{high}"


def _short(line: str) -> str:
    line = printable(line).replace("\n", " ")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ..."
