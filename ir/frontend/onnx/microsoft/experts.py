"""Mixtures of experts (Shazeer et al. 2017), with weights as floats or as integers.

Every expert is computed for every row, in one product with the weights of all experts. The router's weights, 0 for experts that
a row did not choose, scale their results. That is right at every length, but costs the work of all experts.

Tests: `tests/ir/frontend/onnx/microsoft/test_experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.microsoft.attention import pick
from relax_tune.ir.frontend.onnx.microsoft.blocks import constant, unpacked, weights_of_blocks
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers import math as shared
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.reduction.reduce import Softmax


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer of all experts.

    Attributes:
        weights: (experts, in, out).
        bias: (experts, out), or None.
    """

    weights: Value
    bias: Value | None

    def of(self, w: Writer, x: Value) -> Value:
        """Return the layer of all experts, (experts, rows, out), of (experts or 1, rows, in)."""
        y = w.matmul(x, self.weights)
        return y if self.bias is None else w.add(y, w.expand_dims(self.bias, (1,)))


def _routed(w: Writer, node: OnnxNode, router: Value, mixed: Value | None) -> Value:
    """Emit the weight of each expert for each row, (rows, experts): 0 for experts that are not chosen."""
    if node.flag("use_sparse_mixer"):
        raise node.refuse("expected the largest experts to be chosen, got use_sparse_mixer")
    rows, experts = tensor_dims(router)
    k = node.integer("k", 1)
    best = w.top_k(router, const(k), 1)
    if mixed is None:
        share = w.emit(Softmax(), router)
        # ONNX Runtime's kernel of QMoE for processors ignores the attribute and always normalises
        if node.flag("normalize_routing_weights") or node.op == "QMoE":
            # of the chosen experts only
            largest = w.emit(Softmax(), w.gather_elements(router, best, 1))
        else:
            largest = w.gather_elements(share, best, 1)
    else:
        largest = w.gather_elements(mixed, best, 1)
        if node.flag("normalize_routing_weights"):
            largest = w.div(largest, w.sum(largest, (1,), True))
    numbers = w.reshape(w.iota(experts), [const(1), const(1), experts])
    chosen = w.equal(w.reshape(w.cast(best, i64), [rows, const(k), const(1)]), numbers)
    return w.sum(w.mul(w.cast(chosen, element_of(largest)), w.reshape(largest, [rows, const(k), const(1)])), (1,))


def _swiglu(w: Writer, node: OnnxNode, gate: Value, linear: Value) -> Value:
    """Emit `G * sigmoid(alpha * G) * (L + beta)` of clipped gates G and linear parts L."""
    limit = node.attributes.get("swiglu_limit")
    if limit is not None:
        # The gate is limited from above only: far below 0 it is 0 after the sigmoid anyway.
        gate = w.minimum(gate, float(limit))
        linear = shared.clip(w, linear, -float(limit), float(limit))
    gated = w.mul(gate, w.sigmoid(w.mul(gate, node.real("activation_alpha", 1.0))))
    return w.mul(gated, w.add(linear, node.real("activation_beta", 0.0)))


def _hidden(w: Writer, node: OnnxNode, first: Value, third: Value | None) -> Value:
    """Emit the activations between the layers, of the first layer's results and of the third layer's, which it may hold."""
    kind = node.text("activation_type", "relu")
    if node.flag("swiglu_limit_after_activation"):
        raise node.refuse("expected limits before the activation, got swiglu_limit_after_activation")
    if kind in ("swiglu", "geglu"):
        fused = node.integer("swiglu_fusion", 0)
        *lead, width = tensor_dims(first)
        half = w.simplify(width // 2)
        if fused == 1:
            both = w.reshape(first, [*lead, half, const(2)])
            gate, linear = (pick(w, both, len(lead) + 1, p) for p in range(2))
        elif fused == 2:
            gate, linear = w.slice(first, len(lead), const(0), half), w.slice(first, len(lead), half, width)
        elif third is None:
            raise node.refuse("expected fc3_experts_weights, or swiglu_fusion 1 or 2, got neither")
        else:
            gate, linear = first, third
        return w.mul(shared.tanh_gelu(w, gate), linear) if kind == "geglu" else _swiglu(w, node, gate, linear)
    plain: dict[str, Callable[[Value], Value]] = {
        "relu": w.relu, "gelu": lambda v: shared.tanh_gelu(w, v), "silu": lambda v: shared.silu(w, v), "identity": lambda v: v,
        "relu2": lambda v: shared.square(w, w.relu(v)),
    }  # fmt: skip
    if kind not in plain:
        raise node.refuse(f"expected an activation_type among {', '.join(plain)}, swiglu and geglu, got {kind}")
    y = plain[kind](first)
    return y if third is None else w.mul(y, third)


def _mixture(w: Writer, node: OnnxNode, layers: list[Layer | None], mixed: Value | None = None) -> ImportedValue:
    """Emit the mixture of (rows, hidden) or (batch, positions, hidden) by its first, second and third layers."""
    x, router = node.item(0), node.operand(w, 1)
    rows = w.simplify(product(x.shape[:-1]))
    flat = w.reshape(w.tensor(x), [const(1), rows, x.shape[-1]])
    first, second, third = layers
    assert first is not None and second is not None
    share = _routed(w, node, router, mixed)
    hidden = _hidden(w, node, first.of(w, flat), None if third is None else third.of(w, flat))
    y = second.of(w, hidden)
    # an expert that was not chosen may overflow, and 0 times infinity is NaN
    share = w.expand_dims(w.permute(share, (1, 0)), (2,))
    y = w.where(w.not_equal(share, 0.0), w.mul(y, share), 0.0)
    return w.of(w.reshape(w.sum(y, (0,)), x.shape))


def _moe(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MoE of (input, router, then weights and bias of the first, second and third layer)."""
    layers: list[Layer | None] = []
    for p in (2, 4, 6):
        if not node.has(p):
            layers.append(None)
            continue
        bias = node.operand(w, p + 1) if node.has(p + 1) else None
        item = node.item(p)
        if item.array is None:
            # The weights are stored as (experts, out, in).
            weights = w.permute(w.tensor(item), (0, 2, 1))
        else:
            weights = w.tensor(w.constant(np.ascontiguousarray(item.array.transpose(0, 2, 1)), item.name))
        layers.append(Layer(weights, bias))
    return _mixture(w, node, layers)


def _bits(node: OnnxNode, number: int) -> int:
    """Return the bits of a weight of the layer of a number from 1 on."""
    bits = node.integer(f"fc{number}_expert_weight_bits", node.integer("expert_weight_bits", 4))
    if bits not in (2, 4, 8):
        raise node.refuse(f"expected weights of 2, 4 or 8 bits, got {bits}")
    return bits


def _depth(w: Writer, node: OnnxNode, number: int) -> int:
    """Return the size of the input of a layer, which its packed weights (experts, out, bytes) have."""
    return int(constant(node, w, 3 * number - 1, "weights").shape[-1]) * (8 // _bits(node, number))


def _quantized_layer(w: Writer, node: OnnxNode, number: int, depth: int) -> Layer | None:
    """Read the layer of a number from 1 on: weights, scales and bias from input 2 on, zero points from input 11 on.

    Args:
        depth: Size of the input of the layer.
    """
    place = 2 + 3 * (number - 1)
    if not node.has(place):
        return None
    bits = _bits(node, number)
    numbers = unpacked(constant(node, w, place, "weights"), bits, depth)
    scales = constant(node, w, place + 1, "scales")
    scales = scales[..., None] if scales.ndim == 2 else scales
    blocks = scales.shape[-1]
    zeros = None
    if node.has(10 + number):
        zeros = constant(node, w, 10 + number, "zero points")
        if zeros.ndim == 2:
            zeros = unpacked(zeros, bits, scales.shape[1])[..., None]
        else:
            zeros = unpacked(zeros, bits, blocks)
    block = node.integer("block_size", 0) or depth
    weights = weights_of_blocks(w, node.item(place).name, numbers, scales, zeros, bits, block, node.item(0).dtype)
    return Layer(weights, node.operand(w, place + 2) if node.has(place + 2) else None)


def _quantized_moe(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import QMoE: MoE whose weights are integers, with a scale for each column or block."""
    if node.text("quant_type", "int") != "int":
        raise node.refuse(f"expected quant_type int, got {node.text('quant_type', 'int')}")
    width, inner = (_depth(w, node, number) for number in (1, 2))
    layers = [
        _quantized_layer(w, node, 1, width),
        _quantized_layer(w, node, 2, inner),
        _quantized_layer(w, node, 3, width),
    ]
    return _mixture(w, node, layers, node.operand(w, 14) if node.has(14) else None)


HANDLERS: Mapping[str, Handler] = {"MoE": _moe, "QMoE": _quantized_moe}
