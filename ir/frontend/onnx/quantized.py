"""ONNX operators on quantised integers: QuantizeLinear, DequantizeLinear, products and convolutions.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.core.dtype import SMALL, DType, f8e8m0, f32, i8, i16, i32, u8, u16
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.window import of_kernel
from relax_tune.ir.frontend.shared.handlers import window as windows
from relax_tune.ir.frontend.shared.handlers.math import clip
from relax_tune.ir.frontend.shared.handlers.neural import matmul
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.quantize import Dequantize, Quantize
from relax_tune.ir.op.reduction.reduce import MinOrHighest


def _scale_and_zero(w: Writer, node: OnnxNode) -> tuple[int | None, int | None, list[Value]]:
    """Return the axis and group of a scale, and the scale and zero point in the layout of our operators."""
    x, scale = node.item(0), node.item(1)
    group = node.integer("block_size", 0)
    items = [node.item(p) for p in (1, 2) if node.has(p)]
    one = scale.ndim == 0 or (scale.array is not None and scale.array.size == 1 and scale.ndim == 1 and not group)
    if one:
        return None, None, [w.reshape(w.tensor(i), []) for i in items]
    if scale.ndim != (x.ndim if group else 1):
        raise node.refuse(f"expected one number, one dim, or a number for each block as scale, got {scale.info!r}")
    axis = node.axis(x.ndim, 1)
    return axis, group or None, [w.tensor(i) for i in items]


def requantized(w: Writer, value: Value, zero: Value | None, source: DType, target: DType) -> Value:
    """Return round(value) + zero, saturated to `target`. value: floats; zero: of type `target`."""
    return w.emit(Quantize(dtype=target), value, w.literal(1.0, source), *([] if zero is None else [zero]))


def _quantize(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    if node.has(2):
        target = node.item(2).dtype
    else:
        target = node.element("output_dtype", u8)
    if target not in (i8, u8, i16, u16, *SMALL) or target is f8e8m0:
        raise node.refuse(f"expected an integer or float of at most 8 bits, int16 or uint16, got {target}")
    if node.integer("precision", 0) not in (0, 1):
        raise node.refuse(f"expected the division in 32 bits, got precision {node.attributes['precision']}")
    axis, group, (by, *zero) = _scale_and_zero(w, node)
    # 16-bit floats are divided in 32 bits, rounded once
    value, by = w.cast(w.tensor(x), f32), w.cast(by, f32)
    saturate = node.flag("saturate", True)
    return w.of(w.emit(Quantize(axis, group, target, saturate=saturate), value, by, *zero))


def _dequantize(w: Writer, node: OnnxNode) -> ImportedValue:
    x, scale = node.item(0), node.item(1)
    target = node.element("output_dtype", scale.dtype)
    axis, group, (by, *zero) = _scale_and_zero(w, node)
    wide = scale.dtype if scale.dtype is target else f32
    y = w.emit(Dequantize(axis, group), w.tensor(x), w.cast(by, wide), *zero)
    return w.of(w.cast(y, target))


def _broadcastable(w: Writer, item: ImportedValue, rows: bool) -> Value:
    """Return one number, or one for each row or column of a matrix, with dims that broadcast against it."""
    if all(d is const(1) for d in item.shape):
        return w.reshape(w.tensor(item), [])
    return w.reshape(w.tensor(item), [*item.shape, const(1)]) if rows and item.ndim == 1 else w.tensor(item)


def centred(w: Writer, x: ImportedValue, zero: ImportedValue | None, rows: bool) -> Value:
    """Subtract the zero point of integers, as int32. rows: one zero point for each row, otherwise for each column."""
    value = w.cast(w.tensor(x), i32)
    return value if zero is None else w.sub(value, w.cast(_broadcastable(w, zero, rows), i32))


def dynamically_quantized(w: Writer, x: Value) -> tuple[Value, Value, Value]:
    """Quantise floats to uint8 by their range, which includes 0. Returns the integers, their scale and zero point, without dims."""
    axes = tuple(range(len(tensor_dims(x))))
    # The range includes 0 so that 0, which padding uses, is one of the quantised numbers.
    low, high = w.minimum(w.emit(MinOrHighest(axes, False), x), 0.0), w.maximum(w.max_or_lowest(x, axes), 0.0)
    scale = w.div(w.sub(high, low), 255)
    # All elements are 0: any scale is right, but a division by 0 is not.
    scale = w.where(w.equal(scale, 0.0), 1.0, scale)
    zero = w.cast(w.rint(clip(w, w.div(w.mul(low, -1), scale), 0.0, 255.0)), u8)
    return w.emit(Quantize(dtype=u8), x, scale, zero), scale, zero


def _matmul_integer(w: Writer, node: OnnxNode) -> ImportedValue:
    zeros = [node.item(p) if node.has(p) else None for p in (2, 3)]
    a, b = centred(w, node.item(0), zeros[0], True), centred(w, node.item(1), zeros[1], False)
    return matmul(w, replace(node, inputs=(w.of(a), w.of(b))))


def _require_one_scale(node: OnnxNode, positions: Sequence[int]) -> None:
    for p in positions:
        if any(d is not const(1) for d in node.item(p).shape):
            raise node.refuse(
                f"expected one scale and zero point for a whole tensor, got {node.item(p).info!r} as input {p}"
            )


def _qlinear_matmul(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearMatMul: round((a - za)(b - zb) * sa * sb / sy) + zy, the product exact in int32.

    `a` may have a scale and zero point for each row, `b` for each column."""
    _require_one_scale(node, (6, 7))
    a, b = centred(w, node.item(0), node.item(2), True), centred(w, node.item(3), node.item(5), False)
    product = w.cast(w.matmul(a, b), f32)
    scales = [w.cast(_broadcastable(w, node.item(p), p == 1), f32) for p in (1, 4, 6)]
    scale = w.div(w.mul(scales[0], scales[1]), scales[2])
    zero = w.reshape(w.tensor(node.item(7)), [])
    return w.of(requantized(w, w.mul(product, scale), zero, f32, node.item(7).dtype))


def _along(w: Writer, node: OnnxNode, item: ImportedValue, axis: int, ndim: int, what: str) -> Value:
    """Return one number, or one for each element of an axis, as a value that broadcasts against `ndim` dims."""
    if item.ndim > 1:
        raise node.refuse(f"expected one {what}, or one for each channel, got {item.info!r}")
    if item.ndim == 0 or as_int(item.shape[0]) == 1:
        return w.reshape(w.tensor(item), [])
    return w.reshape(w.tensor(item), [item.shape[0], *[const(1)] * (ndim - 1 - axis)])


def _centred_along(w: Writer, node: OnnxNode, item: ImportedValue, zero: ImportedValue | None, axis: int) -> Value:
    """Subtract the zero points of an axis, as int32; padding with 0 is then padding with the zero point."""
    value = w.cast(w.tensor(item), i32)
    if zero is None:
        return value
    return w.sub(value, w.cast(_along(w, node, zero, axis, item.ndim, "zero point"), i32))


def _convolved(w: Writer, node: OnnxNode, places: Sequence[int | None]) -> Value:
    """Emit the exact sums of a convolution, in int32. places: Inputs x, w and their zero points."""
    x, kernel, *zeros = (None if p is None or not node.has(p) else node.item(p) for p in places)
    assert x is not None and kernel is not None
    window = of_kernel(w, replace(node, inputs=(x, kernel)))
    value, weights = _centred_along(w, node, x, zeros[0], 1), _centred_along(w, node, kernel, zeros[1], 0)
    return windows.convolved(w, value, weights, window, node.integer("group", 1))


def _conv_integer(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(_convolved(w, node, (0, 1, 2, 3)))


def _qlinear_conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearConv: round((sum of (x - zx)(w - zw) + bias) * sx * sw / sy) + zy, the sum exact in int32."""
    x = node.item(0)
    total = _convolved(w, node, (0, 3, 2, 5))
    if node.has(8):
        total = w.add(total, _along(w, node, node.item(8), 1, x.ndim, "bias"))
    for p in (1, 6, 7):
        if node.item(p).ndim and as_int(node.item(p).shape[0]) != 1:
            raise node.refuse(f"expected one number for a whole tensor as input {p}, got {node.item(p).info!r}")
    scales = [w.cast(_along(w, node, node.item(p), 1, x.ndim, "scale"), f32) for p in (1, 4, 6)]
    scale = w.div(w.mul(scales[0], scales[1]), scales[2])
    zero = w.reshape(w.tensor(node.item(7)), [])
    value = w.mul(w.cast(total, f32), scale)
    return w.of(requantized(w, value, zero, f32, node.item(7).dtype))


HANDLERS: Mapping[str, Handler] = {
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul, "ConvInteger": _conv_integer, "QLinearConv": _qlinear_conv,
}  # fmt: skip
