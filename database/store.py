"""The `Store` contract: a store of measurements, queried by target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from relax_tune.database.counts import TargetStats, UnitStats
from relax_tune.database.engine import default_file, default_url, parse_url
from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.records import (
    Environment,
    JobRecord,
    JobState,
    Lease,
    Measurement,
    PlanRecord,
    Regime,
    Selection,
    ShapeHistogram,
    Status,
    Target,
    VariantKind,
    Workload,
)
from relax_tune.database.rules import Spent
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.sqlite_file import is_missing

_LOG = logging.getLogger(__name__)
__all__ = ["Store", "SqlStore", "MemoryStore", "open_store"]

MEMORY_URL = "memory://"


class Store(Protocol):
    """Owns its connections until `close`; hands out immutable values that stay valid after it.

    Thread safety: every method may be called from several threads, and several processes may each open the same URL.
    One open store must not be carried across a fork. Every method is one transaction.

    Order: every list is ordered by content (ids, keys, medians), never by arrival, so the same set of records gives the
    same answers.

    Append-only: a measurement is never changed; adding an id again changes nothing. Only `prune` removes.

    Targets: every query of measurements names one target key and never returns another target's.

    Errors: `DatabaseError`, always: what was wanted and found, which database, what to do. A read-only store raises it
    on every method that writes. An unknown key gives None or an empty list in queries, and an error in records to add.
    """

    @property
    def where(self) -> str:
        """The URL, without password."""
        ...

    @property
    def id(self) -> str:
        """The name of this database for others, by which they know its plans; empty before schema 7."""
        ...

    def add_target(self, target: Target) -> str:
        """Add a target; return its key. Idempotent: the first limits and the first reference stay."""
        ...

    def add_environment(self, environment: Environment) -> str:
        """Add an environment; return its key. Idempotent."""
        ...

    def add_workload(self, workload: Workload) -> str:
        """Add a workload; return its key. Idempotent by key: the first text and hint stay."""
        ...

    def target(self, key: str) -> Target | None:
        """Return the target of that key."""
        ...

    def targets(self) -> list[Target]:
        """List the targets by key."""
        ...

    def environment(self, key: str) -> Environment | None:
        """Return the environment of that key."""
        ...

    def environments(self) -> list[Environment]:
        """List the environments by key."""
        ...

    def workload(self, key: str) -> Workload | None:
        """Return the workload of that key."""
        ...

    def workloads(self, target: str | None) -> list[Workload]:
        """List the workloads measured on `target`, or all for None, by key."""
        ...

    def measured(self, target: str, since: float | None = None) -> list[str]:
        """List the keys of the workloads measured on `target`. since: only those measured from then on"""
        ...

    def known_workloads(self, keys: Iterable[str]) -> list[Workload]:
        """List the workloads of these keys that there are, by key."""
        ...

    def add_measurements(self, batch: Iterable[Measurement]) -> int:
        """Commit a batch at once; return the number of new measurements.

        Raises:
            DatabaseError: a workload, target or environment was never added, or an id already stands for another subject
                (workload, target, variant, point, regime). Nothing of the batch is kept then.
        """
        ...

    def query(
        self,
        target: str,
        workload: str | None = None,
        *,
        status: Status | None = None,
        kinds: Sequence[VariantKind] | None = None,
        symbols: Mapping[str, int] | None = None,
        regime: Regime | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> list[Measurement]:
        """List the measurements of a target, by id. Each further argument narrows the selection.

        since: Unix seconds of the earliest `measured_at`; limit: the number of first ids to return

        Tuning jobs make ids by hashing, so the first few are a fair sample, which does not depend on the order of
        arrival.
        """
        ...

    def measurements(self, ids: Iterable[str]) -> list[Measurement]:
        """List the measurements of these ids that there are, by id."""
        ...

    def count(
        self,
        target: str,
        workload: str | None = None,
        status: Status | None = None,
        regime: Regime | None = None,
    ) -> int:
        """Return the number of measurements of `target`."""
        ...

    def best(
        self, workload: str, target: str, symbols: Mapping[str, int], regime: Regime = "warm"
    ) -> Measurement | None:
        """Return the ok and checked measurement of the smallest median at exactly this point, ties by content."""
        ...

    def top(
        self, workload: str, target: str, symbols: Mapping[str, int], n: int, regime: Regime = "warm"
    ) -> list[Measurement]:
        """Return the `n` best variants at this point, each by its best ok and checked measurement, best first."""
        ...

    def stats(self, target: str) -> TargetStats | None:
        """Count the records of a target."""
        ...

    def units(self, target: str) -> list[UnitStats]:
        """Count the measurements of a target by worker, host and unit, in this order."""
        ...

    def put_plans(self, target: str, entries: Mapping[str, str]) -> list[PlanRecord]:
        """Store the plans of several workloads (workload -> JSON text) at once; return the newest plans, by workload.

        Each becomes the next version, unless the newest has the same text. No reader sees some of the old and some of
        the new.
        """
        ...

    def add_plans(self, batch: Iterable[PlanRecord]) -> int:
        """Add plans under their own origins and versions; existing versions stay. Returns the number of new ones.

        A plan of this database (no origin) is current if its version is the highest. One of another never becomes current,
        unless it has a turn.
        """
        ...

    def plan(self, workload: str, target: str, version: int | None = None) -> PlanRecord | None:
        """Return the current plan, or that of a version: of this database, else of the first origin that has one."""
        ...

    def plans(self, target: str) -> list[PlanRecord]:
        """Return all versions, by workload, origin and version."""
        ...

    def acquire_lease(self, workload: str, target: str, holder: str, *, secs: float) -> Lease | None:
        """Acquire the right to tune this task for `secs` by the store's own clock. Returns None while another holder's lease has not
        expired.

        It is atomic over all processes: of several concurrent calls, one succeeds. A holder's second call extends its
        lease, so `holder` must be unique (`relax_tune.tuner.job.job_names.new_holder` makes such names).
        """
        ...

    def renew_lease(self, lease: Lease, *, secs: float) -> Lease | None:
        """Extend a lease to `secs` from now. Returns None if it was released, or expired and was taken."""
        ...

    def release_lease(self, lease: Lease) -> bool:
        """Release a lease. Returns False if its holder had lost it.

        A process may release the lease of a holder that is known to be dead (`relax_tune.tuner.job.job_names` checks
        processes of its own machine). One of several concurrent calls succeeds. A living holder never loses its lease.
        """
        ...

    def claim_trials(
        self, lease: Lease, wanted: int, budget: int, spent: Mapping[str, Spent]
    ) -> tuple[Lease, int] | None:
        """Claim candidates of a budget that all jobs on these tasks share; return the lease and their number.

        The number is at most `wanted`: what the budget leaves after the tried candidates and the claims of other leases. Returns
        None when a task has other records than the caller has read, who then reads them and asks again. So the budget holds
        exactly, whatever jobs there are.

        spent: all tasks under the budget, by workload
        """
        ...

    def settle_trials(self, lease: Lease, trials: int) -> Lease:
        """Reduce a lease's claim by candidates whose records are stored. Releasing a lease settles it wholly."""
        ...

    def lease(self, workload: str, target: str) -> Lease | None:
        """Return the lease of the task, expired or not."""
        ...

    def put_job(self, job: JobRecord) -> None:
        """Add or replace a job."""
        ...

    def job(self, id: str) -> JobRecord | None:
        """Return the job of that id."""
        ...

    def jobs(self, state: JobState | None = None) -> list[JobRecord]:
        """List the jobs by id."""
        ...

    def put_histogram(self, histogram: ShapeHistogram) -> None:
        """Add or replace a histogram."""
        ...

    def histograms(self, task: str | None) -> list[ShapeHistogram]:
        """List the histograms of a task, or all for None, by task and symbol."""
        ...

    def prune(self, target: str, selection: Selection, *, dry_run: bool = False) -> int:
        """Remove the selected measurements of `target`; return their number.

        dry_run: only count

        Variants that are no longer referred to are removed too.
        """
        ...

    def check(self) -> list[str]:
        """Return a sentence for each problem of the stored data; empty if there is none."""
        ...

    def close(self) -> None:
        """Release everything; the store cannot be used afterwards. Closing twice is harmless."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_store(
    url: str | None = None,
    *,
    create: bool = True,
    read_only: bool = False,
    wait_secs: float | None = None,
    notice: Callable[[str], None] = _LOG.warning,
) -> SqlStore | MemoryStore:
    """Open a store. None is this user's database on this machine, `memory://` one that is not kept.

    create: make an SQLite file or the tables of an empty database when missing. Never upgrades an older schema. What is opened
        read_only must exist; only this user's database (None) counts as empty while there is none, unless `create` is off.
    read_only: nothing can be written, so the file and its folder need not be writable; `sqlite:///FILE?mode=ro` means
        the same.
    wait_secs: how long to wait for a server that is away, now and later. None: not now, and AWAY_SECS later.
    notice: receives a sentence when a server is waited for now, and when rows are left out that cannot be read

    Raises:
        DatabaseError: the URL is malformed, the database cannot be reached, is not ours, is older (with the command that
            upgrades it) or newer than this code.
    """
    if url == MEMORY_URL:
        return MemoryStore()
    if url is None and read_only and create and is_missing(default_file()):
        return MemoryStore()
    if url is None:
        return SqlStore(default_url(), create=create, read_only=read_only, make_folder=True, notice=notice)
    return SqlStore(url, create=create, read_only=read_only, wait_secs=wait_secs, notice=notice)


def open_records(url: str | None) -> tuple[SqlStore | MemoryStore, tuple[str, ...]]:
    """Open a store to build from, read-only. A file that is not yet in its folder is an empty store, and a note says so."""
    parsed = None if url is None or url == MEMORY_URL else parse_url(url)
    if parsed is not None and parsed.drivername.startswith("sqlite"):
        path = Path(parsed.database or ".")
        if is_missing(path) and path.parent.is_dir():
            return MemoryStore(), (f"{path}: no database yet, so nothing is on record and every kernel is untuned",)
    return open_store(url, read_only=True), ()
