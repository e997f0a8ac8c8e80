"""Normalisations with residual sums, of embeddings, and of groups.

Tests: `tests/ir/frontend/onnx/microsoft/test_norms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import f32, i32, i64
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.microsoft.products import channels_first, channels_last
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.indexing import natural_indices
from relax_tune.ir.frontend.shared.handlers.neural import group_norm, layer_norm, moments
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.neural.decoder import RmsNorm


def rms_norm(w: Writer, x: ImportedValue, axis: int, gamma: Value, eps: float) -> Value:
    """Emit RMSNorm (Zhang and Sennrich 2019) over the dims from `axis` on."""
    width = w.simplify(product(x.shape[axis:]))
    rows = w.reshape(w.tensor(x), [*x.shape[:axis], width])
    return w.reshape(w.emit(RmsNorm(eps), rows, w.reshape(gamma, [width])), x.shape)


def _mean_square(w: Writer, x: Value, axes: tuple[int, ...]) -> Value:
    return w.mean(w.mul(x, x), axes, True)


def _residual(w: Writer, node: OnnxNode, bias: int) -> Value:
    """Return input + skip, with the bias at a position; a skip may lack the batch."""
    x, skip = node.operand(w, 0), node.operand(w, 1)
    value = w.add(x, w.broadcast(skip, tensor_dims(x)))
    return w.add(value, node.operand(w, bias)) if node.has(bias) else value


def _skip_layer_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import SkipLayerNormalization: layer normalisation of a residual sum, and the sum."""
    eps = node.real("epsilon", 1e-12)
    value = w.of(_residual(w, node, 4))
    y = layer_norm(w, value, value.ndim - 1, node.item(2), node.optional(3), eps)
    results: list[ImportedValue | None] = [w.of(y), None, None, value]
    if node.is_read(1) or node.is_read(2):
        mean, _, variance = moments(w, w.cast(w.tensor(value), f32), (value.ndim - 1,))
        results[1:3] = [w.of(mean), w.of(w.rsqrt(w.add(variance, eps)))]
    return results


def _skip_rms_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import SkipSimplifiedLayerNormalization: RMSNorm of a residual sum, and the sum."""
    if node.is_read(1):
        raise node.refuse("expected no reader of the result mean, which this norm does not compute")
    eps = node.real("epsilon", 1e-12)
    value = w.of(_residual(w, node, 3))
    y = rms_norm(w, value, value.ndim - 1, node.operand(w, 2), eps)
    results: list[ImportedValue | None] = [w.of(y), None, None, value]
    if node.is_read(2):
        square = _mean_square(w, w.cast(w.tensor(value), f32), (value.ndim - 1,))
        results[2] = w.of(w.rsqrt(w.add(square, eps)))
    return results


def simplified_layer_norm(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import SimplifiedLayerNormalization: RMSNorm, and the inverse root of the mean of squares if something reads it."""
    x, eps = node.item(0), node.real("epsilon", 1e-5)
    axis = node.axis(x.ndim, -1)
    scale = w.cast(node.operand(w, 1), x.dtype)
    results = [w.of(rms_norm(w, x, axis, w.broadcast(scale, x.shape[axis:]), eps))]
    if node.is_read(1):
        square = _mean_square(w, w.cast(w.tensor(x), f32), tuple(range(axis, x.ndim)))
        results.append(w.of(w.rsqrt(w.add(square, eps))))
    return results


def embedded(w: Writer, table: ImportedValue, indices: ImportedValue) -> Value:
    """Return the rows of a table (rows, width) at indices (..., n)."""
    return w.take(w.tensor(table), 0, natural_indices(w, indices, table.shape[0]))


def masked_count(w: Writer, node: OnnxNode, position: int) -> ImportedValue:
    """Return the number of ones in each row of a mask (b, n), as int32; 0 without a mask."""
    ids = node.item(0)
    if not node.has(position):
        return w.of(w.full([ids.shape[0]], 0, i32))
    ones = w.cast(w.equal(node.operand(w, position), 1), i64)
    return w.of(w.cast(w.sum(ones, (1,)), i32))


def embeddings_norm(
    w: Writer, node: OnnxNode, tables: tuple[ImportedValue, ImportedValue, ImportedValue | None],
    weights: tuple[ImportedValue, ImportedValue], positions: ImportedValue | None,
) -> list[ImportedValue | None]:  # fmt: skip
    """Emit the sum of word, position and segment embeddings, and its layer normalisation.

    Returns:
        The normalised sum (b, n, width), and the sum.
    """
    words, places, segments = tables
    ids = node.item(0)
    length = ids.shape[1]
    value = embedded(w, words, ids)
    if positions is None:
        rows = w.slice(w.tensor(places), 0, const(0), length)
    else:
        rows = embedded(w, places, positions)
    value = w.add(value, w.broadcast(rows, tensor_dims(value)))
    if segments is not None:
        value = w.add(value, embedded(w, segments, node.item(1)))
    total = w.of(value)
    return [w.of(layer_norm(w, total, 2, *weights, node.real("epsilon", 1e-12))), total]


def _embed_layer_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import EmbedLayerNormalization, with the count of each row's mask."""
    segments = node.item(4) if node.has(1) and node.has(4) else None
    tables, weights = (node.item(2), node.item(3), segments), (node.item(5), node.item(6))
    y, total = embeddings_norm(w, node, tables, weights, node.optional(8))
    return [y, masked_count(w, node, 7), total]


def _grouped(w: Writer, node: OnnxNode, value: Value) -> Value:
    groups, last = node.integer("groups"), node.flag("channels_last", True)
    dims, axis = list(tensor_dims(value)), -1 if last else 1
    known = [c for c in (dims[axis], *(node.item(p).shape[0] for p in (1, 2))) if as_int(c) is not None] or [dims[axis]]
    channels = as_int(known[0])
    if groups < 1 or (channels is not None and channels % groups):
        raise node.refuse(f"expected groups that divide the channels, got {groups} of {tensor_dims(value)!r}")
    dims[axis] = known[0]
    value = w.viewed(value, dims)
    value = channels_first(w, value) if last else value
    element = w.of(value).dtype
    gamma, beta = (w.cast(node.operand(w, p), element) for p in (1, 2))
    y = group_norm(w, value, const(groups), gamma, beta, node.real("epsilon", 1e-5))
    y = channels_last(w, y) if last else y
    return w.mul(y, w.sigmoid(y)) if node.integer("activation", 0) == 1 else y


def _group_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(_grouped(w, node, node.operand(w, 0)))


def _skip_group_norm(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import SkipGroupNorm: group normalisation of x + skip + bias, and the sum. A skip (n, channels) is one of the plane."""
    x, skip = node.item(0), node.item(3)
    if not node.flag("channels_last", True):
        raise node.refuse("expected channels_last, got channels first")
    added = w.tensor(skip)
    if skip.ndim == 2:
        added = w.reshape(added, [skip.shape[0], *[const(1)] * (x.ndim - 2), skip.shape[1]])
    value = w.add(w.tensor(x), w.broadcast(added, x.shape))
    value = w.add(value, node.operand(w, 4)) if node.has(4) else value
    return [w.of(_grouped(w, node, value)), w.of(value)]


HANDLERS: Mapping[str, Handler] = {
    "SkipLayerNormalization": _skip_layer_norm, "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "SimplifiedLayerNormalization": simplified_layer_norm, "EmbedLayerNormalization": _embed_layer_norm,
    "GroupNorm": _group_norm, "SkipGroupNorm": _skip_group_norm,
}  # fmt: skip
