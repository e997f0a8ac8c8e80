"""Submission of a model: its files go to the folder or bucket of files, the job into the database.

Tests: `tests/tuner/service/test_jobs_commands.py`.
"""

from __future__ import annotations

import getpass
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Union

from relax_tune.database.engine import default_file, parse_url, sqlite_path
from relax_tune.database.jobs.queue import JobQueue
from relax_tune.database.jobs.submitted import ATTEMPTS, SubmittedJob
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import ModelSource
from relax_tune.ir.frontend.source import find_model
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.frontend.torch.export import is_exported_program
from relax_tune.tuner.measure.cluster.fleet import label_of
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.work_order import BOUNDS
from relax_tune.tuner.settings import Settings, settings_taken_by

Model = Union[IRModule, ModelSource]
_NOT_SUBMITTED = ("db", "files", "profile", "max_minutes", "wait_secs")


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Options of a submission, in addition to the settings of the job.

    Attributes:
        priority: Jobs of higher priority go first.
        owner: None for the user of this process.
        attempts: Number of services that the job may lose before it fails.
    """

    priority: int = 0
    note: str = ""
    owner: str | None = None
    attempts: int = ATTEMPTS


def files_of(settings: Settings) -> str:
    """Return the folder or URL of the files of a database's jobs. Raises `UserError` if --files is required and missing."""
    if settings.files is not None:
        return settings.files
    path = default_file() if settings.db is None else sqlite_path(parse_url(settings.db))
    if path is None:
        raise UserError(
            "a PostgreSQL database needs --files (or RELAX_TUNE_FILES): a folder that all machines share, or a URL such as "
            "s3://BUCKET/FOLDER"
        )
    return f"{path.absolute()}.files"


def submit_model(
    queue: JobQueue,
    model: Model,
    settings: Settings,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    options: SubmitOptions | None = None,
) -> SubmittedJob:
    """Store a model, and queue the job to tune it.

    Raises:
        UserError: The model does not exist, or is an exported program of torch in memory.
        FilesAway: The model cannot be stored.
    """
    options = options or SubmitOptions()
    if is_exported_program(model):
        raise UserError("an exported program in memory cannot be submitted; `torch.export.save` it to a file first")
    defaults = {f.name: f.default for f in fields(Settings)}
    given: dict[str, Any] = {
        name: value
        for name in settings_taken_by("submit")
        if name not in _NOT_SUBMITTED and (value := getattr(settings, name)) != defaults[name]
    }
    given |= {"target": settings.target}
    content = ContentStore(files_of(settings))
    with tempfile.TemporaryDirectory(prefix="relax-tune-submit-") as folder:
        name, path = _saved(model, Path(folder))
        key = content.put_model(path, Path(folder))
    if settings.profile is not None:
        profile = Path(settings.profile)
        if not profile.is_file():
            raise UserError(f"--profile {profile!s:.200} does not exist")
        given["profile"] = content.put_file(profile)
    if bounds:
        given[BOUNDS] = {symbol: list(span) for symbol, span in bounds.items()}
    return queue.submit(
        SubmittedJob(
            id=uuid.uuid4().hex[:12],
            model=key,
            name=name,
            settings=SubmittedJob.text(given),
            label=label_of(settings.target),
            priority=options.priority,
            owner=getpass.getuser() if options.owner is None else options.owner,
            note=options.note,
            max_secs=None if settings.max_minutes is None else 60 * settings.max_minutes,
            attempts=options.attempts,
        )
    )


def _saved(model: Model, folder: Path) -> tuple[str, Path]:
    """Return the name of a model and the path of its file or folder; a module is written into `folder`."""
    if isinstance(model, IRModule):
        return "module", save_text(model, folder / "module.relax")
    path = find_model(model)
    parts = [part for part in path.absolute().parts if part not in ("model", "/")]
    return (parts[-1] if parts else "model")[-80:], path
