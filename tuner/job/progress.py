"""Reports of a job: the progress after a batch, and counts of the whole.

Tests: `tests/tuner/job/test_loop.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TuningProgress:
    """A report after a batch, for a display."""

    task: str
    position: int
    tasks: int
    trials: int
    failures: int
    best_secs: float
    library_secs: float | None
    generic_secs: float | None


@dataclass
class TuningSummary:
    """Counts of a job's measurements. problems: (task, sentence) for each task that could not be tuned."""

    trials: int = 0
    measurements: int = 0
    failures: int = 0
    wall_secs: float = 0.0
    compiles: int = 0
    problems: tuple[tuple[str, str], ...] = ()
