"""Removal of permutes that the operators around them can do without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Function, GVar, Value
from relax_tune.ir.core.graph_walk import all_uses, used_vars
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Binary, Unary
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function
from relax_tune.ir.rewrite.fixpoint import RuleTable
from relax_tune.ir.rewrite.movement_rules import TRANSPOSED_OPERAND

RULES = (TRANSPOSED_OPERAND,)


@dataclass(frozen=True, slots=True)
class PushPermutes:
    """Remove permutes of a matmul's second operand, and permutes that undo earlier ones.

    A matmul reads a permute of the last two dims by its own flag. Between a permute and those it undoes there may be
    elementwise operators with no other reader. `FoldConstants` folds permutes of weights; `FuseOps` fuses the remaining ones."""

    def __call__(self, module: IRModule) -> IRModule:
        env, table = env_of(module.bounds), RuleTable(RULES)

        def function(f: Function, _: FunctionTable) -> Function:
            made: dict[GVar, Value] = {}
            fixed = ordering_constrained(f)
            readers = Counter(v for value in all_uses(f) for v in used_vars(value))

            def visit(out: Emitter, binding: AnyBinding) -> None:
                value = table.rewritten(out.value(binding.value), binding.var, made, module, out)
                if isinstance(binding, Binding) and isinstance(value, Call):
                    if isinstance(value.op, Permute):
                        value = _undone(out, value, made, readers)
                    if binding.var not in fixed:  # it may be a copy of what is written over
                        made[binding.var] = value
                out.keep(binding if value is binding.value else replace(binding, value=value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)


def _undone(out: Emitter, value: Call, made: Mapping[GVar, Value], readers: Mapping[GVar, int]) -> Call:
    """`permute(f(permute(x)))` as `f(x)` where the two permutes cancel; otherwise `value` itself.

    `f` is a graph of elementwise operators of any size, with a permute at each of its inputs. No pattern describes that, so
    this move is a function and not a rule."""
    assert isinstance(value.op, Permute)
    axes, order, stack = value.op.axes, list[Value](), [value.args[0]]
    sources: dict[Value, Value] = {}
    while stack:
        v = stack.pop()
        found = made.get(v) if isinstance(v, GVar) else None
        call = found if isinstance(found, Call) else None
        if v in sources or v in order:
            continue
        if call is not None and isinstance(call.op, Permute):
            if len(call.op.axes) != len(axes) or tuple(call.op.axes[a] for a in axes) != tuple(range(len(axes))):
                return value
            sources[v] = call.args[0]
        elif call is not None and _elementwise(call) and isinstance(v, GVar) and readers.get(v) == 1:
            order.append(v)
            stack.extend(call.args)
        else:
            return value
    if not order:
        return value  # two permutes by themselves: `Canonicalise`
    for v in reversed(order):
        assert isinstance(v, GVar) and isinstance(v.info, TensorInfo) and v.info.shape is not None
        step = made[v]
        assert isinstance(step, Call)
        inner = Call(step.op, tuple(sources[a] for a in step.args))
        if v is value.args[0]:
            return inner
        dims = tuple(v.info.shape[a] for a in axes)
        sources[v] = out.bind(inner, TensorInfo(dims, v.info.dtype), v.name)
    return value


def _elementwise(call: Call) -> bool:
    """Return whether the arguments and the result have the same known dims."""
    if not isinstance(call.op, (Unary, Binary)):
        return False
    infos = [a.info for a in call.args if isinstance(a, GVar)]
    shapes = {i.shape for i in infos if isinstance(i, TensorInfo)}
    return len(infos) == len(call.args) and len(shapes) == 1 and None not in shapes
