"""The build: records to plans, plans and a lowered module to one `Program`.

It is a pure function of the module, the set of records, the policy and the target: no clock, no randomness, no
measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from relax_tune.tuner.emit.emit_graph import GraphEmitter, choose_inplace
from relax_tune.tuner.emit.emit_host_program import emit_host_program
from relax_tune.tuner.plan.library_facts import LibraryFacts, library_notes
from relax_tune.tuner.plan.plans import TaskPlan, kept_plan, plan_task
from relax_tune.tuner.plan.predicted import UNTRAINED, Predictor
from relax_tune.tuner.plan.regimes import stands_in
from relax_tune.tuner.plan.stored_plans import PlanSet
from relax_tune.tuner.program.prepack import PackingStep
from relax_tune.tuner.program.program_builder import ProgramBuilder
from relax_tune.tuner.settings import Memory, Policy
from relax_tune.tuner.task.task import Choices

RECORDLESS: tuple[Policy, ...] = ("predicted", "generic")
"""Policies that are not better with records."""
MEMORY: Mapping[Memory, tuple[PlanMemory, bool]] = {
    "symbolic": (PlanMemory(), False),
    "constant": (PlanMemory(constant=True), False),
    "inplace": (PlanMemory(), True),
    "constant-inplace": (PlanMemory(constant=True), True),
}
"""The plan of storages, and whether outputs may take the memory of arguments."""


@dataclass(frozen=True)
class BuildResult:
    """The result of a build: programs, plans and notes.

    programs: one for every straight-line function
    plans: one for every task
    notes: for each task, what it lacked
    packings: the packing steps of each program's `prepare`
    host_programs: one for each function with branches or calls
    self_test: its results (`relax_tune.tuner.job.self_test`); None if it did not run
    quality: the choice of types for weights (`relax_tune.tuner.quality`); None where none was asked for
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
        """The program of `main`, or the only one. Raises UserError when there are several, none of them `main`."""
        return choose_function(self.programs, None)


def build_programs(
    lowered: LoweredModule,
    choices: Mapping[str, Choices],
    facts: LibraryFacts,
    target_key: str,
    target: CodeTarget,
    policy: Policy = "measured",
    memory: Memory = "symbolic",
    stored: PlanSet | None = None,
    refused: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    predictor: Predictor = UNTRAINED,
) -> BuildResult:
    """Plan every task and emit the program or host program of every graph function.

    choices: by name of the tensor function in the module
    facts: the records and the installed libraries
    memory: how storages are planned, and whether outputs take the memory of arguments that are not read later
    stored: the plans of policy `stored`
    refused: by function, keys of variants that are not dispatched, and why
    predictor: chooses candidates of tasks without records

    Raises BuildError when every form of a function is refused.
    """
    plans: dict[str, TaskPlan] = {}
    notes = []
    for callee, own in choices.items():
        records = facts.records(target_key, own.task.key, own.task.regime)
        current = [r for r in records if facts.counts(r)]
        without = refused.get(callee, {})
        if stored is None:
            plans[callee] = plan_task(own, current, policy, without, predictor)
        else:
            plans[callee] = kept_plan(own, current, *stored.plan(own.task.key), refused=without, predictor=predictor)
        notes += _notes(callee, plans[callee], current, policy, own.task.regime)
        if policy not in RECORDLESS:
            notes += library_notes(callee, own, plans[callee], records, facts)
    planner, inplace = MEMORY[memory]
    lowered, inplace_notes = choose_inplace(lowered, choices, plans, find=inplace)
    notes += inplace_notes
    builders = {n: ProgramBuilder(n, target) for n in lowered.functions}
    programs = {
        n: GraphEmitter(lowered, f, choices, plans, builders[n], planner).run() for n, f in lowered.functions.items()
    }
    host_programs = tuple(
        emit_host_program(n, lowered.outlined, programs, n in lowered.entries) for n in lowered.host_functions
    )
    packings = {n: tuple(b.packings) for n, b in builders.items()}
    return BuildResult(programs, plans, tuple(notes), packings, host_programs)


def _notes(callee: str, plan: TaskPlan, records: Sequence[Measurement], policy: Policy, regime: Regime) -> list[str]:
    """List what a task lacks, one sentence each."""
    found = []
    if policy not in RECORDLESS:
        if not plan.times:
            kinds = {"predicted" if k in plan.predicted else plan.variants[k].kind for k in plan.plan.variants}
            found.append(
                f"{callee}: no usable record for this device, so the {kinds.pop()} form is dispatched; "
                "run `relax-tune tune` to measure some"
            )
        elif not any(r.variant.kind == "tuned" for r in records):
            found.append(f"{callee}: no tuned record for this device; run `relax-tune tune` to measure some")
        if plan.times and stands_in(regime, records):
            found.append(
                f"{callee}: chosen by times with its weights in the caches, for want of times without; run `relax-tune tune` to "
                "measure some, or build with `--caches warm`"
            )
    if plan.lost:
        why = next(iter(plan.lost.values()))
        found.append(
            f"{callee}: {len(plan.lost)} of the kernels on record, the fastest somewhere, can no longer be made ({why:.200}); "
            "run `relax-tune tune` to measure others"
        )
    failures = [r for r in records if r.status == "failed" and r.variant.key in plan.plan.variants]
    if failures and plan.plan.variants[0] not in plan.times:
        why = f"{failures[0].stage}: {failures[0].message.splitlines()[0][:200]}"
        kind = plan.variants[plan.plan.variants[0]].kind
        found.append(f"{callee}: the {kind} form is dispatched although it failed on this device ({why})")
    return found


def check_policy(policy: str) -> Policy:
    """Return the policy. Raises UserError for an unknown one."""
    if policy not in get_args(Policy):
        raise UserError(f"--policy wants one of {', '.join(get_args(Policy))}; found {policy!r}")
    return policy  # type: ignore[return-value]
