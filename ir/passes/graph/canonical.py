"""The normal form: one name for each value, no tuple of known fields, no identity operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import (
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
from relax_tune.ir.core.struct_info import TupleInfo
from relax_tune.ir.deduce.relations import is_certain
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, returned, rewrite_function
from relax_tune.ir.rewrite.fixpoint import RuleTable
from relax_tune.ir.rewrite.movement_rules import (
    CONCAT_OF_ONE,
    IDENTITY_PERMUTE,
    PERMUTE_OF_PERMUTE,
    SAME_DTYPE,
    UNCHANGED_DIMS,
)

RULES = (PERMUTE_OF_PERMUTE, IDENTITY_PERMUTE, SAME_DTYPE, CONCAT_OF_ONE, UNCHANGED_DIMS)
"""The equations of the normal form. Names, tuples and branches are no operators, so `_same_value` sees through them."""


@dataclass(frozen=True, slots=True)
class Canonicalise:
    """Give each value one name and drop computations that give an existing value.

    Old and new side:

    * `y = x` and a match_cast that says nothing new: `x`;
    * item `i` of `(a_0, a_1, ...)`: `a_i`; the tuple of all items of `t`, in order: `t`;
    * reshape, flatten, expand_dims, broadcast_to or slice to the dims there are, cast to the dtype there is, permute by the
      identity, concat of one: the argument;
    * an `if` that gives the same on both sides and does nothing else: that;
    * permute of permute: one permute.

    Results keep their names and stay computed into memory of their own. So does a copy of a value that a `call_tir_inplace`
    overwrites. The equations over operators are `RULES`; names, tuples and branches are no operators."""

    def __call__(self, module: IRModule) -> IRModule:
        env, table = env_of(module.bounds), RuleTable(RULES)

        def function(f: Function, _: FunctionTable) -> Function:
            made: dict[GVar, Value] = {}
            kept = returned(f) | ordering_constrained(f)

            def visit(out: Emitter, binding: AnyBinding) -> None:
                def stays(same: Value) -> bool:
                    return binding.var in kept or not is_certain(binding.var.info, same.info, out.env)

                old = out.value(binding.value)
                same: Value | None
                if isinstance(old, Call) and isinstance(binding, Binding):
                    value = same = table.rewritten(old, binding.var, made, module, out, stays)
                else:
                    value, same = old, _same_value(binding, old, made, Deduction(out.env))
                if same is not None and same.is_atom and not stays(same):
                    out.mapping[binding.var] = same
                    return
                made[binding.var] = value
                if value is old:
                    out.keep(binding)
                else:
                    out.bindings.append(Binding(binding.var, value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)


def _same_value(binding: AnyBinding, value: Value, made: Mapping[GVar, Value], ctx: Deduction) -> Value | None:
    """Return the existing value that `binding` gives, None where it gives a new one."""
    if isinstance(binding, MatchCast):
        return value if value.is_atom and is_certain(binding.info, value.info, ctx.env) else None
    if value.is_atom:
        return value
    if isinstance(value, If):
        empty = not value.then.bindings and not value.orelse.bindings
        return value.then.ret if empty and value.then.ret is value.orelse.ret and value.then.ret.is_atom else None
    if isinstance(value, TupleItem):
        owner = made.get(value.value) if isinstance(value.value, GVar) else None
        return owner.fields[value.index] if isinstance(owner, TupleValue) else None
    return _whole(value, made) if isinstance(value, TupleValue) else None


def _whole(value: TupleValue, made: Mapping[GVar, Value]) -> GVar | None:
    """`t` of `(item 0 of t, item 1 of t, ...)`."""
    items = [made.get(f) if isinstance(f, GVar) else None for f in value.fields]
    owner = items[0].value if items and isinstance(items[0], TupleItem) else None
    if not isinstance(owner, GVar) or not isinstance(owner.info, TupleInfo):
        return None
    in_order = all(isinstance(v, TupleItem) and v.value is owner and v.index == i for i, v in enumerate(items))
    return owner if in_order and len(items) == len(owner.info.fields) else None
