"""`relax-tune export`: an artifact as C sources.

Tests: `tests/tuner/export/test_bad_input.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.commands.options import Json, print_json
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.export.c_export import export_c


def export(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file of target c.")],
    *,
    c: Annotated[
        Path,
        typer.Option("--c", metavar="FOLDER", help="Where to write the sources; files of these names are replaced."),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="What names in C begin with. [default: the artifact's file name]"),
    ] = None,
    function: Annotated[
        list[str] | None,
        typer.Option("--function", metavar="NAME", help="A function to export. May be repeated. [default: all]"),
    ] = None,
    json: Json = False,
) -> None:
    """Write an artifact as C sources, which run without Python.

    The folder gets C11 sources with a header, the weights, and files for CMake and pkg-config. Kernels and plans are
    copied from the artifact. An artifact that calls libraries is refused: build it with `--no-libraries`.
    """
    console = make_console(stderr=json)
    export = export_c(load_artifact(artifact), c, name, function or [])
    say(
        console, f"wrote {', '.join(export.functions)} to {c} ({len(export.files)} files, {export.nbytes / 1e6:.1f} MB)"
    )
    if json:
        files = {file: (c / file).stat().st_size for file in export.files}
        print_json({"artifact": str(artifact), "folder": str(c), "functions": list(export.functions), "files": files})
