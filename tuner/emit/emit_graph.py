"""Emit one `Program` of a straight-line graph function and the plans of its tasks: arrays, memory, calls and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import BuildError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.aliasing import AllocatedTensor, is_view
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, substitute
from relax_tune.ir.core.graph import (
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
    name_of,
)
from relax_tune.ir.core.graph import Call as GraphCall
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import ShapeInfo, StructInfo, TensorInfo, TupleInfo, info_symbols
from relax_tune.ir.deduce.relations import is_known
from relax_tune.ir.op.base import env_of
from relax_tune.ir.passes.memory.append import logical
from relax_tune.ir.passes.memory.inplace import InplacePair, appended_pairs, inplace_pairs, with_inplace
from relax_tune.ir.passes.memory.memory_plan import MemoryPlan, PlanMemory, overlay
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.runtime.program.plan import Entry, choice_slot
from relax_tune.runtime.program.program import (
    CallSite,
    CallVariant,
    Check,
    CheckedIndex,
    InputRange,
    LaunchStep,
    Program,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.plan.select import GuardTest
from relax_tune.tuner.program.program_builder import ProgramBuilder, SlotOf, place_obstacle
from relax_tune.tuner.task.extract import site_symbols
from relax_tune.tuner.task.index_ranges import range_fill
from relax_tune.tuner.task.task import Choices


def choose_inplace(
    lowered: LoweredModule, choices: Mapping[str, Choices], plans: Mapping[str, TaskPlan], find: bool
) -> tuple[LoweredModule, list[str]]:
    """Decide for every output whether it takes the memory of an argument. Returns notes on the refused candidates.

    An output takes it when neither the graph nor a dispatched variant forbids it. find: seek candidates beyond the
    pairs that the model states, and parameters that results extend
    """
    functions, notes = dict(lowered.module.functions), []
    for name, f in lowered.module.graphs.items():
        chosen = []
        extended = appended_pairs(f, lowered.module, lowered.appended.get(name, ()))
        for pair in (*inplace_pairs(f, lowered.module, find), *extended):
            why = pair.reason or _variant_obstacle(pair, choices[pair.callee], plans[pair.callee])
            if why is None:
                chosen.append(pair)
            else:
                notes.append(f"{pair.var.name}: not written in place of an argument: {why}")
        functions[name] = with_inplace(f, chosen)
    return replace(lowered, module=replace(lowered.module, functions=functions)), notes


def _variant_obstacle(pair: InplacePair, own: Choices, plan: TaskPlan) -> str | None:
    """Return why a dispatched variant may not write the output in the memory of the argument; None if every one may."""
    func = own.task.func
    output, sources = func.output_buffers[pair.output], [func.input_buffers[k] for k in pair.inputs]
    found = (
        place_obstacle(own.stages(plan.variants[key]), output, source)
        for source in sources
        for key in plan.plan.variants
    )
    return next((why for why in found if why is not None), None)


def workspaces(
    lowered: LoweredModule,
    main: Function,
    choices: Mapping[str, Choices],
    plans: Mapping[str, TaskPlan],
    builder: ProgramBuilder,
) -> dict[GVar, tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]]:
    """Return the workspace of every call: sizes in bytes that suffice for each variant, and the parts each variant uses."""
    env = env_of(lowered.module.bounds)
    found = {}
    for var, call in _calls(main):
        own, plan = choices[call.callee], plans[call.callee]
        meaning = site_symbols(own.task.func, call)
        variants = [own.stages(plan.variants[key]) for key in plan.plan.variants]
        needs = [builder.workspaces(stages, own.task.func.buffers) for stages in variants]
        found[var] = overlay([[simplify(substitute(e, meaning), env) for e in n] for n in needs], env)
    return found


def _calls(main: Function) -> Iterator[tuple[GVar, CallTIR]]:
    """Yield the calls of tensor functions, each with the variable of its result."""
    return ((b.var, b.value) for b in main.bindings if isinstance(b.value, CallTIR))


class GraphEmitter:
    """An emitter that walks one graph function once, and declares arrays, calls and checks."""

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
        self.arrays: dict[AllocatedTensor, int] = {}
        self.definitions = {x.var: x.value for x in main.bindings}
        extended = lowered.appended.get(main.name, ())
        self.outer: dict[AllocatedTensor | int, int] = {(main.params[a.param], 0): a.axis for a in extended}
        self.outer |= {a.result: a.axis for a in extended}
        self.constants: dict[str, int] = {}
        self.names = {*lowered.module.constants, *(p.name for p in main.params), *(n for _, n in results(main.ret))}
        found = workspaces(lowered, main, choices, plans, builder)
        self.places = {v: places for v, (_, places) in found.items()}
        sizes = {v: sizes for v, (sizes, _) in found.items()}
        self.memory: MemoryPlan = memory.plan(lowered.module, main.name, sizes)

    def run(self) -> Program:
        main, b = self.main, self.builder
        known = {v for x in (*main.params, *(y.var for y in main.bindings)) for v in info_symbols(x.info)}
        for bound in self.lowered.module.bounds:
            if bound.var not in known:
                continue  # of another function
            limits = (0, None) if bound.implied else (bound.lower, bound.upper)
            self.symbols[bound.var] = b.symbol(bound.var.name, *limits)
        inputs = []
        for position, p in enumerate(main.params):
            if isinstance(p.info, ShapeInfo):  # the caller gives the symbols in it
                continue
            own = [r for r in self.lowered.ranges.get(main.name, ()) if r.position == position]
            fill = range_fill(own)
            own = [] if fill.kind == "integers" else own
            outer = self.outer.get((p, 0), 0)
            wanted = _buffer(p.name, logical(_known(p.name, p.info), outer))
            self.arrays[p, 0] = b.buffer(p.name, wanted, "input", self.symbols, fill=fill, outer=outer)
            inputs.append(self.arrays[p, 0])
            for r in own:
                low, high = (b.slot(e, self.symbols) for e in (r.low, r.high))
                b.ranges.append(InputRange(self.arrays[p, 0], low, high, r.every, r.column))
        storages = [b.storage(size, self.symbols) for size in self.memory.storages]
        outputs = [self._output(v, name, self.outer.get(i, 0)) for i, (v, name) in enumerate(results(main.ret))]
        for binding in main.bindings:
            value = binding.value
            if isinstance(value, CallTIR) and isinstance(binding, Binding):
                self._call(binding.var, value, storages)
            elif isinstance(value, CallDPSLibrary):
                self._library(binding.var, value, storages)
            elif not is_view(value) and not isinstance(
                value, (TupleValue, TupleItem, GVar, Constant, ShapeValue, PrimValue)
            ):
                raise BuildError(f"{binding.var.name}: wanted a lowered graph, found {type(value).__name__}")
        for check in self.lowered.checks[main.name]:
            slot = b.slot(check.cond, self.symbols)
            b.checks.append(Check(slot, check.message, tuple(b.slot(v, self.symbols) for v in check.values)))
        return b.finish(inputs, self._checked(outputs))

    def _checked(self, outputs: Sequence[int]) -> Sequence[int]:
        """Declare the checks of computed indices, the last outputs. Return the outputs of the model itself."""
        checks = self.lowered.index_checks.get(self.main.name, ())
        own = len(outputs) - len({c.result for c in checks})
        for c in checks:
            size = self.builder.slot(c.size, self.symbols)
            self.builder.checked.append(CheckedIndex(outputs[own + c.result], c.operator, size, c.every, c.column))
        return outputs[:own]

    def _output(self, value: Value, name: str, outer: int) -> int:
        """Return the array from which a result is read. outer: the dim stored outermost

        It may be that of another result, a parameter or a weight.
        """
        source, wanted = self._source(value), _buffer(name, logical(_known(name, value.info), outer))
        if isinstance(source, tuple) and source not in self.arrays:
            self.arrays[source] = self.builder.buffer(name, wanted, "output", self.symbols, outer=outer)
            return self.arrays[source]
        held = self._array(source)
        return self.builder.view(name, wanted, held, self.symbols, outer)

    def _source(self, v: Value) -> AllocatedTensor | Constant:
        """Return the allocated tensor, parameter or weight whose memory `v` is.

        It follows casts, tuples, views and in-place calls.
        """
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
            elif isinstance(made, GraphCall) and is_view(made):
                v = made.args[0]
            elif isinstance(made, (GVar, Constant)):
                v = made
            else:
                raise BuildError(f"wanted a tensor, found {made!r}")

    def _array(self, v: Value | AllocatedTensor) -> int:
        source = v if isinstance(v, tuple) else self._source(v)
        if isinstance(source, tuple):
            return self.arrays[source]
        if source.name not in self.constants:
            info = _buffer(source.name, source.info)
            self.constants[source.name] = self.builder.buffer(source.name, info, "const", self.symbols)
        return self.constants[source.name]

    def _destinations(self, var: GVar, call: CallTIR | CallDPSLibrary, storages: Sequence[int]) -> list[int]:
        """Return the arrays that a call writes, declared unless they are results of the model."""
        found = []
        for i, info in enumerate(call.out):
            source = self._source(var if len(call.out) == 1 else TupleItem(var, i))
            assert isinstance(source, tuple)
            if source not in self.arrays:
                number = self.memory.assignment[var][i]
                assert number is not None
                name = var.name if len(call.out) == 1 else f"{var.name}.{i}"
                self.names.add(name := fresh(name, self.names))
                buffer = _buffer(name, info)
                self.arrays[source] = self.builder.buffer(name, buffer, "temp", self.symbols, storages[number])
            found.append(self.arrays[source])
        return found

    def _library(self, var: GVar, call: CallDPSLibrary, storages: Sequence[int]) -> None:
        """Emit the call of a routine that the model names: one variant without a choice."""
        b = self.builder
        buffers = (*map(self._array, call.args), *self._destinations(var, call, storages))
        step = LaunchStep("library", call.routine, buffers, tuple(b.slot(e, self.symbols) for e in call.scalars))
        b.calls.append(CallSite(var.name, "", b.scalars.const(0), (CallVariant("library", (step,)),)))

    def _call(self, var: GVar, call: CallTIR, storages: Sequence[int]) -> None:
        b = self.builder
        choices, task_plan = self.choices[call.callee], self.plans[call.callee]
        func = choices.task.func
        arguments = {p: self._array(a) for p, a in zip(func.input_buffers, call.args, strict=True)}
        arguments |= zip(func.output_buffers, self._destinations(var, call, storages), strict=True)
        meaning = site_symbols(func, call)
        symbols: SlotOf = {v: b.slot(e, self.symbols) for v, e in meaning.items()}
        keys = task_plan.plan.variants
        variants: list[CallVariant] = []
        workspaces = [storages[number] for number in self.memory.workspaces.get(var, ())]
        for key, places in zip(keys, self.places[var], strict=True):
            record = task_plan.variants[key]
            own = [workspaces[p] for p in places]
            label = "predicted" if key in task_plan.predicted else record.kind
            variants.append(b.variant(label, key, choices.stages(record), arguments, symbols, own))
        entries = []
        for entry in task_plan.plan.entries:
            guard = None
            for test, wanted in entry.tests:
                slot = self._test(func.symbols, test, symbols)
                slot = slot if wanted else b.scalars.op(Opcode.NOT, slot)
                guard = slot if guard is None else b.scalars.op(Opcode.AND, guard, slot)
            entries.append(Entry(guard, keys.index(entry.variant)))
        entries[-1] = Entry(None, entries[-1].variant)
        b.calls.append(CallSite(var.name, choices.task.key, choice_slot(b.scalars, entries), tuple(variants)))

    def _test(self, order: Sequence[Var], test: GuardTest, symbols: SlotOf) -> int:
        product = symbols[order[test.axes[0]]]
        for axis in test.axes[1:]:
            product = self.builder.scalars.op(Opcode.MUL, product, symbols[order[axis]])
        return guard_slot(self.builder.scalars, product, test)


def guard_slot(scalars: ScalarBuilder, product: int, test: GuardTest) -> int:
    """Return the slot that is 1 where a test holds of the product in a slot."""
    if test.divisor > 1:
        ahead = scalars.op(Opcode.ADD, product, scalars.const(test.divisor - 1))
        product = scalars.op(Opcode.FLOORDIV, ahead, scalars.const(test.divisor))
    if test.modulus:
        product = scalars.op(Opcode.FLOORMOD, product, scalars.const(test.modulus))
    return scalars.op(Opcode.EQ if test.modulus else Opcode.LE, product, scalars.const(test.threshold))


def results(ret: Value, name: str = "result") -> Iterator[tuple[Value, str]]:
    """Yield each returned tensor and its name; tuples are flattened.

    Raises BuildError for anything else.
    """
    if isinstance(ret, TupleValue):
        for field in ret.fields:
            yield from results(field, name)
        return
    info = ret.info
    name = name_of(ret, name)
    if isinstance(info, TupleInfo):
        for i in range(len(info.fields)):
            yield from results(TupleItem(ret, i), f"{name}.{i}")
    elif isinstance(info, TensorInfo):
        yield ret, name
    else:
        raise BuildError(f"wanted tensors as results, found {ret!r}")


def _known(name: str, info: StructInfo) -> TensorInfo:
    if not is_known(info):
        raise BuildError(f"{name}: wanted a tensor of known dims and dtype, found {info!r}; add a match_cast")
    return info


def _buffer(name: str, info: TensorInfo) -> Buffer:
    assert info.shape is not None and info.dtype is not None
    return Buffer(name, info.shape, info.dtype)
