"""Validation of plans at shapes between the anchors: the choice of shapes and variants, and the results.

The contenders are the variants of a finished plan, and the fastest other variant of each kind that comes near. They are
checked and timed next to the bounds, at primes, and on both sides of each threshold. The answers are ordinary records.
A variant that is wrong there is excluded. A shape at which the plan is slower than another variant beyond noise joins
the shapes by which plans are chosen (`tuner/plan/plans`). That may bring in other variants and thresholds, so
validation repeats until no time is missing. A task is validated at VALIDATIONS x SHAPES shapes at most, for any number of
jobs on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_tune.database.records import VARIANT_KINDS, Measurement
from relax_tune.ir.core.expr import Var
from relax_tune.tuner.plan.plans import TaskPlan, between, plan_task, pooled, shape_of, timed_between
from relax_tune.tuner.plan.select import GuardTest, Times
from relax_tune.tuner.settings import Effort
from relax_tune.tuner.task.check import check_work
from relax_tune.tuner.task.domain import Point, distance
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.variants import TaskVariants

SHAPES: Mapping[Effort, int] = {"auto": 3, "quick": 3, "normal": 6, "full": 12}
"""Number of shapes at which a plan is validated, half of them at its thresholds."""
VALIDATIONS = 3
"""Validations of a task in total: a plan that was chosen again may have other thresholds or variants."""
NEAR = 2.0
"""Factor on the best time: a variant slower than that at every anchor is no contender."""
CHECKED_WORK = 1 << 28
"""Loop iterations of the reference up to which outputs are compared; larger shapes are timed only."""


def validation_shapes(task: Task, plan: TaskPlan, count: int) -> tuple[Point, ...]:
    """Return up to `count` shapes, from thresholds and from between the anchors."""
    known = set(task.domain.points)
    borders = [p for p in dict.fromkeys(_borders(task, plan)) if p not in known and task.allows(p)]
    others = [p for p in task.domain.others if p not in known and p not in borders]
    # At least half of the shapes lie between the anchors, even if there are many thresholds.
    left = max(count - len(borders), count - count // 2)
    return tuple((others[:left] + borders)[:count])


def _borders(task: Task, plan: TaskPlan) -> Iterator[Point]:
    """Yield the last shape of each threshold and the first beyond it, for symbols that vary independently.

    At a threshold of a product of symbols it is a shape on the line between the points around it.
    """
    points = task.domain.points
    symbols = len(task.func.symbols)
    free = symbols == 1 or any(len({v for v in site if isinstance(v, Var)}) == symbols for site in task.sites)
    for entry in plan.plan.entries:
        for test, _ in entry.tests:
            if test.modulus or not free:
                continue
            if len(test.axes) > 1:
                yield from shapes_on_product(points, test)
                continue
            (axis,) = test.axes
            values = [p[axis] for p in points]
            for value in (test.threshold, test.threshold + 1):
                if min(values) <= value <= max(values):
                    moved = [(*p[:axis], value, *p[axis + 1 :]) for p in points]
                    yield min(zip(moved, points), key=lambda m: (distance(*m), m))[0]


def shapes_on_product(points: Sequence[Point], test: GuardTest) -> Iterator[Point]:
    """Yield a shape at the threshold of a product of all symbols, on the line between the points around it."""
    below = [p for p in points if test.holds(p) and min(p) >= 1]
    above = [p for p in points if not test.holds(p)]
    if not below or not above:
        return
    low, high = max(below, key=math.prod), min(above, key=math.prod)
    share = math.log(max(test.threshold, 1) / math.prod(low)) / math.log(math.prod(high) / math.prod(low))
    # Geometric interpolation: the product of the dims is then about the threshold.
    yield tuple(round(a ** (1 - share) * b**share) for a, b in zip(low, high, strict=True))


def unvalidated(
    task_variants: TaskVariants, records: Sequence[Measurement], effort: Effort
) -> dict[str, tuple[Point, ...]]:
    """Return the shapes that contenders still lack, by variant.

    Contenders are the variants that the plan dispatches, and the fastest other one of each kind.
    """
    plan = plan_task(task_variants, records)
    if not plan.times or not task_variants.task.domain.points[0]:
        return {}
    _, variants = pooled(records)
    contenders = [k for k in plan.plan.variants if k in plan.times]
    rest = {k: row for k, row in plan.times.items() if k not in contenders}
    for kind in VARIANT_KINDS:
        if fastest := _best(
            {k: row for k, row in rest.items() if variants[k].kind == kind}, plan.times, task_variants.task
        ):
            contenders.append(fastest)
    shapes = validation_shapes(task_variants.task, plan, SHAPES[effort])
    asked = {(r.variant.key, tuple(sorted(r.symbols.items()))) for r in records}
    looked = between({shape for _, shape in asked}, task_variants.task.domain)
    # A limit on all validations of a task: each may change the plan, whose new thresholds ask for new shapes.
    room = max(VALIDATIONS * SHAPES[effort] - len(looked), 0)
    new = [p for p in shapes if p not in looked][room:]
    shapes = tuple(p for p in shapes if p not in new)
    lacking = {k: tuple(p for p in shapes if (k, shape_of(p)) not in asked) for k in contenders}
    return {k: points for k, points in lacking.items() if points}


def _best(rows: Times, times: Times, task: Task) -> str | None:
    """Return the fastest variant with all times; None if no such variant is near the best at any anchor."""
    near, ranked = False, []
    for key, row in rows.items():
        if None in row:
            continue
        known = [t for t in row if t is not None]
        best = [min(t for other in times.values() if (t := other[a]) is not None) for a in range(len(known))]
        near = near or any(t < NEAR * b for t, b in zip(known, best))
        ranked.append((sum(w * math.log(t) for w, t in zip(task.domain.weights, known)), key))
    return min(ranked)[1] if near else None


def checkable(task: Task, points: Sequence[Point]) -> list[Point]:
    """Return the shapes whose outputs are compared with the reference."""
    return [p for p in points if check_work(task, p) <= CHECKED_WORK]


@dataclass(frozen=True, slots=True)
class Validation:
    """The results of a plan at shapes between the anchors.

    Attributes:
        shapes: Number of shapes at which it was timed.
        worst: Largest ratio of the dispatched variant's time to the best time at these shapes.
        added: Shapes for which the plan was chosen again.
        wrong: Number of variants with wrong outputs.
    """

    shapes: int
    worst: float | None
    added: tuple[Point, ...]
    wrong: int


def validation_of(task_variants: TaskVariants, plan: TaskPlan, records: Sequence[Measurement]) -> Validation:
    """Summarise how the plan compares with the times between its points."""
    samples, _ = pooled(records)
    behind = []
    for point in timed_between(plan.plan, samples, task_variants.task.domain):
        samples_of_plan = samples[plan.plan.choose(point)][shape_of(point)]
        rivals = [s for other in samples.values() if (s := other.get(shape_of(point))) is not None]
        behind.append(statistics.median(samples_of_plan) / min(map(statistics.median, rivals)))
    wrong = {r.variant.key for r in records if r.stage == "wrong-result"}
    return Validation(len(behind), max(behind, default=None), plan.added, len(wrong))
