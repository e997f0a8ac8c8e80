"""The normal form: one name for each value, tuples seen through, and no operator that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import (
    ATOMS,
    AnyBinding,
    Binding,
    Call,
    Function,
    GVar,
    If,
    MatchCast,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.deduce.deduce import infer_value, info_of
from relax_tune.ir.deduce.relations import is_certain
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.op.elementwise import Cast
from relax_tune.ir.op.movement import VIEWS, BroadcastTo, Concat, Permute, Slice
from relax_tune.ir.passes.memory.inplace import pinned
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, returned, rewrite_function

SAME_DIMS: tuple[type[OperatorSpec], ...] = (*VIEWS, BroadcastTo, Slice)
"""Operators that give their argument itself when the result has its dims."""


@dataclass(frozen=True, slots=True)
class Canonicalise:
    """Each value by one name, and nothing computed that is there already:

    * `y = x` and a match_cast that says nothing new: `x`;
    * item `i` of `(a_0, a_1, ...)`: `a_i`; the tuple of all items of `t`, in order: `t`;
    * reshape, flatten, expand_dims, broadcast_to or slice to the dims there are, cast to the dtype there is, permute by the
      identity, concat of one: the argument;
    * an `if` that gives the same on both sides and does nothing else: that;
    * permute of permute: one permute.

    Results keep their names, and what the function returns stays computed by itself; so does a copy of what a `call_tir_inplace`
    writes over."""

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def function(f: Function, _: FunctionTable) -> Function:
            made: dict[Value, Value] = {}
            kept = returned(f) | pinned(f)

            def visit(out: Emitter, binding: AnyBinding) -> None:
                old = out.value(binding.value)
                value, ctx = _one_permute(old, made) or old, Deduction(out.env)
                same = _same_value(binding, value, made, ctx)
                if (
                    same is not None
                    and binding.var not in kept
                    and is_certain(binding.var.info, info_of(same), ctx.env)
                ):
                    out.mapping[binding.var] = same
                    return
                made[binding.var] = value
                if value is old:
                    out.keep(binding)
                else:
                    out.bindings.append(Binding(binding.var, value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)


def _same_value(binding: AnyBinding, value: Value, made: dict[Value, Value], ctx: Deduction) -> Value | None:
    """The value that is there already and is all that `binding` gives."""
    if isinstance(binding, MatchCast):
        return value if isinstance(value, ATOMS) and is_certain(binding.info, info_of(value), ctx.env) else None
    if isinstance(value, ATOMS):
        return value
    if isinstance(value, If):
        empty = not value.then.bindings and not value.orelse.bindings
        return (
            value.then.ret
            if empty and value.then.ret is value.orelse.ret and isinstance(value.then.ret, ATOMS)
            else None
        )
    if isinstance(value, TupleItem):
        owner = made.get(value.value, value.value)
        return owner.fields[value.index] if isinstance(owner, TupleValue) else None
    if isinstance(value, TupleValue):
        return _whole(value, made)
    return _unchanged(value, ctx) if isinstance(value, Call) else None


def _whole(value: TupleValue, made: dict[Value, Value]) -> GVar | None:
    """`t` of `(item 0 of t, item 1 of t, ...)`."""
    items = [made.get(f) for f in value.fields]
    owner = items[0].value if items and isinstance(items[0], TupleItem) else None
    if not isinstance(owner, GVar) or not isinstance(owner.info, TupleInfo):
        return None
    in_order = all(isinstance(v, TupleItem) and v.value is owner and v.index == i for i, v in enumerate(items))
    return owner if in_order and len(items) == len(owner.info.fields) else None


def _unchanged(value: Call, ctx: Deduction) -> Value | None:
    """The argument of an operator that gives it back."""
    op, first = value.op, value.args[0] if value.args else None
    found = None if first is None else info_of(first)
    if first is None or not isinstance(found, TensorInfo):
        return None
    if isinstance(op, Cast):
        return first if op.dtype is found.dtype else None
    if isinstance(op, Permute):
        return first if op.axes == tuple(range(len(op.axes))) else None
    if isinstance(op, Concat):
        return first if len(value.args) == 1 else None
    if not isinstance(op, SAME_DIMS) or (isinstance(op, Slice) and op.step < 0):
        return None
    new = infer_value(value, ctx)
    dims = new.shape if isinstance(new, TensorInfo) else None
    if dims is None or found.shape is None or len(dims) != len(found.shape):
        return None
    return first if all(map(ctx.same, dims, found.shape)) else None


def _one_permute(value: Value, made: dict[Value, Value]) -> Call | None:
    """`permute(x, axes)` of a permute of x."""
    if not isinstance(value, Call) or not isinstance(value.op, Permute):
        return None
    inner = made.get(value.args[0])
    if not isinstance(inner, Call) or not isinstance(inner.op, Permute) or len(inner.op.axes) != len(value.op.axes):
        return None
    return Call(Permute(tuple(inner.op.axes[a] for a in value.op.axes)), inner.args)
