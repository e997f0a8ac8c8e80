"""Lower operator calls to `call_tir` of tensor functions; views stay views.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

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
    """Replace operator calls on tensors of known dims by `call_tir` of tensor functions (Relax, section 4.1).

    Reshape, flatten and expand_dims all become `reshape`, which moves no data and stays in the graph. Equal tensor functions are shared.
    Shape and device operators stay.

    Attributes:
        strict: Whether calls with unknown dims are refused; otherwise they stay.

    Raises:
        BuildError: With `strict`, a value needs a match_cast.
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
            known_outs = [o for o in outs if is_known(o)]
            known_infos = [i for i in infos if is_known(i)]
            if len(known_infos) != len(infos) or len(known_outs) != len(outs):
                if self.strict:
                    raise BuildError(
                        f"{binding.var.name}: expected known dims to lower {op.name}, got arguments {infos!r} and "
                        f"result {info!r}; add a match_cast"
                    )
                out.keep(binding)
                return
            # A tensor function would copy. As a view it costs nothing, and fusion looks through it.
            if isinstance(op, Reshape):
                out.keep(binding)
                return
            if isinstance(op, VIEWS):
                dims = shape_of(known_outs[0])
                out.bindings.append(Binding(binding.var, Call(Reshape(dims), (out.value(value.operands[0]),))))
                return
            # A weight may be packed when the program is built, which schedules need to know.
            consts = [isinstance(a, Constant) for a in value.operands]
            lifted = lift_symbols(op.legalize(op.name, known_infos, consts, ctx), out.env)
            name = table.add(lifted.func)
            call = CallTIR(name, tuple(map(out.value, value.operands)), tuple(known_outs), lifted.scalars)
            # The value of a call with one output is not a tuple.
            if isinstance(info, TupleInfo) and len(known_outs) == 1:
                out.bindings.append(Binding(binding.var, TupleValue((out.bind(call, call.info, op.name),))))
                return
            out.bindings.append(Binding(binding.var, call))

        return map_graphs(module, lambda f, t: rewrite_function(f, lambda out, b: visit(out, b, t), env))
