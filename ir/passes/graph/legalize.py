"""Operator calls become `call_tir` of tensor functions; views stay views."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, CallTIR, Constant, TupleValue
from relax_tune.ir.core.graph_walk import operator_of
from relax_tune.ir.core.struct_info import TupleInfo, info_parts
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.deduce.relations import is_known
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of, shape_of
from relax_tune.ir.op.devices import DeviceOperator
from relax_tune.ir.op.indexing.movement import VIEWS, Reshape
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.passes.fusion.symbol_interface import lift_symbols
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function


@dataclass(frozen=True, slots=True)
class Legalize:
    """Every operator call on tensors of known dims becomes `call_tir` of a tensor function made for it (paper section 4.1).

    Reshape, flatten and expand_dims all become `reshape`, which moves no data and stays in the graph. Equal tensor
    functions are kept once. Calls whose dims are not known stay, unless `strict`; shape and device operators always do.

    Raises: BuildError, when strict, naming the value that needs a match_cast.
    """

    strict: bool = False

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def visit(out: Emitter, binding: AnyBinding, table: FunctionTable) -> None:
            value = binding.value
            op = operator_of(value, OperatorSpec)
            if not isinstance(binding, Binding) or op is None or isinstance(op, (ShapeOperator, DeviceOperator)):
                out.keep(binding)
                return
            ctx = Deduction(out.env, choices=True)
            info = infer_value(value, ctx)
            infos = [a.info for a in value.operands]
            outs = info_parts(info)
            found = [o for o in outs if is_known(o)]
            given = [i for i in infos if is_known(i)]
            if len(given) != len(infos) or len(found) != len(outs):
                if self.strict:
                    raise BuildError(
                        f"{binding.var.name}: wanted known dims to lower {op.name}, found arguments {infos!r} and "
                        f"result {info!r}; add a match_cast"
                    )
                out.keep(binding)
                return
            if isinstance(op, Reshape):
                out.keep(binding)
                return
            if isinstance(op, VIEWS):
                dims = shape_of(found[0])
                out.bindings.append(Binding(binding.var, Call(Reshape(dims), (out.value(value.operands[0]),))))
                return
            consts = [isinstance(a, Constant) for a in value.operands]
            lifted = lift_symbols(op.legalize(op.name, given, consts, ctx), out.env)
            name = table.add(lifted.func)
            call = CallTIR(name, tuple(map(out.value, value.operands)), tuple(found), lifted.scalars)
            if isinstance(info, TupleInfo) and len(found) == 1:  # a call with one output gives no tuple
                out.bindings.append(Binding(binding.var, TupleValue((out.bind(call, call.info, op.name),))))
                return
            out.bindings.append(Binding(binding.var, call))

        return map_graphs(module, lambda f, t: rewrite_function(f, lambda out, b: visit(out, b, t), env))
