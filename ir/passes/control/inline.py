"""Inlining: calls become bodies, decided branches their sides, known shapes and tuples their parts.

The same walk notes the checks that deduction leaves to run time, in the symbols of the function it starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.core.expr import Var, free_vars, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function, GVar, MatchCast
from relax_tune.ir.core.graph_walk import callees
from relax_tune.ir.core.names import fresh, same_objects
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, TensorInfo, info_symbols
from relax_tune.ir.deduce.relations import solve
from relax_tune.ir.op.base import RuntimeCheck
from relax_tune.ir.passes.control.inline_walk import DivergentBranch, Walk


@dataclass(frozen=True, slots=True)
class Inline:
    """Inline calls of graph functions and take decided branches.

    Recursive calls stay. A match_cast of a parameter sharpens the parameter. Shapes, tuples and casts without new facts
    disappear, and so do functions that were only called. Raises DeduceError.
    """

    def __call__(self, module: IRModule) -> IRModule:
        return self.run(module)[0]

    def run(self, module: IRModule) -> tuple[IRModule, Mapping[str, tuple[RuntimeCheck, ...]]]:
        """Return the module with calls inlined, and the run-time checks of its graph functions by name."""
        functions = dict(module.functions)
        called = {name for f in functions.values() if isinstance(f, Function) for name in callees(f)}
        checks: dict[str, tuple[RuntimeCheck, ...]] = {}
        bounds = list(module.bounds)
        for name, f in module.functions.items():
            if isinstance(f, Function):
                params = _sharpened(f)
                while True:
                    walk = Walk(module)
                    try:
                        functions[name] = new = walk.root(f, params)
                    except DivergentBranch:
                        break
                    again = _sharpened(new)  # by casts in inlined callees
                    if same_objects(again, new.params) or not same_objects(new.params, params):
                        break
                    params = again
                checks[name] = tuple(walk.checks)
                bounds += walk.dims
        kept = {name for f in functions.values() if isinstance(f, Function) for name in callees(f)} | {"main"}
        entries = {n for n, f in functions.items() if isinstance(f, Function) and n not in called} | kept
        functions = {n: f for n, f in functions.items() if not isinstance(f, Function) or n in entries}
        same = len(functions) == len(module.functions) and all(f is module.functions[n] for n, f in functions.items())
        return (module if same else replace(module, functions=functions, bounds=tuple(bounds))), {
            n: c for n, c in checks.items() if n in functions
        }


def _sharpened(f: Function) -> tuple[GVar, ...]:
    """Return the parameters, with unknown dims and dtypes as a match_cast in the function asserts them.

    A symbol of such a cast gets a name that no other symbol of the parameters has, since it may be another function's.
    """
    own = {v: v for p in f.params for v in info_symbols(p.info)}
    taken = {v.name for v in own}
    casts = {b.value: b.info for b in reversed(f.bindings) if isinstance(b, MatchCast) and isinstance(b.value, GVar)}
    params = []
    for p in f.params:
        info, cast = p.info, casts.get(p)
        if isinstance(info, TensorInfo) and isinstance(cast, TensorInfo) and None in (info.shape, info.dtype):
            ndim = cast.ndim if info.ndim is None else info.ndim
            shape = cast.shape if info.shape is None else info.shape
            if shape is not None:
                for v in free_vars(*shape):
                    if v not in own:
                        name = fresh(v.name, taken)
                        own[v] = v if name == v.name else Var(name, v.dtype)
                        taken.add(name)
                shape = tuple(substitute(d, own) for d in shape)
            info = TensorInfo(shape, info.dtype or cast.dtype, ndim)
        params.append(p if info == p.info else GVar(p.name, info))
    infos = tuple(p.info for p in params)
    return tuple(params) if None not in solve(CallableInfo(infos, ObjectInfo()), infos).values() else f.params
