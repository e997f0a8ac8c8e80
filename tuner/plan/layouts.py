"""The layouts that variants read weights in: a weight has one, unless a second one makes a function much faster.

A decoder's prefill and its step read the same weights. If each packs them into panels of another width, the artifact and the process
hold them twice.

Tests: `tests/tuner/plan/test_layouts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

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
Weights = Mapping[str, Mapping[int, set[str]]]
"""By function and number of its parameter, the names of the weights that calls give to it."""
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
            # By name, so that the other sketches are not generated for it.
            for sketch in variants.sketch_set.named(variant.sketch):
                if sketch.trace.to_json() == variant.trace:
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


def weights_of(module: IRModule) -> Weights:
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
    """Return plans in which the variants and functions that read the same weights read them in one layout, where that costs little time.

    Among functions that share weights, each layout of a dispatched variant is a candidate for all. A function that would lose more than the
    cost of a layout keeps its plan. The candidate with the least sum of losses and of costs of further layouts is chosen.
    """
    weights = {f: by for f, by in weights_of(module).items() if f in plans}
    chosen = dict(plans)
    for functions in _connected(weights):
        best, least = {}, float(_further(functions, plans, weights, layouts))
        for target in _candidates(functions, plans, weights, layouts) if least else ():
            moved, lost = dict[str, TaskPlan](), 0.0
            for function in functions:
                own = {n: target[w] for n, names in weights[function].items() for w in names if w in target}
                if all(_fits(layout, own) for layout in _dispatched(function, plans, layouts)):
                    continue
                restricted = restrict(function, partial(_variant_fits, layouts, function, own))
                if restricted is not None and restricted[1] < 1:
                    moved[function], lost = restricted[0], lost + max(0.0, restricted[1])
            total = lost + _further(functions, {**plans, **moved}, weights, layouts)
            if total < least:
                best, least = moved, total
        chosen |= best
    return chosen


def _connected(weights: Weights) -> list[list[str]]:
    """Return the functions in groups that share no weight with each other."""
    groups: list[tuple[list[str], set[str]]] = []
    for function in sorted(weights):
        names = set[str]().union(*weights[function].values())
        joined = [g for g in groups if g[1] & names]
        groups = [g for g in groups if not g[1] & names]
        groups.append(([f for g in joined for f in g[0]] + [function], names.union(*(g[1] for g in joined))))
    return [functions for functions, _ in groups]


def _further(functions: Sequence[str], plans: Mapping[str, TaskPlan], weights: Weights, layouts: Layouts) -> int:
    """Return the number of layouts of the weight that is read in most, without the first."""
    kernels: dict[str, set[str]] = {}
    for function in functions:
        for layout in _dispatched(function, plans, layouts):
            for number, names in weights[function].items():
                for name in names if number in layout else ():
                    kernels.setdefault(name, set()).add(layout[number])
    return max((len(names) - 1 for names in kernels.values()), default=0)


def _candidates(
    functions: Sequence[str], plans: Mapping[str, TaskPlan], weights: Weights, layouts: Layouts
) -> list[dict[str, str]]:
    """Return the layout of each weight by name, for each layout that a dispatched variant has."""
    candidates: list[dict[str, str]] = []
    for function in functions:
        for layout in _dispatched(function, plans, layouts):
            target = {w: layout[n] for n, names in weights[function].items() if n in layout for w in names}
            if target not in candidates:
                candidates.append(target)
    return candidates


def _dispatched(function: str, plans: Mapping[str, TaskPlan], layouts: Layouts) -> list[Layout]:
    plan = plans[function]
    dispatched = (layouts.of(function, plan.variants[key]) for key in plan.plan.variants)
    return [layout for layout in dispatched if layout is not None]


def _variant_fits(layouts: Layouts, function: str, target: Layout, variant: VariantRecord) -> bool:
    layout = layouts.of(function, variant)
    return layout is not None and _fits(layout, target)


def _fits(layout: Layout, target: Layout) -> bool:
    return all(layout.get(number) == kernel for number, kernel in target.items() if number in layout)


def loss(plan: TaskPlan, other: TaskPlan, times: Mapping[str, Sequence[float | None]], variants: TaskVariants) -> float:
    """Return by how much a plan is slower than another one, in weighted log time over the anchors."""
    domain = variants.task.domain
    total = 0.0
    for a, (point, weight) in enumerate(zip(domain.points, domain.weights)):
        mine, its = times[plan.plan.choose(point)][a], times[other.plan.choose(point)][a]
        total += weight * (math.log(mine / its) if mine and its else math.inf)
    return total / sum(domain.weights)
