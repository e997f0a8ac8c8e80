"""Import of ONNX Attention (opset 23 and later) as one operator."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, as_int, const, floordiv
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to, permute
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.math.elementwise import Mul, Rsqrt
from relax_tune.ir.op.neural.attention import Attention

# Attributes handled here. `softmax_precision` is a lower bound that the operator always meets.
KNOWN = frozenset({
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
    number = int(node.attributes.get(count, 0))
    if item.ndim != 3 or number < 1:
        raise node.refuse(
            f"wanted 4 dims, or 3 and {count}, in input {position}, found {item.info!r} and {count} {number}"
        )
    b, n, width = item.shape
    value = w.reshape(w.tensor(item), [b, n, const(number), w.simplify(floordiv(width, const(number)))])
    return permute(w, value, (0, 2, 1, 3))


def _attention(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import Attention, or raise ParseError for cases left to the function body of the standard.

    These cases are scores as a result, lengths by row, and windows that reach forward.
    """
    unknown = sorted(set(node.attributes) - KNOWN)
    if unknown:
        raise node.refuse(f"wanted attributes among {', '.join(sorted(KNOWN))}, found {unknown[0]}")
    if node.wants(3):
        raise node.refuse("wanted no scores among the results (qk_matmul_output), found a reader of them")
    if node.has(6):
        raise node.refuse("wanted keys that all count, found their number by row (nonpad_kv_seqlen)")
    q = _heads(w, node, 0, "q_num_heads")
    k, v = _heads(w, node, 1, "kv_num_heads"), _heads(w, node, 2, "kv_num_heads")
    before: Expr = const(0)
    if node.has(4) and node.has(5):
        before = node.item(4).shape[2]
        k, v = (w.emit(Concat(2), w.tensor(node.item(p)), t) for p, t in ((4, k), (5, v)))
    size = as_int(tensor_dims(q)[-1])
    scale = node.attributes.get("scale")
    if scale is None and not size:  # a size that is a symbol scales the queries
        element = node.item(0).dtype
        root = w.emit(Rsqrt(), cast_to(w, w.size(tensor_dims(q)[-1]), i64, f32))
        q, scale = cast_to(w, w.emit(Mul(), cast_to(w, q, element, f32), root), f32, element), 1.0
    left, right = (int(node.attributes.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    causal = bool(int(node.attributes.get("is_causal", 0))) or right == 0
    if not causal and (left >= 0 or right >= 0):
        raise node.refuse(f"wanted windows that end at the own position, found right_window_size {right}")
    op = Attention(
        float(scale) if scale is not None else float((size or 1) ** -0.5), causal, before if causal else const(0),
        window=left + 1 if left >= 0 else None, softcap=float(node.attributes.get("softcap", 0.0)) or None,
    )  # fmt: skip
    given: tuple[Value, ...] = ()
    if node.has(3):
        mask = node.item(3)
        if not mask.ndim or not w.g.deduction.same(mask.shape[-1], tensor_dims(k)[-2]):
            raise node.refuse(f"wanted a mask of all {tensor_dims(k)[-2]!r} keys, found {mask.info!r}")
        given = (w.tensor(mask),)
    y = w.emit(op, q, k, v, *given)
    if node.item(0).ndim == 3:
        b, _, n, _ = tensor_dims(y)
        y = permute(w, y, (0, 2, 1, 3))
        width = w.simplify(tensor_dims(y)[2] * tensor_dims(y)[3])
        y = w.reshape(y, [b, n, width])
    return [w.of(y), w.of(k), w.of(v)]


HANDLERS: Mapping[str, Handler] = {"Attention": _attention}
