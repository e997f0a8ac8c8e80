"""Decomposition of composite operators.

Tests: `tests/ir/op/neural/test_attention.py`, `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Constant, Value
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.deduce.relations import is_known
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.passes.graph.constant_fold import add_constant
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function


@dataclass(frozen=True, slots=True)
class Decompose:
    """Replace composite operators by simpler ones (`OperatorSpec.decompose`).

    Attention becomes two matmuls around a softmax, an einsum becomes one matmul. Calls with unknown dims stay.

    Attributes:
        whole: Names of operators that are not decomposed.
    """

    whole: tuple[str, ...] = ()

    def __call__(self, module: IRModule) -> IRModule:
        constants: dict[str, NDArray[Any]] = dict(module.constants)
        literals: dict[tuple[float, DType], Constant] = {}
        env = env_of(module.bounds)

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value = out.value(binding.value)
            if not isinstance(binding, Binding) or not isinstance(value, Call):
                out.keep(binding)
                return
            infos = [i for i in (a.info for a in value.args) if is_known(i)]
            if len(infos) != len(value.args) or not isinstance(value.op, OperatorSpec) or value.op.name in self.whole:
                out.keep(binding)
                return
            start = len(out.bindings)
            result = value.op.decompose(
                value.args, infos, _Writer(out, Deduction(out.env, choices=True), constants, literals)
            )
            if result is None:
                out.keep(binding)
            elif len(out.bindings) > start and out.bindings[-1].var is result:
                # bind the last call to the original variable, since results are identified by name
                last = out.bindings.pop()
                out.bindings.append(Binding(binding.var, last.value))
            else:
                out.mapping[binding.var] = result

        new = map_graphs(module, lambda f, _: rewrite_function(f, visit, env))
        return module if new is module else replace(new, constants=constants)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Emitter of the operators that a composite operator decomposes into."""

    out: Emitter
    deduction: Deduction
    constants: dict[str, NDArray[Any]]
    literals: dict[tuple[float, DType], Constant] = field(default_factory=dict)

    def call(self, op: OperatorSpec, *args: Value, hint: str | None = None) -> Value:
        call = Call(op, args)
        return self.out.bind(call, infer_value(call, self.deduction), hint or op.name)

    def literal(self, value: float, dtype: DType) -> Constant:
        key = (value, dtype)
        # One weight for equal literals: the scale of every attention layer is the same number.
        if key not in self.literals:
            self.literals[key] = add_constant(self.constants, "literal", np.asarray(value, dtype.numpy))
        return self.literals[key]
