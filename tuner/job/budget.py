"""The trial budget of a job: how many candidates each task may still try, and which task gets the next batch.

Tests: `tests/tuner/job/test_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_tune.database.rules import Spent
from relax_tune.tuner.job.task_leases import TaskLeases
from relax_tune.tuner.job.task_state import TaskState
from relax_tune.tuner.settings import Settings

HORIZON = 16
"""Candidates that an effort which ends by itself looks ahead. A longer look ahead would never end where each doubling of the
candidates saves the same."""


@dataclass(eq=False)
class TrialBudget:
    """The budget that the tasks of a job share.

    Attributes:
        refresh: Reads the records of a task that other jobs have added.
        closed: True once no task gets further candidates, since time is short.
    """

    states: Sequence[TaskState]
    settings: Settings
    leases: TaskLeases
    refresh: Callable[[TaskState], None]
    closed: bool = False

    @property
    def first_batch(self) -> int:
        """Candidates that every task tries before the most promising task gets more."""
        each = self.settings.candidates if self.settings.budget is None else self.total // max(1, len(self.states))
        return min(self.settings.batch, self.settings.candidates, each)

    @property
    def total(self) -> int:
        """Candidates of all tasks."""
        every = self.settings.candidates * len(self.states)
        return every if self.settings.budget is None else min(every, self.settings.budget)

    @property
    def left(self) -> int:
        """Candidates left, less the ones being measured and the first batches of tasks that other jobs have leased."""
        # First batches are reserved, so that a task that another job holds now still gets its first candidates later.
        tried = [(s, len(s.tuned) + s.flying) for s in self.states]
        return self.total - sum(count if s.ended else max(count, self.first_batch) for s, count in tried)

    def needs_first(self, state: TaskState) -> bool:
        """Return True if the first batch of a task is not complete."""
        if self.closed or state.exhausted:
            return False
        return len(state.tuned) < self.first_batch and not self._is_negligible(state)

    def _is_negligible(self, state: TaskState) -> bool:
        """Return True if a task takes so little of the model's time that no trial of it pays."""
        if not self.settings.ends_early:
            return False
        secs = [s.seconds() for s in self.states if not s.given_up]
        return all(secs) and not state.tuned and state.seconds() < self.settings.worthwhile * sum(secs)

    def needs_more(self, state: TaskState) -> bool:
        """Return True if another batch of a task is affordable and expected to pay."""
        if (
            self.closed
            or self.left <= 0
            or state.exhausted
            or len(state.tuned) + state.flying >= 3 * self.settings.candidates
        ):
            return False
        if state.untried_guesses():
            return True
        return self._saving(state) >= self.settings.worthwhile * sum(s.seconds() for s in self.states)

    def expected_trials(self, state: TaskState) -> int:
        """Return how many further candidates a task is expected to try before another batch no longer pays."""
        if self.left <= 0:
            return 0
        worthwhile = self.settings.worthwhile * sum(s.seconds() for s in self.states)
        most = 3 * self.settings.candidates - len(state.tuned)
        count = 0
        while count < most and self._saving(state, count) >= worthwhile:
            count += self.settings.batch
        return min(count, max(most, 0))

    def _saving(self, state: TaskState, after: int = 0) -> float:
        """Return the seconds of the model's time that decide whether a task goes on, once it has tried `after` more candidates.

        They are what a batch is expected to save, or with an effort that ends by itself, `HORIZON` candidates.
        """
        batch = min(self.settings.batch, self.left)
        return state.saving(max(batch, HORIZON) if self.settings.ends_early else batch, after)

    def worth(self, state: TaskState) -> tuple[float, str]:
        """Return the seconds of the whole model that another batch is expected to save, and the task's key."""
        saving = state.saving(min(self.settings.batch, self.left))
        return max(saving, state.seconds() if state.untried_guesses() else 0.0), state.task.key

    def claim(self, state: TaskState, count: int) -> int:
        """Claim up to `count` candidates of the budget that all jobs on these tasks share. Returns the number claimed."""
        # The store refuses a claim that is based on outdated counts (optimistic locking); then other jobs' records
        # are read and the claim is repeated.
        while (claimed := self.leases.claim(state.task, count, self.total, self._spent())) is None:
            for other in self.states:
                self.refresh(other)
        return claimed

    def _spent(self) -> dict[str, Spent]:
        reserved = {s.task.key: 0 if s.ended else self.first_batch for s in self.states}
        return {(k := s.task.key): Spent(s.counted, s.task.regime, len(s.tuned), reserved[k]) for s in self.states}
