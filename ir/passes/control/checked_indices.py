"""Indices that a function makes as further results of it, which are looked at after a call.

Those from outside always are, computed ones in a build with checks: without, an index outside its dim is defined
(`ir/op/indexing/indices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import AnyFunction, IRModule
from relax_tune.ir.core.graph_walk import all_bindings
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo, info_symbols
from relax_tune.ir.deduce.deduce import signature
from relax_tune.ir.deduce.index_ranges import made_indices
from relax_tune.ir.op.base import IndexUse
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Elements of a computed tensor that an operator uses as indices, in [0, size).

    result: number of the tensor among the results that `add_indices` adds
    every, column: of the flattened elements those at `column`, `column + every` ...; 1 and 0: all
    """

    result: int
    operator: str
    size: Expr
    every: int = 1
    column: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CheckedModule:
    """A module whose straight-line functions return their computed indices after their own results, and the checks of each."""

    module: IRModule
    checks: Mapping[str, tuple[IndexCheck, ...]]


def add_indices(
    module: IRModule, hosts: tuple[str, ...], outside: Mapping[str, frozenset[int]], computed: bool
) -> CheckedModule:
    """Add the indices that every straight-line function makes to its results. `hosts`, which call some, ignore them.

    outside: positions of the parameters that come from outside, by function
    computed: computed indices as well"""
    functions: dict[str, AnyFunction] = dict(module.functions)
    checks: dict[str, tuple[IndexCheck, ...]] = {}
    for name, f in module.graphs.items():
        found = () if name in hosts else tuple(made_indices(f, module.constants, outside.get(name), computed))
        if found:
            added = tuple(dict.fromkeys(index for _, index, _ in found))
            checks[name] = tuple(dict.fromkeys(_check(added.index(i), op, used) for op, i, used in found))
            functions[name] = _returning(f, added)
    new = {n: f for n, f in functions.items() if n in checks and isinstance(f, g.Function)}
    for name in hosts:
        functions[name] = _calling(module.graphs[name], module.graphs, new)
    return CheckedModule(replace(module, functions=functions) if checks else module, checks)


def _check(result: int, operator: str, used: IndexUse) -> IndexCheck:
    return IndexCheck(result, operator, used.size, used.every, used.column)


def _returning(f: g.Function, added: tuple[g.Value, ...]) -> g.Function:
    """Return the function with `added` after its own results."""
    own = f.ret.fields if isinstance(f.ret, g.TupleValue) else (f.ret,)
    declared: tuple[StructInfo, ...] = tuple(v.info for v in own)
    if not isinstance(f.ret, g.TupleValue):
        declared = (f.ret_info,)
    elif isinstance(f.ret_info, TupleInfo):
        declared = f.ret_info.fields
    return replace(f, ret=g.TupleValue((*own, *added)), ret_info=TupleInfo((*declared, *(v.info for v in added))))


def _calling(f: g.Function, old: Mapping[str, g.Function], new: Mapping[str, g.Function]) -> g.Function:
    """Return a host function whose calls of the functions `new` unpack what they return now."""

    def visit(out: Emitter, binding: g.AnyBinding) -> None:
        call = out.value(binding.value)
        callee = call.callee if isinstance(call, g.CallFunction) else None
        if not isinstance(call, g.CallFunction) or not isinstance(callee, g.FunctionRef) or callee.name not in new:
            out.keep(binding)
            return
        target = new[callee.name]
        several = isinstance(old[callee.name].ret, g.TupleValue)
        info = binding.var.info
        own = info.fields if several and isinstance(info, TupleInfo) else (info,)
        assert isinstance(target.ret_info, TupleInfo)
        added = tuple(map(_unsized, target.ret_info.fields[len(own) :]))
        renewed = g.CallFunction(g.FunctionRef(callee.name, signature(target)), call.args)
        whole = out.bind(renewed, TupleInfo((*own, *added)), binding.var.name if several else callee.name)
        if several:
            out.mapping[binding.var] = whole
        else:
            out.bindings.append(replace(binding, value=g.TupleItem(whole, 0)))

    return rewrite_function(f, visit)


def _unsized(info: StructInfo) -> StructInfo:
    """Return the annotation of a tensor without symbols, which are those of another function."""
    sized = isinstance(info, TensorInfo) and any(True for _ in info_symbols(info))
    return TensorInfo(None, info.dtype, info.ndim) if sized and isinstance(info, TensorInfo) else info


def outside_params(module: IRModule, hosts: tuple[str, ...], entries: tuple[str, ...]) -> dict[str, frozenset[int]]:
    """Return the positions of the parameters that come from outside, of every straight-line function.

    Those of an entry all do. One of a subgraph does where each call gives it a parameter of an entry as it is."""
    given: dict[str, list[frozenset[int]]] = {}
    for host in hosts:
        params = frozenset(module.graphs[host].params if host in entries else ())
        for call in _calls(module.graphs[host]):
            if isinstance(call.callee, g.FunctionRef):
                plain = frozenset(i for i, a in enumerate(call.args) if a in params)
                given.setdefault(call.callee.name, []).append(plain)
    return {
        n: frozenset(range(len(f.params))) if n in entries else frozenset.intersection(*given.get(n, [frozenset()]))
        for n, f in module.graphs.items()
        if n not in hosts
    }


def _calls(f: g.Function) -> Iterator[g.CallFunction]:
    return (b.value for b in all_bindings(f) if isinstance(b.value, g.CallFunction))
