"""Removal of permutes that the surrounding operators can absorb.

Tests: `tests/ir/passes/test_graph_passes.py`, `tests/ir/rewrite/test_rule_tables.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, GVar, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Binary, Unary
from relax_tune.ir.rewrite.fixpoint import RewriteToFixpoint
from relax_tune.ir.rewrite.movement_rules import TRANSPOSED_OPERAND, is_identity
from relax_tune.ir.rewrite.pattern import op
from relax_tune.ir.rewrite.rules import Rule, Site


@dataclass(frozen=True, slots=True)
class PushPermutes:
    """Remove permutes of a matmul's second operand, and permutes that undo earlier ones.

    A matmul has a flag for a permute of the last two dims of its second operand. Between a permute and the permutes that it undoes there
    may be elementwise operators with no other reader. `FoldConstants` folds permutes of weights; `FuseOps` fuses the remaining ones.
    """

    def __call__(self, module: IRModule) -> IRModule:
        return RewriteToFixpoint(RULES)(module)


def _without_permutes(site: Site) -> Value | None:
    """Return `f` over the sources of the permutes that the outer one undoes.

    `f` is a graph of elementwise operators of any size, which a pattern cannot express.
    """
    axes, scope, end = site.operator("outer", Permute).axes, site.match.scope, site["between"]
    order: dict[Value, Call] = {}
    sources: dict[Value, Value] = {}
    stack = [end]
    while stack:
        v = stack.pop()
        call = scope.call(v)
        if v in sources or v in order:
            continue
        if call is not None and isinstance(call.op, Permute):
            if len(call.op.axes) != len(axes) or not is_identity(tuple(call.op.axes[a] for a in axes)):
                return None
            sources[v] = call.args[0]
        # With another reader the value would be needed in both orders, and computed twice.
        elif call is not None and _elementwise(call) and isinstance(v, GVar) and scope.readers.get(v) == 1:
            order[v] = call
            stack.extend(call.args)
        else:
            return None
    for v, call in reversed(order.items()):
        sources[v] = site.call(call.op, *(sources[a] for a in call.args))
    return sources[end] if order else None  # `Canonicalise` merges two permutes with nothing between them


def _elementwise(call: Call) -> bool:
    """Return whether the arguments and the result have the same known dims."""
    if not isinstance(call.op, (Unary, Binary)):
        return False
    infos = [a.info for a in call.args if isinstance(a, GVar)]
    shapes = {i.shape for i in infos if isinstance(i, TensorInfo)}
    return len(infos) == len(call.args) and len(shapes) == 1 and None not in shapes


PERMUTES_UNDONE = Rule(
    op(Permute, "between").named("outer"), _without_permutes, "permutes that a later one undoes",
    equation="permute(f(permute(x, p), permute(y, p)), q) = f(x, y) where f is elementwise and q undoes p",
)  # fmt: skip
RULES = (TRANSPOSED_OPERAND, PERMUTES_UNDONE)
