"""ONNX operators whose sizes data decide: NonZero, Compress, Unique, NonMaxSuppression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.ir.core.dtype import bool_, f32, i64, u8
from relax_tune.ir.core.expr import const, mul
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of
from relax_tune.ir.frontend.shared.algorithms.data_sizes import (
    coordinates,
    distinct,
    flat,
    non_max_suppression,
    nonzero,
    rows_as_slices,
    slices_as_rows,
    stacked,
    true_positions,
    truth,
)
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis, take
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.math.elementwise import Add, Maximum, Minimum, Mul, MulScalar, Sub
from relax_tune.ir.op.math.logic import Less
from relax_tune.ir.op.reduction.scan import TopK


def _nonzero(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(nonzero(w, node.item(0), 0), True)


def _compress(w: Writer, node: OnnxNode) -> ImportedValue:
    x, mask = node.item(0), truth(w, node.item(1))
    given = node.attributes.get("axis")
    axis = 0 if given is None else axis_of(node, int(given), x.ndim)
    value = flat(w, w.tensor(x)) if given is None else w.tensor(x)
    return w.of(take(w, value, axis, true_positions(w, mask)), x.natural)


def _unique(w: Writer, node: OnnxNode) -> Sequence[ImportedValue | None]:
    x, ascending = node.item(0), bool(node.attributes.get("sorted", 1))
    element = u8 if x.dtype is bool_ else x.dtype
    value, axis = cast_to(w, w.tensor(x), x.dtype, element), node.attributes.get("axis")
    if axis is None:
        found = distinct(w, flat(w, value), ascending)
        values = found.values
    else:
        at = axis_of(node, int(axis), x.ndim)
        found = distinct(w, slices_as_rows(w, value, at), ascending)
        values = rows_as_slices(w, found.values, value, at)
    others = (w.of(v, True) for v in (found.first, found.inverse, found.counts))
    return [w.of(cast_to(w, values, element, x.dtype), x.natural), *others]


def _corners(w: Writer, boxes: Value, centred: bool) -> Value:
    """Return (n, 4) boxes as lowest and highest corners."""
    n = tensor_dims(boxes)[0]
    first, second = (slice_axis(w, boxes, 1, const(k), const(k + 2)) for k in (0, 2))
    if centred:
        half = w.emit(MulScalar(0.5), second)
        first, second = w.emit(Sub(), first, half), w.emit(Add(), first, half)
    ends = w.emit(Minimum(), first, second), w.emit(Maximum(), first, second)
    return w.reshape(w.emit(Concat(1), *ends), [n, const(4)])


def _non_max_suppression(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import NonMaxSuppression: (count, 3) of batch, class and box, by class, and by falling score in a class.

    boxes: (batch, n, 4); scores: (batch, classes, n)"""
    boxes, scores = node.item(0), node.item(1)

    def number(position: int, default: float, element: object) -> ImportedValue:
        if node.has(position):
            return node.item(position)
        return w.constant(np.asarray(default, np.int64 if element is i64 else np.float32), "default")

    most, overlap = number(2, 0, i64), number(3, 0.0, f32)
    batch, n, _ = boxes.shape
    classes = scores.shape[1]
    flat_scores = flat(w, w.tensor(scores))
    if node.has(4):
        least = w.reshape(w.tensor(node.item(4)), ())
        chosen = true_positions(w, w.emit(Less(), least, flat_scores))
    else:
        chosen = true_positions(w, w.full([w.simplify(product(scores.shape))], True, bool_))
    (count,) = tensor_dims(chosen)
    order = w.emit(TopK(count, 0, True), w.emit(GatherElements(0), flat_scores, chosen))
    chosen = w.emit(GatherElements(0), chosen, order)
    image, label, box = coordinates(w, chosen, [batch, classes, n])
    group = w.emit(Add(), w.emit(Mul(), image, w.size(classes)), label)
    order = w.emit(TopK(count, 0, False), group)  # stable: scores keep falling
    image, label, box, group = (w.emit(GatherElements(0), v, order) for v in (image, label, box, group))
    rows = w.reshape(w.tensor(boxes), [w.simplify(mul(batch, n)), const(4)])
    at = w.emit(Add(), w.emit(Mul(), image, w.size(n)), box)
    corners = _corners(w, take(w, rows, 0, at), bool(node.attributes.get("center_point_box", 0)))
    limit = cast_to(w, w.reshape(w.tensor(most), ()), most.dtype, i64)
    kept = non_max_suppression(w, corners, group, limit, w.reshape(w.tensor(overlap), ()))
    return w.of(stacked(w, [w.emit(GatherElements(0), v, kept) for v in (image, label, box)], 1), True)


HANDLERS: Mapping[str, Handler] = {
    "NonZero": _nonzero, "Compress": _compress, "Unique": _unique, "NonMaxSuppression": _non_max_suppression,
}  # fmt: skip
