"""Counts of stored records, as values.

Tests: `tests/database/test_store_contract.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.database.records import Target


@dataclass(frozen=True, slots=True)
class UnitStats:
    """Counts of the measurements of one worker on one unit.

    Attributes:
        last: Unix seconds of the newest measurement; 0 if unknown.
    """

    worker: str
    host: str
    unit: str
    measurements: int
    failed: int
    last: float


@dataclass(frozen=True, slots=True)
class TargetStats:
    """Counts of the records of one target.

    Attributes:
        workloads: Number of distinct workloads.
        ok: Number of ok measurements.
        checked: Number of ok and checked measurements.
        kinds: (variant kind, ok measurements), by name; a missing kind has none.
        failures: (stage, failed measurements), by name; a missing stage has none.
    """

    target: Target
    workloads: int
    measurements: int
    ok: int
    checked: int
    kinds: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Counts of the measurements of one workload on one target.

    Attributes:
        hint: Name of the workload.
        last: Unix seconds of the newest measurement; 0 if unknown.
    """

    workload: str
    hint: str
    measurements: int
    failed: int
    last: float
