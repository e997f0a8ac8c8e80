"""The standard order of passes, from operators to fused tensor functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.check.verify import verify as verify_module
from relax_tune.ir.core.dtype import DType, dtype, f32
from relax_tune.ir.core.function import Bound, IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, Function
from relax_tune.ir.core.graph_walk import all_bindings, callees, entries
from relax_tune.ir.core.struct_info import info_symbols
from relax_tune.ir.deduce.index_ranges import IndexRange, index_ranges
from relax_tune.ir.op.base import RuntimeCheck
from relax_tune.ir.passes.control.checked_indices import IndexCheck, add_indices, outside_params
from relax_tune.ir.passes.control.counted_loops import CountedLoop
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.control.outline import OutlinedModule, OutlineSubgraphs, is_straight_line
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.fusion.gates import FuseGates
from relax_tune.ir.passes.graph.canonical import Canonicalise
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce, TidyNames
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.combine_matmuls import CombineParallelMatmuls
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.cse import CommonSubexpressions
from relax_tune.ir.passes.graph.decompose import Decompose
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.graph.mixed_precision import ComputeWide, MixedPrecision
from relax_tune.ir.passes.graph.push_permutes import PushPermutes
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.graph.quantize_activations import QuantizeActivations
from relax_tune.ir.passes.graph.round_weights import RoundWeights
from relax_tune.ir.passes.graph.split_outputs import SeparateOutputs
from relax_tune.ir.passes.memory.append import Appended, store_outermost
from relax_tune.ir.passes.placement.device_requests import DropDevices
from relax_tune.ir.rewrite.fixpoint import RewriteToFixpoint
from relax_tune.ir.rewrite.movement_rules import PAD_OF_CONCAT
from relax_tune.ir.rewrite.rules import LevelName, RewriteByPattern, Rule

Pass = Callable[[IRModule], IRModule]


@dataclass(frozen=True, slots=True)
class Level:
    """A point in a list of passes at which users' rules of level `name` apply.

    Attributes:
        then: Passes that lower the operators that the rules may introduce.
    """

    name: LevelName
    then: tuple[Pass, ...] = ()

    def __call__(self, module: IRModule) -> IRModule:
        return module


WEIGHT_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Bits of the integer types that weights are quantised to."""


def passes_for(
    qkv: Literal["separate", "merged"] = "separate",
    precision: DType = f32,
    attention: Literal["fused", "unfused"] = "fused",
    rounded: Mapping[str, DType] = MappingProxyType({}),
    activations: Literal["f32", "int8"] = "f32",
    weights: Literal["stored", "bf16", "f16", "int8", "int4"] = "stored",
) -> tuple[Pass, ...]:
    """Return the standard passes.

    Args:
        qkv: Whether matmuls of one value by several weights are merged. Merged, there are fewer calls and wider tasks; whether that is
            faster depends on the device.
        precision: Type in which float32 models store weights and the arguments of matmuls.
        attention: Whether attention is one tensor function, or two matmuls and a softmax that are tuned or left to a library separately.
        rounded: 16-bit float type of each weight that is stored in 16 bits, by name (`RoundWeights`).
        activations: Type of the values that float32 weights are multiplied by. `int8` quantises them at run time
            (`QuantizeActivations`), and implies 8-bit weights unless `weights` gives another type.
        weights: Type in which weights of matmuls are stored (`QuantizeWeights`, `RoundWeights`).
    """
    quantized = "int8" if activations == "int8" and weights == "stored" else weights
    half = dtype(weights) if weights in ("bf16", "f16") else None
    merged, fused = qkv == "merged", attention == "fused"
    decompose = Decompose(("attention",) if fused else ())
    lowering = (decompose, Legalize(strict=True), SeparateOutputs(), DeadCode())
    return (
        Deduce(),
        ComputeWide(),
        decompose,
        Canonicalise(),
        # Permutes of weights disappear by folding, so that only the others are left to push.
        FoldConstants(),
        PushPermutes(),
        # Parts that are padded one by one fuse into the concatenation.
        RewriteToFixpoint((PAD_OF_CONCAT,)),
        DeadCode(),
        # Matmuls are merged that read the same value: equal values become one first.
        *((CommonSubexpressions(repeat_spatial=True), CombineParallelMatmuls()) if merged else ()),
        # Before `MixedPrecision`, which would round the weights that are to be quantised.
        *((QuantizeWeights(WEIGHT_BITS[quantized]),) if quantized in WEIGHT_BITS else ()),
        *((QuantizeActivations(),) if activations == "int8" else ()),
        MixedPrecision(precision),
        *((RoundWeights(rounded, half),) if rounded or half else ()),
        Legalize(strict=True),
        SeparateOutputs(),
        CommonSubexpressions(repeat_spatial=True),
        Level("functions", lowering),
        FuseGates(),
        FuseOps(through_columns=merged),
        # What is equal now cannot fuse into its readers any more, so it is computed once.
        CommonSubexpressions(),
        DeadCode(),
        # Calls of functions over merged dims are between views, which cancel each other; views of weights are folded.
        CollapseDims(),
        CancelViews(),
        FoldConstants(),
        DeadCode(),
        Level("fused", lowering),
        TidyNames(),
    )


STANDARD = passes_for()
FIRST_LEVELS: tuple[LevelName, ...] = ("import", "operators")
"""Levels before calls are inlined, whose rules `lower` applies itself."""


@dataclass(frozen=True, slots=True, eq=False)
class LoweredModule:
    """A module whose straight-line graph functions contain only `call_tir`, `call_dps_library`, views, tuples and match_cast.

    Attributes:
        module: The module.
        checks: Conditions that deduction leaves to run time, by straight-line function.
        stages: Every pass that changed something, with the module after it.
        host_functions: Functions with control flow, which call the outlined subgraphs.
        entries: Functions that a built model offers by name.
        seconds: Time of each pass.
        ranges: For each straight-line function, the valid values of parameters used as indices.
        index_checks: For each straight-line function, the checks of computed indices, which are its last results.
        appended: For each straight-line function, the parameters that results extend in place, stored with the growing dim outermost.
        loops: The host functions that are counted loops.
    """

    module: IRModule
    checks: Mapping[str, tuple[RuntimeCheck, ...]]
    stages: tuple[tuple[str, IRModule], ...]
    host_functions: tuple[str, ...]
    entries: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...] = ()
    ranges: Mapping[str, tuple[IndexRange, ...]] = field(default_factory=dict)
    index_checks: Mapping[str, tuple[IndexCheck, ...]] = field(default_factory=dict)
    appended: Mapping[str, tuple[Appended, ...]] = field(default_factory=dict)
    loops: Mapping[str, CountedLoop] = field(default_factory=dict)

    @property
    def functions(self) -> Mapping[str, Function]:
        """The straight-line graph functions by name: each becomes a program. The machine appends the rows of counted loops itself."""
        others = {*self.host_functions, *(loop.appending for loop in self.loops.values())}
        return {n: f for n, f in self.module.graphs.items() if n not in others}

    @property
    def outlined(self) -> OutlinedModule:
        """The host functions with the subgraphs they call."""
        subgraphs = tuple(n for n in self.functions if n not in self.entries)
        return OutlinedModule(self.module, self.host_functions, subgraphs, self.loops)

    @property
    def prims(self) -> Mapping[str, PrimFunc]:
        """The distinct tensor functions by name."""
        return self.module.prims

    def calls(self, caller: str | None = None) -> tuple[CallTIR, ...]:
        """Return every call of a tensor function, function by function, in order; `caller` selects one function."""
        values = (b.value for n, f in self.functions.items() if caller in (None, n) for b in f.bindings)
        return tuple(v for v in values if isinstance(v, CallTIR))


@dataclass(slots=True)
class PassManager:
    """A runner of passes in order, which records their results.

    Attributes:
        verify: Whether the module is verified before the first pass and after every pass that changes it.
        after: Name of the last pass to run (`pass_names`); None to run all.
        stages: Every pass that changed something, as text, with the module after it.
        seconds: Time of every pass, in the order in which they ran.
    """

    always_verify: ClassVar[bool] = False
    """Set by tests: every manager verifies after each pass, unless the module was invalid before the first."""

    verify: bool = False
    after: str | None = None
    stages: list[tuple[str, IRModule]] = field(default_factory=list)
    seconds: list[tuple[str, float]] = field(default_factory=list)
    _invalid_input: bool = False

    def run(self, module: IRModule, passes: Sequence[Pass]) -> IRModule:
        """Return the module after the passes.

        Raises:
            VerifyError: The module is invalid after a pass; the error names the pass.
        """
        if self.verify:
            self._verified(module, "before the passes")
        elif self.always_verify:
            try:
                verify_module(module)
            except VerifyError:
                self._invalid_input = True
        for step, name in zip(passes, pass_names(passes), strict=True):
            start = time.perf_counter()
            new = step(module)
            self.seconds.append((name, time.perf_counter() - start))
            self.add(repr(step), module, new)
            module = new
            if name == self.after:
                break
        return module

    def add(self, step: str, before: IRModule, after: IRModule) -> None:
        """Record the module after a pass."""
        if after is before:
            return
        if self.verify or (self.always_verify and not self._invalid_input):
            self._verified(after, f"after {step}")
        self.stages.append((step, after))

    @staticmethod
    def _verified(module: IRModule, where: str) -> None:
        try:
            verify_module(module)
        except VerifyError as error:
            raise VerifyError(f"{where}: {error}") from None


def pass_names(passes: Sequence[Pass]) -> tuple[str, ...]:
    """Return the names of the passes in order, without levels. A repeated pass has a number: `DeadCode`, `DeadCode.2`."""
    counts: Counter[str] = Counter()
    names = []
    for step in passes:
        if not isinstance(step, Level):
            name = type(step).__name__
            counts[name] += 1
            names.append(name if counts[name] == 1 else f"{name}.{counts[name]}")
    return tuple(names)


def run_passes(module: IRModule, passes: Sequence[Pass], verify: bool = False) -> tuple[tuple[str, IRModule], ...]:
    """Run passes; return each pass that changed something, and the module after it."""
    manager = PassManager(verify)
    manager.run(module, with_rules(passes, ()))
    return tuple(manager.stages)


def with_rules(passes: Sequence[Pass], rules: Sequence[Rule]) -> tuple[Pass, ...]:
    """Return `passes` with users' rules in place of their levels.

    Raises:
        UserError: A rule has a level that is not among the passes.
    """
    result: list[Pass] = []
    remaining = [r for r in rules if r.level not in FIRST_LEVELS]
    for step in passes:
        if not isinstance(step, Level):
            result.append(step)
            continue
        applied = tuple(r for r in remaining if r.level == step.name)
        if applied:
            remaining = [r for r in remaining if r.level != step.name]
            result += [RewriteByPattern(applied), *step.then]
    if remaining:
        level = remaining[0].level
        raise UserError(
            f"rule {remaining[0].title}: expected passes with level {level!r}, got {result!r:.200}; add Level({level!r}) to them"
        )
    return tuple(result)


def lower(
    module: IRModule,
    passes: Sequence[Pass] = STANDARD,
    rules: Sequence[Rule] = (),
    manager: PassManager | None = None,
    checks: bool = False,
    append: bool = False,
    devices: bool = False,
) -> LoweredModule:
    """Lower a module from operators to fused tensor functions.

    Calls are inlined first. A function that still branches, calls or has side effects is outlined into subgraphs. Then the `passes` run.

    Args:
        rules: Users' rewrite rules, each applied at its level.
        manager: Runs the passes and records their results.
        checks: Whether computed indices become further results, which are checked after each call.
        append: Whether parameters that results extend are stored with the growing dim outermost (`LoweredModule.appended`). The passes
            must then not decompose attention.
        devices: Whether annotations of devices remain, as a build for several devices needs them.

    Raises:
        DeduceError: The shapes or dtypes of the graph contradict each other.
        BuildError: Too few dims are known to lower the graph.
    """
    manager = manager or PassManager()
    first = [RewriteByPattern(tuple(r for r in rules if r.level == level), level == "import") for level in FIRST_LEVELS]
    if not devices:
        without_devices = DropDevices()(module)
        manager.add("DropDevices()", module, without_devices)
        module = without_devices
    module = manager.run(module, [step for step in first if step.rules])
    inlined, conditions = Inline().run(module)
    entry_names = tuple(entries(module.functions))
    hosts: tuple[str, ...] = ()
    loops: Mapping[str, CountedLoop] = {}
    # Placements cut a function by its calls, and transfers go between them: there, loops stay recursions.
    outline = OutlineSubgraphs(tuple(n for n in entry_names if not is_straight_line(_graph(inlined, n))), not devices)
    if outline.roots:
        straight = tuple(n for n in entry_names if n not in outline.roots)
        inlined, conditions, hosts, loops = _outlined(module, straight, outline)
    inlined = _bounded(inlined)
    manager.add(repr(outline if hosts else Inline()), module, inlined)
    outside = outside_params(inlined, hosts, entry_names)
    ranges = {n: index_ranges(inlined.graphs[n], inlined, positions) for n, positions in outside.items()}
    checked = add_indices(inlined, hosts, outside, checks)
    manager.add("CheckIndices()", inlined, checked.module)
    module, appended = store_outermost(checked.module, [n for n in entry_names if n not in hosts] if append else ())
    manager.add("StoreOutermost()", checked.module, module)
    lowered = manager.run(module, with_rules(passes, rules))
    stages, seconds = tuple(manager.stages), tuple(manager.seconds)
    return LoweredModule(
        lowered, conditions, stages, hosts, entry_names, seconds, ranges, checked.checks, appended, loops
    )


def _graph(module: IRModule, name: str) -> Function:
    f = module.functions[name]
    assert isinstance(f, Function)
    return f


def _outlined(
    module: IRModule, entries: tuple[str, ...], outline: OutlineSubgraphs
) -> tuple[IRModule, Mapping[str, tuple[RuntimeCheck, ...]], tuple[str, ...], Mapping[str, CountedLoop]]:
    """Outline functions, and inline calls in the subgraphs and in the straight-line `entries`.

    Returns:
        The module, the run-time checks by function, the names of the host functions, and the counted loops.
    """
    outlined = outline.run(module)
    functions = {n: outlined.module.functions[n] for n in outlined.subgraphs}
    todo = list(entries)
    while todo:
        name = todo.pop()
        if name not in functions:
            functions[name] = f = _graph(module, name)
            todo += callees(f)
    functions |= {n: f for n, f in outlined.module.functions.items() if not isinstance(f, Function)}
    inlined, checks = Inline().run(replace(outlined.module, functions=functions))
    hosts = {n: outlined.module.functions[n] for n in outlined.host_functions}
    functions = {**hosts, **inlined.functions}
    return replace(inlined, functions=functions), checks, outlined.host_functions, outlined.loops


def _bounded(module: IRModule) -> IRModule:
    """Declare a lower bound of 0 for every unbounded symbol of a parameter, and drop bounds of unused symbols."""
    functions = list(module.graphs.values())
    params = dict.fromkeys(v for f in functions for p in f.params for v in info_symbols(p.info))
    used = {
        *params,
        *(v for f in functions for b in all_bindings(f) for v in info_symbols(b.var.info)),
    }
    known = {b.var for b in module.bounds}
    bounds = [b for b in module.bounds if b.var in used] + [Bound(v) for v in params if v not in known]
    return module if len(bounds) == len(known) and used >= known else replace(module, bounds=tuple(bounds))
