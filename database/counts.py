"""Counts of stored records, as values."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.database.records import Target


@dataclass(frozen=True, slots=True)
class UnitStats:
    """Counts of the records that one worker made on one unit. last: Unix seconds of the newest, 0 if unknown"""

    worker: str
    host: str
    unit: str
    measurements: int
    failed: int
    last: float


@dataclass(frozen=True, slots=True)
class TargetStats:
    """Counts of the records of one target.

    workloads: distinct ones; ok, checked: ok measurements, and ok and checked ones; kinds: (variant kind, ok
    measurements); failures: (stage, failed measurements). Both lists are sorted by name; an absent name means 0.
    """

    target: Target
    workloads: int
    measurements: int
    ok: int
    checked: int
    kinds: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, int], ...]
