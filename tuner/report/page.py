"""HTML pages from templates, with escaped texts and inline SVG. Control characters are written as Python escapes.

Reports have filters; their script is `templates/filters.js`.

Tests: `tests/tuner/report/test_report.py`, `tests/tuner/report/test_filters.py`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from relax_tune.errors import UserError
from relax_tune.printable import printable
from relax_tune.tuner.report.charts import drawn
from relax_tune.tuner.report.subject import GROUPS, Anchor, Facets, Figure, PageLink, Subject, TrialCount

_CODE = re.compile(r"`([^`]*)`")
_TONES = {"failed": "bad", "interrupted": "bad", "done": "good"}
"""Classes of the style sheet, by the state of a job or run."""


@cache
def environment() -> Any:
    """Return the Jinja environment of all pages. Raises `UserError` if Jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise UserError(
            "writing pages needs Jinja2, which is not installed; pip install 'relax-tune[report]'"
        ) from None
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("relax_tune.tuner.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_safe,
    )
    templates.globals.update(pictures=_pictures, tones=_TONES)
    templates.filters["href"] = _href
    templates.tests["link"] = lambda cell: isinstance(cell, PageLink)
    templates.tests["anchor"] = lambda cell: isinstance(cell, Anchor)
    templates.tests["progress"] = lambda cell: isinstance(cell, TrialCount)
    templates.filters["prose"] = _prose
    return templates


def _safe(value: Any) -> Any:
    """Return a text without control characters; markup is not changed."""
    return printable(value) if type(value) is str else value


def _prose(text: str) -> Any:
    """Return a sentence as markup, with code between backticks."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(printable(text)))))


def _href(link: PageLink) -> str:
    """Return the address of a page of the dashboard."""
    return "/" + "/".join(quote(part, safe="") for part in link.path)


def _pictures(figure: Figure) -> tuple[Any, Any]:
    from markupsafe import Markup

    wide, narrow = drawn(figure)
    return Markup(wide), Markup(narrow)


@dataclass(frozen=True, slots=True)
class Choices:
    """What the filters of a page offer.

    Attributes:
        tasks: Number of tasks.
        operators: Names of operators.
        groups: Kinds of variants.
        devices: Names of devices.
        sizes: Smallest and largest value of each symbol.
    """

    tasks: int
    operators: tuple[str, ...]
    groups: tuple[str, ...]
    devices: tuple[str, ...]
    sizes: tuple[tuple[str, int, int], ...]


def choices_of(subject: Subject) -> Choices | None:
    """Return what a page can be filtered by; None where there is nothing to choose among."""
    facets = list(_facets(subject))
    tasks, operators = {f.task for f in facets if f.task}, {o for f in facets for o in f.operators}
    groups = {g for f in facets for g in f.groups}
    values: dict[str, set[int]] = {}
    for name, size in (pair for f in facets for pair in f.sizes):
        values.setdefault(name, set()).add(size)
    sizes = tuple((name, min(own), max(own)) for name, own in sorted(values.items()) if len(own) > 1)
    devices = tuple(dict.fromkeys(s.device for s in subject.sections if s.device))
    if max(len(tasks), len(devices), len(groups)) < 2 and not sizes:
        return None
    return Choices(len(tasks), tuple(sorted(operators)), tuple(g for g in GROUPS if g in groups), devices, sizes)


def _facets(subject: Subject) -> Iterator[Facets]:
    for section in subject.sections:
        for table in section.tables:
            yield from table.facets
        for figure in section.figures:
            yield figure.facets
            if figure.table is not None:
                yield from figure.table.facets
                yield Facets(groups=tuple(group for _, group in figure.table.groups))


def style() -> str:
    """Return the style sheet of all pages."""
    return files("relax_tune.tuner.report").joinpath("templates/style.css").read_text("utf-8")


def _digest(text: str) -> str:
    """Return a source of a Content-Security-Policy that permits this text only."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def report_page(subject: Subject, origin: str) -> str:
    """Return a subject as one HTML file without external resources. Its only script filters what is shown.

    origin: a sentence on date and version
    """
    css, choices = style(), choices_of(subject)
    script = files("relax_tune.tuner.report").joinpath("templates/filters.js").read_text("utf-8") if choices else ""
    scripts = f"script-src {_digest(script)}; " if choices else ""
    policy = (
        f"default-src 'none'; {scripts}style-src {_digest(css)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = environment().get_template("report.html")
    text: str = page.render(subject=subject, origin=origin, css=css, policy=policy, choices=choices, script=script)
    return text


def dashboard_page(subject: Subject, now: str) -> str:
    """Return a subject as a page of the dashboard, with links to other pages. now: the time of its facts"""
    text: str = environment().get_template("dashboard.html").render(subject=subject, now=now)
    return text
