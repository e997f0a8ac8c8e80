"""Caches whose growing dim is stored outermost: appending to one then leaves its elements where they are.

A decoder's step extends each cache by the new positions. Row-major memory keeps elements in place only if the dim that grows is
the outermost. So the function takes and gives such arrays with that dim first. The attention reads them through a permute, which
is fused into it, and the concatenation may take the memory of its argument (`call_tir_inplace`, Relax).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Function, GVar, TupleValue, Value
from relax_tune.ir.core.graph_walk import all_uses, callees, used_vars
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class Appended:
    """A parameter that a result extends: both are stored with the dim that grows outermost.

    param: its position; result: the number of the result; axis: the dim that grows, as the model counts
    """

    param: int
    result: int
    axis: int


def store_outermost(module: IRModule, names: Collection[str]) -> tuple[IRModule, Mapping[str, tuple[Appended, ...]]]:
    """Change the dims of parameters that results extend, in functions that nothing calls. Return what was changed."""
    called = {callee for f in module.graphs.values() for callee in callees(f)}
    functions, found = dict(module.functions), {}
    for name in names:
        f = module.graphs[name]
        pairs = () if name in called else _appended(f)
        if pairs:
            functions[name], found[name] = _rewritten(f, pairs), pairs
    return (replace(module, functions=functions) if found else module), found


def _appended(f: Function) -> tuple[Appended, ...]:
    """Return the parameters that only a concatenation reads, whose result is returned once and else read by attention."""
    fields = _fields(f.ret)
    made = {b.var: b.value for b in f.bindings}
    readers: dict[GVar, list[Value]] = {}
    for use in all_uses(f):
        for v in used_vars(use) if use is not f.ret else ():
            readers.setdefault(v, []).append(use)
    returned = used_vars(f.ret)
    found = []
    for number, field in enumerate(fields):
        value = made.get(field) if isinstance(field, GVar) else None
        if not isinstance(field, GVar) or not isinstance(value, Call) or not isinstance(value.op, Concat):
            continue
        past = value.args[0]
        if not isinstance(past, GVar) or past not in f.params or readers.get(past) != [value] or past in returned:
            continue
        info = past.info
        if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None or past in value.args[1:]:
            continue
        axis = value.op.axis % len(info.shape)
        attended = all(isinstance(u, Call) and isinstance(u.op, Attention) for u in readers.get(field, ()))
        if as_int(info.shape[axis]) is None and attended and fields.count(field) == 1:
            found.append(Appended(f.params.index(past), number, axis))
    return tuple(found)


def _rewritten(f: Function, pairs: tuple[Appended, ...]) -> Function:
    fields = _fields(f.ret)
    axes = {fields[p.result]: p.axis for p in pairs}
    stored = {f.params[p.param]: GVar(f.params[p.param].name, _moved(f.params[p.param].info, p.axis)) for p in pairs}
    grown: dict[Value, GVar] = {}

    def visit(out: Emitter, b: AnyBinding) -> None:
        axis = axes.get(b.var)
        if axis is None or not isinstance(b.value, Call):
            out.keep(b)
            return
        info = b.var.info
        assert isinstance(info, TensorInfo) and info.shape is not None
        past, *rest = b.value.args
        assert isinstance(past, GVar)
        rank = len(info.shape)
        order = (axis, *(d for d in range(rank) if d != axis))
        parts: list[Value] = [stored[past]]
        for v in map(out.value, rest):
            moved = _moved(v.info, axis)
            assert moved.shape is not None
            by = Reshape(moved.shape) if as_int(moved.shape[0]) == 1 else Permute(order)
            parts.append(out.bind(Call(by, (v,)), moved, b.var.name) if axis else v)
        grown[b.var] = var = GVar(b.var.name, _moved(info, axis))
        out.bindings.append(Binding(var, Call(Concat(0), tuple(parts))))
        back = Call(Permute(tuple(order.index(d) for d in range(rank))), (var,))
        out.mapping[b.var] = out.bind(back, info, b.var.name) if axis else var

    new = rewrite_function(f, visit)
    results = tuple(grown.get(old, field) for old, field in zip(fields, _fields(new.ret), strict=True))
    infos = tuple(v.info for v in results)
    params = tuple(stored.get(p, p) for p in f.params)
    if isinstance(f.ret, TupleValue):
        return replace(new, params=params, ret=TupleValue(results), ret_info=TupleInfo(infos))
    return replace(new, params=params, ret=results[0], ret_info=infos[0])


def _fields(ret: Value) -> tuple[Value, ...]:
    return ret.fields if isinstance(ret, TupleValue) else (ret,)


def _moved(info: object, axis: int) -> TensorInfo:
    """Return the annotation of a tensor with one dim moved to the front."""
    assert isinstance(info, TensorInfo) and info.shape is not None
    return TensorInfo((info.shape[axis], *info.shape[:axis], *info.shape[axis + 1 :]), info.dtype)


def logical(info: TensorInfo, axis: int) -> TensorInfo:
    """Return the annotation of a tensor as the model counts its dims. axis: the dim that is stored outermost"""
    if not axis:
        return info
    assert info.shape is not None
    first, *rest = info.shape
    return TensorInfo((*rest[:axis], first, *rest[axis:]), info.dtype)
