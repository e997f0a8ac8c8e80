"""Rules that every store follows: which measurements may win, which plan is current, and the subject of an id.

Tests: `tests/database/test_store_contract.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from relax_tune.database.counts import TargetStats
from relax_tune.database.records import VERSION_LIMIT, Measurement, PlanRecord, Regime, Target
from relax_tune.errors import DatabaseError

# SQLite before 3.32 takes at most 999 parameters in a statement.
CHUNK = 500
LEASE_SECS = 60.0
"""Seconds for which jobs lease a task. A job renews its leases several times meanwhile."""
K = TypeVar("K")

ROW_TYPE_ERRORS = (TypeError, AttributeError, ValueError, OverflowError)
"""Exceptions of reading a row with values of wrong types: SQLite is dynamically typed."""


class RefusedRecord(DatabaseError):
    """A record breaks a rule of the store; the store itself is intact."""


def verify_batch(batch: Iterable[Measurement]) -> dict[str, Measurement]:
    """Return a batch by id. Of a repeated id, the first measurement stays.

    Raises:
        RefusedRecord: one id stands for two subjects within the batch.
    """
    by_id: dict[str, Measurement] = {}
    for measurement in batch:
        first = by_id.setdefault(measurement.id, measurement)
        if first is not measurement and first.subject != measurement.subject:
            raise _two_subjects(measurement, first.subject, "the batch")
    return by_id


def verify_same_subjects(
    new: Mapping[str, Measurement], stored: Iterable[tuple[str, tuple[str, ...]]], where: str
) -> None:
    """Check that each stored (id, subject) is the subject of the new measurement of that id.

    Raises:
        RefusedRecord: an id stands for two subjects: the caller's ids are not unique.
    """
    for id, subject in stored:
        if new[id].subject != subject:
            raise _two_subjects(new[id], subject, where)


def _two_subjects(measurement: Measurement, subject: tuple[str, ...], where: str) -> RefusedRecord:
    return RefusedRecord(
        f"measurement {measurement.id!r}: expected an id that stands for one workload, target, variant, point and regime, got "
        f"{subject} in {where} and {measurement.subject} to add; give each measurement its own id"
    )


@dataclass(frozen=True, slots=True)
class Spent:
    """The state of a task under a shared budget, as a job has read it.

    Attributes:
        records: Number of measurements of the task in `regime`.
        tried: Number of candidates among them.
        reserved: Candidates that the task gets in any case.
    """

    records: int
    regime: Regime
    tried: int
    reserved: int


def grant(workload: str, requested: int, budget: int, spent: Mapping[str, Spent], claims: Mapping[str, int]) -> int:
    """Return the candidates that the budget leaves for a workload, at most `requested`, after all claims.

    claims: candidates under measurement, by workload
    """
    others = sum(max(s.reserved, s.tried + claims.get(key, 0)) for key, s in spent.items() if key != workload)
    mine = spent[workload].tried + claims.get(workload, 0)
    return max(0, min(requested, max(budget - others, spent[workload].reserved) - mine))


def same_version(plan: PlanRecord, other: PlanRecord) -> bool:
    """Return True for plans of one task, origin and version: one of them can be stored."""
    same = (plan.workload, plan.target, plan.origin, plan.version)
    return same == (other.workload, other.target, other.origin, other.version)


def plan_after(known: Sequence[PlanRecord], plan: PlanRecord) -> PlanRecord:
    """Return the plan that becomes current: the current one if it has the same text, else the next version of this database.

    Version numbers saturate at VERSION_LIMIT, which only an altered database reaches.
    """
    current = choose_plan(known, None)
    if current is not None and current.entries == plan.entries:
        return current
    version = 1 + max((p.version for p in known if not p.origin), default=0)
    turn = 1 + max((p.turn for p in known), default=0)
    return replace(plan, version=min(version, VERSION_LIMIT), turn=min(turn, VERSION_LIMIT))


def plan_to_add(known: Sequence[PlanRecord], plan: PlanRecord) -> PlanRecord | None:
    """Return the row to store for a plan that is added under its own version; None if it is stored already.

    The turn of a plan of this database is its version. A plan of another database becomes current only if it has a turn.
    """
    last_turn = max((p.turn for p in known), default=0)
    stored = next((p for p in known if same_version(p, plan)), None)
    if plan.origin == "":
        return None if stored is not None else replace(plan, turn=plan.version)
    turn = last_turn + 1 if plan.turn else 0
    if stored is None:
        return replace(plan, turn=turn)
    return replace(stored, turn=turn) if turn and stored.entries == plan.entries else None


def choose_plan(known: Iterable[PlanRecord], version: int | None) -> PlanRecord | None:
    """Return the current plan of a task, or a version: of this database, else of the first origin that has it."""
    if version is None:
        return max((p for p in known if p.turn), key=lambda p: p.turn, default=None)
    return min((p for p in known if p.version == version), key=lambda p: p.origin, default=None)


def stats_of(target: Target, workloads: int, counts: Iterable[tuple[str, str | None, bool, int]]) -> TargetStats:
    """Return the counts of a target from those by kind, stage and check."""
    kinds: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    checked = 0
    for kind, stage, is_checked, count in counts:
        (kinds if stage is None else failures)[kind if stage is None else stage] += count
        checked += count if is_checked and stage is None else 0
    ok = kinds.total()
    measurements = ok + failures.total()
    return TargetStats(
        target, workloads, measurements, ok, checked, tuple(sorted(kinds.items())), tuple(sorted(failures.items()))
    )


def best_of(measurements: Iterable[Measurement], n: int) -> list[Measurement]:
    """Return the `n` best variants, each by its best ok and checked measurement, best first."""
    able = {m.id: m for m in measurements if m.status == "ok" and m.checked}
    return [able[id] for id in _rank([(m.median_secs, m.variant.key, m.id) for m in able.values()], n)]


def rank(stored: Iterable[tuple[str, str, float]], n: int) -> list[str]:
    """Return the ids that `best_of` selects, from (id, variant key, median seconds) of ok, checked measurements."""
    return _rank([(secs, variant, id) for id, variant, secs in stored], n)


def median_of(id: str, values: Any) -> float:
    """Return the median of a measurement's stored samples. Raises `DatabaseError` where they are no list of numbers."""
    if not isinstance(values, (list, tuple)) or not values or not all(type(value) in (int, float) for value in values):
        raise DatabaseError(f"measurements row {id!r:.80} samples: expected a list of seconds, got something else")
    return float(statistics.median(values))


def _rank(scored: list[tuple[float, str, str]], n: int) -> list[str]:
    """Return the id of the best measurement of each variant, best first.

    They are ordered by median, then content, so that ties do not depend on arrival.
    """
    if n < 0:
        raise DatabaseError(f"expected a number of variants >= 0, got {n}")
    best: dict[str, str] = {}
    for _, variant, id in sorted(scored):
        best.setdefault(variant, id)
    return list(best.values())[:n]


def chunks(keys: Sequence[K]) -> Iterator[Sequence[K]]:
    """Yield keys in parts of at most CHUNK, the number of parameters of one statement."""
    for start in range(0, len(keys), CHUNK):
        yield keys[start : start + CHUNK]
