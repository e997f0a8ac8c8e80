"""ONNX operators whose sizes data decide: NonZero, Compress, Unique, NonMaxSuppression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import bool_, f32, i64, u8
from relax_tune.ir.core.expr import const, mul
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.sizes import (
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
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import SCALAR_LIMIT, ImportedValue, Writer
from relax_tune.ir.op.base import product


def _nonzero(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(nonzero(w, node.item(0), 0), True)


def _compress(w: Writer, node: OnnxNode) -> ImportedValue:
    x, mask = node.item(0), truth(w, node.item(1))
    attribute = node.attributes.get("axis")
    axis = 0 if attribute is None else node.normalised(int(attribute), x.ndim)
    value = flat(w, w.tensor(x)) if attribute is None else w.tensor(x)
    return w.of(w.take(value, axis, true_positions(w, mask)), x.natural)


def _unique_numbers(x: NDArray[Any], ascending: bool) -> tuple[NDArray[Any], ...]:
    """Return the distinct numbers, the first place and the count of each, and the place of each number among them."""
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    order = np.arange(len(values)) if ascending else np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(values))
    return (values[order], *(a.astype(np.int64) for a in (first[order], place[inverse], counts[order])))


def _unique(w: Writer, node: OnnxNode) -> Sequence[ImportedValue | None]:
    x, ascending = node.item(0), node.flag("sorted", True)
    known = w.numbers(x)
    if known is not None and known.ndim == 1 and known.dtype.kind in "iu" and known.size <= SCALAR_LIMIT:
        return [w.constant(a, name or "unique") for a, name in zip(_unique_numbers(known, ascending), node.outputs)]
    element = u8 if x.dtype is bool_ else x.dtype
    value, axis = w.cast(w.tensor(x), element), node.attributes.get("axis")
    if axis is None:
        groups = distinct(w, flat(w, value), ascending)
        values = groups.values
    else:
        at = node.normalised(int(axis), x.ndim)
        groups = distinct(w, slices_as_rows(w, value, at), ascending)
        values = rows_as_slices(w, groups.values, value, at)
    others = (w.of(v, True) for v in (groups.first, groups.inverse, groups.counts))
    return [w.of(w.cast(values, x.dtype), x.natural), *others]


def _corners(w: Writer, boxes: Value, centred: bool) -> Value:
    """Return (n, 4) boxes as lowest and highest corners."""
    n = tensor_dims(boxes)[0]
    first, second = (w.slice(boxes, 1, const(k), const(k + 2)) for k in (0, 2))
    if centred:
        half = w.mul(second, 0.5)
        first, second = w.sub(first, half), w.add(first, half)
    # Boxes may name any two opposite corners.
    ends = w.minimum(first, second), w.maximum(first, second)
    return w.reshape(w.concat(1, *ends), [n, const(4)])


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
        chosen = true_positions(w, w.less(least, flat_scores))
    else:
        chosen = true_positions(w, w.full([w.simplify(product(scores.shape))], True, bool_))
    (count,) = tensor_dims(chosen)
    # two stable sorts, by score and then by class, sort by class and by falling score within a class
    order = w.top_k(w.gather_elements(flat_scores, chosen, 0), count, 0, True)
    chosen = w.gather_elements(chosen, order, 0)
    image, label, box = coordinates(w, chosen, [batch, classes, n])
    group = w.add(w.mul(image, w.size(classes)), label)
    order = w.top_k(group, count, 0, False)  # stable: scores keep falling
    image, label, box, group = (w.gather_elements(v, order, 0) for v in (image, label, box, group))
    rows = w.reshape(w.tensor(boxes), [w.simplify(mul(batch, n)), const(4)])
    at = w.add(w.mul(image, w.size(n)), box)
    corners = _corners(w, w.take(rows, 0, at), node.flag("center_point_box"))
    limit = w.cast(w.reshape(w.tensor(most), ()), i64)
    selected = non_max_suppression(w, corners, group, limit, w.reshape(w.tensor(overlap), ()))
    return w.of(stacked(w, [w.gather_elements(v, selected, 0) for v in (image, label, box)], 1), True)


HANDLERS: Mapping[str, Handler] = {
    "NonZero": _nonzero, "Compress": _compress, "Unique": _unique, "NonMaxSuppression": _non_max_suppression,
}  # fmt: skip
