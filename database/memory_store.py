"""`MemoryStore`: the `Store` contract in dictionaries, for packs, dry runs and tests.

A `SqlStore` of an in-memory SQLite database would need a lock as well, since all threads would share one connection, and makes the
tests of tuning several times slower: 21 s instead of 5 s for `tests/tuner/learn/test_warm_start.py`.

Tests: `tests/database/test_store_contract.py`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from relax_tune.database.counts import TargetStats, TaskStats, UnitStats
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
    symbols_text,
)
from relax_tune.database.reference import Reference
from relax_tune.database.rules import (
    RefusedRecord,
    Spent,
    best_of,
    choose_plan,
    grant,
    plan_after,
    plan_to_add,
    stats_of,
    verify_batch,
    verify_same_subjects,
)


class MemoryStore:
    """A `relax_tune.database.store.Store` in memory. One lock guards all of it.

    Args:
        id: Name of this database in the plans of others; None for a random one.
        where: URL of the missing database that this store represents.
    """

    where = "memory://"

    def __init__(self, id: str | None = None, where: str = where) -> None:
        self.where = where
        self.id = id or secrets.token_hex(16)
        self.invalid_rows = Counter[str]()
        self._lock = threading.RLock()
        self._targets: dict[str, Target] = {}
        self._environments: dict[str, Environment] = {}
        self._workloads: dict[str, Workload] = {}
        self._measurements: dict[str, Measurement] = {}
        self._by_task: dict[tuple[str, str], dict[str, Measurement]] = {}
        self._plans: dict[tuple[str, str], dict[tuple[str, int], PlanRecord]] = {}
        self._leases: dict[tuple[str, str], Lease] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._histograms: dict[tuple[str, str], ShapeHistogram] = {}

    # Targets, environments, workloads

    def add_target(self, target: Target) -> str:
        with self._lock:
            # Limits and reference times are no part of the key: stored ones remain, and only missing ones are added.
            known = self._targets.get(target.key, target)
            self._targets[target.key] = replace(
                known, limits=known.limits or target.limits, reference=known.reference or target.reference
            )
        return target.key

    def set_reference(self, target: str, reference: Reference) -> None:
        with self._lock:
            if (known := self._targets.get(target)) is not None:
                self._targets[target] = replace(known, reference=tuple(reference.items()))

    def add_environment(self, environment: Environment) -> str:
        with self._lock:
            self._environments.setdefault(environment.key, environment)
        return environment.key

    def add_workload(self, workload: Workload) -> str:
        with self._lock:
            self._workloads.setdefault(workload.key, workload)
        return workload.key

    def target(self, key: str) -> Target | None:
        return self._targets.get(key)

    def targets(self) -> list[Target]:
        with self._lock:
            return [self._targets[key] for key in sorted(self._targets)]

    def environment(self, key: str) -> Environment | None:
        return self._environments.get(key)

    def environments(self) -> list[Environment]:
        with self._lock:
            return [self._environments[key] for key in sorted(self._environments)]

    def workload(self, key: str) -> Workload | None:
        return self._workloads.get(key)

    def workloads(self, target: str | None) -> list[Workload]:
        with self._lock:
            return self.known_workloads(self._workloads if target is None else self.measured(target))

    def measured(self, target: str, since: float | None = None) -> list[str]:
        with self._lock:
            return sorted(
                workload
                for (workload, key), records in self._by_task.items()
                if key == target and any(since is None or m.measured_at >= since for m in records.values())
            )

    def known_workloads(self, keys: Iterable[str]) -> list[Workload]:
        with self._lock:
            return [self._workloads[key] for key in sorted(set(keys)) if key in self._workloads]

    def _verify_known(self, table: str, known: Mapping[str, object], keys: Iterable[str]) -> None:
        for key in sorted(set(keys)):
            if key not in known:
                raise RefusedRecord(
                    f"{self.where}: expected {table} that were added before, got the unknown key {key!r}; add it first"
                )

    def _verify_task(self, workload: str, target: str) -> None:
        self._verify_known("targets", self._targets, [target])
        self._verify_known("workloads", self._workloads, [workload])

    # Measurements

    def add_measurements(self, batch: Iterable[Measurement]) -> int:
        new = verify_batch(batch)
        with self._lock:
            self._verify_known("targets", self._targets, (m.target for m in new.values()))
            self._verify_known("workloads", self._workloads, (m.workload for m in new.values()))
            environments = (m.environment for m in new.values() if m.environment)
            self._verify_known("environments", self._environments, environments)
            old = [id for id in new if id in self._measurements]
            verify_same_subjects(new, ((id, self._measurements[id].subject) for id in old), self.where)
            for id, measurement in new.items():
                if id not in self._measurements:
                    self._measurements[id] = stored = _copy(measurement)
                    self._by_task.setdefault((stored.workload, stored.target), {})[id] = stored
            return len(new) - len(old)

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
        with self._lock:
            records = sorted(self._matching(target, workload, status, kinds, symbols, regime), key=lambda m: m.id)
        return [_copy(m) for m in [m for m in records if since is None or m.measured_at >= since][:limit]]

    def measurements(self, ids: Iterable[str]) -> list[Measurement]:
        with self._lock:
            return [_copy(self._measurements[id]) for id in sorted(set(ids)) if id in self._measurements]

    def _matching(
        self,
        target: str,
        workload: str | None,
        status: Status | None,
        kinds: Sequence[VariantKind] | None,
        symbols: Mapping[str, int] | None,
        regime: Regime | None,
    ) -> Iterator[Measurement]:
        point = None if symbols is None else symbols_text(symbols)
        known = self._of_target(target) if workload is None else self._by_task.get((workload, target), {}).values()
        for m in known:
            if (
                (status is None or m.status == status)
                and (kinds is None or m.variant.kind in kinds)
                and (regime is None or m.regime == regime)
                and (point is None or symbols_text(m.symbols) == point)
            ):
                yield m

    def _of_target(self, target: str) -> list[Measurement]:
        return [m for task, records in self._by_task.items() if task[1] == target for m in records.values()]

    def count(
        self,
        target: str,
        workload: str | None = None,
        status: Status | None = None,
        regime: Regime | None = None,
    ) -> int:
        with self._lock:
            return sum(
                (workload is None or m.workload == workload)
                and (status is None or m.status == status)
                and (regime is None or m.regime == regime)
                for m in self._of_target(target)
            )

    def best(
        self, workload: str, target: str, symbols: Mapping[str, int], regime: Regime = "warm"
    ) -> Measurement | None:
        return next(iter(self.top(workload, target, symbols, 1, regime)), None)

    def top(
        self, workload: str, target: str, symbols: Mapping[str, int], n: int, regime: Regime = "warm"
    ) -> list[Measurement]:
        with self._lock:
            return [_copy(m) for m in best_of(self._matching(target, workload, "ok", None, symbols, regime), n)]

    def stats(self, target: str) -> TargetStats | None:
        with self._lock:
            known = self._targets.get(target)
            if known is None:
                return None
            records = self._of_target(target)
        counts = Counter((str(m.variant.kind), m.stage, m.checked) for m in records)
        return stats_of(known, len({m.workload for m in records}), ((*key, count) for key, count in counts.items()))

    def units(self, target: str) -> list[UnitStats]:
        with self._lock:
            records = self._of_target(target)
        places: dict[tuple[str, str, str], list[Measurement]] = {}
        for m in records:
            places.setdefault((m.worker, m.host, m.unit), []).append(m)
        return [
            UnitStats(*place, len(ms), sum(m.status == "failed" for m in ms), max(m.measured_at for m in ms))
            for place, ms in sorted(places.items())
        ]

    def tasks(self, target: str, jobs: Collection[str] | None = None) -> list[TaskStats]:
        with self._lock:
            records = [m for m in self._of_target(target) if jobs is None or m.job in jobs]
        tasks: dict[str, list[Measurement]] = {}
        for m in records:
            tasks.setdefault(m.workload, []).append(m)
        counts = [
            TaskStats(
                key,
                self._workloads[key].hint,
                len(ms),
                sum(m.status == "failed" for m in ms),
                max(m.measured_at for m in ms),
            )
            for key, ms in tasks.items()
        ]
        return sorted(counts, key=lambda t: (-t.last, t.workload))

    # Plans

    def put_plans(self, target: str, entries: Mapping[str, str]) -> list[PlanRecord]:
        firsts = [PlanRecord(workload, target, 1, entries[workload]) for workload in sorted(entries)]
        with self._lock:
            for plan in firsts:
                self._verify_task(plan.workload, target)
            current = []
            for plan in firsts:
                versions = self._plans.setdefault((plan.workload, target), {})
                current.append(plan_after(list(versions.values()), plan))
                versions[current[-1].origin, current[-1].version] = current[-1]
            return current

    def add_plans(self, batch: Iterable[PlanRecord]) -> int:
        plans = list(batch)
        with self._lock:
            for plan in plans:
                self._verify_task(plan.workload, plan.target)
            before = sum(len(versions) for versions in self._plans.values())
            for plan in plans:
                versions = self._plans.setdefault((plan.workload, plan.target), {})
                added = plan_to_add(list(versions.values()), plan)
                if added is not None:
                    versions[added.origin, added.version] = added
            return sum(len(versions) for versions in self._plans.values()) - before

    def plan(self, workload: str, target: str, version: int | None = None) -> PlanRecord | None:
        with self._lock:
            return choose_plan(self._plans.get((workload, target), {}).values(), version)

    def plans(self, target: str) -> list[PlanRecord]:
        with self._lock:
            tasks = sorted(task for task in self._plans if task[1] == target)
            return [self._plans[task][version] for task in tasks for version in sorted(self._plans[task])]

    # Leases

    def acquire_lease(self, workload: str, target: str, holder: str, *, secs: float) -> Lease | None:
        now = time.time()
        lease = Lease(workload, target, holder, now + secs)
        with self._lock:
            self._verify_task(workload, target)
            stored = self._leases.get((workload, target))
            # After a clock was set back, the lease would seem to last for long. A holder that is alive renews it in
            # time.
            if stored is not None and stored.holder != holder and stored.expires_at > now + secs:
                stored = self._leases[workload, target] = replace(stored, expires_at=now + secs)
            if stored is not None and stored.holder != holder and stored.expires_at > now:
                return None
            self._leases[workload, target] = lease
            return lease

    def renew_lease(self, lease: Lease, *, secs: float) -> Lease | None:
        renewed = replace(lease, expires_at=time.time() + secs)
        with self._lock:
            stored = self._leases.get((lease.workload, lease.target))
            if stored is None or stored.holder != lease.holder:
                return None
            self._leases[lease.workload, lease.target] = renewed
            return renewed

    def release_lease(self, lease: Lease) -> bool:
        with self._lock:
            stored = self._leases.get((lease.workload, lease.target))
            if stored is None or stored.holder != lease.holder:
                return False
            del self._leases[lease.workload, lease.target]
            return True

    def claim_trials(
        self, lease: Lease, requested: int, budget: int, spent: Mapping[str, Spent]
    ) -> tuple[Lease, int] | None:
        with self._lock:
            # Counted again under the lock: other jobs may have added records since the caller counted.
            if any(self.count(lease.target, k, regime=s.regime) != s.records for k, s in spent.items()):
                return None
            now = time.time()
            claims = {
                key: stored.trials
                for key in spent
                if (stored := self._leases.get((key, lease.target))) is not None
                and (stored.holder == lease.holder or stored.expires_at > now)
            }
            stored = self._leases.get((lease.workload, lease.target))
            if stored is None or stored.holder != lease.holder:
                return lease, 0
            granted = grant(lease.workload, requested, budget, spent, claims)
            claimed = replace(stored, trials=stored.trials + granted)
            self._leases[lease.workload, lease.target] = claimed
            return claimed, granted

    def settle_trials(self, lease: Lease, trials: int) -> Lease:
        settled = replace(lease, trials=max(0, lease.trials - trials))
        with self._lock:
            stored = self._leases.get((lease.workload, lease.target))
            if stored is not None and stored.holder == lease.holder:
                self._leases[lease.workload, lease.target] = settled
        return settled

    def lease(self, workload: str, target: str) -> Lease | None:
        return self._leases.get((workload, target))

    # Jobs and histograms

    def put_job(self, job: JobRecord) -> None:
        with self._lock:
            self._jobs[job.id] = job

    def job(self, id: str) -> JobRecord | None:
        return self._jobs.get(id)

    def jobs(self, state: JobState | None = None) -> list[JobRecord]:
        with self._lock:
            return [self._jobs[id] for id in sorted(self._jobs) if state is None or self._jobs[id].state == state]

    def put_histogram(self, histogram: ShapeHistogram) -> None:
        with self._lock:
            self._histograms[histogram.task, histogram.symbol] = histogram

    def histograms(self, task: str | None) -> list[ShapeHistogram]:
        with self._lock:
            return [self._histograms[key] for key in sorted(self._histograms) if task is None or key[0] == task]

    # Maintenance

    def prune(self, target: str, selection: Selection, *, dry_run: bool = False) -> int:
        with self._lock:
            going = [m for m in self._of_target(target) if selection.takes(m)]
            if not dry_run:
                for m in going:
                    del self._measurements[m.id]
                    del self._by_task[m.workload, m.target][m.id]
                # Reference times belong to records; a target without any may be measured on another unit.
                if going and not any(self._of_target(target)):
                    self.set_reference(target, {})
            return len(going)

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _copy(measurement: Measurement) -> Measurement:
    """Copy a measurement with its point, so that callers cannot change the stored one."""
    return replace(measurement, symbols=dict(measurement.symbols))
