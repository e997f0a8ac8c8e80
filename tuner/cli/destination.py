"""The destination of an artifact, and the files that writing it must not destroy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import ArtifactError, UserError
from relax_tune.ir.frontend.source import PACKAGE
from relax_tune.runtime.artifact import ARTIFACT, SUFFIX
from relax_tune.runtime.hashed_zip import FileFormat, read_file

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.rta", help="Where to write the artifact. [default: MODEL-TARGET.rta]"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write the artifact even where another model's, or another file, is.")
]


def artifact_path(model: str, target: str, out: Path | None) -> Path:
    """Return `out`, or a path in the current folder named after the model's folder or file and the target."""
    return default_path(model_name(model), target) if out is None else out


def default_path(name: str, target: str) -> Path:
    """Return the path of an artifact in the current folder, by the name of its model and the target."""
    kind = "".join(c if c.isalnum() else "-" for c in target).strip("-")
    return Path(f"{name}-{kind}{SUFFIX}")


def model_name(model: str) -> str:
    """Return the last part of a model's path that tells it from others."""
    parts = [p for p in Path(model.removeprefix(PACKAGE)).absolute().parts if p not in ("model", "/")]
    return parts[-1] if parts else "model"


def check_destination(path: Path, model_key: str, overwrite: bool, form: FileFormat = ARTIFACT) -> None:
    """Check, before anything is measured, that a file of this model can be written to `path`.

    Raises: UserError for a folder and for a path that cannot be written. Without `overwrite` also for a file of another format,
    and for the file of another model.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name too long, a file where a folder should be
        raise UserError(
            f"--out {path!s:.200}: expected a file to write, got: {error.strerror}; give another name"
        ) from None
    if path.is_dir():
        raise UserError(
            f"--out {path}: expected the name of a file, got a folder; give a name in it, such as {path / f'model{form.suffix}'}"
        )
    folder = next(p for p in path.absolute().parents if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(
            f"--out {path}: expected a folder that can be written, but {folder} cannot; choose another place"
        )
    if overwrite or not path.exists():
        return
    try:
        stored = read_file(form, path).manifest["extra"].get("model")
    except ArtifactError as error:
        raise UserError(
            f"{path} is there already and is no whole {form.noun} ({error}); give another name with --out, or --overwrite"
        ) from None
    if stored != model_key:
        raise UserError(
            f"{path} is there already and is the {form.noun} of another model; give this one another name with --out, or --overwrite"
        )
