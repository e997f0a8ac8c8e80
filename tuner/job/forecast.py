"""What a job has done and what is left: shares of the model's time, gains that are expected, and the time until it ends.

Tests: `tests/tuner/job/test_forecast.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relax_tune.tuner.job.budget import TrialBudget
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.job.task_state import TaskState

FINAL_BATCHES = 2.0
"""Time of timing a task's contenders once more, and of its shapes between the anchors, in batches of trials."""


@dataclass(eq=False)
class Forecast:
    """The progress of a job, and an estimate of its rest.

    Attributes:
        clock: Seconds of a clock that never goes back.
    """

    states: Sequence[TaskState]
    budget: TrialBudget
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _recorded: int = field(init=False)
    _first_secs: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._recorded = self._tried

    @property
    def _tried(self) -> int:
        return sum(len(s.tuned) for s in self.states)

    def model_secs(self) -> float | None:
        """Return the seconds of one run of the model by the fastest variants so far; None while a task has no time."""
        secs = [s.seconds() for s in self.states if not s.given_up]
        return sum(secs) if secs and all(secs) else None

    def progress(self, state: TaskState) -> TuningProgress:
        """Return a report after a batch of a task."""
        model = self.model_secs()
        if self._first_secs is None:
            self._first_secs = model
        return TuningProgress(
            state.task.name,
            state.position,
            len(self.states),
            len(state.tuned),
            len(state.failed),
            state.best("tuned") or math.nan,
            state.best("library"),
            state.best("generic"),
            done=sum(self._left(s) == 0 and not s.finalists() for s in self.states),
            share=None if model is None else state.seconds() / model,
            model_secs=model,
            first_secs=self._first_secs,
            left=self._left_of_all(),
            left_secs=self._left_secs(),
        )

    def expected_gain(self) -> float | None:
        """Return the fraction of the model's time that as many trials again are expected to save; None while a task has no time."""
        model = self.model_secs()
        if model is None:
            return None
        return sum(s.saving(max(len(s.tuned), 1)) for s in self.states if not s.given_up) / model

    def _left(self, state: TaskState) -> int:
        """Return the number of candidates that a task is expected to try yet."""
        if state.ended:
            return 0
        first = max(0, self.budget.first_batch - len(state.tuned)) if self.budget.needs_first(state) else 0
        return first or self.budget.expected_trials(state)

    def _left_of_all(self) -> int:
        return min(sum(map(self._left, self.states)), max(self.budget.left, 0))

    def _left_secs(self) -> float | None:
        """Return the estimated seconds until the job ends; None before its first trials."""
        tried = self._tried - self._recorded
        if tried <= 0:
            return None
        batches = FINAL_BATCHES * sum(bool(s.finalists()) or self._left(s) > 0 for s in self.states)
        return (self.clock() - self._began) / tried * (self._left_of_all() + batches * self.budget.settings.batch)
