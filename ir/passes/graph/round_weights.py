"""Store selected weights as 16-bit floats.

Tests: `tests/ir/passes/graph/test_round_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Constant, Function, If, Value
from relax_tune.ir.core.graph_walk import all_uses, nested_values, operator_of
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Cast
from relax_tune.ir.passes.graph.constant_fold import add_constant
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function, tensor_info

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RoundWeights:
    """Store float32 weights as 16-bit floats. Kernels convert them while loading, and compute in float32.

    Products, convolutions and gathers may read a rounded weight (`OperatorSpec.half_policy`). A weight that anything else reads
    is not changed, and neither is one with numbers beyond the range of its type. Activations are not changed.

    Attributes:
        types: 16-bit float type of each weight to round, by name.
        others: Type of the weights without an entry in `types`; None not to round them.
    """

    types: Mapping[str, DType] = field(default_factory=dict)
    others: DType | None = None

    def __call__(self, module: IRModule) -> IRModule:
        constants: dict[str, Array] = dict(module.constants)
        rounded: dict[str, Constant] = {}
        # Sorted: the set's order differs between processes, and the order decides the names of weights.
        for name in sorted(_roundable(module)):
            half = self.types.get(name, self.others)
            array = None if half is None else round_array(constants[name], half)
            if array is not None:
                rounded[name] = add_constant(constants, f"{name}.{half}", array)
        if not rounded:
            return module

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value = out.value(binding.value)
            op = operator_of(value, OperatorSpec)
            is_rounded = [isinstance(a, Constant) and a.name in rounded for a in value.operands]
            if op is None or not any(is_rounded) or not isinstance(binding, Binding):
                out.keep(binding)
                return
            # The gather moves 16-bit rows and its result is cast, so that the whole table is never converted.
            if op.half_policy == "table":
                (table, *rest) = value.operands
                assert isinstance(table, Constant)
                info = replace(tensor_info(binding.var), dtype=rounded[table.name].info.dtype)
                rows = out.bind(value.with_operands((rounded[table.name], *rest)), info, f"{binding.var.name}_rows")
                out.bindings.append(replace(binding, value=Call(Cast(f32), (rows,))))
                return
            args = tuple(
                out.bind(Call(Cast(f32), (rounded[a.name],)), a.info, "wide")
                if isinstance(a, Constant) and a.name in rounded
                else a
                for a in value.operands
            )
            out.bindings.append(replace(binding, value=value.with_operands(args)))

        new = map_graphs(module, lambda f, _: rewrite_function(f, visit))
        return replace(new, constants={n: a for n, a in constants.items() if n not in rounded})


def round_array(array: Array, dtype: DType) -> Array | None:
    """Return an array as 16-bit floats; None if a finite number would become infinite."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype.numpy)
    return rounded if np.array_equal(np.isfinite(rounded), np.isfinite(array)) else None


def _roundable(module: IRModule) -> set[str]:
    """Return the names of the float32 weights that only products, convolutions and gathers read, and no function returns."""
    roundable, others = set[str](), set[str]()
    for f in module.functions.values():
        if not isinstance(f, Function):
            continue
        others.update(v.name for v in all_uses(f) if isinstance(v, Constant))
        for value in nested_values(f):
            for position, a in enumerate((value.cond,) if isinstance(value, If) else value.operands):
                if isinstance(a, Constant):
                    fits = a.info.dtype is f32 and _may_round(value, position)
                    (roundable if fits else others).add(a.name)
    return roundable - others


def _may_round(value: Value, position: int) -> bool:
    op = operator_of(value, OperatorSpec)
    if op is None:
        return False
    return position == 0 if op.half_policy == "table" else op.reads(position) == "prefer"
