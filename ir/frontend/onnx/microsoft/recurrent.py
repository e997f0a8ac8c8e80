"""LSTM whose products are of 8-bit integers.

Tests: `tests/ir/frontend/onnx/microsoft/test_recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.microsoft.blocks import constant
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.quantized import dynamically_quantized
from relax_tune.ir.frontend.onnx.recurrent import recurrent
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.quantize import Dequantize


def _quantized(w: Writer, value: Value) -> Value:
    """Return a value quantised by its own range, as the numbers that its integers stand for."""
    return w.emit(Dequantize(), *dynamically_quantized(w, value))


def _weights(w: Writer, node: OnnxNode, position: int, scale: int) -> ImportedValue:
    """Return the weights (directions, in, gates * hidden) at a position as numbers, (directions, gates * hidden, in)."""
    array = constant(node, w, position, "weights")
    by, zero = (constant(node, w, p, "scales and zero points") for p in (scale, scale + 1))
    by, zero = (a.reshape(len(array), 1, -1).astype(np.float32) for a in (by, zero))
    # Dequantised at import: the products run on floats that stand for the integers, since the scale of the state
    # changes at every position.
    numbers = (array.astype(np.float32) - zero) * by
    return w.constant(np.ascontiguousarray(numbers.transpose(0, 2, 1)), node.item(position).name)


def _dynamic_lstm(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import DynamicQuantizeLSTM: the input and, at each position, the state are quantised by their ranges."""
    weights = (_weights(w, node, 1, 8), _weights(w, node, 2, 10))
    inner = replace(node, op="LSTM", inputs=(node.item(0), *weights, *node.inputs[3:8]))
    return recurrent(w, inner, _quantized)


HANDLERS: Mapping[str, Handler] = {"DynamicQuantizeLSTM": _dynamic_lstm}
