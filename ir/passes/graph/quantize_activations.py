"""Dynamic quantisation of the activations of matmuls to 8 bits, with one scale per row.

Tests: `tests/ir/passes/graph/test_quantize_activations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.core.dtype import f32, i8, i16, i32, u8
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, GVar, Value
from relax_tune.ir.core.graph_walk import operator_of
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, MaximumScalar, Mul, MulScalar, division_by
from relax_tune.ir.op.math.numeric import Abs
from relax_tune.ir.op.math.quantize import Dequantize, Quantize, Unpack4
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max, Sum
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function, tensor_info

LARGEST = 127
OFFSET = 128
"""Offset of the quantised activations, since processors multiply unsigned by signed bytes (VNNI)."""
# Far below every scale of real activations, and far above the smallest normal float, so that 1 / TINY is finite.
TINY = 1e-30
"""Smallest scale, for rows of zeros."""


@dataclass(frozen=True, slots=True)
class QuantizeActivations:
    """Compute float32 products by weights of at most 8 bits as integer products.

    The other operand is quantised first, with its largest magnitude over 127 as the scale of each row. The integers are stored with 128
    added, and the contribution of the offset, a constant of each column, is subtracted from the product. Products are summed exactly in
    int32, and the sums are multiplied by both scales. The results of a row with an infinity or NaN are NaN.

    If a weight has a scale per group of rows, the sum of each group is multiplied by its scale. Weights with zero points or of other types
    are read as floats.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        values: dict[GVar, Value] = {}

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value = out.value(binding.value)
            matmul = operator_of(value, Matmul)
            weight = None if matmul is None else _weight(matmul, value, values)
            if matmul is None or weight is None or not isinstance(binding, Binding):
                values[binding.var] = value
                out.keep(binding)
                return
            emit = _summed_exactly if weight.op.group is None else _summed_by_groups
            out.bindings.append(replace(binding, value=emit(out, matmul, value.operands, weight)))

        new = map_graphs(module, lambda f, _: rewrite_function(f, visit, env))
        return module if new is module else DeadCode()(new)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantised weight.

    Attributes:
        op: The operator that dequantises it.
        numbers: The integers.
        scale: The scales.
        packed: Whether two integers share a byte.
    """

    op: Dequantize
    numbers: Value
    scale: Value
    packed: bool


def _weight(matmul: Matmul, value: Value, values: dict[GVar, Value]) -> _Weight | None:
    """Return the quantised weight that a float32 product reads; None if the product must be computed in floats."""
    if not isinstance(value.operands[1], GVar):
        return None
    dequantized = values.get(value.operands[1])
    op = None if dequantized is None else operator_of(dequantized, Dequantize)
    # A third operand is a zero point, whose contribution would need the sum of each row of activations.
    if dequantized is None or op is None or op.axis is None or len(dequantized.operands) != 2:
        return None
    numbers, scale = dequantized.operands
    info, wide = tensor_info(numbers), tensor_info(value.operands[0])
    depth = as_int(wide.shape[-1]) if wide.shape is not None else None
    fits = info.shape is not None and len(info.shape) == 2 and info.dtype is i8
    if not (fits and depth and wide.dtype is f32 and tensor_info(scale).dtype is f32):
        return None
    columns = 0 if matmul.transpose_b else 1
    if op.group is None:
        # Scales per row of the sum cannot be moved out of it.
        return _Weight(op, numbers, scale, False) if op.axis % 2 == columns else None
    # Even groups, since two 4-bit numbers share a byte; whole groups, so that every group sum has as many terms.
    fits = op.axis % 2 != columns and op.group % 2 == 0 and depth % op.group == 0
    inner = values.get(numbers) if isinstance(numbers, GVar) else None
    packed = inner is not None and operator_of(inner, Unpack4) is not None
    return _Weight(op, numbers, scale, packed) if fits else None


def _summed_exactly(out: Emitter, matmul: Matmul, operands: Sequence[Value], weight: _Weight) -> Value:
    """Emit a product of bytes in int32, for scales per column."""
    x, scale = operands[0], _row_scale(out, operands[0])
    if ("bytes", x) not in out.known:
        shifted = _emit(out, AddScalar(OFFSET), _emit(out, Cast(i32), _numbers(out, x)))
        out.known["bytes", x] = _emit(out, Cast(u8), shifted)
    # separate casts for each product, so that they fuse into it
    wide, columns, again = (_emit(out, Cast(i32), v) for v in (out.known["bytes", x], weight.numbers, weight.numbers))
    # (x + 128) w = x w + 128 sum(w): the last term is subtracted, once per column
    added = _emit(out, Sum((1 if matmul.transpose_b else 0,)), _emit(out, MulScalar(-OFFSET), again))
    total = _emit(out, Add(), _emit(out, matmul, wide, columns), added)
    return Call(Mul(), (_emit(out, Mul(), _emit(out, Cast(f32), total), scale), weight.scale))


def _summed_by_groups(out: Emitter, matmul: Matmul, operands: Sequence[Value], weight: _Weight) -> Value:
    """Emit a product of integers converted to floats, for scales per group of rows; a schedule may sum a group in int32."""
    x = operands[0]
    # Bytes are multiplied as 16-bit integers whose products are summed in pairs; 4-bit numbers fit the instructions
    # for bytes (`ir/hardware/dots`).
    kind = "numbers" if weight.packed else "shorts"
    if (kind, x) not in out.known:
        out.known[kind, x] = _numbers(out, x) if weight.packed else _emit(out, Cast(i16), _numbers(out, x))
    sums = _emit(out, matmul, _emit(out, Cast(f32), out.known[kind, x]), operands[1])
    return Call(Mul(), (sums, _row_scale(out, x)))


def _row_scale(out: Emitter, x: Value) -> Value:
    """Return the scale of each row of x: (..., m, k) as (..., m, 1), emitted once per x."""
    if ("scale", x) not in out.known:
        largest = _emit(out, Max((-1,), keepdims=True), _emit(out, Abs(), x))
        out.known["scale", x] = _emit(out, MaximumScalar(TINY), _emit(out, division_by(LARGEST), largest))
    return out.known["scale", x]


def _numbers(out: Emitter, x: Value) -> Value:
    """Emit the rows of x: (..., m, k) as 8-bit integers."""
    dims = tensor_info(x).shape
    assert dims is not None
    return _emit(out, Quantize(len(dims) - 1, as_int(dims[-1])), x, _row_scale(out, x))


def _emit(out: Emitter, op: OperatorSpec, *args: Value) -> GVar:
    value = Call(op, args)
    return out.bind(value, infer_value(value, Deduction(out.env)), op.name)
