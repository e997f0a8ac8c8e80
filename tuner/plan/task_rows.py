"""A summary of each task of a model: calls, costs, trials, and the dispatched variants.

Everything comes from records and plans, so a report needs only a database. Tests: `tests/tuner/cli/test_report_table.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.tuner.plan.plans import TaskPlan, times_of
from relax_tune.tuner.plan.select import GuardTest, PlanEntry
from relax_tune.tuner.plan.validation import Validation, validation_of
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.unfused_variants import in_parts
from relax_tune.tuner.task.variants import TaskVariants

KINDS = ("tuned", "library", "generic")


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Best median seconds of each kind of variant at one shape (None: not measured), and the dispatched variant.

    Attributes:
        shape: Value of each symbol of the task, labelled in the model's terms.
    """

    shape: dict[str, int]
    tuned: float | None
    library: float | None
    generic: float | None
    dispatched: str


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A summary of one task of a model.

    Attributes:
        secs: Seconds of its calls in one run of the model with the dispatched variants, weighted over the tuned range; None if a
            dispatched variant has no time.
        share: Fraction of the sum over all tasks; None if any `secs` is None.
        trials: Tuned candidates on record.
        failed: Candidates of these without a usable time.
        dispatch: The plan as (range, variant); the first match applies.
        validation: Results of the plan at shapes between the timed ones.
    """

    name: str
    key: str
    calls: int
    secs: float | None
    share: float | None
    trials: int
    failed: int
    shapes: tuple[ShapeTimes, ...]
    dispatch: tuple[tuple[str, str], ...]
    validation: Validation

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def symbol_labels(task: Task) -> tuple[str, ...]:
    """Return a label for each symbol of a task: the model's expression when all call sites agree, else its own name."""
    labels = []
    for axis, symbol in enumerate(task.func.symbols):
        meanings = list(dict.fromkeys(str(site[axis]) for site in task.sites))
        labels.append(meanings[0].replace(" ", "") if len(meanings) == 1 else symbol.name)
    return tuple(labels)


def variant_text(variant: VariantRecord) -> str:
    """Describe a variant in a few words: its kind, its sketch or routine, its parameters."""
    values = ",".join(f"{name}={value}" for name, value in variant.values.items())
    named = f"{variant.kind} {variant.sketch}" if variant.sketch and variant.kind != "generic" else variant.kind
    return f"{named} ({values})" if values and variant.kind == "tuned" else named


def kind_of(plan: TaskPlan, key: str) -> str:
    """Return the kind of a variant of a plan: `predicted` if nothing timed it."""
    return "predicted" if key in plan.predicted else plan.variants[key].kind


def dispatched_text(plan: TaskPlan, key: str) -> str:
    """Describe a variant of a plan in a few words."""
    return ("predicted, " if key in plan.predicted else "") + variant_text(plan.variants[key])


def dispatch_ranges(
    entries: Sequence[PlanEntry], labels: Sequence[str], names: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return a plan as (range, variant), tried from first to last: `b*n <= 90` tuned ..., `else` library ...

    Args:
        names: Text of each variant by key.
    """
    lines = []
    for entry in entries:
        most: dict[str, int] = {}
        least: dict[str, int] = {}
        remainders = []
        for test, outcome in entry.tests:
            text = _quantity(test, labels)
            if test.modulus:
                remainders.append(f"{text} {'==' if outcome else '!='} {test.threshold}")
            elif outcome:
                most[text] = min(test.threshold, most.get(text, test.threshold))
            else:
                least[text] = max(test.threshold, least.get(text, test.threshold))
        parts = [f"{text} <= {limit}" for text, limit in most.items()]
        parts += [f"{text} > {limit}" for text, limit in least.items()]
        parts += dict.fromkeys(remainders)
        where = " and ".join(parts) or ("else" if len(entries) > 1 else "always")
        lines.append((where, names.get(entry.variant, entry.variant[:12])))
    return tuple(lines)


def _quantity(test: GuardTest, labels: Sequence[str]) -> str:
    """Write the quantity of a test as a Python expression."""
    text = _product(test.axes, labels)
    if test.divisor > 1:
        text = f"-(-({text})//{test.divisor})"
    elif test.modulus and not text.isidentifier():
        text = f"({text})"
    return f"{text} % {test.modulus}" if test.modulus else text


def _product(axes: Sequence[int], labels: Sequence[str]) -> str:
    texts = [labels[a] for a in axes]
    if len(texts) > 1:
        texts = [t if t.replace("*", "").isidentifier() else f"({t})" for t in texts]
    return "*".join(texts)


def task_rows(
    task_variants: Mapping[str, TaskVariants],
    plans: Mapping[str, TaskPlan],
    records: Mapping[str, Sequence[Measurement]],
) -> tuple[TaskRow, ...]:
    """Return a row per task, the costliest first. The arguments are by name of the tensor function.

    Args:
        records: Measurements on the device of the plans.
    """
    rows = [_row(task_variants[name], plans[name], records[name]) for name in task_variants]
    total = sum(r.secs or 0.0 for r in rows)
    known = total > 0 and all(r.secs is not None for r in rows)
    shared = [
        TaskRow(**{**_fields(r), "share": r.secs / total if known and r.secs is not None else None}) for r in rows
    ]
    return tuple(sorted(shared, key=lambda r: (-(r.secs or 0.0), r.name)))


def shape_times(
    task_variants: TaskVariants,
    task_plan: TaskPlan,
    times: Mapping[str, Sequence[float | None]],
    variants: Mapping[str, VariantRecord],
) -> list[ShapeTimes]:
    """Return the best times at each anchor of a task. times, variants: as `times_of` gives them"""
    labels = symbol_labels(task_variants.task)

    def best(kind: str, a: int) -> float | None:
        return min((t for k in times if variants[k].kind == kind and (t := times[k][a]) is not None), default=None)

    rows = []
    for a, point in enumerate(task_variants.task.domain.points):
        kind = kind_of(task_plan, task_plan.plan.choose(point))
        best_here = best("tuned", a), best("library", a), best("generic", a)
        rows.append(ShapeTimes(dict(zip(labels, point)), *best_here, kind))
    return rows


def dispatched(task_plan: TaskPlan, labels: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return a plan as (range, variant), tried from first to last."""
    names = {key: dispatched_text(task_plan, key) for key in task_plan.variants}
    return dispatch_ranges(task_plan.plan.entries, labels, names)


def _fields(row: TaskRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TaskRow.__slots__}


def _row(task_variants: TaskVariants, task_plan: TaskPlan, records: Sequence[Measurement]) -> TaskRow:
    task = task_variants.task
    points, weights = task.domain.points, task.domain.weights
    times, variants = times_of(task_variants, records)
    chosen = [task_plan.plan.choose(point) for point in points]
    costs = [times[key][a] if key in times else None for a, key in enumerate(chosen)]
    secs = None
    if all(c is not None for c in costs):
        secs = len(task.sites) * sum(w * c for w, c in zip(weights, costs) if c is not None)
    order = sorted(range(len(points)), key=lambda a: (math.prod(max(x, 1) for x in points[a]), points[a]))
    shown = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
    at = shape_times(task_variants, task_plan, times, variants)
    shapes = tuple(at[a] for a in shown)
    tried = {r.variant.key for r in records if r.variant.kind == "tuned" and not in_parts(r.variant)}
    usable = {k for k, v in variants.items() if v.kind == "tuned"}
    dispatch = dispatched(task_plan, symbol_labels(task))
    validation = validation_of(task_variants, task_plan, records)
    failed = len(tried - usable)
    return TaskRow(task.name, task.key, len(task.sites), secs, None, len(tried), failed, shapes, dispatch, validation)
