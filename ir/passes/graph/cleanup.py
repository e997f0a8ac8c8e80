"""Small passes: deducing annotations again, merging views, dead code elimination, tidy names.

Equal views are shared through a table, since a rewrite rule relates a value to its operands and not two values to each other.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relax_tune.errors import DeduceError
from relax_tune.ir.core.function import AnyFunction, IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, Binding, CallTIR, Constant, Function, GVar, MatchCast, Value
from relax_tune.ir.core.graph_walk import nested_values, operator_of
from relax_tune.ir.core.names import fresh
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.rewrite.dead_code import without_dead_code
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function
from relax_tune.ir.rewrite.fixpoint import RuleTable
from relax_tune.ir.rewrite.movement_rules import UNCHANGED_DIMS, VIEW_OF_VIEW
from relax_tune.ir.text.printer import excerpt


@dataclass(frozen=True, slots=True)
class Deduce:
    """Deduce all annotations again, starting from the parameters.

    Raises:
        DeduceError: The shapes or dtypes of an operator contradict each other.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def visit(out: Emitter, binding: AnyBinding, f: Function) -> None:
            value = out.value(binding.value)
            # A match_cast states what deduction cannot know, so its annotation stays.
            if isinstance(binding, MatchCast):
                out.keep(binding)
                return
            try:
                info = infer_value(value, Deduction(out.env, choices=True))
            except DeduceError as error:
                raise DeduceError(f"{f.name}: {error}\n{excerpt(f, binding)}") from None
            if info == binding.var.info:
                out.keep(binding)
                return
            var = GVar(binding.var.name, info)
            out.mapping[binding.var] = var
            out.bindings.append(Binding(var, value))

        return map_graphs(module, lambda f, _: rewrite_function(f, lambda out, b: visit(out, b, f), env))


VIEW_RULES = (VIEW_OF_VIEW, UNCHANGED_DIMS)


@dataclass(frozen=True, slots=True)
class CancelViews:
    """Merge views of views, share equal views, and drop views that do not change the dims. The equations are `VIEW_RULES`."""

    def __call__(self, module: IRModule) -> IRModule:
        env, table = env_of(module.bounds), RuleTable(VIEW_RULES)

        def function(f: Function, _: FunctionTable) -> Function:
            values: dict[GVar, Value] = {}

            def visit(out: Emitter, binding: AnyBinding) -> None:
                old = out.value(binding.value)
                if operator_of(old, Reshape) is None:
                    out.keep(binding)
                    return
                value = table.rewritten(old, binding.var, values, module, out)
                reshape = operator_of(value, Reshape)
                if reshape is None:
                    out.mapping[binding.var] = value
                    return
                values[binding.var] = value
                dims = tuple(Deduction(out.env).simplify(d) for d in reshape.shape)
                # The key is the source and the simplified dims: two views of one value under equal dims are one view,
                # however their dims are written.
                known = out.known.setdefault((value.operands[0], dims), binding.var)
                if known is not binding.var:
                    out.mapping[binding.var] = known
                elif value is old:
                    out.keep(binding)
                else:
                    out.bindings.append(Binding(binding.var, value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)


@dataclass(frozen=True, slots=True)
class DeadCode:
    """Drop bindings that are not read, tensor functions that are not called, and weights that are not used.

    A match_cast stays, since it asserts. So does a call with side effects.
    """

    def __call__(self, module: IRModule) -> IRModule:
        new = map_graphs(module, lambda f, _: self._function(f))
        called: set[str] = set()
        named: set[str] = set()
        for value in (v for f in new.graphs.values() for v in nested_values(f)):
            if isinstance(value, Constant):
                named.add(value.name)
            elif isinstance(value, CallTIR):
                called.add(value.callee)
        functions = {n: f for n, f in new.functions.items() if not isinstance(f, PrimFunc) or n in called}
        constants = {n: a for n, a in new.constants.items() if n in named}
        if len(functions) == len(new.functions) and len(constants) == len(new.constants):
            return new
        # A module without graph functions has no caller that could tell which tensor functions are needed.
        if not new.graphs:
            return new
        return replace(new, functions=functions, constants=constants)

    @staticmethod
    def _function(f: Function) -> Function:
        blocks = without_dead_code(f.blocks, f.ret)
        return f if blocks is f.blocks else replace(f, blocks=blocks)


@dataclass(frozen=True, slots=True)
class TidyNames:
    """Name tensor functions after their operators, with a number only if two would have the same name."""

    def __call__(self, module: IRModule) -> IRModule:
        names: dict[str, str] = {}
        used = {n for n, f in module.functions.items() if not isinstance(f, PrimFunc)}
        for old, f in module.functions.items():
            if isinstance(f, PrimFunc):
                # Numbers come from the order in which passes added functions. Without them, the names of a model do
                # not change when a pass is added.
                names[old] = name = fresh(re.sub(r"(_\d+)+(?=_|$)", "", old), used)
                used.add(name)
        if all(a == b for a, b in names.items()):
            return module
        functions: dict[str, AnyFunction] = {}
        for old, f in module.functions.items():
            if isinstance(f, PrimFunc):
                functions[names[old]] = replace(f, name=names[old])
            elif isinstance(f, Function):
                functions[old] = rewrite_function(f, lambda out, b: _rename_callee(out, b, names))
            else:
                functions[old] = f
        return replace(module, functions=functions)


def _rename_callee(out: Emitter, binding: AnyBinding, names: Mapping[str, str]) -> None:
    value = out.value(binding.value)
    if isinstance(binding, Binding) and isinstance(value, CallTIR) and names.get(value.callee, "") != value.callee:
        out.bindings.append(Binding(binding.var, replace(value, callee=names.get(value.callee, value.callee))))
    else:
        out.keep(binding)
