"""The standard order of passes, from operators to fused tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.function import Bound, IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, Function, all_bindings, callees, entries
from relax_tune.ir.core.struct_info import info_symbols
from relax_tune.ir.op.base import RuntimeCheck
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.control.outline import Cut, CutModule, is_straight
from relax_tune.ir.passes.fusion.fuse import FuseOps
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
from relax_tune.ir.passes.graph.split_outputs import SeparateOutputs
from relax_tune.ir.rewrite.rules import RewriteByPattern, Rule

Pass = Callable[[IRModule], IRModule]


def passes_for(
    qkv: Literal["separate", "merged"] = "separate",
    precision: DType = f32,
    attention: Literal["fused", "unfused"] = "fused",
) -> tuple[Pass, ...]:
    """The standard passes.

    qkv: matmuls of one value with several weights; merged, there are fewer calls and wider tasks: whether that is faster
    depends on the device. precision: what float32 models store weights and the arguments of matmuls in. attention: one
    tensor function, or its two products and the softmax between them, each of which is then tuned or left to a library by itself."""
    merged, fused = qkv == "merged", attention == "fused"
    return (
        Deduce(),
        ComputeWide(),
        Decompose(("attention",) if fused else ()),
        Canonicalise(),
        FoldConstants(),
        PushPermutes(),
        DeadCode(),
        *((CommonSubexpressions(repeat_spatial=True), CombineParallelMatmuls()) if merged else ()),
        MixedPrecision(precision),
        Legalize(strict=True),
        SeparateOutputs(),
        CommonSubexpressions(repeat_spatial=True),
        FuseOps(through_columns=merged),
        CommonSubexpressions(),
        DeadCode(),
        CollapseDims(),
        CancelViews(),
        FoldConstants(),
        DeadCode(),
        TidyNames(),
    )


STANDARD = passes_for()


@dataclass(frozen=True, slots=True, eq=False)
class LoweredModule:
    """A module whose straight graph functions hold only `call_tir`, `call_dps_library`, views, tuples and match_cast.

    checks: what deduction left to run time, by straight function; stages: every pass that changed something with the module it
    made; drivers: the functions that are not straight, whose parts are; entries: the functions a built model offers by name.
    """

    module: IRModule
    checks: Mapping[str, tuple[RuntimeCheck, ...]]
    stages: tuple[tuple[str, IRModule], ...]
    drivers: tuple[str, ...]
    entries: tuple[str, ...]

    @property
    def functions(self) -> Mapping[str, Function]:
        """The straight graph functions by name: each becomes a program."""
        found = {n: f for n, f in self.module.functions.items() if isinstance(f, Function)}
        return {n: f for n, f in found.items() if n not in self.drivers}

    @property
    def cut(self) -> CutModule:
        """The drivers with what they call."""
        return CutModule(self.module, self.drivers, tuple(n for n in self.functions if n not in self.entries))

    @property
    def prims(self) -> Mapping[str, PrimFunc]:
        """The unique tensor functions by name."""
        return {n: f for n, f in self.module.functions.items() if isinstance(f, PrimFunc)}

    def calls(self, caller: str | None = None) -> tuple[CallTIR, ...]:
        """Every call of a tensor function, function by function, in order; or those of one function."""
        found = (b.value for n, f in self.functions.items() if caller in (None, n) for b in f.bindings)
        return tuple(v for v in found if isinstance(v, CallTIR))


def run_passes(module: IRModule, passes: tuple[Pass, ...]) -> tuple[tuple[str, IRModule], ...]:
    """Each pass that changed something, and the module after it."""
    found: list[tuple[str, IRModule]] = []
    for step in passes:
        new = step(module)
        if new is not module:
            found.append((repr(step), new))
        module = new
    return tuple(found)


def with_rules(passes: tuple[Pass, ...], rules: Sequence[Rule]) -> tuple[Pass, ...]:
    """`passes`, with rules of the levels "functions" and "fused" where these begin; what they put is legalised.

    Raises UserError for a rule of a level that these passes do not have."""
    found: list[Pass] = []
    left = [r for r in rules if r.level != "operators"]
    lowering = [p for p in passes if isinstance(p, (Decompose, Legalize, SeparateOutputs))]
    for step in passes:
        level = "functions" if isinstance(step, FuseOps) else "fused" if isinstance(step, TidyNames) else ""
        own = tuple(r for r in left if r.level == level)
        if own:
            left = [r for r in left if r.level != level]
            found += [RewriteByPattern(own), *lowering, DeadCode()]
        found.append(step)
    if left:
        raise UserError(
            f"rule {left[0].title}: wanted passes with level {left[0].level!r}, found {found!r:.200}; add FuseOps for "
            "'functions', TidyNames for 'fused'"
        )
    return tuple(found)


def lower(module: IRModule, passes: tuple[Pass, ...] = STANDARD, rules: Sequence[Rule] = ()) -> LoweredModule:
    """Inline, deduce, fold, legalise, fuse, collapse dims and clean up: the graph functions that no other one calls, each with
    what it calls put in place. One that branches, calls or has side effects in the end is cut into straight parts. rules: a user's
    own, each applied at its level.

    Raises: DeduceError for a graph that cannot fit together, BuildError for one whose dims are not known enough."""
    on_operators = tuple(r for r in rules if r.level == "operators")
    first = run_passes(module, (RewriteByPattern(on_operators),) if on_operators else ())
    module = first[-1][1] if first else module
    straight, checks = Inline().run(module)
    offered = tuple(entries(module.functions))
    drivers: tuple[str, ...] = ()
    roots = tuple(n for n in offered if not is_straight(_graph(straight, n)))
    if roots and Legalize(strict=True) in passes:
        straight, checks, drivers = _driven(module, tuple(n for n in offered if n not in roots), roots)
    straight = _bounded(straight)
    first = first if straight is module else (*first, (repr(Cut(roots) if drivers else Inline()), straight))
    stages = (*first, *run_passes(straight, with_rules(passes, rules)))
    return LoweredModule(stages[-1][1] if stages else module, checks, stages, drivers, offered)


def _graph(module: IRModule, name: str) -> Function:
    found = module.functions[name]
    assert isinstance(found, Function)
    return found


def _driven(
    module: IRModule, entries: tuple[str, ...], roots: tuple[str, ...]
) -> tuple[IRModule, Mapping[str, tuple[RuntimeCheck, ...]], tuple[str, ...]]:
    """The straight `entries` and the parts of `roots` with what they call put in place, their checks, and the drivers."""
    cut = Cut(roots).run(module)
    functions = {n: cut.module.functions[n] for n in cut.parts}
    todo = list(entries)
    while todo:
        name = todo.pop()
        if name not in functions:
            functions[name] = f = _graph(module, name)
            todo += callees(f)
    functions |= {n: f for n, f in cut.module.functions.items() if not isinstance(f, Function)}
    straight, checks = Inline().run(replace(cut.module, functions=functions))
    drivers = {n: cut.module.functions[n] for n in cut.drivers}
    return replace(straight, functions={**drivers, **straight.functions}), checks, cut.drivers


def _bounded(module: IRModule) -> IRModule:
    """A bound of at least 0 for every symbol of a parameter that has none declared; none for a symbol nothing speaks of, such as
    one of a function that was put in place of its calls."""
    functions = [f for f in module.functions.values() if isinstance(f, Function)]
    params = dict.fromkeys(v for f in functions for p in f.params for v in info_symbols(p.info))
    used = {
        *params,
        *(v for f in functions for b in all_bindings(f) for v in info_symbols(b.var.info)),
    }
    known = {b.var for b in module.bounds}
    bounds = [b for b in module.bounds if b.var in used] + [Bound(v) for v in params if v not in known]
    return module if len(bounds) == len(known) and used >= known else replace(module, bounds=tuple(bounds))
