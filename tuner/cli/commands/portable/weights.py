"""`relax-tune weights`: a built artifact with the weights of another model.

Tests: `tests/tuner/cli/test_weights.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.api import replace_weights
from relax_tune.tuner.cli.commands.options import Json, Model, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.destination import Out, Overwrite, artifact_path, check_destination
from relax_tune.tuner.cli.report.console import make_console, say


@with_settings("weights")
def weights(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file.")],
    model: Model,
    *,
    settings: SettingFlags,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a built artifact with the weights of another model.

    The model has the same structure; nothing is timed or compiled. Programs, kernels and plans stay as they are; weights that the build
    packed or computed with are computed again. The model is imported with the bounds of the artifact.
    """
    chosen, built = settings.load_any(), load_artifact(artifact)
    replaced = replace_weights(built, model, adapter=chosen.adapter, trust=chosen.trust_model)
    path = artifact_path(model, built.device_kind, out)
    check_destination(path, replaced.manifest["extra"]["model"], overwrite)
    saved = replaced.save(path)
    say(make_console(stderr=json), f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        print_json({"artifact": str(saved), "model": replaced.manifest["extra"]["model"]})
