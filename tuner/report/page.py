"""Pages from templates: texts escaped, control characters as Python writes them, pictures as SVG in the page."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from relax_tune.errors import UserError
from relax_tune.tuner.printable import printable
from relax_tune.tuner.report.charts import drawn
from relax_tune.tuner.report.figure import Figure, Section

_CODE = re.compile(r"`([^`]*)`")


@cache
def environment() -> Any:
    """Return the Jinja environment of all pages. Raises UserError where Jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise UserError(
            "wanted Jinja2 to write pages, found it not installed; pip install 'relax-tune[report]'"
        ) from None
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("relax_tune.tuner.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_safe,
    )
    made.globals["pictures"] = _pictures
    made.filters["prose"] = _prose
    return made


def _safe(value: Any) -> Any:
    """Return a text without control characters; what is markup already stays."""
    return printable(value) if type(value) is str else value


def _prose(text: str) -> Any:
    """Return a sentence as markup: what stands between backticks is code, all else is text."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(printable(text)))))


def _pictures(figure: Figure) -> tuple[Any, Any]:
    from markupsafe import Markup

    wide, narrow = drawn(figure)
    return Markup(wide), Markup(narrow)


def style() -> str:
    """Return the style sheet of all pages."""
    return files("relax_tune.tuner.report").joinpath("templates/style.css").read_text("utf-8")


def report_page(title: str, sections: Sequence[Section], made: str) -> str:
    """Return a report as one HTML file, which loads nothing and runs nothing. made: when and with which version"""
    css = style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    page = environment().get_template("report.html")
    text: str = page.render(title=title, sections=sections, made=made, css=css, policy=policy)
    return text
