"""The build: records to plans, plans and a lowered module to one `Program`.

It is a pure function of the module, the set of records, the policy and the target: no clock, no randomness, no
measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from relax_tune.database.records import Measurement, Regime
from relax_tune.errors import UserError
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.passes.memory.memory_plan import PlanMemory
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.runtime.model import choose_function
from relax_tune.runtime.program.host_program import HostProgram
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.emit.emit_graph import (
    GraphEmitter,
    LoweredFunction,
    RefusedVariant,
    choose_inplace,
    lowered_functions,
)
from relax_tune.tuner.emit.emit_host_program import emit_host_program
from relax_tune.tuner.emit.unmeasured import lacking_note
from relax_tune.tuner.learn.device_records import DeviceRecords, has_other_regime
from relax_tune.tuner.plan.layouts import LAYOUT_COST, PREDICTED_LAYOUT_COST, Fits, Layouts, loss, share_layouts
from relax_tune.tuner.plan.library_notes import library_notes
from relax_tune.tuner.plan.plans import TaskPlan, plan_from_stored, plan_task
from relax_tune.tuner.plan.predicted import UNTRAINED, Predictor
from relax_tune.tuner.plan.stored_plans import PlanSet
from relax_tune.tuner.program.prepack import PackingStep
from relax_tune.tuner.program.program_builder import ProgramBuilder
from relax_tune.tuner.settings import Memory, Policy
from relax_tune.tuner.task.variants import TaskVariants

RECORDLESS: tuple[Policy, ...] = ("predicted", "generic")
"""Policies that do not use records."""
Refused = Mapping[str, Mapping[str, str]]
"""By function, the keys of variants that are not dispatched, and why."""
MEMORY: Mapping[Memory, tuple[PlanMemory, bool]] = {
    "symbolic": (PlanMemory(), False),
    "constant": (PlanMemory(constant=True), False),
    "inplace": (PlanMemory(), True),
    "constant-inplace": (PlanMemory(constant=True), True),
}
"""How storages are planned, and whether outputs may take the memory of arguments."""


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        programs: One for every straight-line function, by name.
        plans: One for every task, by function.
        notes: What tasks lack, one sentence each.
        packings: Packing steps of each program's `prepare`.
        host_programs: One for each function with branches or calls.
        self_test: Its results (`relax_tune.tuner.job.self_test`); None if it did not run.
        quality: The choice of types for weights (`relax_tune.tuner.quality`); None without a bound on quality.
    """

    programs: Mapping[str, Program]
    plans: Mapping[str, TaskPlan]
    notes: tuple[str, ...]
    packings: Mapping[str, Sequence[PackingStep | None]]
    host_programs: tuple[HostProgram, ...] = ()
    self_test: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None

    @property
    def program(self) -> Program:
        """The program of `main`, or the only one.

        Raises:
            UserError: There are several, none of them `main`.
        """
        return choose_function(self.programs, None)


def build_programs(
    lowered: LoweredModule,
    task_variants: Mapping[str, TaskVariants],
    device_records: DeviceRecords,
    target: CodeTarget,
    policy: Policy = "measured",
    memory: Memory = "symbolic",
    stored: PlanSet | None = None,
    refused: Refused = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> BuildResult:
    """Plan every task and emit the program or host program of every graph function.

    Args:
        task_variants: By name of the tensor function in the module.
        memory: How storages are planned, and whether outputs take the memory of arguments that are not read later.
        stored: The plans of policy `stored`.
        refused: By function, keys of variants that are not dispatched, and why.
        predictor: Chooses candidates of tasks without records.

    Raises:
        BuildError: Every form of a function is refused.
    """
    planner, inplace = MEMORY[memory]
    # Each refusal removes one variant of a finite set, so the loop ends. It plans again instead of dropping the
    # variant from the finished plan, since the shapes that it was for must go to the variant that is next best there.
    while True:
        plans, notes = plan_tasks(task_variants, device_records, policy, stored, refused, predictor)
        if stored is None and policy in ("measured", "predicted") and target.language == "c":
            plan_within = partial(plan_with, plans, task_variants, device_records, policy, refused, predictor)
            plans = share_layouts(plans, lowered.module, Layouts(task_variants), plan_within)
        try:
            module, inplace_notes = choose_inplace(lowered.module, lowered.appended, task_variants, plans, inplace)
            functions = lowered_functions(lowered, module)
            programs, packings = emit_programs(functions, task_variants, plans, target, planner)
        except RefusedVariant as error:  # plan again without the variant that cannot be emitted
            without = {**refused.get(error.function, {}), error.key: error.why}
            refused = {**refused, error.function: without}
            continue
        host_programs = emit_host_programs(replace(lowered, module=module), programs)
        return BuildResult(programs, plans, (*notes, *inplace_notes), packings, host_programs)


def plan_tasks(
    task_variants: Mapping[str, TaskVariants],
    device_records: DeviceRecords,
    policy: Policy,
    stored: PlanSet | None,
    refused: Refused,
    predictor: Predictor,
) -> tuple[dict[str, TaskPlan], list[str]]:
    """Return the plan of every task by function, and notes on what the tasks lack."""
    plans: dict[str, TaskPlan] = {}
    notes = []
    for function, variants in task_variants.items():
        task, without = variants.task, refused.get(function, {})
        records = device_records.any_library(task.key, task.regime)
        valid = [r for r in records if device_records.counts(r)]
        # A stored plan is followed in spite of newer records, so that a build with it gives the same program again.
        if stored is None:
            plan = plan_task(variants, valid, policy, without, predictor)
        else:
            plan = plan_from_stored(variants, valid, *stored.plan(task.key), refused=without, predictor=predictor)
        notes += _notes(function, plan, valid, policy, task.regime)
        if policy not in RECORDLESS:
            notes += library_notes(function, variants, plan, records, device_records)
        plans[function] = plan
    return plans, notes


def plan_with(
    plans: Mapping[str, TaskPlan],
    task_variants: Mapping[str, TaskVariants],
    device_records: DeviceRecords,
    policy: Policy,
    refused: Refused,
    predictor: Predictor,
    function: str,
    fits: Fits,
) -> tuple[TaskPlan, float] | None:
    """Plan a function with the variants that fit; see `layouts.Restrict`."""
    plan, variants = plans[function], task_variants[function]
    exclude = refused.get(function, {})
    if plan.times:
        others = {k: "its weights have another layout" for k, v in plan.variants.items() if not fits(v)}
        if not any(None not in row for k, row in plan.times.items() if k not in others and k not in exclude):
            return None
        records = device_records.valid(variants.task.key, variants.task.regime)
        new = plan_task(variants, records, policy, {**exclude, **others}, predictor)
        return new, loss(new, plan, plan.times, variants) / LAYOUT_COST
    predicted = predictor.plan_within(variants, fits, exclude)
    if predicted is None:
        return None
    new = TaskPlan(*predicted, plan.times, plan.lost, predicted=frozenset(predicted[0].variants))
    times = predictor.times(variants, {**plan.variants, **new.variants})
    if not times.keys() >= {*plan.plan.variants, *new.plan.variants}:
        return None
    return new, loss(new, plan, times, variants) / PREDICTED_LAYOUT_COST


def emit_programs(
    functions: Sequence[LoweredFunction],
    task_variants: Mapping[str, TaskVariants],
    plans: Mapping[str, TaskPlan],
    target: CodeTarget,
    memory: PlanMemory,
) -> tuple[dict[str, Program], dict[str, tuple[PackingStep | None, ...]]]:
    """Emit the program of each straight-line function. Returns programs, and the packing steps of each, by name.

    Raises:
        RefusedVariant: A dispatched variant cannot be emitted.
    """
    programs, packings = {}, {}
    for lowered in functions:
        name = lowered.function.name
        builder = ProgramBuilder(name, target)
        programs[name] = GraphEmitter(lowered, task_variants, plans, builder, memory).run()
        packings[name] = tuple(builder.packings)
    return programs, packings


def emit_host_programs(lowered: LoweredModule, programs: Mapping[str, Program]) -> tuple[HostProgram, ...]:
    """Emit the functions with branches or calls, which call the programs of the others."""
    return tuple(
        emit_host_program(name, lowered.outlined, programs, name in lowered.entries, lowered.checks.get(name, ()))
        for name in lowered.host_functions
    )


def _notes(callee: str, plan: TaskPlan, records: Sequence[Measurement], policy: Policy, regime: Regime) -> list[str]:
    """List what a task lacks, one sentence each."""
    notes = []
    if policy not in RECORDLESS:
        if (lacking := lacking_note(callee, plan)) is not None:
            notes.append(lacking)
        elif not any(r.variant.kind == "tuned" for r in records):
            notes.append(f"{callee}: no tuned record for this device; run `relax-tune tune` to measure some")
        # Small tasks look faster with weights in the caches than they are within a model, whose other layers have
        # evicted them in the meantime.
        if plan.times and has_other_regime(regime, records):
            notes.append(
                f"{callee}: chosen by times with its weights in the caches, since none were measured with cold caches; run "
                "`relax-tune tune` to measure some, or build with `--caches warm`"
            )
    if plan.lost:
        why = next(iter(plan.lost.values()))
        notes.append(
            f"{callee}: {len(plan.lost)} of the kernels on record, each the fastest at some shape, can no longer be generated "
            f"({why:.200}); run `relax-tune tune` to measure others"
        )
    failures = [r for r in records if r.status == "failed" and r.variant.key in plan.plan.variants]
    if failures and plan.plan.variants[0] not in plan.times:
        why = f"{failures[0].stage}: {failures[0].message.splitlines()[0][:200]}"
        kind = plan.variants[plan.plan.variants[0]].kind
        notes.append(f"{callee}: the {kind} form is dispatched although it failed on this device ({why})")
    return notes


def check_policy(policy: str) -> Policy:
    """Return the policy.

    Raises:
        UserError: The policy is unknown.
    """
    if policy not in get_args(Policy):
        raise UserError(f"--policy expects one of {', '.join(get_args(Policy))}; got {policy!r}")
    return policy  # type: ignore[return-value]
