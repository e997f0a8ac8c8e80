"""ONNX convolutions of quantised integers: ConvInteger, QLinearConv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.core.dtype import f32, i32
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.images.window import of_kernel
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.numeric import requantized
from relax_tune.ir.frontend.shared import windows
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, Mul, Sub
from relax_tune.ir.op.neural.window import Conv


def _along(w: Writer, node: OnnxNode, item: ImportedValue, axis: int, ndim: int, what: str) -> Value:
    """Return one number, or one for each element of an axis, as a value that broadcasts against `ndim` dims."""
    if item.ndim > 1:
        raise node.refuse(f"wanted one {what}, or one for each channel, found {item.info!r}")
    if item.ndim == 0 or as_int(item.shape[0]) == 1:
        return w.reshape(w.tensor(item), [])
    return w.reshape(w.tensor(item), [item.shape[0], *[const(1)] * (ndim - 1 - axis)])


def _centred(w: Writer, node: OnnxNode, item: ImportedValue, zero: ImportedValue | None, axis: int) -> Value:
    """Subtract the zero points of an axis, as int32; padding with 0 is then padding with the zero point."""
    value = w.emit(Cast(i32), w.tensor(item))
    if zero is None:
        return value
    return w.emit(Sub(), value, w.emit(Cast(i32), _along(w, node, zero, axis, item.ndim, "zero point")))


def _convolved(w: Writer, node: OnnxNode, given: Sequence[int | None]) -> Value:
    """Emit the exact sums of a convolution, in int32. given: inputs x, w and their zero points."""
    x, kernel, *zeros = (None if p is None or not node.has(p) else node.item(p) for p in given)
    assert x is not None and kernel is not None
    own = of_kernel(w, replace(node, inputs=(x, kernel)))
    value = windows.padded(w, _centred(w, node, x, zeros[0], 1), own.all_pads, 0)
    op = Conv(own.strides, own.dilations, int(node.attributes.get("group", 1)))
    return w.emit(op, value, _centred(w, node, kernel, zeros[1], 0))


def _conv_integer(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(_convolved(w, node, (0, 1, 2, 3)))


def _qlinear_conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearConv: round((sum of (x - zx)(w - zw) + bias) * sx * sw / sy) + zy, the sum exact in int32."""
    x = node.item(0)
    total = _convolved(w, node, (0, 3, 2, 5))
    if node.has(8):
        total = w.emit(Add(), total, _along(w, node, node.item(8), 1, x.ndim, "bias"))
    for p in (1, 6, 7):
        if node.item(p).ndim and as_int(node.item(p).shape[0]) != 1:
            raise node.refuse(f"wanted one number for a whole tensor as input {p}, found {node.item(p).info!r}")
    scales = [cast_to(w, _along(w, node, node.item(p), 1, x.ndim, "scale"), node.item(p).dtype, f32) for p in (1, 4, 6)]
    scale = w.emit(Div(), w.emit(Mul(), scales[0], scales[1]), scales[2])
    zero = w.reshape(w.tensor(node.item(7)), [])
    value = w.emit(Mul(), w.emit(Cast(f32), total), scale)
    return w.of(requantized(w, value, zero, f32, node.item(7).dtype))


HANDLERS: Mapping[str, Handler] = {"ConvInteger": _conv_integer, "QLinearConv": _qlinear_conv}
