"""Store caches with their growing dim outermost, so that appending leaves existing elements in place.

A step of a decoder extends each cache by the new positions. In row-major memory, elements stay in place only if the dim that grows is
the outermost. Therefore parameters and results of this kind are stored with that dim first. The attention reads them through a permute,
which is fused into it, and the concatenation may write into the memory of its argument (`call_tir_inplace`, Relax).

A pool of blocks (`PagedWrite`) keeps its dims: the write changes some of its elements, also in the memory of its argument.

Tests: `tests/tuner/emit/test_sessions.py`, `tests/tuner/emit/test_generate.py`.
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
from relax_tune.ir.op.neural.paged import PagedWrite
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class Appended:
    """A parameter that a result extends, both stored with the growing dim outermost; or a pool that a result changes in place.

    Attributes:
        param: Position of the parameter.
        result: Position of the result.
        axis: The growing dim in the model's order of dims; 0 for a pool.
    """

    param: int
    result: int
    axis: int


def store_outermost(module: IRModule, names: Collection[str]) -> tuple[IRModule, Mapping[str, tuple[Appended, ...]]]:
    """Store parameters that results extend with the growing dim outermost, in functions that no other function calls.

    Returns:
        The module, and the changed parameters of each changed function.
    """
    called = {callee for f in module.graphs.values() for callee in callees(f)}
    functions, appended = dict(module.functions), {}
    for name in names:
        f = module.graphs[name]
        pairs = () if name in called else _appended(f)
        if pairs:
            functions[name], appended[name] = _rewritten(f, pairs), pairs
    return (replace(module, functions=functions) if appended else module), appended


def _appended(f: Function) -> tuple[Appended, ...]:
    """Return the parameters that one call only reads, which extends them for attention or writes into them, and is returned once."""
    fields = _fields(f.ret)
    values = {b.var: b.value for b in f.bindings}
    readers: dict[GVar, list[Value]] = {}
    for use in all_uses(f):
        for v in used_vars(use) if use is not f.ret else ():
            readers.setdefault(v, []).append(use)
    returned = used_vars(f.ret)
    appended = []
    for number, field in enumerate(fields):
        value = values.get(field) if isinstance(field, GVar) else None
        if not isinstance(field, GVar) or not isinstance(value, Call) or not isinstance(value.op, Concat | PagedWrite):
            continue
        past = value.args[0]
        # Any other reader of the old cache would need it in the model's order of dims, or would see it extended.
        if not isinstance(past, GVar) or past not in f.params or readers.get(past) != [value] or past in returned:
            continue
        info = past.info
        if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None or past in value.args[1:]:
            continue
        if isinstance(value.op, PagedWrite):  # the dims stay as they are
            if fields.count(field) == 1:
                appended.append(Appended(f.params.index(past), number, 0))
            continue
        axis = value.op.axis % len(info.shape)
        # Attention reads through the permute without a copy, since the permute is fused into it. Other readers would
        # copy the whole cache at every step.
        attended = all(isinstance(u, Call) and isinstance(u.op, Attention) for u in readers.get(field, ()))
        if as_int(info.shape[axis]) is None and attended and fields.count(field) == 1:
            appended.append(Appended(f.params.index(past), number, axis))
    return tuple(appended)


def _rewritten(f: Function, pairs: tuple[Appended, ...]) -> Function:
    fields = _fields(f.ret)
    written = {b.var for b in f.bindings if isinstance(b.value, Call) and isinstance(b.value.op, PagedWrite)}
    pairs = tuple(p for p in pairs if fields[p.result] not in written)
    if not pairs:
        return f
    axes = {fields[p.result]: p.axis for p in pairs}
    stored = {
        f.params[p.param]: GVar(f.params[p.param].name, _outermost(f.params[p.param].info, p.axis)) for p in pairs
    }
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
            moved = _outermost(v.info, axis)
            assert moved.shape is not None
            # Moving a dim of one element moves no data, and a reshape is a view, whereas a permute is a kernel.
            reorder = Reshape(moved.shape) if as_int(moved.shape[0]) == 1 else Permute(order)
            parts.append(out.bind(Call(reorder, (v,)), moved, b.var.name) if axis else v)
        grown[b.var] = var = GVar(b.var.name, _outermost(info, axis))
        out.bindings.append(Binding(var, Call(Concat(0), tuple(parts))))
        restored = Call(Permute(tuple(order.index(d) for d in range(rank))), (var,))
        out.mapping[b.var] = out.bind(restored, info, b.var.name) if axis else var

    new = rewrite_function(f, visit)
    results = tuple(grown.get(old, field) for old, field in zip(fields, _fields(new.ret), strict=True))
    infos = tuple(v.info for v in results)
    params = tuple(stored.get(p, p) for p in f.params)
    if isinstance(f.ret, TupleValue):
        return replace(new, params=params, ret=TupleValue(results), ret_info=TupleInfo(infos))
    return replace(new, params=params, ret=results[0], ret_info=infos[0])


def _fields(ret: Value) -> tuple[Value, ...]:
    return ret.fields if isinstance(ret, TupleValue) else (ret,)


def _outermost(info: object, axis: int) -> TensorInfo:
    """Return the annotation of a tensor with one dim first."""
    assert isinstance(info, TensorInfo) and info.shape is not None
    return TensorInfo((info.shape[axis], *info.shape[:axis], *info.shape[axis + 1 :]), info.dtype)


def logical(info: TensorInfo, axis: int) -> TensorInfo:
    """Return the annotation of a stored tensor in the model's order of dims.

    Args:
        axis: The dim that is stored outermost.
    """
    if not axis:
        return info
    assert info.shape is not None
    first, *rest = info.shape
    return TensorInfo((*rest[:axis], first, *rest[axis:]), info.dtype)
