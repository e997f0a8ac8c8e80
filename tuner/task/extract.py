"""Tasks of a lowered module: unique fused tensor functions with their call sites, domain and text.

Tests: `tests/tuner/task/test_allowed_sizes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.database.records import Regime
from relax_tune.errors import BuildError, UserError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.expr import Expr, Var, free_vars, loads, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, Constant, GVar, Value
from relax_tune.ir.core.intervals import Interval
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.core.struct_info import TensorInfo, info_symbols
from relax_tune.ir.op.base import env_of
from relax_tune.ir.passes.fusion.symbol_interface import bind_symbols
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.schedules.loop_tree import block_loads
from relax_tune.tuner.settings import Caches
from relax_tune.tuner.task.allowed_sizes import AllowedSizes, Range, allowed_sizes
from relax_tune.tuner.task.domain import Domain, anchors, checked_points
from relax_tune.tuner.task.task import Task

# Upper end of the tuned range of a symbol without a declared bound. Larger sizes run by the last entry of each plan.
DEFAULT_UPPER = 512
# Weights count as cached if they fill at most one part in STAYING_SHARE of the last cache: activations and other processes
# use the rest.
STAYING_SHARE = 2
# Bytes of weights that do not survive in a core's nearest cache from one call to the next.
MANY_WEIGHTS = 64 << 10


def ranges_of(module: IRModule) -> dict[Var, Range]:
    """Return the declared bounds of the model's symbols."""
    return {b.var: Range(b.lower, DEFAULT_UPPER if b.upper is None else b.upper) for b in module.bounds}


def tensor_infos(values: Sequence[Value]) -> list[TensorInfo]:
    """Return the annotations of tensor operands.

    Raises:
        BuildError: An operand is no tensor.
    """
    infos = []
    for v in values:
        if not isinstance(v, (GVar, Constant)) or not isinstance(v.info, TensorInfo):
            raise BuildError(f"expected tensors as arguments of a tensor function, got {v!r}")
        infos.append(v.info)
    return infos


def site_symbols(func: PrimFunc, call: CallTIR) -> dict[Var, Expr]:
    """Return the model's expression for each symbol of `func` at this call."""
    return bind_symbols(func, tensor_infos(call.args), call.out, call.scalars)


def extract_tasks(
    lowered: LoweredModule,
    count: int = 6,
    overrides: Mapping[str, Range] | None = None,
    profile: ShapeProfile | None = None,
    caches: Caches = "warm",
    cache_bytes: int = 0,
) -> tuple[Task, ...]:
    """Return the tasks of a module, in order of first call.

    Args:
        count: Anchors of each task.
        overrides: Narrower ranges of symbols, by name.
        profile: Served shapes.
        caches: The setting.
        cache_bytes: Size of the device's last cache.

    Raises:
        UserError: An override names a symbol that the model lacks, or the profile counts none of its symbols.
    """
    counted = {} if profile is None else _counted(lowered, profile)
    ranges = _tuned_ranges(lowered.module, counted, overrides or {})
    sites: dict[str, list[tuple[Expr, ...]]] = {}
    callers: dict[str, dict[str, None]] = {}
    limits: dict[tuple[str, ...], tuple[AllowedSizes[Var], AllowedSizes[Var]]] = {}
    weights: dict[str, int] = {}
    served: dict[str, list[tuple[tuple[Expr, ...], Mapping[Var, Mapping[int, int]]]]] = {}
    for caller in lowered.functions:
        for call in lowered.calls(caller):
            func = lowered.prims[call.callee]
            meaning = site_symbols(func, call)
            site = tuple(meaning[v] for v in func.symbols)
            sites.setdefault(call.callee, []).append(site)
            callers.setdefault(call.callee, {})[caller] = None
            read = (lowered.module.constants[v.name] for v in call.args if isinstance(v, Constant))
            weights[call.callee] = sum(array.nbytes for array in read)
            recorded, symbols_used = counted.get(caller, {}), free_vars(*site)
            if all(v in recorded for v in symbols_used):
                served.setdefault(call.callee, []).append((site, {v: recorded[v] for v in symbols_used}))
    flushed = caches == "model" and _weights_read(lowered) * STAYING_SHARE > cache_bytes
    tasks, env = [], env_of(lowered.module.bounds)
    domains: dict[tuple[object, ...], Domain] = {}  # functions of equal symbols share them
    for name, where in sites.items():
        func = lowered.prims[name]
        around = tuple(callers[name])
        if around not in limits:
            limits[around] = function_sizes(lowered, around, ranges), function_sizes(lowered, around, ranges, 1)
        allowed, full = limits[around]
        same = (around, tuple(where)) if name not in served else (name,)
        if same not in domains:
            domain = anchors(where, _used(where, ranges), count, served=served.get(name, ()), allowed=allowed)
            domains[same] = replace(domain, checked=checked_points(where[0], domain, (full, allowed)))
        text = print_text(func, normalise=True)
        # Traces name loops and blocks. They apply to the normalised function, so that records do not depend on the model's names.
        plain = replace(parse_prim_func(text), name=name)
        regime: Regime = "flushed" if flushed and weights[name] >= MANY_WEIGHTS else "warm"
        possible = tuple(_range_of([site[a] for site in where], env) for a in range(len(func.symbols)))
        tasks.append(Task(workload_key(func), text, plain, tuple(where), domains[same], regime, possible, allowed))
    return tuple(tasks)


def _tuned_ranges(
    module: IRModule, counted: Mapping[str, Mapping[Var, Mapping[int, int]]], overrides: Mapping[str, Range]
) -> dict[Var, Range]:
    """Return the range over which each symbol is tuned."""
    ranges = ranges_of(module)
    for bound in module.bounds:
        if bound.upper is None:  # recorded shapes extend the range
            values = [x for symbols in counted.values() for x in symbols.get(bound.var, ())]
            ranges[bound.var] = Range(bound.lower, max(DEFAULT_UPPER, *values, bound.lower))
    for name, narrower in overrides.items():
        matches = [v for v in ranges if v.name == name]
        if not matches:
            known = ", ".join(v.name for v in ranges) or "none"
            raise UserError(f"bound of {name}: expected a symbol of the model, which has {known}")
        ranges.update(dict.fromkeys(matches, narrower))
    return ranges


def function_sizes(
    lowered: LoweredModule, callers: Sequence[str], ranges: Mapping[Var, Range], least: int = 0
) -> AllowedSizes[Var]:
    """Return the sizes at which straight-line functions run, with every dim of every array at least `least`."""
    dims: dict[Expr, None] = {}
    for caller in callers:
        for call in lowered.calls(caller):
            func = lowered.prims[call.callee]
            meaning = site_symbols(func, call)
            every = (d for b in (*func.buffers, *func.allocs) for d in b.shape)
            dims |= dict.fromkeys(substitute(d, meaning) for d in every)
    return allowed_sizes(ranges, [c.cond for caller in callers for c in lowered.checks[caller]], dims, least)


def sizes_near(lowered: LoweredModule, function: str, starts: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the distinct sizes near each of `starts`, by name, at which a straight-line function runs."""
    ranges = ranges_of(lowered.module)
    by_name = {v.name: v for v in ranges}
    limits = [function_sizes(lowered, [function], ranges, least) for least in (1, 0)]
    start_sizes = [{by_name[n]: x for n, x in start.items()} for start in starts]
    near_sizes = next((near for m in limits if (near := m.all_nearest(start_sizes))), [])
    return [{v.name: x for v, x in values.items() if v.name in starts[0]} for values in near_sizes]


def _counted(lowered: LoweredModule, profile: ShapeProfile) -> dict[str, dict[Var, dict[int, int]]]:
    """Count the values of each symbol of each straight-line function.

    Raises:
        UserError: The profile counts none of them.
    """
    counted: dict[str, dict[Var, dict[int, int]]] = {}
    for name, function in lowered.functions.items():
        symbols_of_function = {
            v for x in (*function.params, *(b.var for b in function.bindings)) for v in info_symbols(x.info)
        }
        known = profile.histograms.get(name, {})
        symbols = {
            b.var: known[b.var.name].values
            for b in lowered.module.bounds
            if b.var in symbols_of_function and b.var.name in known
        }
        if symbols:
            counted[name] = symbols
    if not counted:
        has = ", ".join(f"{f}: {' '.join(s)}" for f, s in profile.histograms.items()) or "no calls at all"
        raise UserError(
            f"shape profile: expected counts of the symbols of {', '.join(lowered.functions)}, got {has}; record them with an "
            "artifact of this model"
        )
    return counted


def _weights_read(lowered: LoweredModule) -> int:
    """Return the bytes of all weights that functions read completely, which excludes tables that are indexed by data."""
    whole: dict[str, int] = {}
    for caller in lowered.functions:
        for call in lowered.calls(caller):
            func = lowered.prims[call.callee]
            chosen = {x.buffer for b in blocks(func.body) for x in block_loads(b) if loads(*x.indices)}
            for argument, buffer in zip(call.args, func.input_buffers, strict=True):
                if isinstance(argument, Constant) and buffer not in chosen:
                    whole[argument.name] = lowered.module.constants[argument.name].nbytes
    return sum(whole.values())


def _range_of(values: Sequence[Expr], env: Env) -> Interval:
    """Return the least and the largest value of expressions over the model's symbols; None without a bound."""
    lows, highs = zip(*(interval(e, env) for e in values))
    return None if None in lows else min(lows), None if None in highs else max(highs)


def _used(sites: Sequence[tuple[Expr, ...]], ranges: Mapping[Var, Range]) -> dict[Var, Range]:
    used = set(free_vars(*(e for site in sites for e in site)))
    return {v: r for v, r in ranges.items() if v in used}
