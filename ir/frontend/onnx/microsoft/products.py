"""Activations with biases, and matrix products and convolutions with an activation.

Tests: `tests/ir/frontend/onnx/microsoft/test_products.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relax_tune.ir.core.expr import const, floordiv
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import HANDLERS as MATH
from relax_tune.ir.frontend.onnx.neural import HANDLERS as NEURAL
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.recurrent import PARAMETERS, activation
from relax_tune.ir.frontend.onnx.window import HANDLERS as WINDOW
from relax_tune.ir.frontend.shared.handlers import math as shared
from relax_tune.ir.frontend.shared.handlers.neural import matmul
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.math.elementwise import Gelu

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"), "HardSwish": (), "Softplus": (), "Softsign": (), "ScaledTanh": ("alpha", "beta"),
    "ThresholdedRelu": ("alpha",), "Celu": ("alpha",), "Selu": ("alpha", "gamma"),
}  # fmt: skip
"""Activations of fused products, with the names of their parameters in order."""


def with_bias(w: Writer, node: OnnxNode, position: int) -> Value:
    """Return input 0 plus the input at `position`, if there is one."""
    x = node.operand(w, 0)
    return w.add(x, node.operand(w, position)) if node.has(position) else x


def activated(w: Writer, node: OnnxNode, value: Value, name: str, numbers: Mapping[str, float]) -> Value:
    """Emit an activation with its parameters by name. Raises ParseError for another activation."""
    if not name:
        return value
    if name not in ACTIVATIONS:
        raise node.refuse(f"expected an activation among {', '.join(ACTIVATIONS)}, got {name!r}")
    if name == "Clip":
        return shared.clip(w, value, numbers.get("min"), numbers.get("max"))
    if name in PARAMETERS:
        by_name = zip(("alpha", "beta"), PARAMETERS[name], strict=False)
        return activation(node, name, [numbers.get(key, default) for key, default in by_name])(w, value)
    y = MATH[name](w, replace(node, op=name, inputs=(w.of(value),), attributes=numbers, outputs=("",), domain=""))
    assert isinstance(y, ImportedValue)
    return w.tensor(y)


def _bias_gelu(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.emit(Gelu(), with_bias(w, node, 1)))


def _fast_gelu(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(shared.tanh_gelu(w, with_bias(w, node, 1)))


def _quick_gelu(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.operand(w, 0)
    return w.of(w.mul(x, w.sigmoid(w.mul(x, node.real("alpha", 1.702)))))


def _bias_split_gelu(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import BiasSplitGelu: of x + bias, the first half of the last dim times the GELU of the second half."""
    x = with_bias(w, node, 1)
    axis, width = len(tensor_dims(x)) - 1, tensor_dims(x)[-1]
    half = w.simplify(floordiv(width, const(2)))
    return w.of(w.mul(w.slice(x, axis, const(0), half), w.emit(Gelu(), w.slice(x, axis, half, width))))


def _bias_add(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.add(with_bias(w, node, 1), node.operand(w, 2)))


def _bias_softmax(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import BiasSoftmax: softmax over the dims from `axis` on, of the sum with a bias.

    The bias has the dims of the data but for a run of dims of 1: before `axis` (an inner broadcast), or at the front.
    """
    x, bias = node.item(0), node.item(1)
    axis = node.axis(x.ndim, 1)
    value = w.add(w.tensor(x), w.reshape(w.tensor(bias), [*[const(1)] * (x.ndim - bias.ndim), *bias.shape]))
    rows = w.reshape(value, [*x.shape[:axis], w.simplify(product(x.shape[axis:]))])
    soft = NEURAL["Softmax"](
        w, replace(node, op="Softmax", inputs=(w.of(rows),), attributes={"axis": -1}, opset=13, version=13)
    )
    assert isinstance(soft, ImportedValue)
    return w.of(w.reshape(w.tensor(soft), x.shape))


def _fused_matmul(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import FusedMatMul: `alpha * op(a) @ op(b)`.

    `transBatch` moves the first dim of an operand behind its batch dims, `trans` swaps its last two dims then; both leave
    vectors as they are.
    """
    operands = []
    for position, side in enumerate("AB"):
        item = node.item(position)
        value, n = w.tensor(item), item.ndim
        if node.flag(f"transBatch{side}") and n > 2:
            value = w.permute(value, (*range(1, n - 1), 0, n - 1))
        if node.flag(f"trans{side}") and n > 1:
            value = w.permute(value, (*range(n - 2), n - 1, n - 2))
        operands.append(w.of(value))
    y = matmul(w, replace(node, inputs=tuple(operands)))
    alpha = node.real("alpha", 1.0)
    return y if alpha == 1.0 else w.of(w.mul(w.tensor(y), alpha))


def _fused_gemm(w: Writer, node: OnnxNode) -> ImportedValue:
    y = NEURAL["Gemm"](w, node)
    assert isinstance(y, ImportedValue)
    given = ("alpha", "beta", "gamma")
    numbers = {name: node.real(f"activation_{name}") for name in given if f"activation_{name}" in node.attributes}
    return w.of(activated(w, node, w.tensor(y), node.text("activation", ""), numbers))


def _fused_conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import FusedConv: a convolution with its bias, plus a tensor of the result's dims, through an activation."""
    y = WINDOW["Conv"](w, node)
    assert isinstance(y, ImportedValue)
    value = w.add(w.tensor(y), node.operand(w, 3)) if node.has(3) else w.tensor(y)
    name, numbers = node.text("activation", ""), map(float, node.attributes.get("activation_params", ()))
    return w.of(activated(w, node, value, name, dict(zip(ACTIVATIONS.get(name, ()), numbers, strict=False))))


def channels_first(w: Writer, value: Value) -> Value:
    """Permute (n, dims..., channels) to (n, channels, dims...)."""
    n = len(tensor_dims(value))
    return w.permute(value, (0, n - 1, *range(1, n - 1)))


def channels_last(w: Writer, value: Value) -> Value:
    """Permute (n, channels, dims...) to (n, dims..., channels)."""
    n = len(tensor_dims(value))
    return w.permute(value, (0, *range(2, n), 1))


def in_channels_first(handler: Handler, *positions: int) -> Handler:
    """Return the handler of an operator whose inputs at `positions` and result have the channels last."""

    def handle(w: Writer, node: OnnxNode) -> ImportedValue:
        inputs = list(node.inputs)
        for p in filter(node.has, positions):
            inputs[p] = w.of(channels_first(w, w.tensor(node.item(p))))
        y = handler(w, replace(node, inputs=tuple(inputs)))
        assert isinstance(y, ImportedValue)
        return w.of(channels_last(w, w.tensor(y)))

    return handle


def _max_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    y = WINDOW["MaxPool"](w, node)
    assert not isinstance(y, ImportedValue) and isinstance(y[0], ImportedValue)
    return y[0]


HANDLERS: Mapping[str, Handler] = {
    "Gelu": shared.gelu, "BiasGelu": _bias_gelu, "FastGelu": _fast_gelu, "QuickGelu": _quick_gelu,
    "BiasSplitGelu": _bias_split_gelu, "BiasAdd": _bias_add, "BiasSoftmax": _bias_softmax,
    "FusedMatMul": _fused_matmul, "TransposeMatMul": _fused_matmul, "FusedGemm": _fused_gemm, "FusedConv": _fused_conv,
    # both the input and the weights have the channels last
    "NhwcConv": in_channels_first(_fused_conv, 0, 1), "NhwcMaxPool": in_channels_first(_max_pool, 0),
    "NhwcFusedConv": in_channels_first(_fused_conv, 0, 3),
}  # fmt: skip
