"""Emit one `Program` of a straight-line graph function and the plans of its tasks: arrays, memory, calls and checks.

Tests: `tests/tuner/emit/test_build.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError, RelaxTuneError, UnexpectedErrorWarning, warn_unexpected
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.aliasing import AllocatedTensor, is_view
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, substitute
from relax_tune.ir.core.function import IRModule
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
from relax_tune.ir.deduce.index_ranges import IndexRange
from relax_tune.ir.deduce.relations import is_known
from relax_tune.ir.op.base import RuntimeCheck, env_of
from relax_tune.ir.passes.control.checked_indices import IndexCheck
from relax_tune.ir.passes.memory.append import Appended, logical
from relax_tune.ir.passes.memory.inplace import InplacePair, appended_pairs, inplace_pairs, with_inplace
from relax_tune.ir.passes.memory.memory_plan import MemoryPlan, PlanMemory, overlay
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.runtime.program.plan import Entry, choice_slot
from relax_tune.runtime.program.program import (
    CallSite,
    CallVariant,
    Check,
    CheckedIndex,
    Fill,
    InputRange,
    LaunchStep,
    Program,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.plan.select import GuardTest
from relax_tune.tuner.program.program_builder import ProgramBuilder, SlotOf, place_obstacle
from relax_tune.tuner.task.extract import site_symbols
from relax_tune.tuner.task.variants import TaskVariants


def range_fill(ranges: Sequence[IndexRange]) -> Fill:
    """Return how test arrays of an index input are filled: with integers of all its ranges, if their limits are numbers.

    Compiled loops clamp an index that is out of range (`ir/op/indexing/indices`): safe, but wrong for the user. So the program
    states the permitted range of each such input, and the runtime refuses a call with other values.
    """
    limits = [
        (low, high) for r in ranges if (low := as_int(r.low)) is not None and (high := as_int(r.high)) is not None
    ]
    # The highest of the lower limits and the lowest of the upper ones are the values that all uses of the input
    # permit.
    if not limits or len(limits) < len(ranges) or any(r.stride > 1 for r in ranges):
        return Fill()
    return Fill("integers", max(low for low, _ in limits), min(high for _, high in limits))


class RefusedVariant(Exception):
    """A dispatched variant whose emission raised an unexpected error.

    Args:
        function: Name of the tensor function.
        key: Key of the variant.
    """

    def __init__(self, function: str, key: str, why: str) -> None:
        super().__init__(f"{function}: {why}")
        self.function, self.key, self.why = function, key, why


@contextmanager
def refusing(function: str, key: str, variant: VariantRecord) -> Iterator[None]:
    """Turn an unexpected error into RefusedVariant, with a warning, so that the build goes on without the variant."""
    try:
        yield
    # Errors for users say what is wrong with the model; another variant would fail in the same way. The warning is an
    # exception where tests turn warnings into errors.
    except (RelaxTuneError, UnexpectedErrorWarning):
        raise
    except Exception as error:
        warn_unexpected(f"the {variant.kind} variant {variant.sketch}", function, error)
        raise RefusedVariant(function, key, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class LoweredFunction:
    """A straight-line function, and what lowering knows about it.

    Attributes:
        module: The module of the function: bounds of symbols, weights and tensor functions.
        checks: Conditions that deduction left to run time.
        ranges: Permitted values of parameters that are used as indices.
        index_checks: Checks of computed indices, which are the function's last results.
        appended: Parameters that results extend, stored with another dim outermost.
    """

    function: Function
    module: IRModule
    checks: tuple[RuntimeCheck, ...] = ()
    ranges: tuple[IndexRange, ...] = ()
    index_checks: tuple[IndexCheck, ...] = ()
    appended: tuple[Appended, ...] = ()


def lowered_functions(lowered: LoweredModule, module: IRModule) -> list[LoweredFunction]:
    """Return the straight-line functions of a lowered module, as `module` holds them."""
    return [
        LoweredFunction(
            module.graphs[name],
            module,
            lowered.checks[name],
            lowered.ranges.get(name, ()),
            lowered.index_checks.get(name, ()),
            lowered.appended.get(name, ()),
        )
        for name in lowered.functions
    ]


def choose_inplace(
    module: IRModule,
    appended: Mapping[str, tuple[Appended, ...]],
    task_variants: Mapping[str, TaskVariants],
    plans: Mapping[str, TaskPlan],
    search: bool,
) -> tuple[IRModule, list[str]]:
    """Decide for every output whether it takes the memory of an argument. Returns notes on the refused candidates.

    An output takes it when neither the graph nor a dispatched variant forbids it.

    Args:
        appended: By function, the parameters that results extend.
        search: Consider further pairs than the ones that the model states and the appended parameters.
    """
    # The choice follows planning: a variant may write an output in place of an argument only if it reads each
    # element before it overwrites it, which depends on its schedule.
    functions, notes = dict(module.functions), []
    for name, f in module.graphs.items():
        chosen = []
        extended = appended_pairs(f, module, appended.get(name, ()))
        for pair in (*inplace_pairs(f, module, search), *extended):
            obstacle = pair.reason or _variant_obstacle(pair, task_variants[pair.callee], plans[pair.callee])
            if obstacle is None:
                chosen.append(pair)
            else:
                notes.append(f"{pair.var.name}: not written in place of an argument: {obstacle}")
        functions[name] = with_inplace(f, chosen)
    return replace(module, functions=functions), notes


def _variant_obstacle(pair: InplacePair, task_variants: TaskVariants, plan: TaskPlan) -> str | None:
    """Return why a dispatched variant may not write the output in the memory of the argument; None if every one may."""
    func = task_variants.task.func
    output, sources = func.output_buffers[pair.output], [func.input_buffers[k] for k in pair.inputs]
    for source in sources:
        for key in plan.plan.variants:
            with refusing(pair.callee, key, plan.variants[key]):
                obstacle = place_obstacle(task_variants.stages(plan.variants[key]), output, source)
            if obstacle is not None:
                return obstacle
    return None


def workspaces(
    module: IRModule,
    main: Function,
    task_variants: Mapping[str, TaskVariants],
    plans: Mapping[str, TaskPlan],
    builder: ProgramBuilder,
) -> dict[GVar, tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]]:
    """Return the workspace of every call: sizes in bytes that suffice for each variant, and the parts each variant uses."""
    env = env_of(module.bounds)
    by_call = {}
    for var, call in _calls(main):
        func, plan = task_variants[call.callee].task.func, plans[call.callee]
        meaning = site_symbols(func, call)
        needs = []
        for key in plan.plan.variants:
            with refusing(call.callee, key, plan.variants[key]):
                stages = task_variants[call.callee].stages(plan.variants[key])
                needs.append(builder.workspaces(stages, func.buffers))
        by_call[var] = overlay([[simplify(substitute(e, meaning), env) for e in n] for n in needs], env)
    return by_call


def _calls(main: Function) -> Iterator[tuple[GVar, CallTIR]]:
    """Yield the calls of tensor functions, each with the variable of its result."""
    return ((b.var, b.value) for b in main.bindings if isinstance(b.value, CallTIR))


class GraphEmitter:
    """An emitter that walks one graph function once, and declares arrays, calls and checks."""

    def __init__(
        self,
        lowered: LoweredFunction,
        task_variants: Mapping[str, TaskVariants],
        plans: Mapping[str, TaskPlan],
        builder: ProgramBuilder,
        memory: PlanMemory,
    ) -> None:
        self.lowered, self.main = lowered, lowered.function
        self.task_variants = task_variants
        self.plans = plans
        self.builder = builder
        self.symbols: dict[Var, int] = {}
        self.arrays: dict[AllocatedTensor, int] = {}
        self.constants: dict[str, int] = {}
        main, module = self.main, lowered.module
        self.definitions = {x.var: x.value for x in main.bindings}
        self.outer: dict[AllocatedTensor | int, int] = {(main.params[a.param], 0): a.axis for a in lowered.appended}
        self.outer |= {a.result: a.axis for a in lowered.appended}
        self.names = {*module.constants, *(p.name for p in main.params), *(n for _, n in results(main.ret))}
        by_call = workspaces(module, main, task_variants, plans, builder)
        self.places = {v: places for v, (_, places) in by_call.items()}
        self.memory: MemoryPlan = memory.plan(module, main.name, {v: sizes for v, (sizes, _) in by_call.items()})

    def run(self) -> Program:
        main, b = self.main, self.builder
        known = {v for x in (*main.params, *(y.var for y in main.bindings)) for v in info_symbols(x.info)}
        # Implied bounds follow from bounds of other symbols, which calls check, so only the sign is left to check.
        for bound in self.lowered.module.bounds:
            if bound.var not in known:
                continue  # of another function
            limits = (0, None) if bound.implied else (bound.lower, bound.upper)
            self.symbols[bound.var] = b.symbol(bound.var.name, *limits)
        inputs = []
        for position, p in enumerate(main.params):
            if isinstance(p.info, ShapeInfo):  # the caller gives the symbols in it
                continue
            index_ranges = [r for r in self.lowered.ranges if r.position == position]
            fill = range_fill(index_ranges)
            index_ranges = [] if fill.kind == "integers" else index_ranges
            outer = self.outer.get((p, 0), 0)
            buffer = _buffer(p.name, logical(_known(p.name, p.info), outer))
            self.arrays[p, 0] = b.buffer(p.name, buffer, "input", self.symbols, fill=fill, outer=outer)
            inputs.append(self.arrays[p, 0])
            for r in index_ranges:
                low, high = (b.slot(e, self.symbols) for e in (r.low, r.high))
                b.ranges.append(InputRange(self.arrays[p, 0], low, high, r.stride, r.offset))
        # Outputs are declared before the calls: a call whose result is an output then finds its array, and writes the
        # memory of the caller directly instead of a temporary.
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
                raise BuildError(f"{binding.var.name}: expected a lowered graph, got {type(value).__name__}")
        for check in self.lowered.checks:
            slot = b.slot(check.cond, self.symbols)
            b.checks.append(Check(slot, check.message, tuple(b.slot(v, self.symbols) for v in check.values)))
        return b.finish(inputs, self._checked(outputs))

    def _checked(self, outputs: Sequence[int]) -> Sequence[int]:
        """Declare the checks of computed indices, the last outputs. Return the outputs of the model itself."""
        checks = self.lowered.index_checks
        own = len(outputs) - len({c.result for c in checks})
        for c in checks:
            size = self.builder.slot(c.size, self.symbols)
            self.builder.checked.append(CheckedIndex(outputs[own + c.result], c.operator, size, c.every, c.column))
        return outputs[:own]

    def _output(self, value: Value, name: str, outer: int) -> int:
        """Return the array from which a result is read: its own, or the array of another result, a parameter or a weight.

        Args:
            outer: The dim stored outermost.
        """
        source, buffer = self._source(value), _buffer(name, logical(_known(name, value.info), outer))
        if isinstance(source, tuple) and source not in self.arrays:
            self.arrays[source] = self.builder.buffer(name, buffer, "output", self.symbols, outer=outer)
            return self.arrays[source]
        array = self._array(source)
        return self.builder.view(name, buffer, array, self.symbols, outer)

    def _source(self, v: Value) -> AllocatedTensor | Constant:
        """Return the allocated tensor, parameter or weight whose memory `v` shares.

        It follows casts, tuples, views and in-place calls.
        """
        fields: list[int] = []
        while True:
            if isinstance(v, Constant):
                return v
            value = self.definitions.get(v) if isinstance(v, GVar) else v
            if isinstance(v, GVar) and (value is None or isinstance(value, (CallTIR, CallDPSLibrary))):
                field = fields.pop() if fields else 0
                # A result written in place of an argument shares the memory of that argument.
                at = value.inplace[field] if isinstance(value, CallTIR) and value.inplace else None
                if at is None or not isinstance(value, CallTIR):
                    return v, field
                v = value.args[at]
            elif isinstance(value, TupleItem):
                fields.append(value.index)
                v = value.value
            elif isinstance(value, TupleValue):
                # `fields` holds the indices still to be applied, innermost last, so nested tuples resolve in order.
                v = value.fields[fields.pop()]
            elif isinstance(value, GraphCall) and is_view(value):
                v = value.args[0]
            elif isinstance(value, (GVar, Constant)):
                v = value
            else:
                raise BuildError(f"expected a tensor, got {value!r}")

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
        arrays = []
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
            arrays.append(self.arrays[source])
        return arrays

    def _library(self, var: GVar, call: CallDPSLibrary, storages: Sequence[int]) -> None:
        """Emit the call of a routine that the model names: one variant without a choice."""
        b = self.builder
        buffers = (*map(self._array, call.args), *self._destinations(var, call, storages))
        step = LaunchStep("library", call.routine, buffers, tuple(b.slot(e, self.symbols) for e in call.scalars))
        b.calls.append(CallSite(var.name, "", b.scalars.const(0), (CallVariant("library", (step,)),)))

    def _call(self, var: GVar, call: CallTIR, storages: Sequence[int]) -> None:
        b = self.builder
        task_variants, task_plan = self.task_variants[call.callee], self.plans[call.callee]
        func = task_variants.task.func
        arguments = {p: self._array(a) for p, a in zip(func.input_buffers, call.args, strict=True)}
        arguments |= zip(func.output_buffers, self._destinations(var, call, storages), strict=True)
        meaning = site_symbols(func, call)
        symbols: SlotOf = {v: b.slot(e, self.symbols) for v, e in meaning.items()}
        keys = task_plan.plan.variants
        variants: list[CallVariant] = []
        workspaces = [storages[number] for number in self.memory.workspaces.get(var, ())]
        for key, places in zip(keys, self.places[var], strict=True):
            record = task_plan.variants[key]
            own_workspaces = [workspaces[p] for p in places]
            label = "predicted" if key in task_plan.predicted else record.kind
            with refusing(call.callee, key, record):
                variants.append(b.variant(label, key, task_variants.stages(record), arguments, symbols, own_workspaces))
        entries = []
        for entry in task_plan.plan.entries:
            guard = None
            for test, outcome in entry.tests:
                slot = self._test(func.symbols, test, symbols)
                slot = slot if outcome else b.scalars.op(Opcode.NOT, slot)
                guard = slot if guard is None else b.scalars.op(Opcode.AND, guard, slot)
            entries.append(Entry(guard, keys.index(entry.variant)))
        # The last entry loses its guard: shapes that no guard admits, for instance beyond those measured, still get a
        # kernel.
        entries[-1] = Entry(None, entries[-1].variant)
        b.calls.append(CallSite(var.name, task_variants.task.key, choice_slot(b.scalars, entries), tuple(variants)))

    def _test(self, order: Sequence[Var], test: GuardTest, symbols: SlotOf) -> int:
        product = symbols[order[test.axes[0]]]
        for axis in test.axes[1:]:
            product = self.builder.scalars.op(Opcode.MUL, product, symbols[order[axis]])
        return guard_slot(self.builder.scalars, product, test)


def guard_slot(scalars: ScalarBuilder, product: int, test: GuardTest) -> int:
    """Return the slot that is 1 where a test holds of the product in a slot."""
    if test.divisor > 1:
        # Rounded up as in `Quantity.at`: the plan chose its threshold by the same numbers.
        ahead = scalars.op(Opcode.ADD, product, scalars.const(test.divisor - 1))
        product = scalars.op(Opcode.FLOORDIV, ahead, scalars.const(test.divisor))
    if test.modulus:
        product = scalars.op(Opcode.FLOORMOD, product, scalars.const(test.modulus))
    return scalars.op(Opcode.EQ if test.modulus else Opcode.LE, product, scalars.const(test.threshold))


def results(ret: Value, name: str = "result") -> Iterator[tuple[Value, str]]:
    """Yield each returned tensor and its name; tuples are flattened.

    Raises:
        BuildError: A value is no tensor.
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
        raise BuildError(f"expected tensors as results, got {ret!r}")


def _known(name: str, info: StructInfo) -> TensorInfo:
    if not is_known(info):
        raise BuildError(f"{name}: expected a tensor of known dims and dtype, got {info!r}; add a match_cast")
    return info


def _buffer(name: str, info: TensorInfo) -> Buffer:
    assert info.shape is not None and info.dtype is not None
    return Buffer(name, info.shape, info.dtype)
