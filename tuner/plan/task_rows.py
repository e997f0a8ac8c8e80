"""A summary of each task of a model: calls, costs, trials, and the dispatched variants.

Everything comes from records and plans; nothing is measured, so a report needs only a database.
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
from relax_tune.tuner.task.task import Choices, Task
from relax_tune.tuner.task.unfused_variants import in_parts

KINDS = ("tuned", "library", "generic")


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Best median seconds of each kind of variant at one shape (None: not measured), and the dispatched variant.

    shape: the task's symbols in the model's terms, by name
    """

    shape: dict[str, int]
    tuned: float | None
    library: float | None
    generic: float | None
    dispatched: str


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A summary of one task of a model.

    secs: seconds of its calls in one run of the model with the dispatched variants, weighted over the tuned range
    share: fraction of the sum over all tasks; it and secs are None when a dispatched variant has no time
    trials, failed: tuned candidates on record, and the number of them without a usable time
    dispatch: the plan as (range, variant), the first match counts
    validation: results of the plan at shapes between the timed ones
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
    for axis, own in enumerate(task.func.symbols):
        meanings = list(dict.fromkeys(str(site[axis]) for site in task.sites))
        labels.append(meanings[0].replace(" ", "") if len(meanings) == 1 else own.name)
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

    names: variant key -> its text
    """
    lines = []
    for entry in entries:
        most: dict[str, int] = {}
        least: dict[str, int] = {}
        remainders = []
        for test, wanted in entry.tests:
            text = _quantity(test, labels)
            if test.modulus:
                remainders.append(f"{text} {'==' if wanted else '!='} {test.threshold}")
            elif wanted:
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
    choices: Mapping[str, Choices], plans: Mapping[str, TaskPlan], records: Mapping[str, Sequence[Measurement]]
) -> tuple[TaskRow, ...]:
    """Return a row per task, the costliest first. The arguments are by name of the tensor function.

    records: measurements on the plans' device
    """
    rows = [_row(choices[name], plans[name], records[name]) for name in choices]
    total = sum(r.secs or 0.0 for r in rows)
    known = total > 0 and all(r.secs is not None for r in rows)
    shared = [
        TaskRow(**{**_fields(r), "share": r.secs / total if known and r.secs is not None else None}) for r in rows
    ]
    return tuple(sorted(shared, key=lambda r: (-(r.secs or 0.0), r.name)))


def _fields(row: TaskRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TaskRow.__slots__}


def _row(choices: Choices, task_plan: TaskPlan, records: Sequence[Measurement]) -> TaskRow:
    task = choices.task
    points, weights, labels = task.domain.points, task.domain.weights, symbol_labels(task)
    times, variants = times_of(choices, records)
    chosen = [task_plan.plan.choose(point) for point in points]
    costs = [times[key][a] if key in times else None for a, key in enumerate(chosen)]
    secs = None
    if all(c is not None for c in costs):
        secs = len(task.sites) * sum(w * c for w, c in zip(weights, costs) if c is not None)
    names = {key: dispatched_text(task_plan, key) for key in task_plan.variants}
    kinds = {key: kind_of(task_plan, key) for key in task_plan.variants}

    def best(kind: str, a: int) -> float | None:
        return min((t for k in times if variants[k].kind == kind and (t := times[k][a]) is not None), default=None)

    order = sorted(range(len(points)), key=lambda a: (math.prod(max(x, 1) for x in points[a]), points[a]))
    shown = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
    shapes = tuple(
        ShapeTimes(
            dict(zip(labels, points[a])),
            best("tuned", a),
            best("library", a),
            best("generic", a),
            kinds.get(chosen[a], "generic"),
        )
        for a in shown
    )
    tried = {r.variant.key for r in records if r.variant.kind == "tuned" and not in_parts(r.variant)}
    usable = {k for k, v in variants.items() if v.kind == "tuned"}
    dispatch = dispatch_ranges(task_plan.plan.entries, labels, names)
    found = validation_of(choices, task_plan, records)
    failed = len(tried - usable)
    return TaskRow(task.name, task.key, len(task.sites), secs, None, len(tried), failed, shapes, dispatch, found)
