"""What a server tells the child process that tunes a model it serves, and how models are improved at all.

Tests: `tests/tuner/serve/improve/test_child.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.job.replaced_weights import stored_import
from relax_tune.tuner.settings import Settings

IMPROVES = "improves"
"""The entry of `manifest["extra"]` of an improved artifact with the hash of the file that was given to the server."""
WAIT_SECS = 10
"""Seconds to wait for a database that is away; the server tries again later."""
Via = Literal["here", "jobs"]


@dataclass(frozen=True, slots=True)
class ImproveOptions:
    """How served models are improved.

    Attributes:
        secs: Longest time of one tuning.
        tolerance: Greatest difference of a result, relative to its largest element.
        via: Where it is tuned: in a child process here, or by a service of the database's queue.
        db: URL of the database; None: the default one.
        files: Files of submitted jobs; None: next to the database.
        sources: Path of the model of each served model, by name.
        device: Name of the device; None: the one that the artifact was tuned for.
        threads: Threads of target c; None: all.
    """

    secs: float = 600.0
    tolerance: float = 1e-3
    via: Via = "here"
    db: str | None = None
    files: str | None = None
    sources: Mapping[str, str] | None = None
    device: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ImproveOrder:
    """A model to tune for served sizes, and to compare with the artifact that is served.

    Attributes:
        artifact: File of the artifact that is served.
        base: Hash of the file that was given to the server.
        source: Path of the model.
        out: File of the improved artifact.
        profile: File of the profile of shapes.
        sizes: Functions, values of their symbols, and their shares of the calls.
        built: File of an artifact that a service built; None: tune here.
        secs, tolerance, db, device, threads: As of `ImproveOptions`.
    """

    artifact: str
    base: str
    source: str
    out: str
    profile: str
    sizes: tuple[tuple[str, tuple[int, ...], float], ...]
    secs: float
    tolerance: float
    db: str | None = None
    built: str | None = None
    device: str | None = None
    threads: int | None = None

    def to_json(self) -> str:
        """Return one line of JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ImproveOrder:
        """Return the order that `to_json` wrote."""
        document: dict[str, Any] = json.loads(text)
        sizes = tuple((function, tuple(values), share) for function, values, share in document["sizes"])
        return ImproveOrder(**{**document, "sizes": sizes})


def settings_of(order: ImproveOrder, served: Artifact) -> tuple[Settings, dict[str, Any]]:
    """Return the settings to tune with, and how the served artifact was lowered.

    Raises:
        RelaxTuneError: The artifact does not say how it was lowered.
    """
    stored_import(served)  # checks the facts
    facts = dict(served.manifest["extra"]["lowering"])
    settings = Settings(
        **facts["settings"],
        target=order.device or served.device_kind,
        threads=order.threads,
        db=order.db,
        max_minutes=order.secs / 60,
        shapes="profile",
        profile=order.profile,
    )
    return settings, facts
