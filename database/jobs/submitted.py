"""Submitted jobs: models to tune, queued in a database until a service runs them.

Tests: `tests/database/jobs/test_queue.py`, `tests/tuner/service/test_jobs_commands.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from relax_tune.database.records import KEY_LIMIT, MESSAGE_LIMIT, canonical_json, parse_json
from relax_tune.errors import DatabaseError

SubmittedState = Literal["queued", "running", "done", "failed", "cancelled"]
SUBMITTED_STATES: tuple[SubmittedState, ...] = get_args(SubmittedState)
ENDED: frozenset[SubmittedState] = frozenset(["done", "failed", "cancelled"])

MOST_PRIORITY = 1_000_000
NOTE_LIMIT = 1_000
ATTEMPTS = 5
"""Services that a job may lose before it is given up."""


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A model to tune with its settings, and the state of the work.

    Attributes:
        model: Key of its content in the folder or bucket of files.
        name: Name under which it was submitted.
        settings: JSON text of the given settings by name, and of `bounds`.
        label: Class of device, such as `cuda`.
        priority: Jobs of higher priority go first.
        owner, note: Texts for people.
        max_secs: Time limit of tuning over all runs.
        attempts: Number of services that the job may lose before it fails.
        submitted_at, started_at, ended_at: Unix seconds by the store's clock.
        not_before: The job waits until this moment.
        holder: The run that works on the job, until `expires_at`.
        runs: Number of started runs.
        losses: Number of runs whose service was lost.
        cancel: Somebody asked to end the job.
        progress, result: JSON text.
        message: A sentence on the state.
        exit_code: Of the last run that ended.
    """

    id: str
    model: str
    name: str
    settings: str
    label: str
    priority: int = 0
    owner: str = ""
    note: str = ""
    max_secs: float | None = None
    attempts: int = ATTEMPTS
    state: SubmittedState = "queued"
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    not_before: float = 0.0
    holder: str = ""
    expires_at: float = 0.0
    runs: int = 0
    losses: int = 0
    cancel: bool = False
    spent_secs: float = 0.0
    progress: str = "{}"
    message: str = ""
    exit_code: int | None = None
    result: str = "{}"

    def __post_init__(self) -> None:
        where = f"job {str(self.id)[:80]!r}"
        for field in ("id", "model", "name", "label"):
            _check(
                1 <= len(_text(getattr(self, field), where, field)) <= KEY_LIMIT, where, field, "1 to 200 characters"
            )
        for field, limit in (
            ("owner", KEY_LIMIT),
            ("note", NOTE_LIMIT),
            ("holder", KEY_LIMIT),
            ("message", MESSAGE_LIMIT),
        ):
            _check(len(_text(getattr(self, field), where, field)) <= limit, where, field, f"at most {limit} characters")
        _check(self.state in SUBMITTED_STATES, where, "state", f"one of {', '.join(SUBMITTED_STATES)}")
        for field in ("settings", "progress", "result"):
            document = parse_json(_text(getattr(self, field), where, field), f"{where} {field}")
            _check(isinstance(document, dict), where, field, "a JSON object")
        _check(
            type(self.priority) is int and abs(self.priority) <= MOST_PRIORITY,
            where,
            "priority",
            f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}",
        )
        for field in ("attempts", "runs", "losses"):
            _check(_is_count(getattr(self, field)), where, field, "a whole number from 0 to 2**31 - 1")
        for field in ("submitted_at", "not_before", "expires_at", "spent_secs"):
            _check(_is_number(getattr(self, field)), where, field, "a finite number >= 0")
        for field in ("max_secs", "started_at", "ended_at"):
            value = getattr(self, field)
            _check(value is None or _is_number(value), where, field, "a finite number >= 0, or none")

    @property
    def ended(self) -> bool:
        """True if the job is done, failed or cancelled."""
        return self.state in ENDED

    @staticmethod
    def text(values: Mapping[str, Any]) -> str:
        """Return the JSON text of a field."""
        return canonical_json(dict(values))

    def values(self, field: Literal["settings", "progress", "result"]) -> dict[str, Any]:
        """Return a JSON field as a dictionary."""
        document: dict[str, Any] = parse_json(getattr(self, field), f"job {self.id} {field}")
        return document


def _text(value: object, where: str, field: str) -> str:
    if type(value) is not str or "\0" in value or not _is_unicode(value):
        raise DatabaseError(f"{where} {field}: expected text without NUL and lone surrogates, got {value!r:.80}")
    return value


def _is_unicode(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type,operator]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _check(holds: bool, where: str, field: str, expected: str) -> None:
    if not holds:
        raise DatabaseError(f"{where} {field}: expected {expected}; correct it")
