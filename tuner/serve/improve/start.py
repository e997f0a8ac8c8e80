"""The start of improving: which artifact a server opens, and which models it can improve.

Tests: `tests/tuner/serve/improve/test_improver.py`, `tests/tuner/serve/improve/test_improve_command.py`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.hashed_zip import digest_at_end
from relax_tune.runtime.opened import check_swap
from relax_tune.tuner.job.replaced_weights import stored_import
from relax_tune.tuner.serve.improve.improver import Improvement, Improver, improved_path
from relax_tune.tuner.serve.improve.order import IMPROVES, ImproveOptions
from relax_tune.tuner.serve.models import ModelVersion
from relax_tune.tuner.serve.requests import Serving


def improve_models(serving: Serving, options: ImproveOptions, tell: Callable[[str], None]) -> None:
    """Have a server improve its models. tell: receives a sentence for each change

    Raises:
        UserError: No model can be improved.
    """
    improved = improvements(serving.repository.models, options, tell)
    serving.improvements = improved
    serving.background.append(Improver(improved, options, serving.metrics, tell).work)


def load_improved(given: Path, artifact: Artifact, tell: Callable[[str], None]) -> Artifact:
    """Return the confirmed improvement of a file; the artifact of the file itself if there is none that is whole and of this file."""
    path = improved_path(given)
    if not path.exists():
        return artifact
    try:
        improved = load_artifact(path)
        if improved.manifest["extra"].get(IMPROVES) != digest_at_end(given):
            raise UserError("it improves another file of this name")
        check_swap(artifact, improved, str(path))
    except (RelaxTuneError, OSError) as error:
        tell(f"{path} is not served: {error}")
        return artifact
    return improved


def improvements(
    models: Sequence[ModelVersion], options: ImproveOptions, tell: Callable[[str], None]
) -> list[Improvement]:
    """Return the models that can be improved; says of the others why not.

    Raises:
        UserError: No model can be improved.
    """
    result, reasons, able = list[Improvement](), list[str](), 0
    for model in models:
        given = model.argument.path.absolute()
        try:
            source = _source(model, options)
            able += 1
            lock, serving = _locked(given), Path(model.artifact.path).absolute()
            result.append(Improvement(model, given, digest_at_end(given), serving, source, lock))
            result[-1].candidate.unlink(missing_ok=True)  # of a server that was killed
        except (RelaxTuneError, OSError) as error:
            reasons.append(f"{model.name} version {model.version} is not improved: {error}")
    if not able:
        raise UserError(f"--improve: {'; '.join(reasons)}")
    for reason in reasons:
        tell(reason)
    return result


def _locked(path: Path) -> BinaryIO:
    """Return the open file, which no other server improves while it is open. Raises UserError if one does."""
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"another server improves {path}, and writes next to it; this one serves what is there"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def _source(model: ModelVersion, options: ImproveOptions) -> str:
    """Return the path of a model. Raises RelaxTuneError for a model that cannot be improved."""
    artifact, given = model.artifact, model.argument.path
    source = (options.sources or {}).get(model.name) or model.argument.folder
    if model.generator is not None:
        raise UserError("a text in progress goes on with its caches; tune a decoder with `tune --profile`")
    if artifact.host_programs or artifact.placement.devices:
        raise UserError("expected functions of one program on one device")
    if source is None:
        raise UserError("expected the model that the artifact was built from; give it with --improve-from")
    stored_import(artifact)  # raises for an artifact that does not say how it was lowered
    if not os.access(given.absolute().parent, os.W_OK):
        raise UserError(f"expected a folder that improved artifacts can be written to, got {given.absolute().parent}")
    return str(Path(source).absolute()) if Path(source).exists() else str(source)
