"""Reports of a job: the progress after a batch, and counts of the whole.

Tests: `tests/tuner/job/test_loop.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

NOISY = 0.1
"""Mean contention of measurements from which a note says that the machine was busy."""


@dataclass(frozen=True)
class TuningProgress:
    """A report after a batch, for a display.

    Attributes:
        trials, failures: Of the task.
        best_secs, library_secs, generic_secs: Seconds of the best tuned, library and generic variant of the task, weighted over its
            shapes.
        done: Number of tasks that are expected to be measured no further.
        share: Fraction of the model's time that the task takes; None while a task of the model has no time.
        model_secs: Seconds of one run of the model by the fastest variants so far.
        first_secs: The same, when it was first known.
        left: Candidates that the job is expected to try yet.
        left_secs: Estimated seconds until the job ends; None before its first trials.
    """

    task: str
    position: int
    tasks: int
    trials: int
    failures: int
    best_secs: float
    library_secs: float | None
    generic_secs: float | None
    done: int = 0
    share: float | None = None
    model_secs: float | None = None
    first_secs: float | None = None
    left: int = 0
    left_secs: float | None = None


@dataclass
class TuningSummary:
    """Counts of a job's measurements.

    Attributes:
        problems: (task, sentence) for each task that could not be tuned.
        contention: Fraction of their time in which kernels waited for a processor, mean over the measurements; None if unknown.
        expected_gain: Fraction of the model's time that as many trials again are expected to save; None if unknown.
    """

    trials: int = 0
    measurements: int = 0
    failures: int = 0
    wall_secs: float = 0.0
    compiles: int = 0
    problems: tuple[tuple[str, str], ...] = ()
    contention: float | None = None
    expected_gain: float | None = None

    def notes(self) -> list[str]:
        """Return a sentence for each task that could not be tuned to the end, and one if other processes disturbed the measurements."""
        notes = [f"{name} could not be tuned to the end: {problem}" for name, problem in self.problems]
        if (self.contention or 0.0) > NOISY:
            notes.append(
                f"other processes used this machine: kernels waited for a processor {self.contention:.0%} of their time; times leave "
                "this out but are less certain, and records name it"
            )
        return notes
