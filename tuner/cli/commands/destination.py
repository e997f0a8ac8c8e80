"""The destination of an artifact, and the files that writing it must not destroy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import ArtifactError, UserError
from relax_tune.ir.frontend.load import PACKAGE
from relax_tune.runtime.artifact import SUFFIX, load_artifact

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.rta", help="Where to write the artifact. [default: MODEL-TARGET.rta]"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write the artifact even where another model's, or another file, is.")
]


def artifact_path(model: str, target: str, out: Path | None) -> Path:
    """Return `out`, or a path in the current folder named after the model's folder or file and the target."""
    if out is not None:
        return out
    parts = [p for p in Path(model.removeprefix(PACKAGE)).absolute().parts if p not in ("model", "/")]
    kind = "".join(c if c.isalnum() else "-" for c in target).strip("-")
    return Path(f"{parts[-1] if parts else 'model'}-{kind}{SUFFIX}")


def check_destination(path: Path, model_key: str, overwrite: bool) -> None:
    """Check, before anything is measured, that an artifact of this model can be written to `path`.

    Raises: UserError for a folder and for a path that cannot be written. Without `overwrite` also for a file that is no artifact,
    and for the artifact of another model.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name too long, a file where a folder should be
        raise UserError(
            f"--out {path!s:.200}: wanted a file to write, found: {error.strerror}; give another name"
        ) from None
    if path.is_dir():
        raise UserError(
            f"--out {path}: wanted the name of a file, found a folder; give a name in it, such as {path / 'model.rta'}"
        )
    folder = next(p for p in path.absolute().parents if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(
            f"--out {path}: wanted a folder that can be written, found that {folder} cannot; choose another place"
        )
    if overwrite or not path.exists():
        return
    try:
        found = load_artifact(path).manifest["extra"].get("model")
    except ArtifactError as error:
        raise UserError(
            f"{path} is there already and is no whole artifact ({error}); give another name with --out, or --overwrite"
        ) from None
    if found != model_key:
        raise UserError(
            f"{path} is there already and is the artifact of another model; give this one another name with --out, or --overwrite"
        )
