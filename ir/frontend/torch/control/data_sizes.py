"""ATen operators whose sizes data decide, such as `nonzero`, and numbers that are read from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import bool_, f32, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const, eq
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.algorithms.data_sizes import (
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
    size_from_data,
    slices_as_rows,
    stacked,
    true_positions,
    truth,
)
from relax_tune.ir.frontend.shared.compositions import cast_to, take
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_item, as_value
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.math.elementwise import AddScalar, MaximumScalar, Sub
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.reduction.reduce import MaxOrLowest, Sum
from relax_tune.ir.op.reduction.scan import CumSum, TopK
from relax_tune.ir.rewrite.emitter import tensor_info


def _nonzero(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(nonzero(w, n.item(0), 1), True)


def _nonzero_static(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the first `size` indices of elements other than 0; missing ones are `fill_value`."""
    x, size = n.item(0), n.number(1, "size")
    fill = n.number(2, "fill_value", -1)
    places, _ = first_places(w, flat(w, truth(w, x)), const(size), -1)
    missing = w.emit(Less(), places, w.literal(0, i64))
    parts = [w.emit(Where(), missing, w.literal(fill, i64), p) for p in coordinates(w, places, x.shape)]
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
    value, chosen = (flat(w, w.emit(BroadcastTo(dims), w.tensor(i))) for i in (x, mask))
    return w.of(w.emit(GatherElements(0), value, true_positions(w, chosen)), x.natural)


def _unique(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    """Import distinct elements in ascending order; torch sorts them whether asked to or not."""
    x = n.item(0)
    return _told(w, n, x, distinct(w, flat(w, ordered(w, x))), x.shape)


def _unique_dim(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim)
    found = distinct(w, slices_as_rows(w, ordered(w, x), axis))
    return _told(w, n, x, found, [x.shape[axis]], axis)


def _unique_consecutive(w: Writer, n: TorchNode) -> Sequence[ImportedValue | None]:
    """Import the first of each run of equal elements, or of equal slices along an axis."""
    x, given = n.item(0), n.given(3, "dim")
    if given is None:
        value = flat(w, ordered(w, x))
        return _told(w, n, x, grouped(w, value, [value], w.emit(Iota(tensor_dims(value)[0]))), x.shape)
    axis = n.axis(3, "dim", x.ndim)
    rows, size = slices_as_rows(w, ordered(w, x), axis), x.shape[axis]
    return _told(w, n, x, grouped(w, rows, columns_of(w, rows), w.emit(Iota(size))), [size], axis)


def ordered(w: Writer, x: ImportedValue) -> Value:
    """Return a tensor for comparisons; truth values become bytes."""
    return cast_to(w, w.tensor(x), x.dtype, u8 if x.dtype is bool_ else x.dtype)


def _told(
    w: Writer, n: TorchNode, x: ImportedValue, found: Distinct, dims: Sequence[Expr], axis: int | None = None
) -> list[ImportedValue | None]:
    """Return values, inverse and counts, empty ones where torch was not asked for them."""
    values = found.values
    if axis is not None:
        values = rows_as_slices(w, values, w.tensor(x), axis)
    items: list[ImportedValue | None] = [
        w.of(cast_to(w, values, u8 if x.dtype is bool_ else x.dtype, x.dtype), x.natural),
        w.of(w.reshape(found.inverse, dims), True),
        w.of(found.counts, True),
    ]
    for p, said in enumerate(n.results):
        if p and said is not None and said.shape is not None and [as_int(d) for d in said.shape] == [0]:
            items[p] = w.of(w.full([const(0)], 0, i64), True)
    return items


def _repeat_interleave(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the number of each element as often as it says, in order."""
    repeats = as_value(w, n.item(0), i64)
    total = size_from_data(w, w.emit(Sum((0,)), repeats), "repeated")
    starts = w.emit(Sub(), w.emit(CumSum(0), repeats), repeats)
    (count,) = tensor_dims(repeats)
    # elements that are not repeated begin where the next one does; behind the end they are dropped
    begun = w.emit(ScatterND("add"), w.full([total], 0, i64), w.emit(ExpandDims((1,)), starts), w.full([count], 1, i64))
    return as_item(w, w.of(w.emit(AddScalar(-1), w.emit(CumSum(0), begun)), True), n.dtype)


def _bincount(w: Writer, n: TorchNode) -> ImportedValue:
    """Import how often each number occurs, or the sum of its weights."""
    x, weights, least = n.item(0), n.given(1, "weights"), n.number(2, "minlength", 0)
    where = as_value(w, x, i64)
    size = w.emit(MaximumScalar(least), w.emit(AddScalar(1), w.emit(MaxOrLowest((0,)), where)))
    total = size_from_data(w, size, "bins")
    updates = w.full(tensor_dims(where), 1, i64) if weights is None else as_value(w, weights, n.dtype)
    room = w.full([total], 0, n.dtype)
    return w.of(w.emit(ScatterND("add"), room, w.emit(ExpandDims((1,)), where), updates), weights is None)


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
        raise n.refuse("wanted branches that do not depend on data; use torch.cond or torch.where")
    if "symbol" not in n.kwargs:  # no dim depends on it, so it may be below 0
        return w.of(w.reshape(cast_to(w, w.tensor(x), x.dtype, i64), ()))
    return size_from_data(w, cast_to(w, w.tensor(x), x.dtype, i64), "number")


def _non_max_suppression(w: Writer, n: TorchNode) -> ImportedValue:
    """Import non-maximum suppression of (n, 4) boxes, as the places of kept ones by falling score."""
    boxes, scores, overlap = n.item(0), n.item(1), n.args[2]
    order = w.emit(TopK(scores.shape[0], 0, True), w.tensor(scores))
    kept = non_max_suppression(w, take(w, w.tensor(boxes), 0, order), None, None, as_value(w, overlap, boxes.dtype))
    return w.of(w.emit(GatherElements(0), order, kept), True)


def masked_rows(w: Writer, mask: Value, rows: Value) -> Value:
    """Return a row for each element of a mask (n,): the next of `rows` where it is true, and some row elsewhere.

    Behind the last row come zeros."""
    ones = cast_to(w, mask, bool_, i64)
    some = w.emit(Concat(0), rows, w.full([const(1), *tensor_dims(rows)[1:]], 0, tensor_info(rows).dtype or f32))
    return take(w, some, 0, w.emit(MaximumScalar(0), w.emit(AddScalar(-1), w.emit(CumSum(0), ones))))


def require_as_many(w: Writer, mask: Value, rows: Expr) -> None:
    """Check at run time that a mask has as many true elements as there are rows."""
    w.require(eq(size_from_data(w, w.emit(Sum((0,)), cast_to(w, flat(w, mask), bool_, i64))), rows))


HANDLERS: Mapping[str, Handler] = {
    "aten.nonzero.default": _nonzero, "aten.nonzero_static.default": _nonzero_static, "aten.masked_select.default": _masked_select,
    "aten._unique2.default": _unique, "aten.unique_dim.default": _unique_dim,
    "aten.unique_consecutive.default": _unique_consecutive, "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten.bincount.default": _bincount, "aten._local_scalar_dense.default": _number, "torchvision.nms.default": _non_max_suppression,
}  # fmt: skip
