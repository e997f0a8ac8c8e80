"""Removal and restoring of padding, and attention of tokens without padding.

Tests: `tests/ir/frontend/onnx/microsoft/test_padding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.onnx.microsoft.attention import Scores, attend, by_heads, columns, joined_heads, pick
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.shapes import TensorToShape


def scattered(w: Writer, rows: Value, places: Value, count: Expr) -> Value:
    """Return `count` rows, zeros but for the given rows at their places."""
    tokens, *rest = tensor_dims(rows)
    zeros = w.full([count, *rest], 0, element_of(rows))
    return w.emit(ScatterND("replace"), zeros, w.reshape(places, [tokens, const(1)]), rows)


def _first_places(w: Writer, item: ImportedValue, tokens: Expr) -> Value:
    """Return the first `tokens` elements of the offsets (b, n)."""
    count = w.simplify(product(item.shape))
    return w.slice(w.cast(w.reshape(w.tensor(item), [count]), i64), 0, const(0), tokens)


def _remove(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import RemovePadding: the tokens of all rows one behind the other, their places, sums of lengths, the largest length."""
    x, lengths = node.item(0), w.cast(node.operand(w, 1), i64)
    b, n, width = x.shape
    count = w.simplify(b * n)
    inside = w.less(w.reshape(w.iota(n), [const(1), n]), w.reshape(lengths, [b, const(1)]))
    used = w.reshape(w.cast(inside, i64), [count])
    total = w.sum(used, (0,))
    # tokens keep their order in front, padding behind
    before = w.sub(w.cum_sum(used, 0), 1)
    behind = w.add(total, w.sub(w.cum_sum(w.sub(1, used), 0), 1))
    place = w.where(w.equal(used, 1), before, behind)
    offsets = w.emit(ScatterND("replace"), w.full([count], 0, i64), w.reshape(place, [count, const(1)]), w.iota(count))
    tokens = Var(w.g.fresh("tokens"))
    w.g.match_cast(w.g.call(TensorToShape(), w.reshape(total, [const(1)])), ShapeInfo((tokens,)))
    rows = w.take(w.reshape(w.tensor(x), [count, width]), 0, w.slice(offsets, 0, const(0), tokens))
    sums = w.concat(0, w.full([const(1)], 0, i64), w.cum_sum(lengths, 0))
    most = w.max(lengths, (0,), True)
    return [w.of(rows), *(w.of(w.cast(v, i32)) for v in (w.reshape(offsets, [b, n]), sums, most))]


def _restore(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import RestorePadding: tokens at their places, zeros at the other places."""
    x, offsets = node.item(0), node.item(1)
    b, n = offsets.shape
    rows = scattered(w, w.tensor(x), _first_places(w, offsets, x.shape[0]), w.simplify(b * n))
    return w.of(w.reshape(rows, [b, n, x.shape[1]]))


def _packed(w: Writer, node: OnnxNode, parts: list[Value], offsets: int, bias: int, heads: int) -> ImportedValue:
    """Emit the attention of each row's tokens to each other: as rows with padding, which its mask hides.

    Args:
        parts: Queries, keys and values, (tokens, heads * size).
        offsets, bias: Positions of the places, followed by the sums of lengths, and of the bias.
    """
    places, sums = node.item(offsets), node.operand(w, offsets + 1)
    b, n = places.shape
    count, tokens = w.simplify(b * n), tensor_dims(parts[0])[0]
    first = _first_places(w, places, tokens)
    q, k, v = (by_heads(w, w.reshape(scattered(w, t, first, count), [b, n, tensor_dims(t)[1]]), heads) for t in parts)
    sums = w.cast(sums, i64)
    lengths = w.sub(w.slice(sums, 0, const(1), w.simplify(b + 1)), w.slice(sums, 0, const(0), b))
    mask = w.less(w.reshape(w.iota(n), [const(1), const(1), const(1), n]), w.reshape(lengths, [b, *[const(1)] * 3]))
    # there are no keys of padding, however low the scores of the others are
    scores = replace(Scores.of(w, node, bias, const(0)), hidden=-math.inf)
    y = joined_heads(w, attend(w, q, k, v, scores, mask))
    return w.of(w.take(w.reshape(y, [count, tensor_dims(y)[2]]), 0, first))


def _packed_attention(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import PackedAttention: projections of one product, and attention within rows."""
    projected = w.add(w.matmul(node.operand(w, 0), node.operand(w, 1)), node.operand(w, 2))
    sizes: list[Expr] = [const(int(s)) for s in node.attributes.get("qkv_hidden_sizes", ())]
    third = w.simplify(tensor_dims(projected)[1] // 3)
    return _packed(w, node, columns(w, projected, sizes or [third] * 3), 3, 5, node.integer("num_heads"))


def _packed_multi_head(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import PackedMultiHeadAttention of (tokens, width) each, or of (tokens, heads, 3, size)."""
    first = node.item(0)
    if first.ndim == 4:
        tokens, heads, _, size = first.shape
        parts = [w.reshape(pick(w, w.tensor(first), 2, p), [tokens, w.simplify(heads * size)]) for p in range(3)]
    else:
        parts = [node.operand(w, p) for p in range(3)]
    if node.has(3):
        biases = columns(w, node.operand(w, 3), [tensor_dims(t)[1] for t in parts])
        parts = [w.add(t, bias) for t, bias in zip(parts, biases, strict=True)]
    return _packed(w, node, parts, 4, 6, node.integer("num_heads"))


HANDLERS: Mapping[str, Handler] = {
    "RemovePadding": _remove, "RestorePadding": _restore, "PackedAttention": _packed_attention,
    "PackedMultiHeadAttention": _packed_multi_head,
}  # fmt: skip
