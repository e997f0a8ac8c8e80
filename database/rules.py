"""The rules that every store follows: which measurements may win, and the subject of an id."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_tune.database.records import Measurement, Regime, parse_json
from relax_tune.errors import DatabaseError


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
        f"measurement {measurement.id!r}: wanted an id that stands for one workload, target, variant, point and regime, found "
        f"{subject} in {where} and {measurement.subject} to add; give each measurement an id of its own"
    )


@dataclass(frozen=True, slots=True)
class Spent:
    """The state of a task under a shared budget, as a job has read it.

    records: measurements of the task, of this regime; tried: candidates among them; kept: candidates that the task gets
    in any case
    """

    records: int
    regime: Regime
    tried: int
    kept: int


def grant(workload: str, wanted: int, budget: int, spent: Mapping[str, Spent], claims: Mapping[str, int]) -> int:
    """Return the candidates that the budget leaves for a workload, at most `wanted`, after all claims.

    claims: candidates under measurement, by workload
    """
    others = sum(max(s.kept, s.tried + claims.get(key, 0)) for key, s in spent.items() if key != workload)
    mine = spent[workload].tried + claims.get(workload, 0)
    return max(0, min(wanted, max(budget - others, spent[workload].kept) - mine))


def best_of(measurements: Iterable[Measurement], n: int) -> list[Measurement]:
    """Return the `n` best variants, each by its best ok and checked measurement, best first."""
    able = {m.id: m for m in measurements if m.status == "ok" and m.checked}
    return [able[id] for id in _rank([(m.median_secs, m.variant.key, m.id) for m in able.values()], n)]


def rank(stored: Iterable[tuple[str, str, str]], n: int) -> list[str]:
    """Return the ids that `best_of` selects, for (id, variant key, samples as JSON text) of ok, checked measurements.

    Raises:
        DatabaseError: samples that are not a list of numbers.
    """
    scored = []
    for id, variant, samples in stored:
        values = parse_json(samples, f"measurements row {id!r} samples")
        if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
            raise DatabaseError(f"measurements row {id!r} samples: wanted a list of seconds, found something else")
        scored.append((statistics.median(values), variant, id))
    return _rank(scored, n)


def _rank(scored: list[tuple[float, str, str]], n: int) -> list[str]:
    """Return the id of the best measurement of each variant, best first.

    They are ordered by median, then content, so that ties do not depend on arrival.
    """
    if n < 0:
        raise DatabaseError(f"wanted a number of variants >= 0, found {n}")
    best: dict[str, str] = {}
    for _, variant, id in sorted(scored):
        best.setdefault(variant, id)
    return list(best.values())[:n]
