"""ONNX matrix products, normalisations and attention.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/onnx/test_onnx_parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.ir.core.dtype import f32, f64
from relax_tune.ir.core.expr import Expr, as_int, const, floordiv
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import in_work_type
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.old_forms import rows
from relax_tune.ir.frontend.shared.handlers.linalg import determinant
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.handlers.neural import (
    batch_norm,
    group_norm,
    inferred_batch_norm,
    layer_norm,
    log_softmax,
    matmul,
    moments,
    scaled_queries,
    softmax,
)
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.einsum import Einsum


def _gemm(w: Writer, node: OnnxNode) -> ImportedValue:
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    a, b = (
        w.permute(x, (1, 0)) if node.flag(name) else x
        for x, name in ((node.operand(w, 0), "transA"), (node.operand(w, 1), "transB"))
    )
    y = w.matmul(a, b)
    y = w.mul(y, alpha) if alpha != 1.0 else y
    if node.has(2):
        bias = node.operand(w, 2)
        bias = w.mul(bias, beta) if beta != 1.0 else bias
        y = w.add(y, _widened(w, node, bias, tensor_dims(y)))
    return w.of(y)


def _widened(w: Writer, node: OnnxNode, value: Value, dims: Sequence[Expr]) -> Value:
    """Return a tensor that broadcasts to dims, which stay as they are. Raises ParseError for more dims."""
    dims_of_value, ctx = tensor_dims(value), w.g.deduction
    if len(dims_of_value) > len(dims):
        raise node.refuse(f"expected at most {len(dims)} dims in C, got {dims_of_value!r}")
    # A dim that may be 1 at some calls and the full size at others needs the broadcast that checks this.
    certain = all(as_int(d) == 1 or ctx.same(d, to) for d, to in zip(dims_of_value[::-1], dims[::-1]))
    return value if certain else w.broadcast(value, dims)


def _einsum(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.emit(Einsum(node.text("equation", "")), *(w.tensor(node.item(p)) for p in range(len(node.inputs)))))


def _layer_norm(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import LayerNormalization, with the mean and the inverse standard deviation if something reads them."""
    x, eps = node.item(0), node.real("epsilon", 1e-5)
    axis = node.axis(x.ndim, -1)
    y = w.of(layer_norm(w, x, axis, node.item(1), node.optional(2), eps))
    if not node.is_read(1) and not node.is_read(2):
        return [y]
    # The standard computes the two statistics in this type, and returns them in it.
    value = w.cast(w.tensor(x), node.element("stash_type", f32))
    mean, _, variance = moments(w, value, tuple(range(axis, x.ndim)))
    return [y, w.of(mean), w.of(w.rsqrt(w.add(variance, eps)))]


def _trained_batch_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import batch normalisation in training: by the statistics of the batch, and the running ones moved towards them."""
    x, momentum = node.item(0), node.real("momentum", 0.9)
    work = work_type(x.dtype)
    value = w.cast(w.tensor(x), work)
    mean, _, variance = moments(w, value, (0, *range(2, x.ndim)), keepdims=False)
    mean = w.reshape(mean, [x.shape[1]])
    gamma, beta, *running = (w.cast(w.tensor(node.item(p)), work) for p in range(1, 5))
    y = batch_norm(w, value, gamma, beta, mean, variance, node.real("epsilon", 1e-5))
    results: list[ImportedValue | None] = [w.of(w.cast(y, x.dtype))]
    for position, (old, new) in enumerate(zip(running, (mean, variance), strict=True), 3):
        updated = w.add(w.mul(old, momentum), w.mul(new, 1 - momentum))
        results.append(w.of(w.cast(updated, node.item(position).dtype)))
    return results


def _batch_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    if node.flag("training_mode"):
        return _trained_batch_norm(w, node)
    if node.integer("spatial", 1) != 1:
        raise node.refuse("expected statistics by channel (spatial 1), got statistics by element")
    if (node.version or 0) < 14 and any(node.is_read(p) for p in range(1, 5)):
        raise node.refuse("expected inference, got results of training; export the model for inference")
    return inferred_batch_norm(w, node)


def _instance_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    return _grouped(w, node, node.item(0).shape[1])


def _group_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    groups = node.integer("num_groups", 0)
    channels = as_int(node.item(0).shape[1])
    if groups < 1 or (channels is not None and channels % groups):
        raise node.refuse(f"expected num_groups that divides the channels, got {groups} of {node.item(0).shape[1]!r}")
    return _grouped(w, node, const(groups))


def _grouped(w: Writer, node: OnnxNode, groups: Expr) -> ImportedValue:
    x, eps = node.item(0), node.real("epsilon", 1e-5)
    scale, bias = (w.tensor(node.item(p)) for p in (1, 2))
    return w.of(group_norm(w, w.tensor(x), groups, scale, bias, eps))


def _lp_normalize(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LpNormalization: x divided by its norm along an axis; 0 where the norm is 0."""
    x = node.item(0)
    p, axis = node.integer("p", 2), node.axis(x.ndim, -1)
    if p not in (1, 2):
        raise node.refuse(f"expected p 1 or 2, got {p}")
    value = w.tensor(x)
    total = w.sum(w.abs(value) if p == 1 else w.mul(value, value), (axis,), True)
    norm = total if p == 1 else w.sqrt(total)
    zero = w.literal(0, x.dtype)
    # 0 / 0 is NaN, which the selection below discards.
    normalised = w.div(value, norm)
    return w.of(w.where(w.not_equal(norm, zero), normalised, zero))


# Attributes handled here. `softmax_precision` is a lower bound that the operator always meets.
ATTENTION_ATTRIBUTES = frozenset({
    "is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode", "right_window_size", "scale",
    "softcap", "softmax_precision",
})  # fmt: skip


def _heads(w: Writer, node: OnnxNode, position: int, count: str) -> Value:
    """Read an input as (batch, heads, positions, size).

    An input of 3 dims has the heads in its last dim; the attribute `count` is their number.
    """
    item = node.item(position)
    if item.ndim == 4:
        return w.tensor(item)
    number = node.integer(count, 0)
    if item.ndim != 3 or number < 1:
        raise node.refuse(
            f"expected 4 dims, or 3 and {count}, in input {position}, got {item.info!r} and {count} {number}"
        )
    b, n, width = item.shape
    value = w.reshape(w.tensor(item), [b, n, const(number), w.simplify(floordiv(width, const(number)))])
    return w.permute(value, (0, 2, 1, 3))


def _attention(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import Attention, or raise ParseError for cases left to the function body of the standard.

    These cases are scores as a result, lengths by row, and windows that reach forward.
    """
    unknown = sorted(set(node.attributes) - ATTENTION_ATTRIBUTES)
    if unknown:
        raise node.refuse(f"expected attributes among {', '.join(sorted(ATTENTION_ATTRIBUTES))}, got {unknown[0]}")
    if node.is_read(3):
        raise node.refuse("expected no scores among the results (qk_matmul_output), got a reader of them")
    if node.has(6):
        raise node.refuse("expected no lengths of keys by row, got nonpad_kv_seqlen")
    q = _heads(w, node, 0, "q_num_heads")
    k, v = _heads(w, node, 1, "kv_num_heads"), _heads(w, node, 2, "kv_num_heads")
    before: Expr = const(0)
    if node.has(4) and node.has(5):
        before = node.item(4).shape[2]
        k, v = (w.concat(2, w.tensor(node.item(p)), t) for p, t in ((4, k), (5, v)))
    scale = node.attributes.get("scale")
    if scale is not None and node.item(0).dtype is f64:
        # the standard scales queries and keys by the root, which is a float32
        scale = float(np.sqrt(np.float32(max(scale, 0)))) ** 2
    q, scale = scaled_queries(w, q, scale)
    left, right = (node.integer(f"{side}_window_size", -1) for side in ("left", "right"))
    causal = node.flag("is_causal") or right == 0
    if not causal and (left >= 0 or right >= 0):
        raise node.refuse(f"expected windows that end at the position of the query, got right_window_size {right}")
    op = Attention(
        scale, causal, before if causal else const(0),
        window=left + 1 if left >= 0 else None, softcap=node.real("softcap", 0.0) or None,
    )  # fmt: skip
    mask = node.optional(3)
    # The standard also permits a mask shorter than the keys, which its function body extends.
    if mask is not None and (not mask.ndim or not w.g.deduction.same(mask.shape[-1], tensor_dims(k)[-2])):
        raise node.refuse(f"expected a mask of all {tensor_dims(k)[-2]!r} keys, got {mask.info!r}")
    y = w.emit(op, q, k, v, *([] if mask is None else [w.tensor(mask)]))
    if node.item(0).ndim == 3:
        b, _, n, _ = tensor_dims(y)
        y = w.permute(y, (0, 2, 1, 3))
        width = w.simplify(tensor_dims(y)[2] * tensor_dims(y)[3])
        y = w.reshape(y, [b, n, width])
    return [w.of(y), w.of(k), w.of(v)]


HANDLERS: Mapping[str, Handler] = {
    "Det": in_work_type(determinant), "LpNormalization": _lp_normalize, "MatMul": matmul, "Gemm": _gemm, "Einsum": _einsum,
    "Softmax": rows(softmax),
    "LogSoftmax": rows(log_softmax), "LayerNormalization": _layer_norm, "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm, "GroupNormalization": _group_norm, "Attention": _attention,
}  # fmt: skip
