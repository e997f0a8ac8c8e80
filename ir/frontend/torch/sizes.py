"""ATen operators whose sizes data decide, such as `nonzero`, and numbers that are read from tensors.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, as_int, const, eq, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.control import size_from_data
from relax_tune.ir.frontend.shared.handlers.reduce import ordered
from relax_tune.ir.frontend.shared.handlers.sizes import (
    Distinct,
    columns_of,
    coordinates,
    distinct,
    first_places,
    flat,
    grouped,
    non_max_suppression,
    nonzero,
    rows_as_slices,
    slices_as_rows,
    stacked,
    true_positions,
    truth,
)
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_item, as_value
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.rewrite.emitter import tensor_info


def _nonzero(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(nonzero(w, n.item(0), 1), True)


def _nonzero_static(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the first `size` indices of elements other than 0; missing ones are `fill_value`."""
    x, size = n.item(0), n.number(1, "size")
    fill = n.number(2, "fill_value", -1)
    places, _ = first_places(w, flat(w, truth(w, x)), const(size), -1)
    missing = w.less(places, 0)
    parts = [w.where(missing, fill, p) for p in coordinates(w, places, x.shape)]
    if not parts:
        return w.of(w.full([const(size), const(0)], 0, i64))
    return w.of(stacked(w, parts, 1), fill >= 0)


def _masked_select(w: Writer, n: TorchNode) -> ImportedValue:
    x, mask = n.item(0), n.item(1)
    lead = [const(1)] * abs(x.ndim - mask.ndim)
    pairs = zip(
        [*lead, *x.shape] if x.ndim < mask.ndim else x.shape, [*lead, *mask.shape] if mask.ndim < x.ndim else mask.shape
    )
    dims = tuple(b if as_int(a) == 1 else a for a, b in pairs)
    value, chosen = (flat(w, w.broadcast_to(w.tensor(i), dims)) for i in (x, mask))
    return w.of(w.gather_elements(value, true_positions(w, chosen), 0), x.natural)


def _unique(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    """Import distinct elements in ascending order; torch sorts them with any `sorted`."""
    x = n.item(0)
    return _requested(w, n, x, distinct(w, flat(w, ordered(w, x))), x.shape)


def _unique_dim(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim)
    groups = distinct(w, slices_as_rows(w, ordered(w, x), axis))
    return _requested(w, n, x, groups, [x.shape[axis]], axis)


def _unique_consecutive(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    """Import the first of each run of equal elements, or of equal slices along an axis."""
    x, axis_argument = n.item(0), n.argument(3, "dim")
    if axis_argument is None:
        value = flat(w, ordered(w, x))
        return _requested(w, n, x, grouped(w, value, [value], w.iota(tensor_dims(value)[0])), x.shape)
    axis = n.axis_at(3, "dim", x.ndim)
    rows, size = slices_as_rows(w, ordered(w, x), axis), x.shape[axis]
    return _requested(w, n, x, grouped(w, rows, columns_of(w, rows), w.iota(size)), [size], axis)


def _requested(
    w: Writer, n: TorchNode, x: ImportedValue, groups: Distinct, dims: Sequence[Expr], axis: int | None = None
) -> list[ImportedValue | None]:
    """Return values, inverse and counts, empty where the program does not request them."""
    values = groups.values
    if axis is not None:
        values = rows_as_slices(w, values, w.tensor(x), axis)
    items: list[ImportedValue | None] = [
        w.of(w.cast(values, x.dtype), x.natural),
        w.of(w.reshape(groups.inverse, dims), True),
        w.of(groups.counts, True),
    ]
    for p, stated in enumerate(n.results):
        if p and stated is not None and stated.shape is not None and [as_int(d) for d in stated.shape] == [0]:
            # Torch states an empty tensor where a result was not requested.
            items[p] = w.of(w.full([const(0)], 0, i64), True)
    return items


def _repeat_interleave(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the index of each element, repeated as often as the element states."""
    repeats = as_value(w, n.item(0), i64)
    total = size_from_data(w, w.sum(repeats, (0,)), "repeated")
    # A running sum of ones at the starts gives each place the number of its element.
    starts = w.sub(w.cum_sum(repeats, 0), repeats)
    (count,) = tensor_dims(repeats)
    # elements that are not repeated begin where the next one does; those after the end are dropped
    begun = w.emit(ScatterND("add"), w.full([total], 0, i64), w.expand_dims(starts, (1,)), w.full([count], 1, i64))
    return as_item(w, w.of(w.add(w.cum_sum(begun, 0), -1), True), n.dtype)


def _bincount(w: Writer, n: TorchNode) -> ImportedValue:
    """Import how often each number occurs, or the sum of its weights."""
    x, weights, least = n.item(0), n.argument(1, "weights"), n.number(2, "minlength", 0)
    where = as_value(w, x, i64)
    size = w.maximum(w.add(w.max_or_lowest(where, (0,)), 1), least)
    total = size_from_data(w, size, "bins")
    updates = w.full(tensor_dims(where), 1, i64) if weights is None else as_value(w, weights, n.dtype)
    room = w.full([total], 0, n.dtype)
    return w.of(w.emit(ScatterND("add"), room, w.expand_dims(where, (1,)), updates), weights is None)


def _number(w: Writer, n: TorchNode) -> Result:
    """Import a number that is read from a tensor: a symbol for an integer, a tensor without dims for a float or a mere result."""
    x = n.item(0)
    known = w.scalars(x)
    if known is not None and x.dtype is not bool_:
        e: Expr = known.reshape(-1)[0]
        return e
    if x.dtype.is_float:
        return w.of(w.reshape(w.tensor(x), ()))
    if x.dtype is bool_:
        raise n.refuse("expected branches that do not depend on data; use torch.cond or torch.where")
    if "symbol" not in n.kwargs:  # no dim depends on it, so it may be below 0
        return w.of(w.reshape(w.cast(w.tensor(x), i64), ()))
    value = w.cast(w.tensor(x), i64)
    if "signed" not in n.kwargs:
        return size_from_data(w, value, "number")
    positive, negative = (size_from_data(w, w.maximum(part, 0), "number") for part in (value, w.mul(value, -1)))
    return sub(positive, negative)


def _non_max_suppression(w: Writer, n: TorchNode) -> ImportedValue:
    """Import non-maximum suppression of (n, 4) boxes, as the places of the selected boxes by falling score."""
    boxes, scores, overlap = n.item(0), n.item(1), n.args[2]
    order = w.top_k(w.tensor(scores), scores.shape[0], 0, True)
    selected = non_max_suppression(w, w.take(w.tensor(boxes), 0, order), None, None, as_value(w, overlap, boxes.dtype))
    return w.of(w.gather_elements(order, selected, 0), True)


def masked_rows(w: Writer, mask: Value, rows: Value) -> Value:
    """Return a row for each element of a mask (n,): the next of `rows` where it is true, any row where it is false.

    Behind the last row come zeros."""
    ones = w.cast(mask, i64)
    # One row more, so that the gather has a row even if there are none.
    some = w.concat(0, rows, w.full([const(1), *tensor_dims(rows)[1:]], 0, tensor_info(rows).dtype or f32))
    return w.take(some, 0, w.maximum(w.add(w.cum_sum(ones, 0), -1), 0))


def require_as_many(w: Writer, mask: Value, rows: Expr) -> None:
    """Check at run time that a mask has as many true elements as there are rows."""
    w.require(eq(size_from_data(w, w.sum(w.cast(flat(w, mask), i64), (0,))), rows))


HANDLERS: Mapping[str, Handler] = {
    "aten.nonzero.default": _nonzero, "aten.nonzero_static.default": _nonzero_static,
    "aten.masked_select.default": _masked_select, "aten._unique2.default": _unique,
    "aten.unique_dim.default": _unique_dim, "aten.unique_consecutive.default": _unique_consecutive,
    "aten.repeat_interleave.Tensor": _repeat_interleave, "aten.bincount.default": _bincount,
    "aten._local_scalar_dense.default": _number, "torchvision.nms.default": _non_max_suppression,
}  # fmt: skip
