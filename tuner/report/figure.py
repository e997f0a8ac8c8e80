"""Figures: a picture with its title, a summary in words, and the table behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
"""A Vega-Lite specification."""
MakeSpec = Callable[[bool], Spec]
"""A function that makes the specification of a picture; True for a narrow one, of a phone's width."""


@dataclass(frozen=True, slots=True)
class Table:
    """The values behind a picture. numeric: columns of numbers, which are aligned to the right"""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture for people, usable without the picture.

    id: its anchor in the page, of letters, digits and hyphens
    summary: a sentence on the result; where there is no data, why, and what to do
    chart: its specification, None without data
    """

    id: str
    title: str
    summary: str
    chart: MakeSpec | None = None
    table: Table | None = None

    def to_json(self) -> dict[str, Any]:
        """Return title, summary and rows as plain values."""
        rows = [] if self.table is None else [dict(zip(self.table.columns, row)) for row in self.table.rows]
        return {"id": self.id, "title": self.title, "summary": self.summary, "rows": rows}


@dataclass(frozen=True, slots=True)
class Section:
    """Figures under one heading. facts: (name, value) pairs; notes: sentences"""

    id: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> Table:
    """Make a table of sequences."""
    return Table(tuple(columns), tuple(map(tuple, rows)), frozenset(numeric))
