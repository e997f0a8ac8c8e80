"""Subjects of views: what a page, a terminal or a script shows of a database, job, model, artifact, task or device, as plain data.

Three renderers show a subject: `relax_tune.tuner.report.page` as HTML, `relax_tune.tuner.cli.report.console` on a terminal, and
`Subject.to_json` for scripts. Commands and pages collect facts and format nothing.

Tests: `tests/tuner/report/test_subject.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Spec = dict[str, Any]
"""A Vega-Lite specification."""
MakeSpec = Callable[[bool], Spec]
"""A function that makes the specification of a chart; its argument is True for the width of a phone."""
Group = Literal["tuned", "library", "generic", "unfused"]
"""Kind of a variant."""
GROUPS: tuple[Group, ...] = ("tuned", "library", "generic", "unfused")


@dataclass(frozen=True, slots=True)
class PageLink:
    """A text that leads to a page of the dashboard.

    Attributes:
        path: Segments of the page's path, such as `("jobs", ID)`.
    """

    text: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Anchor:
    """A text that leads to a place of the same page, or that is this place.

    Attributes:
        id: Id of the place.
        is_target: Whether it is the place.
    """

    text: str
    id: str
    is_target: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TrialCount:
    """Measured and planned candidates."""

    measured: int
    planned: int

    def __str__(self) -> str:
        return f"{self.measured}/{self.planned}"


@dataclass(frozen=True, slots=True)
class Facets:
    """What the filters of a page choose a figure, row or mark by. A filter keeps everything without the facet that it compares.

    Attributes:
        task: Name of a task.
        operators: Names of its operators.
        groups: Kinds of variants, such as `tuned` or `library`.
        sizes: Values of symbols, by name.
    """

    task: str = ""
    operators: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    def attributes(self) -> dict[str, str]:
        """Return the attributes of an element, by name."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        values = {
            "task": self.task,
            "operators": " ".join(self.operators),
            "groups": " ".join(self.groups),
            "sizes": sizes,
        }
        return {f"data-{name}": value for name, value in values.items() if value}


ALL = Facets()
"""No facets: every filter keeps it."""
Cell = str | PageLink | Anchor | TrialCount
Facts = tuple[tuple[str, Cell], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The columns in `numeric` have numbers, which are aligned to the right.

    Attributes:
        caption: A note below the table.
        facets: Facets of the rows, in order; empty for rows without.
        groups: The kind of variant that a column is about, by column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[str] = frozenset()
    title: str = ""
    caption: str = ""
    facets: tuple[Facets, ...] = ()
    groups: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> list[dict[str, str]]:
        """Return the rows by column."""
        return [dict(zip(self.columns, map(str, row))) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a report, which can be understood without the chart.

    Attributes:
        id: Anchor in the page, of letters, digits and hyphens.
        summary: A sentence on the result; without data, the reason and what to do.
        chart: Makes the specification of the chart; None without data.
        facets: Facets of the figure as a whole.
    """

    id: str
    title: str
    summary: str
    chart: MakeSpec | None = None
    table: Table | None = None
    facets: Facets = ALL

    def to_json(self) -> dict[str, Any]:
        """Return title, summary and rows as JSON values."""
        rows = [] if self.table is None else self.table.to_json()
        return {"id": self.id, "title": self.title, "summary": self.summary, "rows": rows}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a subject: notes, facts, texts such as programs, tables and figures, shown in this order.

    Attributes:
        id: Anchor in the page.
        title: A heading; a terminal leaves out an empty one.
        device: Name of the device that it is about; empty for no device.
    """

    id: str
    title: str = ""
    facts: Facts = ()
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    texts: tuple[str, ...] = ()
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return {
            "title": self.title,
            "facts": {name: str(value) for name, value in self.facts},
            "notes": list(self.notes),
            "figures": [figure.to_json() for figure in self.figures],
            "tables": [table.to_json() for table in self.tables],
            "texts": list(self.texts),
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a view.

    Attributes:
        document: The collected facts as JSON values, where scripts get more than the sections show; None for the sections.
    """

    title: str
    sections: tuple[Section, ...]
    document: Any = None

    def to_json(self) -> Any:
        """Return the document of `--json`."""
        if self.document is not None:
            return self.document
        return {"title": self.title, "sections": [section.to_json() for section in self.sections]}


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    numeric: Sequence[str] = (),
    title: str = "",
    caption: str = "",
    facets: Sequence[Facets] = (),
    groups: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Return a table of sequences."""
    cells = tuple(map(tuple, rows))
    return Table(tuple(columns), cells, frozenset(numeric), title, caption, tuple(facets), tuple(groups.items()))


def listing(title: str, values: Table, empty: str, document: Any, *notes: str) -> Subject:
    """Return a subject of one table, or of a sentence for an empty one."""
    shown = Section("list", "", (), notes if values.rows else (*notes, empty), tables=(values,) if values.rows else ())
    return Subject(title, (shown,), document)
