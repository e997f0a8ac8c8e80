"""Activations of products in 8 bits, quantised in the call (dynamic quantisation, one scale a row)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relax_tune.ir.core.dtype import f32, i8, i32
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, GVar, Value
from relax_tune.ir.core.graph_walk import operator_of
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.op.math.elementwise import Cast, MaximumScalar, Mul, MulScalar
from relax_tune.ir.op.math.numeric import Abs
from relax_tune.ir.op.math.quantize import Dequantize, Quantize
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function, tensor_info

LARGEST = 127
TINY = 1e-30
"""The least scale: of a row of zeros."""


@dataclass(frozen=True, slots=True)
class QuantizeActivations:
    """Multiply whole numbers of 8 bits in float32 products of a weight of such numbers with one scale a column.

    The other operand is quantised first. Each of its rows gets the scale of its largest magnitude over 127. Products are summed
    exactly in int32. The sums are multiplied by both scales. A row with an infinity or NaN has NaN as its results.

    Weights with scales for groups of rows, with zero points or of other types are read as floats, as before.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        made: dict[GVar, Value] = {}

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value = out.value(binding.value)
            matmul = operator_of(value, Matmul)
            found = None if matmul is None else _weight(matmul, value, made)
            if matmul is None or found is None or not isinstance(binding, Binding):
                made[binding.var] = value
                out.keep(binding)
                return
            (x, _), (numbers, scale) = value.operands, found
            key = ("int8", x)
            if key not in out.known:
                out.known[key] = _row_scale(out, x)
                out.known["numbers", x] = _numbers(out, x, out.known[key])
            # each product has casts of its own, which become a part of it
            wide = [_emit(out, Cast(i32), v) for v in (out.known["numbers", x], numbers)]
            total = _emit(out, matmul, *wide)
            scaled = _emit(out, Mul(), _emit(out, Cast(f32), total), out.known[key])
            out.bindings.append(replace(binding, value=Call(Mul(), (scaled, scale))))

        new = map_graphs(module, lambda f, _: rewrite_function(f, visit, env))
        return module if new is module else DeadCode()(new)


def _weight(matmul: Matmul, value: Value, made: dict[GVar, Value]) -> tuple[Value, Value] | None:
    """Return the numbers and the scales that a product of float32 reads as its second operand; None for others."""
    if not isinstance(value.operands[1], GVar):
        return None
    back = made.get(value.operands[1])
    dequantize = None if back is None else operator_of(back, Dequantize)
    if back is None or dequantize is None or dequantize.group is not None or len(back.operands) != 2:
        return None
    numbers, scale = back.operands
    info, wide = tensor_info(numbers), tensor_info(value.operands[0])
    columns = 0 if matmul.transpose_b else 1
    fits = info.shape is not None and len(info.shape) == 2 and info.dtype is i8 and dequantize.axis == columns
    depth = as_int(wide.shape[-1]) if wide.shape is not None else None
    return (numbers, scale) if fits and depth and wide.dtype is f32 and tensor_info(scale).dtype is f32 else None


def _row_scale(out: Emitter, x: Value) -> Value:
    """Emit the scale of each row of x (..., m, k), as (..., m, 1)."""
    top = _emit(out, Max((-1,), keepdims=True), _emit(out, Abs(), x))
    return _emit(out, MaximumScalar(TINY), _emit(out, MulScalar(1 / LARGEST), top))


def _numbers(out: Emitter, x: Value, scale: Value) -> Value:
    """Emit the rows of x (..., m, k) as whole numbers of 8 bits."""
    dims = tensor_info(x).shape
    assert dims is not None
    depth = as_int(dims[-1])
    return _emit(out, Quantize(len(dims) - 1, depth), x, scale)


def _emit(out: Emitter, op: OperatorSpec, *args: Value) -> GVar:
    value = Call(op, args)
    return out.bind(value, infer_value(value, Deduction(out.env)), op.name)
