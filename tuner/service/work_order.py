"""The order of a service to the process that runs a job, and the exit codes of that process.

Tests: `tests/tuner/service/test_service.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.errors import UserError
from relax_tune.json_shapes import has_shape
from relax_tune.tuner.settings import Settings, settings_taken_by

DONE, BROKEN, USER_ERROR, NOTHING_MEASURED, TRY_LATER, OTHER_UNIT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
"""Exit codes of a job's process: the exit codes of commands, 1 for a defect, and 5 if the reference times of no unit agree with the
records'."""
_KEY = re.compile(r"[0-9a-f]{64}")
BOUNDS = "bounds"
"""Key of the symbols' ranges among the settings of a submitted job."""


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """A job to run, for its process.

    Attributes:
        model, profile: Keys of files.
        name: Name under which the model was submitted.
        given: Settings of the submitter.
        bounds: Ranges by symbol.
        own: Settings of the service, such as database, scheduler and certificates.
        files: Folder or URL of the files.
        max_minutes: Remaining time for tuning; None for no limit.
    """

    id: str
    model: str
    name: str
    given: Mapping[str, Any]
    bounds: Mapping[str, tuple[int, int]]
    own: Mapping[str, Any]
    files: str
    profile: str | None = None
    max_minutes: float | None = None

    def to_json(self) -> str:
        """Return one line of JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkOrder:
        """Return the order that `to_json` wrote."""
        document = json.loads(text)
        bounds = {name: (low, high) for name, (low, high) in document["bounds"].items()}
        return WorkOrder(**{**document, "bounds": bounds})

    def settings(self, profile: str | None) -> Settings:
        """Return the settings to tune with; `profile` is the path of the fetched file. Raises `UserError` for an invalid value."""
        return replace(Settings(), **self.given, **self.own, profile=profile, max_minutes=self.max_minutes)


def work_order(job: SubmittedJob, own: Mapping[str, Any], files: str) -> WorkOrder:
    """Return the order to run a job.

    The row of the job is untrusted: it may set sizes, choices and keys of files, but no path, host or trust of this machine.

    Raises:
        UserError: The row has a setting that a submitter may not choose.
    """
    given = job.values("settings")
    bounds, profile = given.pop(BOUNDS, {}), given.pop("profile", None)
    allowed = set(settings_taken_by("submit")) - {"db", "files", "max_minutes", "wait_secs"}
    if foreign := sorted(given.keys() - allowed):
        raise UserError(f"job {job.id}: expected settings among {', '.join(sorted(allowed))}, got {foreign[0]!r:.80}")
    if not isinstance(bounds, dict) or not all(has_shape(span, (int, int)) for span in bounds.values()):
        raise UserError(f"job {job.id}: expected bounds as LOW and HIGH by symbol, got {bounds!r:.80}")
    left = None if job.max_secs is None else max(job.max_secs - job.spent_secs, 1.0) / 60
    return WorkOrder(
        job.id,
        check_key(job.model),
        job.name,
        given,
        {name: (low, high) for name, (low, high) in bounds.items()},
        dict(own),
        files,
        None if profile is None else check_key(profile),
        left,
    )


def check_key(key: str) -> str:
    """Return `key` if it is the key of a file. Raises `UserError` otherwise."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UserError(f"expected the key of a file, 64 hex digits, got {key!r:.80}")
    return key
