"""Options that several commands share, and the model argument."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a Hugging Face model, or package:NAME/FOLDER for one inside an installed package.",
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="Device: c, opencl, or opencl:PART of a device's name. [default: opencl]")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER@HOST/NAME. [default: records.db in the user data folder]",
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option("--bound", metavar="NAME=LOW:HIGH", help="Bounds of a symbol, such as n=1:512. May be repeated."),
]
Effort = Annotated[str | None, typer.Option("--effort", help="quick, normal or full. [default: normal]")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout; all else goes to stderr.")]


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    print(json.dumps(value, indent=2, allow_nan=False))
