"""ONNX operators: trigonometry, rounding, integer division, norms, quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import SMALL, DType, bool_, f8e8m0, f32, i8, i16, i32, u8, u16
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import binary, unary
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of
from relax_tune.ir.frontend.onnx.tensors import element_type
from relax_tune.ir.frontend.shared.compositions import cast_to, remainder
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.math.bits import BitCast, BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.elementwise import Cast, Div, Mul, Sqrt, Sub
from relax_tune.ir.op.math.logic import NotEqual, Where
from relax_tune.ir.op.math.numeric import (
    Abs,
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atanh,
    Cos,
    Cosh,
    Rint,
    Sin,
    Sinh,
    Tan,
)
from relax_tune.ir.op.math.quantize import Dequantize, Quantize
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum


def _mod(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Mod: with `fmod` the result has the sign of the dividend, otherwise that of the divisor."""
    a, b = node.item(0), node.item(1)
    towards_zero = bool(node.attributes.get("fmod", 0))
    found = remainder(w, w.tensor(a), w.tensor(b), a.dtype, towards_zero)
    return w.of(found, b.natural and a.dtype.is_int and not towards_zero)


def _shift(w: Writer, node: OnnxNode) -> ImportedValue:
    left = node.choice("direction", "", "LEFT", "RIGHT") == "LEFT"
    return w.of(w.emit(ShiftLeft() if left else ShiftRight(), w.tensor(node.item(0)), w.tensor(node.item(1))))


def _bit_cast(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), element_type(int(node.attributes["to"]), f"node {node.name!r}")
    if x.dtype is target:
        return x
    if x.dtype is bool_ and target.bytes == 1:
        return w.of(cast_to(w, w.tensor(x), bool_, target))
    return w.of(w.emit(BitCast(target, x.dtype), w.tensor(x)))


def _lp_normalize(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LpNormalization: x divided by its norm along an axis; 0 where the norm is 0."""
    x = node.item(0)
    p, axis = int(node.attributes.get("p", 2)), axis_of(node, int(node.attributes.get("axis", -1)), x.ndim)
    if p not in (1, 2):
        raise node.refuse(f"wanted p 1 or 2, found {p}")
    value = w.tensor(x)
    total = w.emit(Sum((axis,), True), w.emit(Abs(), value) if p == 1 else w.emit(Mul(), value, value))
    norm = total if p == 1 else w.emit(Sqrt(), total)
    zero = w.literal(0, x.dtype)
    found = w.emit(Div(), value, norm)
    return w.of(w.emit(Where(), w.emit(NotEqual(), norm, zero), found, zero))


def _scaled(w: Writer, node: OnnxNode) -> tuple[int | None, int | None, list[Value]]:
    """Return the axis and group of a scale, and the scale and zero point in the layout of our operators."""
    x, scale = node.item(0), node.item(1)
    group = int(node.attributes.get("block_size", 0))
    given = [node.item(p) for p in (1, 2) if node.has(p)]
    one = scale.ndim == 0 or (scale.array is not None and scale.array.size == 1 and scale.ndim == 1 and not group)
    if one:
        return None, None, [w.reshape(w.tensor(i), []) for i in given]
    if scale.ndim != (x.ndim if group else 1):
        raise node.refuse(f"wanted one number, one dim, or a number for each block as scale, found {scale.info!r}")
    axis = axis_of(node, int(node.attributes.get("axis", 1)), x.ndim)
    return axis, group or None, [w.tensor(i) for i in given]


def requantized(w: Writer, value: Value, zero: Value | None, source: DType, target: DType) -> Value:
    """Return round(value) + zero, saturated to `target`. value: floats; zero: of type `target`."""
    return w.emit(Quantize(dtype=target), value, w.literal(1.0, source), *([] if zero is None else [zero]))


def _quantize(w: Writer, node: OnnxNode) -> ImportedValue:
    x, scale = node.item(0), node.item(1)
    if node.has(2):
        target = node.item(2).dtype
    else:
        number = int(node.attributes.get("output_dtype", 0))
        target = element_type(number, f"node {node.name!r}") if number else u8
    if target not in (i8, u8, i16, u16, *SMALL) or target is f8e8m0:
        raise node.refuse(f"wanted an integer or float of at most 8 bits, int16 or uint16, found {target}")
    if int(node.attributes.get("precision", 0)) not in (0, 1):
        raise node.refuse(f"wanted the division in 32 bits, found precision {node.attributes['precision']}")
    axis, group, (by, *zero) = _scaled(w, node)
    # 16-bit floats are divided in 32 bits, rounded once
    value, by = cast_to(w, w.tensor(x), x.dtype, f32), cast_to(w, by, scale.dtype, f32)
    saturate = bool(node.attributes.get("saturate", 1))
    return w.of(w.emit(Quantize(axis, group, target, saturate=saturate), value, by, *zero))


def _dequantize(w: Writer, node: OnnxNode) -> ImportedValue:
    x, scale = node.item(0), node.item(1)
    number = int(node.attributes.get("output_dtype", 0))
    target = element_type(number, f"node {node.name!r}") if number else scale.dtype
    axis, group, (by, *zero) = _scaled(w, node)
    wide = scale.dtype if scale.dtype is target else f32
    found = w.emit(Dequantize(axis, group), w.tensor(x), cast_to(w, by, scale.dtype, wide), *zero)
    return w.of(cast_to(w, found, wide, target))


def _centred(w: Writer, x: ImportedValue, zero: ImportedValue | None, rows: bool) -> Value:
    """Subtract the zero point of integers, as int32. rows: one zero point for each row, otherwise for each column."""
    value = w.emit(Cast(i32), w.tensor(x))
    if zero is None:
        return value
    point = w.emit(Cast(i32), w.tensor(zero))
    if rows and zero.ndim == 1 and (zero.array is None or zero.array.size != 1):
        point = w.reshape(point, [*zero.shape, const(1)])
    return w.emit(Sub(), value, point)


def _matmul_integer(w: Writer, node: OnnxNode) -> ImportedValue:
    zeros = [node.item(p) if node.has(p) else None for p in (2, 3)]
    a, b = _centred(w, node.item(0), zeros[0], True), _centred(w, node.item(1), zeros[1], False)
    if min(len(tensor_dims(a)), len(tensor_dims(b))) < 2:
        raise node.refuse("wanted at least 2 dims in both operands")
    return w.of(w.emit(Matmul(), a, b))


def _one(node: OnnxNode, positions: Sequence[int]) -> None:
    for p in positions:
        if any(d is not const(1) for d in node.item(p).shape):
            raise node.refuse(
                f"wanted one scale and zero point for a whole tensor, found {node.item(p).info!r} as input {p}"
            )


def _qlinear_matmul(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearMatMul: round((a - za)(b - zb) * sa * sb / sy) + zy, the product exact in int32."""
    _one(node, (1, 2, 4, 5, 6, 7))
    a, b = _centred(w, node.item(0), node.item(2), True), _centred(w, node.item(3), node.item(5), False)
    product = w.emit(Cast(f32), w.emit(Matmul(), a, b))
    scales = [cast_to(w, w.reshape(w.tensor(node.item(p)), []), node.item(p).dtype, f32) for p in (1, 4, 6)]
    scale = w.emit(Div(), w.emit(Mul(), scales[0], scales[1]), scales[2])
    zero = w.reshape(w.tensor(node.item(7)), [])
    return w.of(requantized(w, w.emit(Mul(), product, scale), zero, f32, node.item(7).dtype))


HANDLERS: Mapping[str, Handler] = {
    "Sin": unary(Sin()), "Cos": unary(Cos()), "Tan": unary(Tan()), "Asin": unary(Asin()), "Acos": unary(Acos()),
    "Atan": unary(Atan()), "Sinh": unary(Sinh()), "Cosh": unary(Cosh()), "Asinh": unary(Asinh()), "Acosh": unary(Acosh()),
    "Atanh": unary(Atanh()), "BitShift": _shift, "BitCast": _bit_cast, "BitwiseNot": unary(BitwiseNot()),
    "BitwiseAnd": binary(BitwiseAnd()), "BitwiseOr": binary(BitwiseOr()), "BitwiseXor": binary(BitwiseXor()),
    "Round": unary(Rint()), "Mod": _mod, "LpNormalization": _lp_normalize,
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
}  # fmt: skip
