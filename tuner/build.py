"""The build: records to plans, plans and a lowered module to one `Program` (DESIGN 10).

A pure function of the module, the set of records, the policy and the target: no clock, no randomness, nothing measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.database.records import Measurement
from relax_tune.database.records import Variant as VariantRecord
from relax_tune.database.store import Store
from relax_tune.errors import BuildError, RelaxTuneError, UserError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.buffer import Buffer
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.deduce import info_of
from relax_tune.ir.expr import Expr, Var, substitute
from relax_tune.ir.graph import (
    Binding,
    CallDPSLibrary,
    CallTIR,
    Constant,
    Function,
    GVar,
    PrimValue,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.graph import Call as GraphCall
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.movement import Reshape
from relax_tune.ir.passes.inplace import Inplace, misuses, sources_of, without_places
from relax_tune.ir.passes.memory import MemoryPlan, PlanMemory, overlay
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.ir.passes.roots import Roots, Tensor, steps
from relax_tune.ir.relations import info_symbols
from relax_tune.ir.struct_info import ShapeInfo, StructInfo, TensorInfo, TupleInfo
from relax_tune.runtime.driver import Driver
from relax_tune.runtime.model import choose_function
from relax_tune.runtime.plan import Entry, choice_slot
from relax_tune.runtime.program import Call, Check, Program, Step, Variant
from relax_tune.runtime.scalars import Op
from relax_tune.tuner.drive import emit_driver
from relax_tune.tuner.emit import ProgramBuilder, SlotOf, place_obstacle
from relax_tune.tuner.extract import site_symbols
from relax_tune.tuner.index_ranges import index_range, meet, range_fill
from relax_tune.tuner.pack import Packing
from relax_tune.tuner.select import NOISE, Plan, PlanEntry, Test, select
from relax_tune.tuner.settings import Memory, Policy
from relax_tune.tuner.task import Choices

MEMORY: Mapping[Memory, tuple[PlanMemory, bool]] = {
    "symbolic": (PlanMemory(), False),
    "constant": (PlanMemory(constant=True), False),
    "inplace": (PlanMemory(), True),
    "constant-inplace": (PlanMemory(constant=True), True),
}
"""How storages are planned, and whether outputs are put in place of arguments."""


@dataclass(frozen=True)
class TaskPlan:
    """What a task dispatches: the plan over variant keys, those variants, and the times it was chosen from."""

    plan: Plan
    variants: Mapping[str, VariantRecord]
    times: Mapping[str, Sequence[float | None]]


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
    while True:
        kept = {k: times[k] for k in sorted(allowed)}
        if not kept or not any(None not in row for row in kept.values()):
            asked = choices.library_variants()[:1] if policy == "library" else ()
            (default,) = asked or (choices.generic(),)
            return TaskPlan(Plan((PlanEntry((), default.key),), 0.0), {default.key: default}, times)
        has_library = any(variants[k].kind == "library" for k in kept)
        handicap = {k: 1 + NOISE for k in kept if has_library and variants[k].kind != "library"}
        plan = select(kept, choices.task.domain, handicap)
        broken = {k for k in plan.variants if not _applies(choices, variants[k])}
        if not broken:
            return TaskPlan(plan, variants, times)
        allowed -= broken


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


def _applies(choices: Choices, variant: VariantRecord) -> bool:
    """Whether a variant's steps can really be made: records outlive the schedules they were made with."""
    try:
        choices.stages(variant)
    except RelaxTuneError:
        return False
    return True


@dataclass(frozen=True)
class BuildResult:
    """The program of every straight function, the plan of every task, and for each task what it lacked. packings: what the steps of
    each program's `prepare` do. drivers: of the functions that are not straight."""

    programs: Mapping[str, Program]
    plans: Mapping[str, TaskPlan]
    notes: tuple[str, ...]
    packings: Mapping[str, Sequence[Packing]]
    drivers: tuple[Driver, ...] = ()

    @property
    def program(self) -> Program:
        """That of `main`, or the only one. Raises UserError when there are several, none of them `main`."""
        return choose_function(self.programs, None)


def build_programs(
    lowered: LoweredModule,
    choices: Mapping[str, Choices],
    store: Store,
    target_key: str,
    target: CodeTarget,
    policy: Policy = "measured",
    memory: Memory = "symbolic",
) -> BuildResult:
    """Plan every task and emit the program or driver of every graph function. `choices` by the name of the tensor function in the
    module; `memory` says how storages are planned, and whether outputs take the memory of arguments that nobody reads later."""
    plans: dict[str, TaskPlan] = {}
    notes = []
    for callee, own in choices.items():
        records = store.query(target_key, own.task.key)
        plans[callee] = plan_task(own, records, policy)
        notes += _notes(callee, plans[callee], records, policy)
    planner, inplace = MEMORY[memory]
    if inplace:
        lowered = replace(lowered, module=Inplace()(lowered.module))
    lowered, moved = settle_places(lowered, choices, plans)
    notes += moved
    builders = {n: ProgramBuilder(n, target) for n in lowered.functions}
    programs = {
        n: _Emitter(lowered, f, choices, plans, builders[n], planner).run() for n, f in lowered.functions.items()
    }
    drivers = tuple(emit_driver(n, lowered.cut, programs, n in lowered.entries) for n in lowered.drivers)
    packings = {n: tuple(b.packings) for n, b in builders.items()}
    return BuildResult(programs, plans, tuple(notes), packings, drivers)


def _notes(callee: str, plan: TaskPlan, records: Sequence[Measurement], policy: Policy) -> list[str]:
    """What a task lacks."""
    found = []
    if policy != "generic":
        if not plan.times:
            (kind,) = {plan.variants[k].kind for k in plan.plan.variants}
            found.append(
                f"{callee}: no usable record for this device, so the {kind} form is dispatched; "
                "run `relax-tune tune` to measure some"
            )
        elif not any(r.variant.kind == "tuned" for r in records):
            found.append(f"{callee}: no tuned record for this device; run `relax-tune tune` to measure some")
    failures = [r for r in records if r.status == "failed" and r.variant.key in plan.plan.variants]
    if failures and plan.plan.variants[0] not in plan.times:
        why = f"{failures[0].stage}: {failures[0].message.splitlines()[0][:200]}"
        kind = plan.variants[plan.plan.variants[0]].kind
        found.append(f"{callee}: the {kind} form is dispatched although it failed on this device ({why})")
    return found


def settle_places(
    lowered: LoweredModule, choices: Mapping[str, Choices], plans: Mapping[str, TaskPlan]
) -> tuple[LoweredModule, list[str]]:
    """Without the outputs that cannot lie in the memory of an argument after all: passes have moved what reads it, or a variant
    that is dispatched reads ahead. What each of them was, and why."""
    functions, notes = dict(lowered.module.functions), []
    for name, f in lowered.module.functions.items():
        if not isinstance(f, Function):
            continue
        dropped = {(m.var, m.output): m.why for m in misuses(f, lowered.module)}
        roots = Roots(inplace=False)
        for var, call in steps(f):
            for i, at in enumerate(call.inplace if isinstance(call, CallTIR) else ()):
                if at is None or (var, i) in dropped or not isinstance(call, CallTIR):
                    continue
                own, plan = choices[call.callee], plans[call.callee]
                output, (tensor,) = own.task.func.output_buffers[i], roots.fields(call.args[at])
                for source in sources_of(own.task.func, call, tensor, roots):
                    for key in plan.plan.variants:
                        why = place_obstacle(own.stages(plan.variants[key]), output, source)
                        if why is not None:
                            dropped.setdefault((var, i), why)
            roots.bind(var, call)
        functions[name] = without_places(f, dropped)
        notes += [f"{v.name}: not written in place of an argument: {why}" for (v, _), why in dropped.items()]
    return (replace(lowered, module=replace(lowered.module, functions=functions)) if notes else lowered), notes


def workspaces(
    lowered: LoweredModule,
    main: Function,
    choices: Mapping[str, Choices],
    plans: Mapping[str, TaskPlan],
    builder: ProgramBuilder,
) -> dict[GVar, tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]]:
    """Bytes every call of a graph function needs while it runs, whichever of its variants that is, and which of them each variant uses."""
    env = env_of(lowered.module.bounds)
    found = {}
    for binding in main.bindings:
        call = binding.value
        if isinstance(call, CallTIR):
            own, plan = choices[call.callee], plans[call.callee]
            meaning = site_symbols(own.task.func, call)
            variants = [own.stages(plan.variants[key]) for key in plan.plan.variants]
            needs = [builder.workspaces(stages, own.task.func.buffers) for stages in variants]
            found[binding.var] = overlay([[simplify(substitute(e, meaning), env) for e in n] for n in needs], env)
    return found


class _Emitter:
    """Walks one graph function once and declares arrays, calls and checks."""

    def __init__(
        self,
        lowered: LoweredModule,
        main: Function,
        choices: Mapping[str, Choices],
        plans: Mapping[str, TaskPlan],
        builder: ProgramBuilder,
        memory: PlanMemory,
    ) -> None:
        self.lowered, self.main = lowered, main
        self.choices = choices
        self.plans = plans
        self.builder = builder
        self.symbols: dict[Var, int] = {}
        self.arrays: dict[Tensor, int] = {}
        self.definitions = {x.var: x.value for x in main.bindings}
        self.constants: dict[str, int] = {}
        found = workspaces(lowered, main, choices, plans, builder)
        self.places = {v: places for v, (_, places) in found.items()}
        sizes = {v: sizes for v, (sizes, _) in found.items()}
        self.memory: MemoryPlan = memory.plan(lowered.module, main.name, sizes)

    def run(self) -> Program:
        main, b = self.main, self.builder
        own = {v for x in (*main.params, *(y.var for y in main.bindings)) for v in info_symbols(x.info)}
        for bound in self.lowered.module.bounds:
            if bound.var not in own:
                continue  # of another function
            self.symbols[bound.var] = b.symbol(bound.var.name, bound.lower, bound.upper)
        inputs = []
        ranges = self._index_ranges()
        for p in main.params:
            if isinstance(p.info, ShapeInfo):  # the caller gives the symbols in it
                continue
            fill = range_fill(ranges.get(p))
            self.arrays[p, 0] = b.buffer(
                p.name, _buffer(p.name, _known(p.name, p.info)), "input", self.symbols, fill=fill
            )
            inputs.append(self.arrays[p, 0])
        storages = [b.storage(size, self.symbols) for size in self.memory.storages]
        outputs = [self._output(value, name) for value, name in results(main.ret)]
        for binding in main.bindings:
            value = binding.value
            if isinstance(value, CallTIR) and isinstance(binding, Binding):
                self._call(binding.var, value, storages)
            elif isinstance(value, CallDPSLibrary):
                self._library(binding.var, value, storages)
            elif not _is_view(value) and not isinstance(
                value, (TupleValue, TupleItem, GVar, Constant, ShapeValue, PrimValue)
            ):
                raise BuildError(f"{binding.var.name}: wanted a lowered graph, found {type(value).__name__}")
        for check in self.lowered.checks[main.name]:
            slot = b.slot(check.cond, self.symbols)
            b.checks.append(Check(slot, check.message, tuple(b.slot(v, self.symbols) for v in check.values)))
        return b.finish(inputs, outputs)

    def _index_ranges(self) -> dict[GVar, tuple[int, int]]:
        """The values parameters of the model may hold that are used as indices."""
        found: dict[GVar, tuple[int, int]] = {}
        params = set(self.main.params)
        for call in (b.value for b in self.main.bindings):
            if not isinstance(call, CallTIR):
                continue
            func = self.choices[call.callee].task.func
            given = dict(zip(func.input_buffers, call.args, strict=True))
            numbers = {b: n for b, a in given.items() if (n := self._number(a)) is not None}
            for buffer, argument in given.items():
                source = self._source(argument)
                if isinstance(source, tuple) and source[0] in params:
                    allowed = index_range(func, buffer, numbers)
                    if allowed is not None:
                        found[source[0]] = meet(found.get(source[0], allowed), allowed)
        return found

    def _number(self, v: Value) -> int | None:
        """The value of an integer constant without dims."""
        array = self.lowered.module.constants[v.name] if isinstance(v, Constant) else None
        return int(array) if array is not None and array.ndim == 0 and array.dtype.kind in "iu" else None

    def _output(self, value: Value, name: str) -> int:
        """The array a result is read from: one of its own, or one that another result, a parameter or a weight has."""
        source, wanted = self._source(value), _buffer(name, _known(name, info_of(value)))
        if isinstance(source, tuple) and source not in self.arrays:
            self.arrays[source] = self.builder.buffer(name, wanted, "output", self.symbols)
            return self.arrays[source]
        held = self._array(source)
        return self.builder.view(name, wanted, held, self.symbols)

    def _source(self, v: Value) -> Tensor | Constant:
        """The made tensor, parameter or weight whose memory `v` is: through casts, tuples, views and calls that write in place."""
        fields: list[int] = []
        while True:
            if isinstance(v, Constant):
                return v
            made = self.definitions.get(v) if isinstance(v, GVar) else v
            if isinstance(v, GVar) and (made is None or isinstance(made, (CallTIR, CallDPSLibrary))):
                field = fields.pop() if fields else 0
                at = made.inplace[field] if isinstance(made, CallTIR) and made.inplace else None
                if at is None or not isinstance(made, CallTIR):
                    return v, field
                v = made.args[at]
            elif isinstance(made, TupleItem):
                fields.append(made.index)
                v = made.value
            elif isinstance(made, TupleValue):
                v = made.fields[fields.pop()]
            elif isinstance(made, GraphCall) and _is_view(made):
                v = made.args[0]
            elif isinstance(made, (GVar, Constant)):
                v = made
            else:
                raise BuildError(f"wanted a tensor, found {made!r}")

    def _array(self, v: Value | Tensor) -> int:
        source = v if isinstance(v, tuple) else self._source(v)
        if isinstance(source, tuple):
            return self.arrays[source]
        if source.name not in self.constants:
            info = _buffer(source.name, source.info)
            self.constants[source.name] = self.builder.buffer(source.name, info, "const", self.symbols)
        return self.constants[source.name]

    def _destinations(self, var: GVar, call: CallTIR | CallDPSLibrary, storages: Sequence[int]) -> list[int]:
        """The arrays a call writes, declared unless they are results of the model."""
        found = []
        for i, info in enumerate(call.out):
            source = self._source(var if len(call.out) == 1 else TupleItem(var, i))
            assert isinstance(source, tuple)
            if source not in self.arrays:
                number = self.memory.assignment[var][i]
                assert number is not None
                name = var.name if len(call.out) == 1 else f"{var.name}.{i}"
                buffer = _buffer(name, info)
                self.arrays[source] = self.builder.buffer(name, buffer, "temp", self.symbols, storages[number])
            found.append(self.arrays[source])
        return found

    def _library(self, var: GVar, call: CallDPSLibrary, storages: Sequence[int]) -> None:
        """A routine that the model itself names: one variant, nothing to choose."""
        b = self.builder
        buffers = (*map(self._array, call.args), *self._destinations(var, call, storages))
        step = Step("library", call.routine, buffers, tuple(b.slot(e, self.symbols) for e in call.scalars))
        b.calls.append(Call(var.name, "", b.scalars.const(0), (Variant("library", (step,)),)))

    def _call(self, var: GVar, call: CallTIR, storages: Sequence[int]) -> None:
        b = self.builder
        choices, task_plan = self.choices[call.callee], self.plans[call.callee]
        func = choices.task.func
        arguments = {p: self._array(a) for p, a in zip(func.input_buffers, call.args, strict=True)}
        arguments |= zip(func.output_buffers, self._destinations(var, call, storages), strict=True)
        meaning = site_symbols(func, call)
        symbols: SlotOf = {v: b.slot(e, self.symbols) for v, e in meaning.items()}
        keys = task_plan.plan.variants
        variants: list[Variant] = []
        workspaces = [storages[number] for number in self.memory.workspaces.get(var, ())]
        for key, places in zip(keys, self.places[var], strict=True):
            record = task_plan.variants[key]
            own = [workspaces[p] for p in places]
            variants.append(b.variant(record.kind, key, choices.stages(record), arguments, symbols, own))
        entries = []
        for entry in task_plan.plan.entries:
            guard = None
            for test, wanted in entry.tests:
                slot = self._test(func.symbols, test, symbols)
                slot = slot if wanted else b.scalars.op(Op.NOT, slot)
                guard = slot if guard is None else b.scalars.op(Op.AND, guard, slot)
            entries.append(Entry(guard, keys.index(entry.variant)))
        entries[-1] = Entry(None, entries[-1].variant)
        b.calls.append(Call(var.name, choices.task.key, choice_slot(b.scalars, entries), tuple(variants)))

    def _test(self, order: Sequence[Var], test: Test, symbols: SlotOf) -> int:
        product = symbols[order[test.axes[0]]]
        for axis in test.axes[1:]:
            product = self.builder.scalars.op(Op.MUL, product, symbols[order[axis]])
        return self.builder.scalars.op(Op.LE, product, self.builder.scalars.const(test.threshold))


def _is_view(value: Value) -> bool:
    return isinstance(value, GraphCall) and isinstance(value.op, Reshape)


def results(ret: Value, name: str = "result") -> Iterator[tuple[Value, str]]:
    """The tensors that are returned, tuples taken apart, and what each is called.

    Raises BuildError for anything else."""
    if isinstance(ret, TupleValue):
        for field in ret.fields:
            yield from results(field, name)
        return
    info = info_of(ret)
    name = ret.name if isinstance(ret, (GVar, Constant)) else name
    if isinstance(info, TupleInfo):
        for i in range(len(info.fields)):
            yield from results(TupleItem(ret, i), f"{name}.{i}")
    elif isinstance(info, TensorInfo):
        yield ret, name
    else:
        raise BuildError(f"wanted tensors as results, found {ret!r}")


def _known(name: str, info: StructInfo) -> TensorInfo:
    if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None:
        raise BuildError(f"{name}: wanted a tensor of known dims and dtype, found {info!r}; add a match_cast")
    return info


def _buffer(name: str, info: TensorInfo) -> Buffer:
    assert info.shape is not None and info.dtype is not None
    return Buffer(name, info.shape, info.dtype)


def check_policy(policy: str) -> Policy:
    """Raises UserError for an unknown policy."""
    if policy not in ("measured", "library", "generic"):
        raise UserError(f"--policy wants measured, library or generic; found {policy!r}")
    return policy  # type: ignore[return-value]
