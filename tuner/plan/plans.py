"""Plans of tasks from records: the dispatched variants and their ranges."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.tuner.plan.predicted import UNTRAINED, Predictor
from relax_tune.tuner.plan.select import NOISE, DispatchPlan, PlanEntry, beyond, select, standard_error
from relax_tune.tuner.settings import Policy
from relax_tune.tuner.task.domain import Domain, Point, distance
from relax_tune.tuner.task.task import Choices
from relax_tune.tuner.task.unfused_variants import in_parts, routines_of

Shape = tuple[tuple[str, int], ...]
Samples = dict[str, dict[Shape, list[float]]]
"""Seconds by variant and shape."""

# Number and largest of the tile sizes whose remainders guards may test.
STEPS = 6
LARGEST_STEP = 256


@dataclass(frozen=True)
class TaskPlan:
    """The dispatch of a task: a plan over variant keys, the variants, and the times it was chosen from.

    lost: for each variant that would have been dispatched, the reason why it can no longer be made
    added: shapes besides the anchors that count, since a plan for the anchors was found slower there
    predicted: the dispatched variants that no record timed, but a prior or the rules predict to be fast
    """

    plan: DispatchPlan
    variants: Mapping[str, VariantRecord]
    times: Mapping[str, Sequence[float | None]]
    lost: Mapping[str, str] = field(default_factory=dict)
    added: tuple[Point, ...] = ()
    predicted: frozenset[str] = frozenset()


def times_of(
    choices: Choices, records: Sequence[Measurement]
) -> tuple[dict[str, list[float | None]], dict[str, VariantRecord]]:
    """Return median seconds by variant and anchor, over all samples of ok, checked records, and the variants by key.

    A variant that ever failed is left out.
    """
    samples, variants = pooled(records)
    found = timed(samples, choices.task.domain.points)
    times = {key: row for key, row in found.items() if any(t is not None for t in row)}
    return times, {key: variants[key] for key in times}


def timed(samples: Samples, points: Sequence[Point]) -> dict[str, list[float | None]]:
    """Return the median seconds of every variant at points."""
    shapes = [shape_of(p) for p in points]
    return {key: [statistics.median(own[s]) if s in own else None for s in shapes] for key, own in samples.items()}


def errors_of(samples: Samples, points: Sequence[Point]) -> dict[str, list[float | None]]:
    """Return the relative standard errors of the medians of `timed`."""
    shapes = [shape_of(p) for p in points]
    return {key: [standard_error(own[s]) if s in own else None for s in shapes] for key, own in samples.items()}


def shape_of(point: Point) -> Shape:
    """Return a point in the form of records."""
    return tuple(sorted((f"s{a}", x) for a, x in enumerate(point)))


def pooled(records: Sequence[Measurement]) -> tuple[Samples, dict[str, VariantRecord]]:
    """Return all samples of ok, checked records by variant and shape, without variants that ever failed."""
    samples: Samples = {}
    variants: dict[str, VariantRecord] = {}
    failed = _failures(records)
    for r in sorted(records, key=lambda r: r.id):
        if r.status != "ok" or not r.checked or r.variant.key in failed:
            continue
        if r.median_secs <= 0:
            continue  # below the clock's resolution
        variants[r.variant.key] = r.variant
        shape = tuple(sorted(r.symbols.items()))
        samples.setdefault(r.variant.key, {}).setdefault(shape, []).extend(r.samples_secs)
    return samples, variants


def _failures(records: Sequence[Measurement]) -> dict[str, str]:
    """Return why each variant failed that ever did, but for lost devices."""
    return {r.variant.key: r.message for r in records if r.status == "failed" and r.stage != "device-lost"}


def plan_task(
    choices: Choices,
    records: Sequence[Measurement],
    policy: Policy = "measured",
    refused: Mapping[str, str] = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> TaskPlan:
    """Choose variants for a task.

    Without usable records, or under the policy `predicted`, what a prior or else the rules predict is dispatched; the generic
    form or the library under the policy of that name.
    """
    times, variants = times_of(choices, records)
    samples, _ = pooled(records)
    domain = choices.task.domain
    allowed = {k for k, v in variants.items() if k not in refused and usable(choices, v)}
    if policy == "generic":
        allowed = {k for k in allowed if variants[k].kind == "generic"}
    elif policy == "predicted":
        allowed = set()
    elif policy == "library":
        of_library = {k for k in allowed if variants[k].kind == "library"}
        allowed = of_library or allowed
    lost: dict[str, str] = {}
    while True:
        if not any(None not in times[k] for k in allowed):
            # a device that got a kernel of this function wrong is not trusted with another unmeasured one
            if policy in ("measured", "stored", "predicted") and not refused:
                predicted = predictor.plan(choices, {r.variant.key for r in records if r.status == "failed"})
                if predicted is not None:
                    return TaskPlan(*predicted, times, lost, predicted=frozenset(predicted[0].variants))
            default = _default(choices, policy, refused)
            return TaskPlan(DispatchPlan((PlanEntry((), default.key),), 0.0), {default.key: default}, times, lost)
        kept = {k: samples[k] for k in sorted(allowed)}
        libraries = {k for k in kept if variants[k].kind == "library"}
        rows = timed(kept, domain.points)
        best = [min(t for row in rows.values() if (t := row[a]) is not None) for a in range(len(domain.points))]
        steps = _steps(rows, variants)
        plan, chosen_for = choose(kept, domain.timed(best), libraries, steps, choices.hardware.workers)
        broken = {k: why for k in plan.variants if (why := _obstacle(choices, variants[k])) is not None}
        if not broken:
            return TaskPlan(plan, variants, times, lost, chosen_for.points[len(domain.points) :])
        lost |= broken
        allowed -= set(broken)


REPORT = ". Report the function, which `relax-tune show` prints"


def _default(choices: Choices, policy: Policy, refused: Mapping[str, str]) -> VariantRecord:
    """Return the form without records: generic, or of a library under the policy `library` or if generic cannot be used."""

    def forms() -> Iterator[VariantRecord]:
        if policy == "library":
            yield from choices.of_libraries()
        yield choices.generic()
        if policy != "library":
            yield from choices.of_libraries()

    reasons: list[str] = []
    for form in forms():
        why = f"it failed the self-test: {refused[form.key]}" if form.key in refused else _obstacle(choices, form)
        if why is None:
            return form
        reasons.append(f"{form.kind} {form.sketch}: {why}")
    raise BuildError(
        f"{choices.task.name}: wanted a form with right results on this device, found none. {'; '.join(reasons)}"
        f"{REPORT if refused else ''}"
    )


def kept_plan(
    choices: Choices,
    records: Sequence[Measurement],
    plan: DispatchPlan,
    variants: Mapping[str, VariantRecord],
    refused: Mapping[str, str] = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> TaskPlan:
    """Return a plan as it was stored. If one of its variants cannot be made here any more, plan anew from records."""
    times, measured = times_of(choices, records)
    lost = {k: _obstacle(choices, v) or "its library is not here" for k, v in variants.items() if not _made(choices, v)}
    if lost or set(refused) & set(variants):
        chosen = plan_task(choices, records, refused=refused, predictor=predictor)
        return replace(chosen, lost={**chosen.lost, **lost})
    unseen = frozenset(k for k in plan.variants if k not in measured and variants[k].kind == "tuned")
    return TaskPlan(plan, {**measured, **variants}, times, predicted=unseen)


def _made(choices: Choices, variant: VariantRecord) -> bool:
    return usable(choices, variant) and _obstacle(choices, variant) is None


def choose(
    samples: Samples, domain: Domain, libraries: Collection[str], steps: Sequence[int] = (), workers: int = 1
) -> tuple[DispatchPlan, Domain]:
    """Choose the plan for a domain. Recorded shapes at which the plan is beaten join the domain."""
    while True:
        times, errors = timed(samples, domain.points), errors_of(samples, domain.points)
        plan = select(times, domain, errors, libraries, steps=steps, workers=workers)
        beaten = _beaten(plan, samples, domain)
        if not beaten:
            return plan, domain
        domain = _with(domain, beaten)


def _beaten(plan: DispatchPlan, samples: Samples, domain: Domain) -> tuple[Point, ...]:
    """Return the shapes besides the domain's points at which a dispatched variant was beaten beyond noise."""
    found = []
    for point in elsewhere(plan, samples, domain):
        shape = shape_of(point)
        own = samples[plan.choose(point)][shape]
        if any(shape in rival and slower(own, rival[shape]) for rival in samples.values()):
            found.append(point)
    return tuple(found)


def elsewhere(plan: DispatchPlan, samples: Samples, domain: Domain) -> list[Point]:
    """Return the shapes between the domain's points, excluding the points, at which the dispatched variant was timed."""
    shapes = {s for key in plan.variants for s in samples.get(key, ())}
    return [p for p in between(shapes, domain) if shape_of(p) in samples.get(plan.choose(p), ())]


def between(shapes: Collection[Shape], domain: Domain) -> list[Point]:
    """Select the shapes that lie between a domain's points, excluding the points."""
    symbols = len(domain.points[0])
    ends = [(min(p[a] for p in domain.points), max(p[a] for p in domain.points)) for a in range(symbols)]
    found = []
    for values in map(dict, shapes):
        if len(values) != symbols or any(f"s{a}" not in values for a in range(symbols)):
            continue
        point = tuple(values[f"s{a}"] for a in range(symbols))
        if point not in domain.points and all(low <= x <= top for x, (low, top) in zip(point, ends)):
            found.append(point)
    return sorted(found)


def slower(own: Sequence[float], rival: Sequence[float]) -> bool:
    """Return True if samples are slower than others beyond noise."""
    behind = math.log(statistics.median(own) / statistics.median(rival))
    return behind > max(math.log1p(NOISE), beyond(standard_error(own), standard_error(rival)))


def _with(domain: Domain, added: Sequence[Point]) -> Domain:
    """Add points to a domain, each with an equal part of the nearest point's weight."""
    nearest = [min(range(len(domain.points)), key=lambda a: (distance(domain.points[a], p), a)) for p in added]
    parts = [w / (1 + nearest.count(a)) for a, w in enumerate(domain.weights)]
    return Domain((*domain.points, *added), (*parts, *(parts[a] for a in nearest)))


def _steps(times: Mapping[str, Sequence[float | None]], variants: Mapping[str, VariantRecord]) -> tuple[int, ...]:
    """Return the few smallest tile sizes of the fastest variants. Multiples of these sizes may suit these variants."""
    fastest = set()
    for a in range(len(next(iter(times.values())))):
        fastest |= {min(((t, k) for k, row in times.items() if (t := row[a]) is not None), default=(0.0, ""))[1]}
    sizes = {x for k in fastest if k for x in variants[k].values.values() if 1 < x <= LARGEST_STEP}
    return tuple(sorted(sizes)[:STEPS])


def usable(choices: Choices, variant: VariantRecord) -> bool:
    """Return True if this version of the tool has such a variant on this machine."""
    try:
        if in_parts(variant):
            return routines_of(variant) <= {a.routine for a in choices.alternatives}
        if variant.kind == "library":
            return variant.key in {v.key for v in choices.library_variants()}
        if variant.kind == "generic":
            return variant.key == choices.generic().key
        return True  # whether a winner's trace still applies is seen when it is replayed
    except RelaxTuneError:
        return False


def _obstacle(choices: Choices, variant: VariantRecord) -> str | None:
    """Return why a variant's steps cannot be made, else None. Records may be older than the schedules."""
    try:
        choices.stages(variant)
    except RelaxTuneError as error:
        return str(error).splitlines()[0]
    return None
