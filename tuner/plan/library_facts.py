"""The validity of recorded library times on this machine, and notes of a build on invalid ones.

A time of a library belongs to its version and settings, so it counts only where the library has the recorded
fingerprint. Our kernels depend only on the device and its compiler, which the target's fingerprint covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_tune.database.records import Measurement, Regime, VariantRecord
from relax_tune.database.store import Store
from relax_tune.runtime.library.registry import how_to_install
from relax_tune.tuner.plan.plans import TaskPlan, times_of
from relax_tune.tuner.plan.regimes import records_for
from relax_tune.tuner.task.task import Choices
from relax_tune.tuner.task.unfused_variants import routines_of

# Gain of a missing library, as a fraction of the time, from which a note mentions it.
WORTH_SAYING = 0.01


def libraries_of(variant: VariantRecord) -> frozenset[str]:
    """Return the libraries that a variant calls."""
    return frozenset(routine.split(".")[0] for routine in routines_of(variant))


@dataclass(frozen=True, eq=False)
class LibraryFacts:
    """The validity of records for the present libraries.

    here: name and fingerprint of each, as `library_facts` writes them.
    """

    store: Store
    here: Mapping[str, str]
    _known: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def recorded(self, record: Measurement) -> Mapping[str, str]:
        """Return the fingerprint of each library that a record was made with; empty for records that do not say."""
        key = record.environment
        if key and key not in self._known:
            found = self.store.environment(key)
            self._known[key] = {} if found is None else dict(found.facts)
        return self._known.get(key, {})

    def counts(self, record: Measurement) -> bool:
        """Return True if a record holds for the libraries of this machine."""
        return all(self.same(record, name) for name in libraries_of(record.variant))

    def records(self, target: str, workload: str, regime: Regime) -> list[Measurement]:
        """Return the records that stand for a workload in a regime, those of libraries in another state too."""
        return records_for(self.store, target, workload, regime, self.counts)

    def same(self, record: Measurement, name: str) -> bool:
        """Return True if a library is present in the state of a record."""
        return name in self.here and self.recorded(record).get(name) == self.here[name]


def library_notes(
    callee: str, choices: Choices, plan: TaskPlan, records: Sequence[Measurement], facts: LibraryFacts
) -> list[str]:
    """List the library times that the plan of a task could not use: the library is missing, or its state differs.

    records: all records of the task; the plan was made from the valid ones
    """
    passed_over: dict[str, list[Measurement]] = {}
    for r in records:
        for name in libraries_of(r.variant):
            if not facts.same(r, name):
                passed_over.setdefault(name, []).append(r)
    notes = []
    for name, found in sorted(passed_over.items()):
        if name in facts.here:
            notes += _stale(callee, choices, name, found, records, facts)
        elif (gain := _gain(choices, plan, found)) >= WORTH_SAYING:
            notes.append(
                f"{callee}: the library {name!r} is not here; by its times on record for this device the task would take "
                f"{100 * gain:.0f} % less time with it; {how_to_install(name)}"
            )
    return notes


def _stale(
    callee: str,
    choices: Choices,
    name: str,
    found: Sequence[Measurement],
    records: Sequence[Measurement],
    facts: LibraryFacts,
) -> list[str]:
    """Return notes on forms without a time of the present library that have a time of another state of it."""
    made = {v.key for v in (*choices.library_variants(), *choices.variants_in_parts())}
    anchors = [dict(b) for b in choices.task.bindings()]
    current = [r for r in records if facts.counts(r)]
    failed = {r.variant.key for r in current if r.status == "failed"}
    known = {(r.variant.key, tuple(sorted(r.symbols.items()))) for r in current if r.status == "ok" and r.checked}
    missed = [
        r
        for r in found
        if r.variant.key in made - failed
        and r.symbols in anchors
        and (r.variant.key, tuple(sorted(r.symbols.items()))) not in known
    ]
    if not missed:
        return []
    then = sorted({_differing(facts.recorded(r).get(name), facts.here[name]) for r in missed})
    return [
        f"{callee}: the library {name!r} was timed with {' and with '.join(then)}, so those times are not used; "
        "`relax-tune tune` times it again"
    ]


def _differing(then: str | None, now: str) -> str:
    """Describe the difference between a recorded fingerprint and the present one."""
    if then is None:
        return f"a version that was not recorded (here {now})"
    old, new = then.split("; "), now.split("; ")
    return f"{'; '.join(x for x in old if x not in new)} (here {'; '.join(x for x in new if x not in old)})"


def _gain(choices: Choices, plan: TaskPlan, found: Sequence[Measurement]) -> float:
    """Return the fraction of the dispatched time that the fastest of some variants would save.

    It is a geometric mean over the domain; 0 where the dispatched variants have no times.
    """
    rows, _ = times_of(choices, found)
    domain, total = choices.task.domain, 0.0
    for a, (point, weight) in enumerate(zip(domain.points, domain.weights)):
        row = plan.times.get(plan.plan.choose(point))
        mine = None if row is None else row[a]
        if mine is None:
            return 0.0
        theirs = [t for r in rows.values() if (t := r[a]) is not None]
        total += weight * math.log(min(mine, *theirs) / mine) if theirs else 0.0
    return 1 - math.exp(total)
