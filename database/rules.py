"""The rules every store follows, whatever it keeps its records in: what may win, what an id stands for, what may go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from relax_tune.database.records import Measurement
from relax_tune.errors import DatabaseError


class RefusedRecord(DatabaseError):
    """A record that breaks a rule of the store; the store itself is well."""


def winner_order(measurement: Measurement) -> tuple[float, str, str]:
    """Sort key of ok measurements, best first: median, then content, so that ties never depend on arrival."""
    return (measurement.median_secs, measurement.variant.key, measurement.id)


def verify_batch(batch: Iterable[Measurement]) -> dict[str, Measurement]:
    """A batch by id; of an id that comes twice, the first stays.

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


def best_of(measurements: Iterable[Measurement], n: int) -> list[Measurement]:
    """The `n` best variants, each by its best ok and checked measurement, best first."""
    if n < 0:
        raise DatabaseError(f"wanted a number of variants >= 0, found {n}")
    best: dict[str, Measurement] = {}
    for measurement in measurements:
        if measurement.status != "ok" or not measurement.checked:
            continue
        other = best.get(measurement.variant.key)
        if other is None or winner_order(measurement) < winner_order(other):
            best[measurement.variant.key] = measurement
    return sorted(best.values(), key=winner_order)[:n]


def prune_cutoff(older_than: float | None, failed: bool) -> float | None:
    """Check the conditions of a prune: at least one, and a sensible time.

    Raises:
        DatabaseError: neither was given: that would remove everything.
    """
    if older_than is None and not failed:
        raise DatabaseError("prune: wanted older_than or failed, found neither; say what may go")
    if older_than is not None and not (math.isfinite(older_than) and older_than >= 0):
        raise DatabaseError(f"prune older_than: wanted Unix seconds >= 0, found {older_than!r}")
    return older_than
