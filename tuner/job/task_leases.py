"""The leases of one job: the right to tune a task, renewed while it is held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from relax_tune.database.records import Lease
from relax_tune.database.rules import Spent
from relax_tune.database.store import Store
from relax_tune.tuner.job.job_names import lives
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.task.task import Task

# A lease is renewed while its batch is measured; it outlives its job by no more than this.
LEASE_SECS = 60.0
# How often a job says again what it waits for.
SAY_SECS = 60.0


class TaskLeases:
    """Leases of the job `holder` on tasks of a target.

    notice: receives a sentence when the job waits for tasks of other jobs
    """

    def __init__(self, store: Store, target: str, holder: str, notice: Callable[[str], None]) -> None:
        self._store, self._target, self._holder, self._notice = store, target, holder, notice
        self._held: dict[str, Lease] = {}
        self._renewed = 0.0
        self._said = 0.0

    def acquire(self, task: Task) -> bool:
        """Acquire the lease of a task; first release the lease of a holder that has died on this machine."""
        names = (task.key, self._target)
        with shielded():
            mine = self._store.acquire_lease(*names, self._holder, secs=LEASE_SECS)
            if mine is None and (held := self._store.lease(*names)) is not None and lives(held.holder) is False:
                self._store.release_lease(held)
                mine = self._store.acquire_lease(*names, self._holder, secs=LEASE_SECS)
            if mine is not None:
                self._held[task.key] = mine
                self._renewed = self._renewed or time.monotonic()
        return mine is not None

    def renew(self) -> None:
        """Renew all leases when a third of their time has gone."""
        if time.monotonic() - self._renewed < LEASE_SECS / 3:
            return
        with shielded():
            for key, lease in list(self._held.items()):
                renewed = self._store.renew_lease(lease, secs=LEASE_SECS)
                if renewed is None:
                    del self._held[key]
                else:
                    self._held[key] = renewed
        self._renewed = time.monotonic()

    def claim(self, task: Task, wanted: int, budget: int, spent: Mapping[str, Spent]) -> int | None:
        """Claim candidates of a shared budget for a held task; see `Store.claim_trials`."""
        lease = self._held.get(task.key)
        if lease is None:  # lost to another job
            return 0
        with shielded():
            claimed = self._store.claim_trials(lease, wanted, budget, spent)
        if claimed is None:
            return None
        self._held[task.key], count = claimed
        return count

    def settle(self, task: Task, trials: int) -> None:
        """Return the claim on candidates whose records are stored."""
        if (lease := self._held.get(task.key)) is not None and trials:
            with shielded():
                self._held[task.key] = self._store.settle_trials(lease, trials)

    def release(self, task: Task) -> None:
        """Release the lease of a task."""
        lease = self._held.pop(task.key, None)
        if lease is not None:
            with shielded():
                self._store.release_lease(lease)

    def release_all(self) -> None:
        """Release what is still held, such as after an interruption."""
        with shielded():
            while self._held:
                _, lease = self._held.popitem()
                self._store.release_lease(lease)

    def waiting(self, tasks: Iterable[Task]) -> None:
        """Say which tasks are waited for, and who holds them, at most once in SAY_SECS."""
        now = time.monotonic()
        if self._said and now - self._said < SAY_SECS:
            return
        held = [(t.name, lease.holder) for t in tasks if (lease := self._store.lease(t.key, self._target)) is not None]
        if held:
            self._said = now
            self._notice("waiting for " + ", ".join(f"{task}, held by job {holder}" for task, holder in held[:5]))
