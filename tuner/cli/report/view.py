"""Commands that show a subject: as text, with `--json` as a document, with `--html` also as a page.

Tests: `tests/tuner/cli/test_view.py`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.hashed_zip import tool_version
from relax_tune.tuner.cli.commands.options import Json, print_json
from relax_tune.tuner.cli.report.console import make_console, print_sections
from relax_tune.tuner.report.page import report_page
from relax_tune.tuner.report.subject import Subject

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", help="Also write it there as a page of HTML. [default: nowhere]"),
]


def view(command: Callable[..., Subject]) -> Callable[..., None]:
    """Turn a function that returns a subject into a command that shows it. A parameter `json` of the function gets the flag."""
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name != "json"]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in (("html", None, Html), ("json", False, Json))
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        html, json = given.pop("html"), given["json"]
        subject = command(
            **(given if "json" in signature.parameters else {k: v for k, v in given.items() if k != "json"})
        )
        if html is not None:
            write_page(html, subject, "--html")
        if json:
            print_json(subject.to_json())
        else:
            print_sections(make_console(), *subject.sections)

    parameters = [*own, *more]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def write_page(path: Path, subject: Subject, option: str) -> int:
    """Write a subject as an HTML file; return its size in bytes. option: the option that named the file"""
    now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = report_page(subject, f"Written {now} by relax-tune {tool_version()}.").encode("utf-8", "replace")
    try:
        write_whole(path, memoryview(page))
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: expected to write it, got: {reason(error)}; give another place") from None
    return len(page)
