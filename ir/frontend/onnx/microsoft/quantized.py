"""Operators on 8-bit integers that ONNX Runtime's quantizer and optimizer write.

Tests: `tests/ir/frontend/onnx/microsoft/test_quantized.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from relax_tune.ir.core.dtype import f32, i32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.microsoft.attention import attention_of
from relax_tune.ir.frontend.onnx.microsoft.norms import embeddings_norm, masked_count
from relax_tune.ir.frontend.onnx.microsoft.products import channels_first, channels_last
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.quantized import HANDLERS as QUANTIZED
from relax_tune.ir.frontend.onnx.quantized import centred, dynamically_quantized
from relax_tune.ir.frontend.onnx.window import HANDLERS as WINDOW
from relax_tune.ir.frontend.shared.handlers.math import leaky_relu
from relax_tune.ir.frontend.shared.handlers.neural import along_last_axis
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.math.quantize import Dequantize, Quantize
from relax_tune.ir.op.reduction.reduce import Softmax


def dequantized(w: Writer, node: OnnxNode, position: int) -> Value:
    """Return the numbers of a tensor whose one scale, and optional zero point, are the inputs behind it."""
    value, scale = node.operand(w, position), w.reshape(node.operand(w, position + 1), [])
    zero = [w.reshape(node.operand(w, position + 2), [])] if node.has(position + 2) else []
    # Such operators are defined as the float operator between a dequantisation and a quantisation, and computed so.
    return w.emit(Dequantize(), value, scale, *zero)


def quantized(w: Writer, node: OnnxNode, value: Value, position: int) -> ImportedValue:
    """Quantise numbers by the scale at a position, and the optional zero point behind it, to the element type of input 0."""
    zero = [w.reshape(node.operand(w, position + 1), [])] if node.has(position + 1) else []
    target = node.item(position + 1).dtype if zero else node.item(0).dtype
    return w.of(w.emit(Quantize(dtype=target), value, w.reshape(node.operand(w, position), []), *zero))


def unary(function: Callable[[Writer, OnnxNode, Value], Value]) -> Handler:
    """Make a handler of (x, scale, zero point, scale of the result, its zero point)."""
    return lambda w, node: quantized(w, node, function(w, node, dequantized(w, node, 0)), 3)


def binary(function: Callable[[Writer, Value, Value], Value]) -> Handler:
    """Make a handler of (a, scale, zero point, b, scale, zero point, scale of the result, its zero point)."""
    return lambda w, node: quantized(w, node, function(w, dequantized(w, node, 0), dequantized(w, node, 3)), 6)


def _leaky(w: Writer, node: OnnxNode, x: Value) -> Value:
    y = leaky_relu(w, replace(node, inputs=(w.of(x),)))
    return w.tensor(y)


def _softmax(w: Writer, node: OnnxNode, x: Value) -> Value:
    """Emit a softmax along an axis; before opset 13 over all dims from the axis on."""
    dims = tensor_dims(x)
    axis = node.axis(len(dims), -1)
    if node.integer("opset") >= 13:
        return along_last_axis(w, x, axis, lambda v: w.emit(Softmax(), v))
    rows = w.reshape(x, [*dims[:axis], w.simplify(product(dims[axis:]))])
    return w.reshape(w.emit(Softmax(), rows), dims)


def _average_pool(w: Writer, node: OnnxNode, x: Value) -> Value:
    last = node.flag("channels_last")
    inner = replace(node, inputs=(w.of(channels_first(w, x) if last else x),))
    y = WINDOW["AveragePool"](w, inner)
    assert isinstance(y, ImportedValue)
    return channels_last(w, w.tensor(y)) if last else w.tensor(y)


def _global_average_pool(w: Writer, node: OnnxNode, x: Value) -> Value:
    n = len(tensor_dims(x))
    return w.mean(x, tuple(range(1, n - 1)) if node.flag("channels_last") else tuple(range(2, n)), True)


def _mean(w: Writer, node: OnnxNode, x: Value) -> Value:
    n = len(tensor_dims(x))
    axes = tuple(node.normalised(int(a), n) for a in node.attributes["axes"])
    return w.mean(x, axes, node.flag("keepdims", True))


def _concat(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearConcat of (scale and zero point of the result, then tensor, scale and zero point of each part)."""
    parts = [dequantized(w, node, p) for p in range(2, len(node.inputs), 3)]
    value = w.concat(node.axis(len(tensor_dims(parts[0]))), *parts)
    return quantized(w, node, value, 0)


def _where(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearWhere of (condition, x, scale, zero point, y, scale, zero point, scale of the result, its zero point)."""
    value = w.where(node.operand(w, 0), dequantized(w, node, 1), dequantized(w, node, 4))
    return quantized(w, node, value, 7)


def _conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QLinearConv, whose input and result may have the channels last; the weights have them first."""
    last = node.flag("channels_last")
    inputs = list(node.inputs)
    if last:
        inputs[0] = w.of(channels_first(w, node.operand(w, 0)))
    y = QUANTIZED["QLinearConv"](w, replace(node, inputs=tuple(inputs)))
    assert isinstance(y, ImportedValue)
    return w.of(channels_last(w, w.tensor(y))) if last else y


def _by_scale(w: Writer, node: OnnxNode, position: int) -> Value:
    """Return a scale of a tensor or of its columns, which broadcasts to the product."""
    item = node.item(position)
    return w.reshape(w.tensor(item), []) if all(d is const(1) for d in item.shape) else w.tensor(item)


def _integer_product(w: Writer, node: OnnxNode, a: Value, zero_a: Value | None, b: int, zero_b: int) -> Value:
    """Emit the exact product of integers less their zero points, as f32; the zero points of b are inputs at positions."""
    left = w.cast(a, i32)
    left = left if zero_a is None else w.sub(left, w.cast(zero_a, i32))
    right = centred(w, node.item(b), node.optional(zero_b), False)
    # Summed in int32, the product is exact, and the same in any order; only the conversion rounds.
    return w.cast(w.matmul(left, right), f32)


def _to_float(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MatMulIntegerToFloat of (a, b, their scales, their zero points, bias)."""
    zero = w.reshape(node.operand(w, 4), []) if node.has(4) else None
    total = _integer_product(w, node, node.operand(w, 0), zero, 1, 5)
    y = w.mul(total, w.mul(w.cast(_by_scale(w, node, 2), f32), w.cast(_by_scale(w, node, 3), f32)))
    y = w.cast(y, node.item(2).dtype)
    return w.of(w.add(y, node.operand(w, 6)) if node.has(6) else y)


def _dynamic(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import DynamicQuantizeMatMul of (a, b, scale and zero point of b, bias): a is quantised by its own range."""
    a, scale, zero = dynamically_quantized(w, node.operand(w, 0))
    total = _integer_product(w, node, a, zero, 1, 3)
    y = w.mul(total, w.mul(scale, _by_scale(w, node, 2)))
    return w.of(w.add(y, node.operand(w, 4)) if node.has(4) else y)


def _gemm(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QGemm of (a, scale, zero point, b, scale, zero point, c, scale of the result, its zero point).

    The sum with c is exact in int32; without a scale of the result it is a float.
    """
    sides = []
    for p, name in ((0, "transA"), (3, "transB")):
        value = node.operand(w, p)
        sides.append(w.permute(value, (1, 0)) if node.flag(name) else value)
    inner = replace(node, inputs=(None, w.of(sides[1]), *node.inputs[2:]))
    zero = w.reshape(node.operand(w, 2), [])
    left = w.sub(w.cast(sides[0], i32), w.cast(zero, i32))
    total = w.matmul(left, centred(w, inner.item(1), node.item(5), False))
    if node.has(6):
        total = w.add(total, w.broadcast(node.operand(w, 6), tensor_dims(total)))
    scale = w.mul(w.mul(_by_scale(w, node, 1), node.real("alpha", 1.0)), _by_scale(w, node, 4))
    y = w.mul(w.cast(total, f32), scale)
    return quantized(w, node, y, 7) if node.has(7) else w.of(y)


def _attention(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import QAttention: Attention whose projections are products of integers."""
    zero = w.reshape(node.operand(w, 6), []) if node.has(6) else None
    total = _integer_product(w, node, node.operand(w, 0), zero, 1, 7)
    projected = w.mul(total, w.mul(_by_scale(w, node, 3), _by_scale(w, node, 4)))
    return attention_of(w, node, w.add(projected, node.operand(w, 2)), 5, 8, len(node.inputs))


def _embed(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import QEmbedLayerNormalization: EmbedLayerNormalization whose tables and weights are integers."""

    def table(position: int, scale: int) -> ImportedValue:
        parts = (node.item(position), node.item(scale), node.item(scale + 5))
        return w.of(dequantized(w, replace(node, inputs=parts), 0))

    segments = table(4, 10) if node.has(1) and node.has(4) else None
    y, _ = embeddings_norm(w, node, (table(2, 8), table(3, 9), segments), (table(5, 11), table(6, 12)), None)
    return [y, masked_count(w, node, 7)]


HANDLERS: Mapping[str, Handler] = {
    "QLinearAdd": binary(lambda w, a, b: w.add(a, b)), "QLinearMul": binary(lambda w, a, b: w.mul(a, b)),
    "QLinearSigmoid": unary(lambda w, _, x: w.sigmoid(x)), "QLinearLeakyRelu": unary(_leaky),
    "QLinearSoftmax": unary(_softmax), "QLinearAveragePool": unary(_average_pool),
    "QLinearGlobalAveragePool": unary(_global_average_pool), "QLinearReduceMean": unary(_mean),
    "QLinearConcat": _concat, "QLinearWhere": _where, "QLinearConv": _conv, "QGemm": _gemm,
    "MatMulIntegerToFloat": _to_float, "DynamicQuantizeMatMul": _dynamic, "QAttention": _attention,
    "QEmbedLayerNormalization": _embed,
    "QuantizeLinear": QUANTIZED["QuantizeLinear"], "DequantizeLinear": QUANTIZED["DequantizeLinear"],
}  # fmt: skip
