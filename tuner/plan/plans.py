"""Plans of tasks from records: the dispatched variants and their ranges."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.errors import (
    BuildError,
    RelaxTuneError,
    ScheduleError,
    UnexpectedErrorWarning,
    left_out,
    warn_unexpected,
)
from relax_tune.tuner.plan.predicted import UNTRAINED, Predictor
from relax_tune.tuner.plan.select import NOISE, DispatchPlan, PlanEntry, beyond, select, standard_error
from relax_tune.tuner.settings import Policy
from relax_tune.tuner.task.domain import Domain, Point, distance
from relax_tune.tuner.task.unfused_variants import in_parts, routines_of
from relax_tune.tuner.task.variants import TaskVariants

Shape = tuple[tuple[str, int], ...]
Samples = dict[str, dict[Shape, list[float]]]
"""Seconds by variant and shape."""

# Most tile sizes whose remainders guards may test, and the largest such size.
STEPS = 6
LARGEST_STEP = 256


@dataclass(frozen=True)
class TaskPlan:
    """The dispatch of a task: a plan over variant keys, the variants, and the times it was chosen from.

    Attributes:
        lost: Variants that would have been dispatched but can no longer be generated, and why.
        added: Shapes that count in addition to the anchors, since a plan for the anchors was slower there.
        predicted: Dispatched variants without a time, which a prior or the rules predict to be fast.
    """

    plan: DispatchPlan
    variants: Mapping[str, VariantRecord]
    times: Mapping[str, Sequence[float | None]]
    lost: Mapping[str, str] = field(default_factory=dict)
    added: tuple[Point, ...] = ()
    predicted: frozenset[str] = frozenset()


def times_of(
    task_variants: TaskVariants, records: Sequence[Measurement]
) -> tuple[dict[str, list[float | None]], dict[str, VariantRecord]]:
    """Return median seconds by variant and anchor, over all samples of ok, checked records, and the variants by key.

    Samples and variants of `failed_variants` are left out.
    """
    samples, variants = pooled(records)
    medians = timed(samples, task_variants.task.domain.points)
    times = {key: row for key, row in medians.items() if any(t is not None for t in row)}
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
    """Return all samples of ok, checked records by variant and shape, without samples of `failed_variants`."""
    samples: Samples = {}
    variants: dict[str, VariantRecord] = {}
    failed = failed_variants(records)
    # By id, so that the order in which records arrived has no influence on the samples.
    for r in sorted(records, key=lambda r: r.id):
        if r.status != "ok" or not r.checked or r.variant.key in failed:
            continue
        if r.median_secs <= 0:
            continue  # below the clock's resolution
        variants[r.variant.key] = r.variant
        shape = tuple(sorted(r.symbols.items()))
        samples.setdefault(r.variant.key, {}).setdefault(shape, []).extend(r.samples_secs)
    return samples, variants


def failed_variants(records: Sequence[Measurement], lost: bool = False) -> dict[str, str]:
    """Return why each variant failed that may not be dispatched.

    A variant is left out if it failed on two units, or on more units than have only measured it correctly: in a database of many
    machines, one broken or dishonest unit must not decide for all. A unit that measured a variant correctly once and failed another time
    counts as failed. Every build compares the dispatched kernels with the reference on its own unit.

    Args:
        lost: count devices lost, too. They are no fault of a variant that is known to work.
    """
    failing: dict[str, set[tuple[str, str]]] = {}
    correct: dict[str, set[tuple[str, str]]] = {}
    why: dict[str, str] = {}
    for r in records:
        unit = (r.host, r.unit)
        # A lost device says more about the device than about the variant that ran then.
        if r.status == "failed" and (lost or r.stage != "device-lost"):
            failing.setdefault(r.variant.key, set()).add(unit)
            why[r.variant.key] = r.message
        elif r.status == "ok" and r.checked:
            correct.setdefault(r.variant.key, set()).add(unit)
    return {
        key: why[key]
        for key, units in failing.items()
        # Two units that fail prove a fault of the variant. A single one may be faulty itself, if other units have
        # right results.
        if len(units) > 1 or len(units) > len(correct.get(key, set()) - units)
    }


def plan_task(
    task_variants: TaskVariants,
    records: Sequence[Measurement],
    policy: Policy = "measured",
    refused: Mapping[str, str] = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> TaskPlan:
    """Choose variants for a task.

    Without usable records, or under the policy `predicted`, the variants that a prior or else the rules predict are dispatched;
    under the policies `generic` and `library`, the generic form or a library call.

    Args:
        refused: Keys of variants that may not be dispatched, and why.
    """
    times, variants = times_of(task_variants, records)
    samples, _ = pooled(records)
    domain = task_variants.task.domain
    allowed = {k for k, v in variants.items() if k not in refused and usable(task_variants, v)}
    if policy == "generic":
        allowed = {k for k in allowed if variants[k].kind == "generic"}
    elif policy == "predicted":
        allowed = set()
    elif policy == "library":
        of_library = {k for k in allowed if variants[k].kind == "library"}
        allowed = of_library or allowed
    lost: dict[str, str] = {}
    # Until all chosen variants can be generated: only the chosen ones are tried, since generating one takes long.
    while True:
        # Some variant needs a time at every anchor, as the last entry of a plan that covers what the others leave.
        if not any(None not in times[k] for k in allowed):
            # After a wrong result of this function the device is not trusted with another unmeasured kernel.
            if policy in ("measured", "stored", "predicted") and not refused:
                predicted = None
                with left_out("the prediction", task_variants.task.name, ScheduleError):
                    predicted = predictor.plan(task_variants, failed_variants(records, lost=True))
                if predicted is not None:
                    return TaskPlan(*predicted, times, lost, predicted=frozenset(predicted[0].variants))
            default = _default(task_variants, policy, refused)
            return TaskPlan(DispatchPlan((PlanEntry((), default.key),), 0.0), {default.key: default}, times, lost)
        usable_samples = {k: samples[k] for k in sorted(allowed)}
        libraries = {k for k in usable_samples if variants[k].kind == "library"}
        rows = timed(usable_samples, domain.points)
        best = [min(t for row in rows.values() if (t := row[a]) is not None) for a in range(len(domain.points))]
        steps = _steps(rows, variants)
        # Weights by time, not by calls: the selection compares ratios of times (`Domain.timed`).
        plan, chosen_for = choose(usable_samples, domain.timed(best), libraries, steps, task_variants.hardware.workers)
        broken = {k: why for k in plan.variants if (why := _obstacle(task_variants, variants[k])) is not None}
        if not broken:
            return TaskPlan(plan, variants, times, lost, chosen_for.points[len(domain.points) :])
        lost |= broken
        allowed -= set(broken)


REPORT = ". Report the function, which `relax-tune show` prints"


def _default(task_variants: TaskVariants, policy: Policy, refused: Mapping[str, str]) -> VariantRecord:
    """Return the variant to dispatch without records: generic, or a library call if the policy or a refusal demands it."""

    def libraries() -> tuple[VariantRecord, ...]:
        with left_out("the library forms", task_variants.task.name):
            return task_variants.calling_libraries()
        return ()

    def forms() -> Iterator[VariantRecord]:
        if policy == "library":
            yield from libraries()
        with left_out("the generic form", task_variants.task.name):
            yield task_variants.sketch_set.generic()
        if policy != "library":
            yield from libraries()

    reasons: list[str] = []
    for form in forms():
        why = refused[form.key] if form.key in refused else _obstacle(task_variants, form)
        if why is None:
            return form
        reasons.append(f"{form.kind} {form.sketch}: {why}")
    raise BuildError(
        f"{task_variants.task.name}: no form has right results on this device. {'; '.join(reasons)}"
        f"{REPORT if refused else ''}"
    )


def plan_from_stored(
    task_variants: TaskVariants,
    records: Sequence[Measurement],
    plan: DispatchPlan,
    variants: Mapping[str, VariantRecord],
    refused: Mapping[str, str] = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> TaskPlan:
    """Return a stored plan, or a new plan from records if one of its variants can no longer be generated here."""
    times, measured = times_of(task_variants, records)
    lost = {
        k: _obstacle(task_variants, v) or "its library is not installed"
        for k, v in variants.items()
        if not _is_available(task_variants, v)
    }
    if lost or set(refused) & set(variants):
        chosen = plan_task(task_variants, records, refused=refused, predictor=predictor)
        return replace(chosen, lost={**chosen.lost, **lost})
    untimed = frozenset(k for k in plan.variants if k not in measured and variants[k].kind == "tuned")
    return TaskPlan(plan, {**measured, **variants}, times, predicted=untimed)


def _is_available(task_variants: TaskVariants, variant: VariantRecord) -> bool:
    return usable(task_variants, variant) and _obstacle(task_variants, variant) is None


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
    """Return the shapes off the domain's points at which a dispatched variant was slower than another beyond noise."""
    beaten = []
    for point in timed_between(plan, samples, domain):
        shape = shape_of(point)
        own = samples[plan.choose(point)][shape]
        if any(shape in rival and slower(own, rival[shape]) for rival in samples.values()):
            beaten.append(point)
    return tuple(beaten)


def timed_between(plan: DispatchPlan, samples: Samples, domain: Domain) -> list[Point]:
    """Return the shapes strictly between the domain's points at which the dispatched variant was timed."""
    shapes = {s for key in plan.variants for s in samples.get(key, ())}
    return [p for p in between(shapes, domain) if shape_of(p) in samples.get(plan.choose(p), ())]


def between(shapes: Collection[Shape], domain: Domain) -> list[Point]:
    """Select the shapes that lie between a domain's points and are none of them."""
    symbols = len(domain.points[0])
    ends = [(min(p[a] for p in domain.points), max(p[a] for p in domain.points)) for a in range(symbols)]
    inside = []
    for values in map(dict, shapes):
        if len(values) != symbols or any(f"s{a}" not in values for a in range(symbols)):
            continue
        point = tuple(values[f"s{a}"] for a in range(symbols))
        if point not in domain.points and all(low <= x <= top for x, (low, top) in zip(point, ends)):
            inside.append(point)
    return sorted(inside)


def slower(own: Sequence[float], rival: Sequence[float]) -> bool:
    """Return True if samples are slower than others beyond noise."""
    behind = math.log(statistics.median(own) / statistics.median(rival))
    return behind > max(math.log1p(NOISE), beyond(standard_error(own), standard_error(rival)))


def _with(domain: Domain, added: Sequence[Point]) -> Domain:
    """Add points to a domain, each with an equal part of the nearest point's weight."""
    nearest = [min(range(len(domain.points)), key=lambda a: (distance(domain.points[a], p), a)) for p in added]
    # The total stays 1: a neighbourhood that was timed more often is not served more often.
    parts = [w / (1 + nearest.count(a)) for a, w in enumerate(domain.weights)]
    return Domain((*domain.points, *added), (*parts, *(parts[a] for a in nearest)))


def _steps(times: Mapping[str, Sequence[float | None]], variants: Mapping[str, VariantRecord]) -> tuple[int, ...]:
    """Return the smallest tile sizes of the fastest variants, whose multiples may suit these variants."""
    fastest = set()
    for a in range(len(next(iter(times.values())))):
        fastest |= {min(((t, k) for k, row in times.items() if (t := row[a]) is not None), default=(0.0, ""))[1]}
    # A variant may be fast just at multiples of its tile sizes, where no tile is incomplete.
    sizes = {x for k in fastest if k for x in variants[k].values.values() if 1 < x <= LARGEST_STEP}
    return tuple(sorted(sizes)[:STEPS])


def usable(task_variants: TaskVariants, variant: VariantRecord) -> bool:
    """Return True if this version of the tool has such a variant on this machine."""
    try:
        if in_parts(variant):
            return routines_of(variant) <= {a.routine for a in task_variants.alternatives}
        if variant.kind == "library":
            return variant.key in {v.key for v in task_variants.library.variants}
        if variant.kind == "generic":
            return variant.key == task_variants.sketch_set.generic().key
        return True  # a replay will tell whether the trace still applies
    except RelaxTuneError:
        return False
    except UnexpectedErrorWarning:
        raise
    except Exception as error:
        warn_unexpected(f"the {variant.kind} variant {variant.sketch}", task_variants.task.name, error)
        return False


def _obstacle(task_variants: TaskVariants, variant: VariantRecord) -> str | None:
    """Return why a variant cannot be generated, else None. Records may be older than the schedule rules."""
    try:
        task_variants.stages(variant)
    except RelaxTuneError as error:
        return str(error).splitlines()[0]
    return None
