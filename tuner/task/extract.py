"""Tasks of a lowered module: unique fused tensor functions with their call sites, domain and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.database.records import Regime
from relax_tune.errors import BuildError, UserError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.expr import Expr, Var, free_vars, loads
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
from relax_tune.tuner.task.domain import Range, anchors
from relax_tune.tuner.task.task import Task

# A symbol without a declared upper bound is tuned up to here; it runs beyond, by the last entry of each plan.
DEFAULT_UPPER = 512
# Weights stay in the last cache if they fill at most one part in so many: activations, and other processes, want the rest.
STAYING_SHARE = 2
# Bytes of weights that a worker's nearest cache cannot keep from one call to the next.
MANY_WEIGHTS = 64 << 10


def ranges_of(module: IRModule) -> dict[Var, Range]:
    """Return the declared bounds of the model's symbols."""
    return {b.var: Range(b.lower, DEFAULT_UPPER if b.upper is None else b.upper) for b in module.bounds}


def tensor_infos(values: Sequence[Value]) -> list[TensorInfo]:
    """Return the annotations of tensor operands. Raises BuildError for any other operand."""
    found = []
    for v in values:
        if not isinstance(v, (GVar, Constant)) or not isinstance(v.info, TensorInfo):
            raise BuildError(f"wanted tensors as arguments of a tensor function, found {v!r}")
        found.append(v.info)
    return found


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
    """Return the tasks of a module, in order of first call. overrides: ranges that narrow symbols, by name; profile:
    the served shapes; caches: as in the settings; cache_bytes: of the device's last cache

    Raises UserError for an override of a symbol the model does not have, and for a profile that counts none of its symbols.
    """
    ranges = ranges_of(lowered.module)
    counted = {} if profile is None else _counted(lowered, profile)
    for bound in lowered.module.bounds:
        if bound.upper is None:  # recorded shapes extend the range
            seen = [x for symbols in counted.values() for x in symbols.get(bound.var, ())]
            ranges[bound.var] = Range(bound.lower, max(DEFAULT_UPPER, *seen, bound.lower))
    for name, narrower in (overrides or {}).items():
        matches = [v for v in ranges if v.name == name]
        if not matches:
            known = ", ".join(v.name for v in ranges) or "none"
            raise UserError(f"--bound {name}: wanted a symbol of the model, which has {known}")
        ranges.update(dict.fromkeys(matches, narrower))
    sites: dict[str, list[tuple[Expr, ...]]] = {}
    weights: dict[str, int] = {}
    served: dict[str, list[tuple[tuple[Expr, ...], Mapping[Var, Mapping[int, int]]]]] = {}
    for caller in lowered.functions:
        for call in lowered.calls(caller):
            func = lowered.prims[call.callee]
            meaning = site_symbols(func, call)
            site = tuple(meaning[v] for v in func.symbols)
            sites.setdefault(call.callee, []).append(site)
            held = (lowered.module.constants[v.name] for v in call.args if isinstance(v, Constant))
            weights[call.callee] = sum(array.nbytes for array in held)
            own, wanted = counted.get(caller, {}), free_vars(*site)
            if all(v in own for v in wanted):
                served.setdefault(call.callee, []).append((site, {v: own[v] for v in wanted}))
    apart = caches == "model" and _weights_read(lowered) * STAYING_SHARE > cache_bytes
    tasks, env = [], env_of(lowered.module.bounds)
    for name, where in sites.items():
        func = lowered.prims[name]
        domain = anchors(where, _used(where, ranges), count, served=served.get(name, ()))
        text = print_text(func, normalise=True)
        # traces name loops and blocks: they are made on the normalised function, so a record fits whatever the model calls things
        plain = replace(parse_prim_func(text), name=name)
        regime: Regime = "flushed" if apart and weights[name] >= MANY_WEIGHTS else "warm"
        possible = tuple(_range_of([site[a] for site in where], env) for a in range(len(func.symbols)))
        tasks.append(Task(workload_key(func), text, plain, tuple(where), domain, regime, possible))
    return tuple(tasks)


def _counted(lowered: LoweredModule, profile: ShapeProfile) -> dict[str, dict[Var, dict[int, int]]]:
    """Count the values of each symbol of each straight-line function. Raises UserError when the profile knows none of them."""
    found: dict[str, dict[Var, dict[int, int]]] = {}
    for name, function in lowered.functions.items():
        own = {v for x in (*function.params, *(b.var for b in function.bindings)) for v in info_symbols(x.info)}
        known = profile.histograms.get(name, {})
        symbols = {
            b.var: known[b.var.name].values for b in lowered.module.bounds if b.var in own and b.var.name in known
        }
        if symbols:
            found[name] = symbols
    if not found:
        has = ", ".join(f"{f}: {' '.join(s)}" for f, s in profile.histograms.items()) or "no calls at all"
        raise UserError(
            f"shape profile: wanted counts of the symbols of {', '.join(lowered.functions)}, found {has}; record them with an "
            "artifact of this model"
        )
    return found


def _weights_read(lowered: LoweredModule) -> int:
    """Return the bytes of all weights that functions read whole: not of tables, whose rows the data choose."""
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
    """Return the least and the largest value of expressions over the model's symbols; None where there is no bound."""
    lows, highs = zip(*(interval(e, env) for e in values))
    return None if None in lows else min(lows), None if None in highs else max(highs)


def _used(sites: Sequence[tuple[Expr, ...]], ranges: Mapping[Var, Range]) -> dict[Var, Range]:
    wanted = set(free_vars(*(e for site in sites for e in site)))
    return {v: r for v, r in ranges.items() if v in wanted}
