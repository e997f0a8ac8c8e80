"""Attention, MultiHeadAttention and GroupQueryAttention, their quantised and packed forms, and rotary embedding.

Tests: `tests/ir/frontend/onnx/microsoft/test_attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, const, floordiv, ge, maximum, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.microsoft.window_cache import WindowCache
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.neural import scaled_queries
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm

NONE_BEFORE = const(0)


def by_heads(w: Writer, value: Value, heads: int) -> Value:
    """Permute (batch, positions, heads * size) to (batch, heads, positions, size)."""
    b, n, width = tensor_dims(value)
    size = w.simplify(floordiv(width, const(heads)))
    return w.permute(w.reshape(value, [b, n, const(heads), size]), (0, 2, 1, 3))


def joined_heads(w: Writer, value: Value) -> Value:
    """Permute (batch, heads, positions, size) to (batch, positions, heads * size)."""
    value = w.permute(value, (0, 2, 1, 3))
    b, n, heads, size = tensor_dims(value)
    return w.reshape(value, [b, n, w.simplify(heads * size)])


def columns(w: Writer, value: Value, sizes: Sequence[Expr]) -> list[Value]:
    """Split the last dim of a tensor into parts."""
    parts, axis = list[Value](), len(tensor_dims(value)) - 1
    begin: Expr = const(0)
    for size in sizes:
        end = w.simplify(begin + size)
        parts.append(w.slice(value, axis, begin, end))
        begin = end
    return parts


def pick(w: Writer, value: Value, axis: int, at: int) -> Value:
    """Return the part of a tensor at an index, without the axis."""
    part = w.slice(value, axis, const(at), const(at + 1))
    return w.reshape(part, [d for p, d in enumerate(tensor_dims(part)) if p != axis])


def stacked(w: Writer, *values: Value) -> Value:
    return w.concat(0, *(w.expand_dims(v, (0,)) for v in values))


@dataclass(frozen=True, slots=True)
class Scores:
    """What attention does to its scores.

    Attributes:
        scale: Factor; None for the inverse root of the width of a head.
        bias: Summands that broadcast to (batch, heads, rows, columns).
        causal: Whether row `i` sees the columns up to `before + i` only.
        before: Number of cached positions.
        hidden: Summand of columns that a mask hides.
    """

    scale: float | None
    bias: Value | None = None
    causal: bool = False
    before: Expr = NONE_BEFORE
    hidden: float = -10000.0

    @staticmethod
    def of(w: Writer, node: OnnxNode, bias: int, before: Expr) -> Scores:
        """Read the attributes of a node, and its bias at a position."""
        added = node.operand(w, bias) if node.has(bias) else None
        scale = node.attributes.get("scale")
        hidden = node.real("mask_filter_value", -10000.0)
        return Scores(scale or None, added, node.flag("unidirectional"), before, hidden)


def fitting(w: Writer, bias: Value, dims: Sequence[Expr]) -> Value:
    """Return a bias whose dims are 1 or dims of the scores; dims that only a run decides are broadcast."""
    own, same = tensor_dims(bias), w.g.deduction.same
    return w.broadcast(
        bias, [d if d is const(1) or same(d, to) else to for d, to in zip(own, dims[-len(own) :], strict=True)]
    )


def attend(w: Writer, q: Value, k: Value, v: Value, scores: Scores, mask: Value | None) -> Value:
    """Emit attention of (batch, heads, positions, size); the mask is True where a row sees a column.

    A masked column gets `scores.hidden` added, as in ONNX Runtime: a row that sees no column is then as without the mask.
    """
    bias, element = scores.bias, element_of(q)
    batch, heads, rows, size = tensor_dims(q)
    count, depth = tensor_dims(k)[2], tensor_dims(v)[3]
    k, v = w.viewed(k, [batch, heads, count, size]), w.viewed(v, [batch, heads, count, depth])
    bias = None if bias is None else fitting(w, bias, [batch, heads, rows, count])
    mask = None if mask is None else fitting(w, mask, [batch, heads, rows, count])
    q, scale = scaled_queries(w, q, scores.scale)
    if mask is not None:
        # A finite number, as ONNX Runtime adds it: a row without any attended key gets finite weights instead of NaN.
        # The maximum keeps a filter value beyond the range of the type from becoming minus infinity.
        low = w.where(mask, 0.0, w.literal(max(scores.hidden, element.lowest), element))
        bias = low if bias is None else w.add(low, bias)
    op = Attention(scale, scores.causal, scores.before if scores.causal else const(0))
    return w.emit(op, q, k, v, *([] if bias is None else [bias]))


def visible(w: Writer, node: OnnxNode, position: int, batch: Expr, total: Expr) -> Value | None:
    """Return the mask of a node as truth values that broadcast to (batch, heads, rows, columns); None without one.

    Its forms: numbers above 0 where visible, (batch, columns) or (batch, rows, columns); ends of the rows, (batch,); ends and
    then starts, (2 * batch,); lengths with sums that nothing here reads, (3 * batch + 2,).
    """
    if not node.has(position):
        return None
    item = node.item(position)
    value = w.tensor(item)
    if item.ndim in (2, 3):
        attended = w.less(w.literal(0, item.dtype), value)
        dims = tensor_dims(attended)
        return w.reshape(attended, [dims[0], const(1), *([const(1)] if item.ndim == 2 else []), *dims[1:]])
    if item.ndim != 1:
        raise node.refuse(f"expected a mask of 1 to 3 dims, got {item.info!r}")
    place = w.reshape(w.iota(total), [const(1), const(1), const(1), total])

    def limit(part: int) -> Value:
        rows = w.slice(w.cast(value, i64), 0, w.simplify(batch * part), w.simplify(batch * (part + 1)))
        return w.reshape(rows, [batch, const(1), const(1), const(1)])

    count, same = item.shape[0], w.g.deduction.same
    # The length of a mask of one dim says what it holds: ends (b), ends and starts (2 b), or lengths and offsets (3 b + 2).
    attended = w.less(place, limit(0))
    if same(count, batch) or same(count, w.simplify(batch * 3 + 2)):
        return attended
    if same(count, w.simplify(batch * 2)):
        return w.logical_and(attended, w.less_equal(limit(1), place))
    # Decided at each call.
    starts = w.minimum(w.add(w.iota(batch), w.size(batch)), w.size(w.simplify(count - 1)))
    first = w.reshape(w.take(w.cast(value, i64), 0, starts), [batch, const(1), const(1), const(1)])
    has_starts = w.equal(w.size(count), w.size(w.simplify(batch * 2)))
    return w.logical_and(attended, w.less_equal(w.where(has_starts, first, w.literal(0, i64)), place))


def _own_cache(node: OnnxNode) -> None:
    """Refuse nodes whose cache is written in place."""
    if node.flag("past_present_share_buffer"):
        raise node.refuse(
            "expected a new cache as result, got past_present_share_buffer; export without shared buffers"
        )


def attention_of(w: Writer, node: OnnxNode, projected: Value, mask: int, past: int, bias: int) -> list[ImportedValue]:
    """Emit self-attention of queries, keys and values side by side, with inputs at the given positions. Gives also the cache."""
    _own_cache(node)
    if node.flag("do_rotary"):
        raise node.refuse(
            "expected positions added before, got do_rotary; apply RotaryEmbedding or GroupQueryAttention"
        )
    heads = node.integer("num_heads")
    b, n, width = tensor_dims(projected)
    sizes: list[Expr] = [const(int(s)) for s in node.attributes.get("qkv_hidden_sizes", ())]
    third = w.simplify(floordiv(width, const(3)))
    q, k, v = (by_heads(w, part, heads) for part in columns(w, projected, sizes or [third] * 3))
    before: Expr = const(0)
    if node.has(past):
        cache = node.operand(w, past)
        # The cache is (2, batch, heads, positions, size): keys, then values.
        before = tensor_dims(cache)[3]
        k, v = (w.concat(2, pick(w, cache, 0, p), t) for p, t in enumerate((k, v)))
    total = w.simplify(before + n)
    y = attend(w, q, k, v, Scores.of(w, node, bias, before), visible(w, node, mask, b, total))
    return [w.of(joined_heads(w, y)), *([w.of(stacked(w, k, v))] if node.is_read(1) else [])]


def _attention(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import Attention: projections of one product, and self-attention."""
    if node.has(6):
        raise node.refuse("expected a new cache as result, got past_sequence_length; export without shared buffers")
    projected = w.matmul(node.operand(w, 0), node.operand(w, 1))
    projected = w.add(projected, node.operand(w, 2)) if node.has(2) else projected
    return attention_of(w, node, projected, 3, 4, 5)


def _separate(w: Writer, node: OnnxNode, heads: int) -> list[Value]:
    """Return the queries, keys and values of MultiHeadAttention, by heads, with their biases.

    Queries may hold keys and values too, (batch, positions, heads, 3, size), keys values, (batch, positions, heads, 2, size).
    Keys and values of 4 dims are by heads already.
    """
    first = node.item(0)
    if first.ndim == 5:
        values = [w.permute(pick(w, w.tensor(first), 3, p), (0, 2, 1, 3)) for p in range(3)]
    elif node.has(1) and node.item(1).ndim == 5:
        both = node.operand(w, 1)
        values = [by_heads(w, w.tensor(first), heads)]
        values += [w.permute(pick(w, both, 3, p), (0, 2, 1, 3)) for p in range(2)]
    else:
        items = [node.item(p) for p in range(3)]
        values = [w.tensor(i) if i.ndim == 4 else by_heads(w, w.tensor(i), heads) for i in items]
    if not node.has(3):
        return values
    # The biases of queries, keys and values are one input, side by side; values may have another size.
    sizes = [w.simplify(tensor_dims(t)[1] * tensor_dims(t)[3]) for t in values]
    biases = columns(w, node.operand(w, 3), sizes)
    return [
        w.add(t, w.reshape(b, [tensor_dims(t)[1], const(1), tensor_dims(t)[3]]))
        for t, b in zip(values, biases, strict=True)
    ]


def _multi_head(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import MultiHeadAttention: self-attention or cross-attention, with the cached keys and values ahead of the new ones."""
    if node.has(8) or node.has(9):
        raise node.refuse("expected a new cache as result, got past_sequence_length; export without shared buffers")
    if node.is_read(3):
        raise node.refuse("expected no scores among the results (qk), got a reader of them")
    q, k, v = _separate(w, node, node.integer("num_heads"))
    before: Expr = const(0)
    if node.has(6) and node.has(7):
        before = node.item(6).shape[2]
        k, v = (w.concat(2, node.operand(w, p), t) for p, t in ((6, k), (7, v)))
    scores = Scores.of(w, node, 5, before)
    y = attend(w, q, k, v, scores, visible(w, node, 4, tensor_dims(q)[0], tensor_dims(k)[2]))
    return [w.of(joined_heads(w, y)), w.of(k), w.of(v)]


# rotary embedding


def rotated(w: Writer, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Rotate pairs of the first elements of the last dim (Su et al. 2021); those behind stay.

    Args:
        x: (..., size).
        cos, sin: (..., pairs) that broadcast to the dims of x before its last.
        interleaved: Whether a pair are neighbours; otherwise their distance is `pairs`.
    """
    dims, axis = tensor_dims(x), len(tensor_dims(x)) - 1
    pairs = tensor_dims(cos)[-1]
    turned = w.simplify(pairs * 2)
    part = w.slice(x, axis, const(0), turned)
    if interleaved:
        split = w.reshape(part, [*dims[:-1], pairs, const(2)])
        a, b = (pick(w, split, axis + 1, p) for p in range(2))
    else:
        a, b = w.slice(part, axis, const(0), pairs), w.slice(part, axis, pairs, turned)
    first = w.sub(w.mul(a, cos), w.mul(b, sin))
    second = w.add(w.mul(b, cos), w.mul(a, sin))
    if interleaved:
        y = w.reshape(
            w.concat(axis + 1, *(w.expand_dims(t, (axis + 1,)) for t in (first, second))), [*dims[:-1], turned]
        )
    else:
        y = w.concat(axis, first, second)
    # Tables narrower than half a head rotate only its first elements (partial rotary embedding).
    return y if w.g.deduction.same(turned, dims[-1]) else w.concat(axis, y, w.slice(x, axis, turned, dims[-1]))


def _angles(w: Writer, node: OnnxNode, positions: Value, tables: tuple[int, int]) -> list[Value]:
    """Return the rows of the tables of cosines and sines at positions (batch, n), with a dim for heads in the middle."""
    rows = (w.take(node.operand(w, p), 0, positions) for p in tables)
    return [w.expand_dims(t, (1,)) for t in rows]


def _rotary(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import RotaryEmbedding of (batch, positions, heads * size) or (batch, heads, positions, size).

    As in ONNX Runtime's kernels, `is_packed_batching` changes no number, and no kernel reads `scale`.
    """
    x, positions, table = node.item(0), node.item(1), node.item(2)
    heads, pairs = node.integer("num_heads", 0), table.shape[1]
    value = w.tensor(x)
    if x.ndim == 3:
        size = w.simplify(floordiv(x.shape[2], const(heads))) if heads else w.simplify(pairs * 2)
        count = const(heads) if heads else w.simplify(floordiv(x.shape[2], size))
        value = w.permute(w.reshape(value, [*x.shape[:2], count, size]), (0, 2, 1, 3))
    place = w.cast(w.tensor(positions), i64)
    if positions.ndim == 1:  # the position of the first column
        length = tensor_dims(value)[2]
        place = w.add(w.reshape(place, [const(1), const(1)]), w.reshape(w.iota(length), [const(1), length]))
    cos, sin = _angles(w, node, place, (2, 3))
    y = rotated(w, value, cos, sin, node.flag("interleaved"))
    return w.of(y if x.ndim == 4 else joined_heads(w, y))


# grouped queries with a cache


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of GroupQueryAttention. Its positions may end before its dim does, differently in each batch.

    Attributes:
        before: Number of positions of each batch before this call, (batch,) int64.
        size: Dim of the positions of the result.
    """

    before: Value
    size: Expr

    def places(self, w: Writer, length: Expr) -> Value:
        """Return the positions of the new rows, (batch, length)."""
        b = tensor_dims(self.before)[0]
        return w.add(w.reshape(self.before, [b, const(1)]), w.reshape(w.iota(length), [const(1), length]))

    def extended(self, w: Writer, old: Value | None, new: Value) -> Value:
        """Return (batch, heads, size, width): the old rows up to `before`, the new ones behind, then zeros or old rows."""
        b, heads, n, width = tensor_dims(new)
        rows = new if old is None else w.concat(2, old, new)
        # In `rows` the new rows begin behind the whole old cache, also where only a part of it is filled.
        capacity = const(0) if old is None else tensor_dims(old)[2]
        place = w.reshape(w.iota(self.size), [const(1), self.size])
        before = w.reshape(self.before, [b, const(1)])
        behind = w.sub(place, before)
        fresh = w.logical_and(w.less_equal(0, behind), w.less(behind, w.size(n)))
        last = w.size(w.simplify(maximum(capacity + n - 1, 0)))
        source = w.where(fresh, w.add(behind, w.size(capacity)), place)
        known = w.logical_or(fresh, w.less(place, w.size(capacity)))
        index = w.reshape(w.minimum(source, last), [b, const(1), self.size, const(1)])
        index = w.broadcast_to(index, [b, heads, self.size, width])
        taken = w.gather_elements(rows, index, 2)
        return w.where(w.reshape(known, [b, const(1), self.size, const(1)]), taken, 0.0)


def _filled(w: Writer, node: OnnxNode, batch: Expr, length: Expr, total: Expr) -> tuple[Value, Value]:
    """Read how far the cache is filled before and after a call, (batch,).

    The first call of a sequence has as many positions in total as in its input.
    """
    ends = w.add(w.cast(w.reshape(node.operand(w, 5), [batch]), i64), 1)
    first = w.equal(w.size(length), w.size(total))
    return w.where(first, w.literal(0, i64), w.sub(ends, w.size(length))), ends


def _cache(w: Writer, node: OnnxNode, batch: Expr, length: Expr) -> Cache:
    (total,) = node.sizes(w, 6, scalar=True)
    capacity = node.item(3).shape[2] if node.has(3) else const(0)
    before, _ = _filled(w, node, batch, length, total)
    size = total if w.g.deduction.proves(ge(total, capacity)) is Proof.YES else maximum(total, capacity)
    return Cache(before, w.simplify(size))


def _window_cache(w: Writer, node: OnnxNode, batch: Expr, length: Expr) -> WindowCache:
    (total,) = node.sizes(w, 6, scalar=True)
    window = node.integer("local_window_size", -1)
    if window < 1 or not (node.has(3) and node.has(4)) or not node.flag("causal", True):
        raise node.refuse("expected sliding_window_cache with a cache, local_window_size above 0 and causal 1")
    capacity = node.item(3).shape[2]
    if not w.require(ge(capacity, window)):
        raise node.refuse(f"expected a cache of at least local_window_size {window} rows, got {capacity!r}")
    return WindowCache(*_filled(w, node, batch, length, total), capacity, length, window)


GROUPED_DEFAULTS: Mapping[str, object] = {
    "qk_output": 0, "k_quant_type": b"NONE", "v_quant_type": b"NONE", "kv_cache_bit_width": 0,
}  # fmt: skip
"""Attributes of GroupQueryAttention whose other values are not supported."""


def _grouped(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import GroupQueryAttention (Ainslie et al. 2023), with rotary embedding, and the cache with the new positions."""
    for name, default in GROUPED_DEFAULTS.items():
        if node.attributes.get(name, default) != default:
            raise node.refuse(f"expected {name} {default!r}, got {node.attributes[name]!r}")
    if node.has(16):
        raise node.refuse("expected rows without padding, got query_seqlens")
    heads, shared = node.integer("num_heads"), node.integer("kv_num_heads")
    x = node.operand(w, 0)
    if node.has(1) and node.has(2):
        parts = [x, node.operand(w, 1), node.operand(w, 2)]
    else:
        size = floordiv(tensor_dims(x)[2], const(heads + 2 * shared))
        parts = columns(w, x, [w.simplify(size * h) for h in (heads, shared, shared)])
    q, k, v = (by_heads(w, t, h) for t, h in zip(parts, (heads, shared, shared), strict=True))
    batch, _, length, size = tensor_dims(q)
    k, v = (w.viewed(t, [batch, const(shared), length, size]) for t in (k, v))
    if node.has(14) and node.has(15):
        eps = node.real("qk_norm_epsilon", 1e-6)
        # Queries and keys are normalised before the rotation (Qwen3), each head by itself.
        q = w.emit(RmsNorm(node.real("q_norm_epsilon", eps)), q, node.operand(w, 14))
        k = w.emit(RmsNorm(node.real("k_norm_epsilon", eps)), k, node.operand(w, 15))
    sliding = node.flag("sliding_window_cache")
    cache = _window_cache(w, node, batch, length) if sliding else _cache(w, node, batch, length)
    places = cache.places(w, length)
    if node.flag("do_rotary"):
        stated = w.cast(node.operand(w, 9), i64) if node.has(9) else places
        cos, sin = _angles(w, node, stated, (7, 8))
        q, k = (rotated(w, t, cos, sin, node.flag("rotary_interleaved")) for t in (q, k))
    old = [node.operand(w, p) if node.has(p) else None for p in (3, 4)]
    old = [None if t is None else w.viewed(t, [batch, const(shared), tensor_dims(t)[2], size]) for t in old]
    if isinstance(cache, WindowCache):
        k, v = (w.concat(2, before, t) for before, t in zip(old, (k, v), strict=True) if before is not None)
        y = _grouped_scores(w, node, q, k, v, cache.before, places, cache.positions(w))
        return [w.of(joined_heads(w, y)), *(w.of(cache.evicted(w, t)) for t in (k, v))]
    k, v = (cache.extended(w, before, t) for before, t in zip(old, (k, v), strict=True))
    y = _grouped_scores(w, node, q, k, v, cache.before, places)
    return [w.of(joined_heads(w, y)), w.of(k), w.of(v)]


def _grouped_scores(
    w: Writer,
    node: OnnxNode,
    q: Value,
    k: Value,
    v: Value,
    before: Value,
    places: Value,
    positions: Value | None = None,
) -> Value:
    """Emit the attention of GroupQueryAttention over the positions of its cache.

    Args:
        before: number of positions of each batch before this call.
        places: positions of the queries, (batch, length).
        positions: positions of the keys, (batch, size); by default their indices.
    """
    batch, heads, length, _ = tensor_dims(q)
    element, size = element_of(q), tensor_dims(k)[2]
    row = w.reshape(places, [batch, const(1), length, const(1)])
    if positions is None:
        column = w.reshape(w.iota(size), [const(1), const(1), const(1), size])
    else:
        column = w.reshape(positions, [batch, const(1), const(1), size])
    window = node.integer("local_window_size", -1)
    if node.flag("causal", True):
        attended = w.less_equal(column, row)
        attended = (
            w.logical_and(attended, w.less(w.sub(row, w.literal(window, i64)), column)) if window > 0 else attended
        )
    else:
        ends = w.reshape(w.add(before, w.size(length)), [batch, const(1), const(1), const(1)])
        attended = w.less(column, ends)
    q, scale = scaled_queries(w, q, node.attributes.get("scale") or None)
    sink = node.operand(w, 11) if node.has(11) else None
    # A smooth softmax has 1 as an additional summand of its denominators: a sink with score 0.
    if sink is None and node.integer("smooth_softmax", -1) == 1:
        sink = w.literal(0.0, element)
    mask = attended
    if node.has(10) or sink is not None:
        mask = w.where(attended, w.literal(0.0, element), w.literal(float("-inf"), element))
        mask = _biased(w, node, mask, [batch, heads, length, size], positions) if node.has(10) else mask
    if sink is not None:
        # a column of key 0 and value 0, whose score is the sink: a summand of the denominators
        k, v = (
            w.concat(2, t, w.full([*tensor_dims(t)[:2], const(1), tensor_dims(t)[3]], 0.0, element)) for t in (k, v)
        )
        wide = w.broadcast_to(mask, [batch, heads, length, size])
        added = w.reshape(sink, [const(1), tensor_dims(sink)[0] if tensor_dims(sink) else const(1), const(1), const(1)])
        mask = w.concat(3, wide, w.broadcast_to(added, [batch, heads, length, const(1)]))
    return w.emit(Attention(scale, softcap=node.real("softcap", 0.0) or None), q, k, v, mask)


def _biased(w: Writer, node: OnnxNode, mask: Value, scores: list[Expr], positions: Value | None) -> Value:
    """Add the bias of the scores, (batch or 1, heads or 1, rows, columns); columns that it lacks, behind all attended columns, get 0."""
    bias = node.operand(w, 10)
    dims, size = tensor_dims(bias), scores[3]
    if positions is not None:
        column = w.minimum(w.reshape(positions, [scores[0], const(1), const(1), size]), w.size(sub(dims[3], const(1))))
        bias = w.broadcast(fitting(w, bias, [*scores[:3], dims[3]]), [*scores[:3], dims[3]])
        return w.add(mask, w.gather_elements(bias, w.broadcast_to(column, scores), 3))
    more = w.simplify(size - dims[3])
    if not w.g.deduction.same(dims[3], size):
        bias = w.concat(3, bias, w.full([*dims[:3], more], 0.0, element_of(bias)))
    return w.add(mask, fitting(w, bias, scores))


HANDLERS: Mapping[str, Handler] = {
    "Attention": _attention, "MultiHeadAttention": _multi_head, "GroupQueryAttention": _grouped, "RotaryEmbedding": _rotary,
}  # fmt: skip
