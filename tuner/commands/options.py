"""Options that several commands share, and the model argument."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_tune.errors import UserError

PACKAGE = "package:"

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
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.rta", help="Where to write the artifact. [default: MODEL-TARGET.rta]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout; all else goes to stderr.")]


def find_model(text: str) -> Path:
    """The folder a MODEL argument names. `package:NAME/FOLDER` is looked up without importing the package.

    Raises UserError when the package or the folder is not there.
    """
    if not text.startswith(PACKAGE):
        return Path(text)
    name, _, inside = text.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise UserError(f"{text}: wanted an installed package {name!r}, found none; install it with pip")
    folder = Path(places[0], inside)
    if not folder.is_dir():
        raise UserError(
            f"{text}: wanted the folder {inside!r} in {places[0]}, found none; correct the part after the /"
        )
    return folder


def artifact_path(model: str, target: str, out: Path | None) -> Path:
    """`out`, or a name from the model's folder and the target, in the current folder."""
    if out is not None:
        return out
    parts = [p for p in Path(model.removeprefix(PACKAGE)).absolute().parts if p not in ("model", "/")]
    kind = "".join(c if c.isalnum() else "-" for c in target).strip("-")
    return Path(f"{parts[-1] if parts else 'model'}-{kind}.rta")


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    print(json.dumps(value, indent=2, allow_nan=False))
