"""The `Store` contract in four parts (records, plans, leases, runs), and `open_store`.

Implementations are `SqlStore` over SQLite and PostgreSQL, and `MemoryStore`.

Tests: `tests/database/test_store_contract.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from relax_tune.database import schema
from relax_tune.database.counts import TargetStats, TaskStats, UnitStats
from relax_tune.database.engine import (
    asks_read_only,
    default_file,
    default_url,
    explained,
    make_engine,
    parse_url,
    shown,
    sqlite_path,
    use_wal,
    writer,
)
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
from relax_tune.database.reference import Reference
from relax_tune.database.rules import Spent
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.sqlite_file import is_missing, verify_file
from relax_tune.errors import DatabaseError, warn

__all__ = ["Store", "SqlStore", "MemoryStore", "open_store"]

MEMORY_URL = "memory://"


class Records(Protocol):
    """Measurements, and what they refer to: targets, environments and workloads.

    Append-only: a measurement is never changed, and adding an id again changes nothing. Only `prune` removes measurements.

    Targets: every query of measurements names one target key and never returns measurements of another target.
    """

    def add_target(self, target: Target) -> str:
        """Add a target; return its key. Idempotent: the first limits and the first reference times stay."""

    def set_reference(self, target: str, reference: Reference) -> None:
        """Replace the reference times of a target; an empty mapping removes them."""

    def add_environment(self, environment: Environment) -> str:
        """Add an environment; return its key. Idempotent."""

    def add_workload(self, workload: Workload) -> str:
        """Add a workload; return its key. Idempotent by key: the first text and hint stay."""

    def target(self, key: str) -> Target | None:
        """Return the target of a key."""

    def targets(self) -> list[Target]:
        """List the targets by key."""

    def environment(self, key: str) -> Environment | None:
        """Return the environment of a key."""

    def environments(self) -> list[Environment]:
        """List the environments by key."""

    def workload(self, key: str) -> Workload | None:
        """Return the workload of a key."""

    def workloads(self, target: str | None) -> list[Workload]:
        """List the workloads measured on `target`, or all for None, by key."""

    def measured(self, target: str, since: float | None = None) -> list[str]:
        """List the keys of the workloads with measurements on `target`, or with measurements since a moment (Unix seconds)."""

    def known_workloads(self, keys: Iterable[str]) -> list[Workload]:
        """List the stored workloads among these keys, by key."""

    def add_measurements(self, batch: Iterable[Measurement]) -> int:
        """Commit a batch in one transaction; return the number of new measurements.

        Raises:
            DatabaseError: A workload, target or environment was never added, or an id already stands for another subject
                (workload, target, variant, point, regime). No measurement of the batch is stored then.
        """

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

        Tuning jobs generate ids by hashing, so the first few ids are a fair sample that does not depend on the order of arrival.

        Args:
            since: Earliest `measured_at`, in Unix seconds.
            limit: Number of first ids to return.
        """

    def measurements(self, ids: Iterable[str]) -> list[Measurement]:
        """List the stored measurements among these ids, by id."""

    def count(
        self,
        target: str,
        workload: str | None = None,
        status: Status | None = None,
        regime: Regime | None = None,
    ) -> int:
        """Return the number of measurements of `target`."""

    def best(
        self, workload: str, target: str, symbols: Mapping[str, int], regime: Regime = "warm"
    ) -> Measurement | None:
        """Return the ok and checked measurement with the smallest median at exactly this point; content decides ties."""

    def top(
        self, workload: str, target: str, symbols: Mapping[str, int], n: int, regime: Regime = "warm"
    ) -> list[Measurement]:
        """Return the best ok and checked measurement of each of the `n` best variants at this point, best first."""

    def stats(self, target: str) -> TargetStats | None:
        """Count the measurements of a target; None for an unknown one."""

    def units(self, target: str) -> list[UnitStats]:
        """Count the measurements of a target by worker, host and unit, in this order."""

    def tasks(self, target: str, jobs: Collection[str] | None = None) -> list[TaskStats]:
        """Count the measurements of a target by workload, the latest measured first, then by key.

        Args:
            jobs: Full names of the jobs whose measurements count; None for all.
        """

    def put_histogram(self, histogram: ShapeHistogram) -> None:
        """Add or replace a histogram of served shapes."""

    def histograms(self, task: str | None) -> list[ShapeHistogram]:
        """List the histograms of a task, or all for None, by task and symbol."""

    def prune(self, target: str, selection: Selection, *, dry_run: bool = False) -> int:
        """Remove the selected measurements of `target`, and variants without measurements; return their number.

        The last measurement of a target takes the reference times with it.

        Args:
            dry_run: Only count.
        """


class Plans(Protocol):
    """Versions of the plans of tasks. One version of a task is current; `turn` orders all versions that have ever been current."""

    def put_plans(self, target: str, entries: Mapping[str, str]) -> list[PlanRecord]:
        """Make plans (workload -> JSON text) current in one transaction; return them by workload.

        Each becomes the next version of its task, unless the current version has the same text. No reader sees a part of the change.
        """

    def add_plans(self, batch: Iterable[PlanRecord]) -> int:
        """Add plans under their own origins and versions; return the number of new ones. Stored versions stay.

        A plan of this database (empty origin) is current if its version is the highest. A plan of another database becomes current
        only if it has a turn.
        """

    def plan(self, workload: str, target: str, version: int | None = None) -> PlanRecord | None:
        """Return the current plan, or a version: of this database, else of the first origin that has it."""

    def plans(self, target: str) -> list[PlanRecord]:
        """Return all versions, by workload, origin and version."""


class Leases(Protocol):
    """Rights of jobs to tune a task, for a time by the store's own clock, and claims on a shared budget of candidates."""

    def acquire_lease(self, workload: str, target: str, holder: str, *, secs: float) -> Lease | None:
        """Acquire the right to tune a task for `secs`. Returns None while the lease of another holder has not expired.

        Atomic over all processes: one of several concurrent calls succeeds. A second call of a holder extends its lease, so `holder`
        must be unique (`relax_tune.tuner.job.job_names.new_holder`).

        All jobs ask for the same time. A lease of this task that would last longer than `secs` from now is shortened to it: its row
        was altered, or the clock was set back.
        """

    def renew_lease(self, lease: Lease, *, secs: float) -> Lease | None:
        """Extend a lease to `secs` from now. Returns None if it was released, or expired and another holder acquired it."""

    def release_lease(self, lease: Lease) -> bool:
        """Release a lease. Returns False if its holder had lost it.

        A process may release the lease of a holder that is known to be dead (`relax_tune.tuner.job.job_names` checks processes of
        the same machine). One of several concurrent calls succeeds. A living holder never loses its lease.
        """

    def claim_trials(
        self, lease: Lease, requested: int, budget: int, spent: Mapping[str, Spent]
    ) -> tuple[Lease, int] | None:
        """Claim candidates of a budget that all jobs on these tasks share; return the lease and their number.

        The number is at most `requested`, and at most what the budget leaves after tried candidates and the claims of other leases. So
        all jobs together never exceed the budget.

        Args:
            spent: State of each task under the budget, by workload.

        Returns:
            None if a task has other records than `spent` says; the caller then reads them and asks again.
        """

    def settle_trials(self, lease: Lease, trials: int) -> Lease:
        """Reduce a lease's claim by candidates whose records are stored. Releasing a lease settles all of it."""

    def lease(self, workload: str, target: str) -> Lease | None:
        """Return the lease of a task, expired or not. None for an invalid row, which expires by its time."""


class Runs(Protocol):
    """Tuning runs by id, with their settings and state. Submitted jobs are in `relax_tune.database.jobs.queue`."""

    def put_job(self, job: JobRecord) -> None:
        """Add or replace a run."""

    def job(self, id: str) -> JobRecord | None:
        """Return the run of an id."""

    def jobs(self, state: JobState | None = None) -> list[JobRecord]:
        """List the runs by id."""


class Store(Records, Plans, Leases, Runs, Protocol):
    """A database of records, plans, leases and runs.

    Ownership: a store owns its connections until `close`. It returns immutable values, which stay valid after it.

    Thread safety: every method may be called from several threads, and several processes may open the same URL. An open store must
    not be carried across a fork. Every method is one transaction.

    Order: every list is ordered by content (ids, keys, medians), never by arrival, so the same set of records gives the same answers.

    Errors: `DatabaseError`, with the database, what was expected and got, and what to do. A read-only store raises it for every
    method that writes. An unknown key gives None or an empty list in queries, and an error in records to add.
    """

    @property
    def where(self) -> str:
        """The URL, without password."""

    @property
    def id(self) -> str:
        """The name of this database in the plans of other databases."""

    @property
    def invalid_rows(self) -> Counter[str]:
        """Number of invalid rows that reads skipped, by table."""

    def check(self) -> list[str]:
        """Return a sentence for each problem of the stored data."""

    def close(self) -> None:
        """Close all connections; the store cannot be used afterwards. Closing twice is harmless."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_store(
    url: str | os.PathLike[str] | None = None,
    *,
    create: bool = True,
    read_only: bool = False,
    wait_secs: float | None = None,
    notice: Callable[[str], None] = warn,
) -> SqlStore | MemoryStore:
    """Open a store.

    Args:
        url: SQLite file or PostgreSQL database; None for this user's database, `memory://` for a store in memory.
        create: Create a missing SQLite file, as `tune` does, and the tables of an empty database. A new file next to one with a
            similar name causes a notice. Without it a missing file is an error. A database that is opened read-only must exist;
            only this user's database (None) then counts as empty while it is missing. An older schema is never upgraded here.
        read_only: Refuse writes, so that the file and its folder need not be writable; `sqlite:///FILE?mode=ro` has the same effect.
        wait_secs: Seconds to wait for a server that is away, now and later. None does not wait now, and AWAY_SECS later.
        notice: Receives a sentence when this waits for a server or creates a file that may be misnamed, and when a read skips invalid
            rows. By default it becomes a `RelaxTuneWarning`.

    Raises:
        DatabaseError: The URL is malformed, or the database cannot be reached, belongs to another program, or has an older schema
            (with the command that upgrades or converts it) or a newer one.
    """
    if url is not None:
        url = os.fspath(url)
    if url == MEMORY_URL:
        return MemoryStore()
    if url is None and read_only and create and is_missing(default_file()):
        return MemoryStore(where=default_url())
    if url is None:
        return SqlStore(default_url(), create=create, read_only=read_only, make_folder=True, notice=notice)
    return SqlStore(url, create=create, read_only=read_only, wait_secs=wait_secs, notice=notice)


def open_records(url: str | None) -> tuple[SqlStore | MemoryStore, tuple[str, ...]]:
    """Open a store to build from, read-only, with notes for the user.

    This user's database (None) counts as empty while it is missing, and a note says so.

    Raises:
        DatabaseError: As `open_store`; for a missing file the message names similar files.
    """
    store = open_store(url, read_only=True)
    if isinstance(store, MemoryStore) and url is None:
        return store, (f"{default_file()} does not exist yet, so no records are available and every kernel is untuned",)
    return store, ()


def upgrade_store(url: str) -> tuple[str | None, str]:
    """Create the tables of an empty database, or bring an older one to the newest schema.

    Returns:
        The version before, None for an empty database, and the version after.

    Raises:
        DatabaseError: The database is missing, cannot be reached or written, belongs to another program, is from before the first
            release, or is newer than this code.
    """
    parsed = parse_url(url)
    where = shown(parsed)
    if asks_read_only(parsed):
        raise DatabaseError(f"{where}: mode=ro in the URL forbids to upgrade the database; leave it out")
    path = sqlite_path(parsed)
    if path is not None:
        verify_file(path, where, write=True, create=False)
    engine = make_engine(parsed, read_only=False)
    try:
        with explained(where, "upgrade it", path):
            with writer(engine).begin() as connection:
                versions = schema.migrate(connection, where)
            use_wal(engine)
        return versions
    finally:
        engine.dispose()
