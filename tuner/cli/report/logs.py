"""Logs of commands that run until they are interrupted: sentences for people, or one JSON object a line.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

from rich.console import Console

from relax_tune.errors import UserError
from relax_tune.printable import of_printable
from relax_tune.tuner.cli.report.console import say


def teller(form: Literal["text", "json"], console: Console, command: str) -> Callable[[str], None]:
    """Return the function that a command says its sentences with.

    With `json` each becomes an object with `time`, `level`, `logger` and `message` on standard error, and so does all that
    libraries log. command: name of the logger

    Raises UserError where python-json-logger is not installed.
    """
    if form == "text":
        return partial(say, console)
    try:
        from pythonjsonlogger.json import JsonFormatter
    except ImportError:
        raise UserError(
            "--logs json expects python-json-logger, got it not installed; pip install 'relax-tune[dashboard]', or leave it out"
        ) from None
    handler = logging.StreamHandler(sys.stderr)
    fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler.setFormatter(JsonFormatter(fields, rename_fields=renamed, datefmt="%Y-%m-%dT%H:%M:%S%z"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logger = logging.getLogger(f"relax_tune.{command}")
    logger.setLevel(logging.INFO)
    return of_printable(logger.info)
