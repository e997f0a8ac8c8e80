"""HTML pages from templates, with escaped texts and inline SVG. Control characters are written as Python escapes.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from relax_tune.errors import UserError
from relax_tune.printable import printable
from relax_tune.tuner.report.charts import drawn
from relax_tune.tuner.report.subject import Anchor, Figure, PageLink, Subject, TrialCount

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


def style() -> str:
    """Return the style sheet of all pages."""
    return files("relax_tune.tuner.report").joinpath("templates/style.css").read_text("utf-8")


def report_page(subject: Subject, origin: str) -> str:
    """Return a subject as one HTML file without scripts and external resources. origin: a sentence on date and version"""
    css = style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    page = environment().get_template("report.html")
    text: str = page.render(subject=subject, origin=origin, css=css, policy=policy)
    return text


def dashboard_page(subject: Subject, now: str) -> str:
    """Return a subject as a page of the dashboard, with links to other pages. now: the time of its facts"""
    text: str = environment().get_template("dashboard.html").render(subject=subject, now=now)
    return text
