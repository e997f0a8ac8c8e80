"""The records that count for a device: its own as far as they are valid, and records of similar devices.

A time of a library counts only where the library has the recorded fingerprint. Generated kernels depend on the device and its
compiler only, which the target's fingerprint covers. Records of similar devices influence what is tried; they never count as
times of this device.

Tests: `tests/tuner/plan/test_library_notes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from relax_tune.database.records import Measurement, Regime, Target, VariantRecord
from relax_tune.database.store import Store
from relax_tune.tuner.task.unfused_variants import routines_of


@dataclass(frozen=True, eq=False)
class DeviceRecords:
    """The records in a store that count for one device.

    Attributes:
        libraries: Name and fingerprint of each library on the device, as `library_facts` writes them.
    """

    store: Store
    target: Target
    libraries: Mapping[str, str]
    _environments: dict[str, Mapping[str, str]] = field(default_factory=dict, init=False)

    def valid(self, workload: str, regime: Regime) -> list[Measurement]:
        """Return the records that stand for a workload, without times of libraries in another state."""
        return [r for r in self.any_library(workload, regime) if self.counts(r)]

    def any_library(self, workload: str, regime: Regime) -> list[Measurement]:
        """Return the records that stand for a workload, with times of libraries in other states."""
        return records_in_regime(self.store, self.target.key, workload, regime, self.counts)

    def counts(self, record: Measurement) -> bool:
        """Return True if a record holds for the libraries of this machine."""
        return all(self.has_library_of(record, name) for name in libraries_of(record.variant))

    def has_library_of(self, record: Measurement, name: str) -> bool:
        """Return True if a library is installed in the state that a record was measured with."""
        return name in self.libraries and self.recorded_libraries(record).get(name) == self.libraries[name]

    def recorded_libraries(self, record: Measurement) -> Mapping[str, str]:
        """Return the fingerprint of each library that a record was measured with; empty if the record names none."""
        key = record.environment
        if key and key not in self._environments:
            environment = self.store.environment(key)
            self._environments[key] = {} if environment is None else dict(environment.facts)
        return self._environments.get(key, {})


def libraries_of(variant: VariantRecord) -> frozenset[str]:
    """Return the libraries that a variant calls."""
    return frozenset(routine.split(".")[0] for routine in routines_of(variant))


def similar_targets(store: Store, device: Target) -> list[Target]:
    """Return the targets of a device's kind, most similar first: by the number of facts and limits they share.

    A target with the key of the device comes first.
    """
    facts = {*device.fingerprint, *device.limits, ("name", device.name)}

    def rank(other: Target) -> tuple[bool, int, str]:
        shared = facts & {*other.fingerprint, *other.limits, ("name", other.name)}
        # The key last, for a fixed choice among equally similar devices.
        return other.key != device.key, -len(shared), other.key

    return sorted((t for t in store.targets() if t.kind == device.kind), key=rank)


def records_in_regime(
    store: Store, target: str, workload: str, regime: Regime, counts: Callable[[Measurement], bool] = lambda _: True
) -> list[Measurement]:
    """Return the records that stand for a workload in a cache regime.

    Records of the regime stand for it, unless its warm records have times of a better kind: a model may have been tuned
    before its settings asked for other caches, and those times are better than none. Failures in the regime always count.

    Args:
        counts: Test for records that are valid on this machine.
    """
    records = store.query(target, workload, regime=regime)
    if regime == "warm":
        return records
    worth = _worth(records, counts)
    # Tuned variants have times in the regime that was asked for, so times of the other regime add nothing.
    if worth == _TUNED:
        return records
    warm = store.query(target, workload, regime="warm")
    return records if _worth(warm, counts) <= worth else [*(r for r in records if r.status == "failed"), *warm]


def has_other_regime(regime: Regime, records: Sequence[Measurement]) -> bool:
    """Return True if times among the records that stand for a regime are of another one."""
    return any(r.status == "ok" and r.regime != regime for r in records)


_NOTHING, _TIMED, _TUNED = 0, 1, 2


def _worth(records: Sequence[Measurement], counts: Callable[[Measurement], bool]) -> int:
    timed = [r for r in records if r.status == "ok" and r.checked and r.median_secs > 0 and counts(r)]
    if any(r.variant.kind == "tuned" for r in timed):
        return _TUNED
    return _TIMED if timed else _NOTHING
