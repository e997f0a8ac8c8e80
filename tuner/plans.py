"""Records to plans: which variants a task dispatches, and where (DESIGN 7)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_tune.database.records import Measurement
from relax_tune.database.records import Variant as VariantRecord
from relax_tune.errors import RelaxTuneError
from relax_tune.tuner.select import NOISE, Plan, PlanEntry, select
from relax_tune.tuner.settings import Policy
from relax_tune.tuner.task import Choices


@dataclass(frozen=True)
class TaskPlan:
    """What a task dispatches: the plan over variant keys, those variants, and the times it was chosen from. lost: why each variant
    that would have been dispatched cannot be made any more."""

    plan: Plan
    variants: Mapping[str, VariantRecord]
    times: Mapping[str, Sequence[float | None]]
    lost: Mapping[str, str] = field(default_factory=dict)


def times_of(
    choices: Choices, records: Sequence[Measurement]
) -> tuple[dict[str, list[float | None]], dict[str, VariantRecord]]:
    """The matrix of median seconds per variant and anchor over all samples of ok, checked records; a variant that ever failed
    is left out."""
    spots = {tuple(sorted(b.items())): a for a, b in enumerate(choices.task.bindings())}
    times: dict[str, list[float | None]] = {}
    samples: dict[tuple[str, int], list[float]] = {}
    variants: dict[str, VariantRecord] = {}
    failed = {r.variant.key for r in records if r.status == "failed" and r.stage != "device-lost"}
    for r in records:
        spot = spots.get(tuple(sorted(r.symbols.items())))
        if r.status != "ok" or not r.checked or spot is None or r.variant.key in failed:
            continue
        if r.median_secs <= 0:
            continue  # below the clock's resolution: nothing can be concluded
        variants[r.variant.key] = r.variant
        times.setdefault(r.variant.key, [None] * len(spots))
        samples.setdefault((r.variant.key, spot), []).extend(r.samples_secs)
    for (key, spot), pooled in samples.items():
        times[key][spot] = statistics.median(pooled)
    return times, variants


def plan_task(choices: Choices, records: Sequence[Measurement], policy: Policy = "measured") -> TaskPlan:
    """Choose variants for a task. Without usable records the generic form is dispatched everywhere, or the library where the
    policy asks for it."""
    times, variants = times_of(choices, records)
    allowed = {k for k, v in variants.items() if _usable(choices, v)}
    if policy == "generic":
        allowed = {k for k in allowed if variants[k].kind == "generic"}
    elif policy == "library":
        of_library = {k for k in allowed if variants[k].kind == "library"}
        allowed = of_library or allowed
    lost: dict[str, str] = {}
    while True:
        kept = {k: times[k] for k in sorted(allowed)}
        if not kept or not any(None not in row for row in kept.values()):
            asked = choices.library_variants()[:1] if policy == "library" else ()
            (default,) = asked or (choices.generic(),)
            return TaskPlan(Plan((PlanEntry((), default.key),), 0.0), {default.key: default}, times, lost)
        has_library = any(variants[k].kind == "library" for k in kept)
        handicap = {k: 1 + NOISE for k in kept if has_library and variants[k].kind != "library"}
        plan = select(kept, choices.task.domain, handicap)
        broken = {k: why for k in plan.variants if (why := _obstacle(choices, variants[k])) is not None}
        if not broken:
            return TaskPlan(plan, variants, times, lost)
        lost |= broken
        allowed -= set(broken)


def _usable(choices: Choices, variant: VariantRecord) -> bool:
    """Whether this version of the tool, on this machine, has such a variant at all."""
    try:
        if variant.kind == "library":
            return variant.key in {v.key for v in choices.library_variants()}
        if variant.kind == "generic":
            return variant.key == choices.generic().key
        return True  # whether a winner's trace still applies is seen when it is replayed
    except RelaxTuneError:
        return False


def _obstacle(choices: Choices, variant: VariantRecord) -> str | None:
    """Why a variant's steps cannot be made, where they cannot: records outlive the schedules they were made with."""
    try:
        choices.stages(variant)
    except RelaxTuneError as error:
        return str(error).splitlines()[0]
    return None
