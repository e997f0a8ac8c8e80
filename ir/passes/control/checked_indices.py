"""Return the indices that a function computes as further results, so that they can be checked after a call.

Indices that are parameters, or views of parameters, are always returned. Other computed indices are returned only in a build with checks;
without checks, the result for an index out of range is defined (`ir/op/indexing/indices`).

Tests: `tests/tuner/emit/test_host_programs.py`, `tests/ir/deduce/test_deduce.py`.
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
from relax_tune.ir.deduce.index_ranges import computed_indices
from relax_tune.ir.op.base import IndexUse
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Elements of a computed tensor that an operator uses as indices, which must be in [0, size).

    Attributes:
        result: Position of the tensor among the results that `add_indices` adds.
        operator: Name of the operator.
        size: Exclusive upper bound of the indices.
        every, column: The indices are the flattened elements `column, column + every, ...`; (1, 0) selects all.
    """

    result: int
    operator: str
    size: Expr
    every: int = 1
    column: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CheckedModule:
    """A module whose straight-line functions return computed indices after their results.

    Attributes:
        checks: Checks of the indices of each function.
    """

    module: IRModule
    checks: Mapping[str, tuple[IndexCheck, ...]]


def add_indices(
    module: IRModule, hosts: tuple[str, ...], outside: Mapping[str, frozenset[int]], computed: bool
) -> CheckedModule:
    """Add the indices that each straight-line function computes to its results. Host functions, which call them, ignore these results.

    Args:
        outside: Positions of the parameters that the caller of the model provides, by function.
        computed: Whether indices computed from other values are added as well.
    """
    functions: dict[str, AnyFunction] = dict(module.functions)
    checks: dict[str, tuple[IndexCheck, ...]] = {}
    for name, f in module.graphs.items():
        uses = () if name in hosts else tuple(computed_indices(f, module.constants, outside.get(name), computed))
        if uses:
            added = tuple(dict.fromkeys(index for _, index, _ in uses))
            checks[name] = tuple(dict.fromkeys(_check(added.index(i), op, use) for op, i, use in uses))
            functions[name] = _returning(f, added)
    new = {n: f for n, f in functions.items() if n in checks and isinstance(f, g.Function)}
    for name in hosts:
        functions[name] = _calling(module.graphs[name], module.graphs, new)
    return CheckedModule(replace(module, functions=functions) if checks else module, checks)


def _check(result: int, operator: str, used: IndexUse) -> IndexCheck:
    return IndexCheck(result, operator, used.size, used.stride, used.offset)


def _returning(f: g.Function, added: tuple[g.Value, ...]) -> g.Function:
    """Return the function with `added` after its results."""
    results = f.ret.fields if isinstance(f.ret, g.TupleValue) else (f.ret,)
    declared: tuple[StructInfo, ...] = tuple(v.info for v in results)
    if not isinstance(f.ret, g.TupleValue):
        declared = (f.ret_info,)
    elif isinstance(f.ret_info, TupleInfo):
        declared = f.ret_info.fields
    return replace(f, ret=g.TupleValue((*results, *added)), ret_info=TupleInfo((*declared, *(v.info for v in added))))


def _calling(f: g.Function, old: Mapping[str, g.Function], new: Mapping[str, g.Function]) -> g.Function:
    """Return a host function whose calls of changed functions unpack the original results.

    Args:
        old: All functions before the change.
        new: The changed functions.
    """

    def visit(out: Emitter, binding: g.AnyBinding) -> None:
        call = out.value(binding.value)
        callee = call.callee if isinstance(call, g.CallFunction) else None
        if not isinstance(call, g.CallFunction) or not isinstance(callee, g.FunctionRef) or callee.name not in new:
            out.keep(binding)
            return
        target = new[callee.name]
        is_tuple = isinstance(old[callee.name].ret, g.TupleValue)
        info = binding.var.info
        results = info.fields if is_tuple and isinstance(info, TupleInfo) else (info,)
        assert isinstance(target.ret_info, TupleInfo)
        # The host function ignores these results, so that their dims, over symbols of the callee, need no meaning in
        # it.
        added = tuple(map(_unsized, target.ret_info.fields[len(results) :]))
        new_call = g.CallFunction(g.FunctionRef(callee.name, signature(target)), call.args)
        returned = out.bind(new_call, TupleInfo((*results, *added)), binding.var.name if is_tuple else callee.name)
        if is_tuple:
            out.mapping[binding.var] = returned
        else:
            out.bindings.append(replace(binding, value=g.TupleItem(returned, 0)))

    return rewrite_function(f, visit)


def _unsized(info: StructInfo) -> StructInfo:
    """Return the annotation of a tensor without dims if they mention symbols, which belong to another function."""
    sized = isinstance(info, TensorInfo) and any(True for _ in info_symbols(info))
    return TensorInfo(None, info.dtype, info.ndim) if sized and isinstance(info, TensorInfo) else info


def outside_params(module: IRModule, hosts: tuple[str, ...], entries: tuple[str, ...]) -> dict[str, frozenset[int]]:
    """Return the positions of the parameters that the caller of the model provides, for every straight-line function.

    These are all parameters of an entry. For a subgraph, they are those to which each call passes a parameter of an entry.
    """
    passed: dict[str, list[frozenset[int]]] = {}
    for host in hosts:
        params = frozenset(module.graphs[host].params if host in entries else ())
        for call in _calls(module.graphs[host]):
            if isinstance(call.callee, g.FunctionRef):
                # An index that the host function computes is not from outside. So a parameter counts only if every
                # call passes it through: the intersection.
                plain = frozenset(i for i, a in enumerate(call.args) if a in params)
                passed.setdefault(call.callee.name, []).append(plain)
    return {
        n: frozenset(range(len(f.params))) if n in entries else frozenset.intersection(*passed.get(n, [frozenset()]))
        for n, f in module.graphs.items()
        if n not in hosts
    }


def _calls(f: g.Function) -> Iterator[g.CallFunction]:
    return (b.value for b in all_bindings(f) if isinstance(b.value, g.CallFunction))
