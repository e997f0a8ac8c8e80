"""Inlining of calls, decided branches, known shapes and known tuples.

The same traversal collects the checks that deduction leaves to run time, over the symbols of the function it starts from.

Tests: `tests/ir/passes/test_graph_passes.py`, `tests/ir/interp/test_random_graphs.py`.
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
    """Inline calls of graph functions, and replace branches whose condition is known at compile time by the executed side.

    Recursive calls stay. A match_cast of a parameter makes the parameter's annotation more precise. Shapes, tuples and casts without new
    facts are removed, and so are functions that are no longer called.

    Raises:
        DeduceError: The shapes or dtypes contradict each other.
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
                # Before the walk: a dim that a cast deep in the function reveals makes the operators before the cast
                # deducible, too.
                params = _with_cast_infos(f)
                while True:
                    walk = Walk(module)
                    try:
                        functions[name] = new = walk.root(f, params)
                    # The function keeps its old form. It may be right as long as the contradictory side is not
                    # executed, and the walk has no result to keep.
                    except DivergentBranch:
                        break
                    again = _with_cast_infos(new)  # inlined callees may cast parameters, too
                    if same_objects(again, new.params) or not same_objects(new.params, params):
                        break
                    params = again
                checks[name] = tuple(walk.checks)
                bounds += walk.dims
        # A function that was never called is an entry of the model and stays. One whose calls were all inlined goes.
        still_called = {name for f in functions.values() if isinstance(f, Function) for name in callees(f)} | {"main"}
        entries = {n for n, f in functions.items() if isinstance(f, Function) and n not in called} | still_called
        functions = {n: f for n, f in functions.items() if not isinstance(f, Function) or n in entries}
        unchanged = len(functions) == len(module.functions) and all(
            f is module.functions[n] for n, f in functions.items()
        )
        return (module if unchanged else replace(module, functions=functions, bounds=tuple(bounds))), {
            n: c for n, c in checks.items() if n in functions
        }


def _with_cast_infos(f: Function) -> tuple[GVar, ...]:
    """Return the parameters, with unknown dims and dtypes replaced by what match_casts in the function assert.

    Symbols of such casts are renamed if they have the name of a symbol of the parameters, since they may be another function's.
    """
    renamed = {v: v for p in f.params for v in info_symbols(p.info)}
    names = {v.name for v in renamed}
    casts = {b.value: b.info for b in reversed(f.bindings) if isinstance(b, MatchCast) and isinstance(b.value, GVar)}
    params = []
    for p in f.params:
        info, cast = p.info, casts.get(p)
        if isinstance(info, TensorInfo) and isinstance(cast, TensorInfo) and None in (info.shape, info.dtype):
            ndim = cast.ndim if info.ndim is None else info.ndim
            shape = cast.shape if info.shape is None else info.shape
            if shape is not None:
                for v in free_vars(*shape):
                    if v not in renamed:
                        name = fresh(v.name, names)
                        renamed[v] = v if name == v.name else Var(name, v.dtype)
                        names.add(name)
                shape = tuple(substitute(d, renamed) for d in shape)
            info = TensorInfo(shape, info.dtype or cast.dtype, ndim)
        params.append(p if info == p.info else GVar(p.name, info))
    infos = tuple(p.info for p in params)
    # A cast may bring in a symbol that no argument determines. Such a parameter could not be checked when the
    # function is called.
    return tuple(params) if None not in solve(CallableInfo(infos, ObjectInfo()), infos).values() else f.params
