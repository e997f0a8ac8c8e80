"""Canonical form: one name for each value, no items of known tuples, no identity operators.

Aliases, match_casts and branches are not rewrite rules: patterns look through aliases, and cannot match casts or branches.
`_existing_value` handles these three.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Function, GVar, If, MatchCast, TupleItem, TupleValue, Value
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
from relax_tune.ir.rewrite.pattern import item, packed
from relax_tune.ir.rewrite.rules import Rule, Site


def _field(site: Site) -> Value:
    item, owner = site.definition("item"), site.definition("owner")
    assert isinstance(item, TupleItem) and isinstance(owner, TupleValue)
    return owner.fields[item.index]


def _whole(site: Site) -> Value | None:
    fields, definition = site.definition("fields").operands, site.match.scope.definition
    items = [definition(f) for f in fields]
    owner = items[0].value if items and isinstance(items[0], TupleItem) else None
    if not isinstance(owner, GVar) or not isinstance(owner.info, TupleInfo):
        return None
    in_order = all(isinstance(v, TupleItem) and v.value is owner and v.index == i for i, v in enumerate(items))
    return owner if in_order and len(items) == len(owner.info.fields) else None


ITEM_OF_TUPLE = Rule(
    item(packed().named("owner")).named("item"), _field, "item of a tuple", equation="(a, b ...)[0] = a"
)
TUPLE_OF_ITEMS = Rule(packed().named("fields"), _whole, "tuple of all items", equation="(t[0], t[1] ... t[n - 1]) = t")
RULES = (
    PERMUTE_OF_PERMUTE, IDENTITY_PERMUTE, SAME_DTYPE, CONCAT_OF_ONE, UNCHANGED_DIMS, ITEM_OF_TUPLE, TUPLE_OF_ITEMS,
)  # fmt: skip
"""The rewrite rules of the canonical form."""


@dataclass(frozen=True, slots=True)
class Canonicalise:
    """Give each value one name, and replace computations by existing values that they equal:

    * `y = x` and a match_cast without new facts: `x`;
    * item `i` of `(a_0, a_1, ...)`: `a_i`; the tuple of all items of `t`, in order: `t`;
    * reshape, flatten, expand_dims, broadcast_to or slice to the present dims, cast to the present dtype, permute by
    the identity, concat of one: the argument;
    * an `if` with the same result on both sides and no side effects: the result;
    * permute of permute: one permute.

    Results keep their names and are computed into separate memory. So is a copy of a value that a `call_tir_inplace` overwrites. The
    equations over operators and tuples are `RULES`.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env, table = env_of(module.bounds), RuleTable(RULES)

        def function(f: Function, _: FunctionTable) -> Function:
            values: dict[GVar, Value] = {}
            fixed = ordering_constrained(f)
            required = returned(f) | fixed

            def visit(out: Emitter, binding: AnyBinding) -> None:
                def stays(same: Value) -> bool:
                    # The existing value must satisfy at least the same annotation: a less precise one could make a
                    # later operator undeducible.
                    return binding.var in required or not is_certain(binding.var.info, same.info, out.env)

                old = out.value(binding.value)
                same: Value | None
                if table.at(old) and isinstance(binding, Binding):
                    value = same = table.rewritten(old, binding.var, values, module, out, stays)
                else:
                    value, same = old, _existing_value(binding, old, Deduction(out.env))
                if same is not None and same.is_atom and not stays(same):
                    out.mapping[binding.var] = same
                    return
                # a copy of an overwritten value no longer equals it
                if binding.var not in fixed or isinstance(value, (TupleItem, TupleValue)):
                    values[binding.var] = value
                if value is old:
                    out.keep(binding)
                else:
                    out.bindings.append(Binding(binding.var, value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)


def _existing_value(binding: AnyBinding, value: Value, ctx: Deduction) -> Value | None:
    """Return the existing value that `binding` equals; None for a new value."""
    if isinstance(binding, MatchCast):
        return value if value.is_atom and is_certain(binding.info, value.info, ctx.env) else None
    if value.is_atom:
        return value
    if isinstance(value, If):
        empty = not value.then.bindings and not value.orelse.bindings
        return value.then.ret if empty and value.then.ret is value.orelse.ret and value.then.ret.is_atom else None
    return None
