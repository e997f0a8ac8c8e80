"""The trial budget of a job: how many candidates each task may still try, and which task gets the next batch.

Tests: `tests/tuner/job/test_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_tune.database.rules import Spent
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError
from relax_tune.tuner.job.scheduling import WORTHWHILE
from relax_tune.tuner.job.task_leases import TaskLeases
from relax_tune.tuner.job.task_state import TaskState
from relax_tune.tuner.settings import Settings


@dataclass(eq=False)
class TrialBudget:
    """The budget that the tasks of a job share.

    Attributes:
        refresh: Reads the records of a task that other jobs have added.
    """

    states: Sequence[TaskState]
    settings: Settings
    store: Store
    leases: TaskLeases
    refresh: Callable[[TaskState], None]

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
        return not state.exhausted and len(state.tuned) < self.first_batch

    def needs_more(self, state: TaskState) -> bool:
        """Return True if another batch of a task is affordable and expected to pay."""
        if self.left <= 0 or state.exhausted or len(state.tuned) + state.flying >= 3 * self.settings.candidates:
            return False
        return self.worth(state)[0] >= WORTHWHILE * sum(s.seconds() for s in self.states)

    def worth(self, state: TaskState) -> tuple[float, str]:
        """Return the seconds of the whole model that another batch is expected to save, and the task's key."""
        saving = state.saving(min(self.settings.batch, self.left))
        return max(saving, state.seconds() if state.untried_guesses() else 0.0), state.task.key

    def claim(self, state: TaskState, count: int) -> int:
        """Claim up to `count` candidates of the budget that all jobs on these tasks share. Returns the number claimed.

        Raises:
            DatabaseError: The store counts other records than it returns, which only an altered store does.
        """
        # The store refuses a claim that is based on outdated counts (optimistic locking); then other jobs' records
        # are read and the claim is repeated.
        previous: dict[str, Spent] = {}
        while (claimed := self.leases.claim(state.task, count, self.total, spent := self._spent())) is None:
            if spent == previous:
                raise DatabaseError(
                    f"{self.store.where}: expected as many records of a task as the database counts, got others; its rows were "
                    "altered: `relax-tune db check` says which"
                )
            previous = spent
            for other in self.states:
                self.refresh(other)
        return claimed

    def _spent(self) -> dict[str, Spent]:
        reserved = {s.task.key: 0 if s.ended else self.first_batch for s in self.states}
        return {(k := s.task.key): Spent(len(s.records), s.task.regime, len(s.tuned), reserved[k]) for s in self.states}
