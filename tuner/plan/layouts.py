"""The layouts that variants read weights in: a weight has one, unless a second one makes a function much faster.

A decoder's prefill and its step read the same weights. If each packs them into panels of its own width, the artifact and the process
hold them twice.

Tests: `tests/tuner/plan/test_layouts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import CallTIR, Constant
from relax_tune.ir.core.graph_walk import nested_values
from relax_tune.runtime.program.program import LaunchStep, Program
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.task.variants import TaskVariants

LAYOUT_COST = 0.03
"""Gain in weighted log time of a function that justifies another layout of its weights."""
PREDICTED_LAYOUT_COST = 0.18
"""The same where times are predicted: predictions are less sure than measurements, as for `predicted.LEAF_COST`."""

Layout = Mapping[int, str]
"""By number of a function's parameter, the name of the kernel that packs it; empty for a weight that is read as it is."""
Fits = Callable[[VariantRecord], bool]
Restrict = Callable[[str, Fits], "tuple[TaskPlan, float] | None"]
"""Plans a function with the variants that fit; returns the plan and the loss in weighted log time over the cost of a layout."""


@dataclass
class Layouts:
    """Layouts of variants. Variants that differ in nothing that layouts depend on share one, since code takes long to generate."""

    task_variants: Mapping[str, TaskVariants]
    _known: dict[Hashable, Layout | None] = field(default_factory=dict)

    def of(self, function: str, variant: VariantRecord) -> Layout | None:
        """Return the layout of a variant; None if its code cannot be generated."""
        variants = self.task_variants[function]
        key = function, *self._group(variants, variant)
        if key not in self._known:
            try:
                self._known[key] = layout_of(variants.program(variant))
            except BuildError:
                self._known[key] = None
        return self._known[key]

    def _group(self, variants: TaskVariants, variant: VariantRecord) -> tuple[Hashable, ...]:
        if variant.kind == "tuned":
            for sketch in variants.sketch_set.sketches:
                if sketch.name == variant.sketch and sketch.trace.to_json() == variant.trace:
                    return sketch.name, *(variant.values.get(n) for n in sketch.layout_tunables)
        return (variant.key,)


def layout_of(program: Program) -> Layout:
    """Return the layout in which a variant's program (`candidate_program`) reads each weight of more than one dim."""
    numbers = {
        i: int(b.name.removeprefix("p"))
        for i, b in enumerate(program.buffers)
        if b.role == "const" and len(b.shape) > 1
    }
    packed = {numbers[i]: _name(step) for step in program.prepare for i in step.buffers if i in numbers}
    return {number: packed.get(number, "") for number in numbers.values()}


def _name(step: LaunchStep) -> str:
    return f"{step.target}{step.scalars if step.kind == 'library' else ''}"


def weights_of(module: IRModule) -> dict[str, dict[int, set[str]]]:
    """Return the names of the weights that calls give to each parameter of the tensor functions."""
    weights: dict[str, dict[int, set[str]]] = {}
    for f in module.graphs.values():
        for value in nested_values(f):
            if isinstance(value, CallTIR):
                for number, argument in enumerate(value.args):
                    if isinstance(argument, Constant):
                        weights.setdefault(value.callee, {}).setdefault(number, set()).add(argument.name)
    return weights


def share_layouts(
    plans: Mapping[str, TaskPlan], module: IRModule, layouts: Layouts, restrict: Restrict
) -> dict[str, TaskPlan]:
    """Return plans in which functions that read the same weights read them in one layout, where that costs little time.

    Each step gives one function the layout of another one, or of one of its own variants: the step that loses least. A function is
    planned again at most once.
    """
    weights = weights_of(module)
    chosen, fixed = dict(plans), set[str]()
    while True:
        options = []
        for function in sorted(weights.keys() & chosen.keys() - fixed):
            for wanted in _other_layouts(function, chosen, weights, layouts):
                found = restrict(function, lambda v, f=function, w=wanted: _fits(layouts.of(f, v), w))  # type: ignore[misc]
                if found is not None and found[1] <= 1:
                    options.append((found[1], function, found[0]))
        if not options:
            return chosen
        _, function, plan = min(options, key=lambda option: option[:2])
        chosen[function] = plan
        fixed.add(function)


def _fits(layout: Layout | None, wanted: Layout) -> bool:
    return layout is not None and all(layout.get(number) == kernel for number, kernel in wanted.items())


def _other_layouts(
    function: str,
    plans: Mapping[str, TaskPlan],
    weights: Mapping[str, Mapping[int, set[str]]],
    layouts: Layouts,
) -> Iterator[Layout]:
    """Yield each layout that the function's weights would need no other than: of its variants where they differ, and of others."""
    own = list(_dispatched(function, plans, layouts))
    seen = list[Layout]()
    for other in sorted(weights.keys() & plans.keys()):
        for layout in own if other == function else _dispatched(other, plans, layouts):
            wanted = {
                n: layout[m]
                for n, names in weights[function].items()
                for m, others in weights[other].items()
                if names & others and m in layout
            }
            if wanted and wanted not in seen and not all(_fits(mine, wanted) for mine in own):
                seen.append(wanted)
                yield wanted


def _dispatched(function: str, plans: Mapping[str, TaskPlan], layouts: Layouts) -> Iterator[Layout]:
    plan = plans[function]
    for key in plan.plan.variants:
        layout = layouts.of(function, plan.variants[key])
        if layout is not None:
            yield layout


def loss(plan: TaskPlan, other: TaskPlan, times: Mapping[str, Sequence[float | None]], variants: TaskVariants) -> float:
    """Return by how much a plan is slower than another one, in weighted log time over the anchors."""
    domain = variants.task.domain
    total = 0.0
    for a, (point, weight) in enumerate(zip(domain.points, domain.weights)):
        mine, its = times[plan.plan.choose(point)][a], times[other.plan.choose(point)][a]
        total += weight * (math.log(mine / its) if mine and its else math.inf)
    return total / sum(domain.weights)
