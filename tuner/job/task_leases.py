"""The leases of one job: the right to tune a task, renewed while its batch is measured.

Tests: `tests/tuner/job/test_loop.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from relax_tune.database import rules
from relax_tune.database.records import Lease
from relax_tune.database.rules import Spent
from relax_tune.database.store import Store
from relax_tune.tuner.job.job_names import lives
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.task.task import Task

# A lease outlives a job that was killed by at most this time.
LEASE_SECS = rules.LEASE_SECS
# How often a job repeats what it waits for.
NOTICE_SECS = 60.0


class TaskLeases:
    """Leases of the job `holder` on tasks of a target.

    Args:
        notice: Receives a sentence when the job waits for tasks of other jobs.
    """

    def __init__(self, store: Store, target: str, holder: str, notice: Callable[[str], None]) -> None:
        self._store, self._target, self._holder, self._notice = store, target, holder, notice
        self._leases: dict[str, Lease] = {}
        self._renewed = 0.0
        self._noticed = 0.0

    def acquire(self, task: Task) -> bool:
        """Acquire the lease of a task; first release the lease of a holder that has died on this machine."""
        names = (task.key, self._target)
        with shielded():
            lease = self._store.acquire_lease(*names, self._holder, secs=LEASE_SECS)
            # Waiting until the dead job's lease expires would cost LEASE_SECS for every task it leased. `lives` is None
            # for a holder on another machine, about which nothing is known, hence `is False`.
            if lease is None and (other := self._store.lease(*names)) is not None and lives(other.holder) is False:
                self._store.release_lease(other)
                lease = self._store.acquire_lease(*names, self._holder, secs=LEASE_SECS)
            if lease is not None:
                self._leases[task.key] = lease
                self._renewed = self._renewed or time.monotonic()
        return lease is not None

    def renew(self) -> None:
        """Renew all leases when a third of their time has gone."""
        if time.monotonic() - self._renewed < LEASE_SECS / 3:
            return
        with shielded():
            for key, lease in list(self._leases.items()):
                renewed = self._store.renew_lease(lease, secs=LEASE_SECS)
                if renewed is None:
                    # It expired, for example while the machine slept, and another job may hold the task now. The
                    # batch goes on: its records are valid in any case.
                    del self._leases[key]
                else:
                    self._leases[key] = renewed
        self._renewed = time.monotonic()

    def claim(self, task: Task, count: int, budget: int, spent: Mapping[str, Spent]) -> int | None:
        """Claim candidates of a shared budget for a leased task; see `Store.claim_trials`."""
        lease = self._leases.get(task.key)
        if lease is None:  # lost to another job
            return 0
        with shielded():
            claimed = self._store.claim_trials(lease, count, budget, spent)
        if claimed is None:
            return None
        self._leases[task.key], granted = claimed
        return granted

    def settle(self, task: Task, trials: int) -> None:
        """Return the claim on candidates whose records are stored."""
        if (lease := self._leases.get(task.key)) is not None and trials:
            with shielded():
                self._leases[task.key] = self._store.settle_trials(lease, trials)

    def release(self, task: Task) -> None:
        """Release the lease of a task."""
        lease = self._leases.pop(task.key, None)
        if lease is not None:
            with shielded():
                self._store.release_lease(lease)

    def release_all(self) -> None:
        """Release all leases, such as after an interruption."""
        with shielded():
            while self._leases:
                _, lease = self._leases.popitem()
                self._store.release_lease(lease)

    def waiting(self, tasks: Iterable[Task]) -> None:
        """Give notice of the tasks that are waited for and their holders, at most once in NOTICE_SECS."""
        now = time.monotonic()
        if self._noticed and now - self._noticed < NOTICE_SECS:
            return
        leased = [
            (t.name, lease.holder) for t in tasks if (lease := self._store.lease(t.key, self._target)) is not None
        ]
        if leased:
            self._noticed = now
            self._notice("waiting for " + ", ".join(f"{task}, leased by job {holder}" for task, holder in leased[:5]))
