"""Notes of a build on recorded library times that it cannot use: the library is missing, or in another state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_tune.database.records import Measurement
from relax_tune.runtime.library.registry import how_to_install
from relax_tune.tuner.learn.device_records import DeviceRecords, libraries_of
from relax_tune.tuner.plan.plans import TaskPlan, times_of
from relax_tune.tuner.task.variants import TaskVariants

# Gain by a missing library, as a fraction of the time, that is worth a note.
WORTH_SAYING = 0.01


def library_notes(
    callee: str,
    task_variants: TaskVariants,
    plan: TaskPlan,
    records: Sequence[Measurement],
    device_records: DeviceRecords,
) -> list[str]:
    """List the library times that the plan of a task could not use: the library is missing, or its state differs.

    Args:
        records: All records of the task; the plan uses the valid ones.
    """
    passed_over: dict[str, list[Measurement]] = {}
    for r in records:
        for name in libraries_of(r.variant):
            if not device_records.has_library_of(r, name):
                passed_over.setdefault(name, []).append(r)
    notes = []
    for name, unusable in sorted(passed_over.items()):
        if name in device_records.libraries:
            notes += _stale(callee, task_variants, name, unusable, records, device_records)
        elif (gain := _gain(task_variants, plan, unusable)) >= WORTH_SAYING:
            notes.append(
                f"{callee}: the library {name!r} is not installed; by its times on record for this device the task would take "
                f"{100 * gain:.0f} % less time with it; {how_to_install(name)}"
            )
    return notes


def _stale(
    callee: str,
    task_variants: TaskVariants,
    name: str,
    unusable: Sequence[Measurement],
    records: Sequence[Measurement],
    device_records: DeviceRecords,
) -> list[str]:
    """Return notes on variants that were timed with another state of an installed library, but not with the present one."""
    available = {v.key for v in (*task_variants.library.variants, *task_variants.unfused.variants)}
    anchors = [dict(b) for b in task_variants.task.bindings()]
    current = [r for r in records if device_records.counts(r)]
    failed = {r.variant.key for r in current if r.status == "failed"}
    known = {(r.variant.key, tuple(sorted(r.symbols.items()))) for r in current if r.status == "ok" and r.checked}
    missed = [
        r
        for r in unusable
        if r.variant.key in available - failed
        and r.symbols in anchors
        and (r.variant.key, tuple(sorted(r.symbols.items()))) not in known
    ]
    if not missed:
        return []
    then = sorted(
        {_differing(device_records.recorded_libraries(r).get(name), device_records.libraries[name]) for r in missed}
    )
    return [
        f"{callee}: the library {name!r} was timed with {' and with '.join(then)}, so those times are not used; "
        "`relax-tune tune` times it again"
    ]


def _differing(then: str | None, now: str) -> str:
    """Describe how a recorded fingerprint differs from the present one."""
    if then is None:
        return f"a version that was not recorded (here {now})"
    old, new = then.split("; "), now.split("; ")
    return f"{'; '.join(x for x in old if x not in new)} (here {'; '.join(x for x in new if x not in old)})"


def _gain(task_variants: TaskVariants, plan: TaskPlan, unusable: Sequence[Measurement]) -> float:
    """Return the fraction of the dispatched time that the fastest variant of some records would save.

    It is a geometric mean over the domain; 0 if a dispatched variant has no time.
    """
    rows, _ = times_of(task_variants, unusable)
    domain, total = task_variants.task.domain, 0.0
    for a, (point, weight) in enumerate(zip(domain.points, domain.weights)):
        row = plan.times.get(plan.plan.choose(point))
        mine = None if row is None else row[a]
        if mine is None:
            return 0.0
        theirs = [t for r in rows.values() if (t := r[a]) is not None]
        total += weight * math.log(min(mine, *theirs) / mine) if theirs else 0.0
    return 1 - math.exp(total)
