"""ATen order statistics, searches in sorted tensors, and elements that a mask or a diagonal picks."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, as_int, const, floordiv, ge, sub
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.algorithms.data_sizes import flat
from relax_tune.ir.frontend.shared.compositions import cast_to, clip, permute, slice_axis, take
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.control.data_sizes import masked_rows, ordered
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, common_type
from relax_tune.ir.frontend.torch.select import diagonal_places, first_of_all, scattered
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, ExpandDims
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Exp, MaximumScalar, Minimum, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, NotEqual, Where
from relax_tune.ir.op.math.numeric import Log, Quotient
from relax_tune.ir.op.reduction.reduce import MaxOrLowest, MinOrHighest, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, TopK


def _picked(w: Writer, n: TorchNode, x: ImportedValue, axis: int, where: Value) -> list[ImportedValue]:
    """Return (values, indices) of one element along an axis, at indices that keep it."""
    value = w.emit(GatherElements(axis), w.tensor(x), where)
    return [w.of(w.reshape(value, n.dims), x.natural), w.of(w.reshape(where, n.dims), True)]


def _at(w: Writer, places: Value, axis: int, k: Expr) -> Value:
    return slice_axis(w, places, axis, k, w.simplify(plus(k, 1)))


def _kth(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import the k-th smallest element along an axis; NaN is the largest."""
    x, k = n.item(0), n.number(1, "k")
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis(2, "dim", x.ndim, -1)
    return _picked(w, n, x, axis, _at(w, w.emit(TopK(const(k), axis, False), ordered(w, x)), axis, const(k - 1)))


def _middle(w: Writer, n: TorchNode, x: ImportedValue, axis: int) -> Value:
    """Return the place of the median, the lower of two, with its axis kept; of a NaN where one is and is not left out."""
    size, value = x.shape[axis], ordered(w, x)
    if not w.require(ge(size, 1)):
        raise n.refuse(f"wanted at least one element along axis {axis}, found none")
    places = w.emit(TopK(size, axis, False), value)
    if not x.dtype.is_float:
        return _at(w, places, axis, w.simplify(floordiv(sub(size, 1), const(2))))
    if "nanmedian" in n.op:
        numbers = w.emit(Sum((axis,), True), w.emit(Cast(i64), w.emit(Equal(), value, value)))
        last = w.emit(MaximumScalar(0), w.emit(AddScalar(-1), numbers))
        return w.emit(GatherElements(axis), places, w.emit(Quotient(), last, w.literal(2, i64)))
    place = _at(w, places, axis, w.simplify(floordiv(sub(size, 1), const(2))))
    some = w.emit(MaxOrLowest((axis,), True), w.emit(Cast(i64), w.emit(NotEqual(), value, value)))
    first = w.reshape(w.emit(ArgMax(axis), value), tensor_dims(place))
    return w.emit(Where(), w.emit(Less(), w.literal(0, i64), some), first, place)


def _median(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis(1, "dim", x.ndim)
    return _picked(w, n, x, axis, _middle(w, n, x, axis))


def _median_of_all(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    flat = w.of(w.reshape(w.tensor(x), [w.simplify(product(x.shape))]), x.natural)
    return _picked(w, n, flat, 0, _middle(w, n, flat, 0))[0]


def search(turned: bool) -> Handler:
    """Make a handler of the first place in sorted rows that is not below a value. turned: the values come first."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        given, rows = n.args[0 if turned else 1], n.item(1 if turned else 0)
        element = common_type(rows, given)
        table, values = as_value(w, rows, element), as_value(w, given, element)
        if n.kwargs.get("sorter") is not None:
            table = w.emit(GatherElements(rows.ndim - 1), table, w.tensor(n.kwargs["sorter"]))
        above = bool(n.kwargs.get("right", False)) or n.kwargs.get("side") == "right"
        size, count = rows.shape[-1], len(tensor_dims(values))
        table = w.emit(ExpandDims((rows.ndim - 1,)), table) if rows.ndim > 1 else table
        values = w.emit(ExpandDims((count,)), values)
        reached = w.emit(Less() if above else LessEqual(), values, table)
        place = w.emit(Where(), reached, w.emit(Iota(size)), w.size(size))
        found = w.emit(Minimum(), w.emit(MinOrHighest((count,)), place), w.size(size))
        return w.of(cast_to(w, found, i64, n.dtype), True)

    return handler


def _masked_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x` with the elements that a mask picks replaced by those of a source, in order."""
    x, source = n.item(0), n.item(2)
    mask = w.emit(BroadcastTo(n.dims), as_value(w, n.item(1), bool_))
    found = masked_rows(w, flat(w, mask), flat(w, as_value(w, source, n.dtype)))
    return w.of(w.emit(Where(), mask, w.reshape(found, n.dims), w.tensor(x)))


def _diagonal_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x` with the diagonal of two dims replaced."""
    x, offset = n.item(0), n.number(2, "offset", 0)
    axes = (n.axis(3, "dim1", x.ndim, 0), n.axis(4, "dim2", x.ndim, 1))
    order = [*axes, *(p for p in range(x.ndim) if p not in axes)]
    source = as_value(w, n.item(1), n.dtype)
    last = len(tensor_dims(source)) - 1
    updates = permute(w, source, [last, *range(last)])
    where = diagonal_places(w, tensor_dims(source)[-1], offset)
    found = scattered(w, ScatterND("replace"), w.of(permute(w, w.tensor(x), order)), where, updates)
    return w.of(permute(w, w.tensor(found), [order.index(p) for p in range(x.ndim)]))


def _running_extreme(least: bool) -> Handler:
    """Make a handler of (values, indices) of the extreme up to each element, the last of equal ones; NaN is the extreme.

    Behind an element stands itself, so that each row of a square of places has the elements up to its own."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue]:
        x = n.item(0)
        if not x.ndim:
            return first_of_all(w, x)
        axis = n.axis(1, "dim", x.ndim)
        if as_int(x.shape[axis]) == 0:
            return [x, w.of(w.full(x.shape, 0, i64), True)]
        place = w.emit(Iota(x.shape[axis]))
        own = w.emit(ExpandDims((1,)), place)
        found = take(w, ordered(w, x), axis, w.emit(Minimum(), place, own))
        where = w.emit(ArgMax(axis + 1, least, last=True), found)
        where = w.emit(Minimum(), where, w.reshape(own, [x.shape[axis], *[const(1)] * (x.ndim - 1 - axis)]))
        return _picked(w, n, x, axis, where)

    return handler


def _running_log_sum(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the logarithm of running sums of exponentials, each shifted by the largest element up to its own."""
    x = n.item(0)
    if not x.ndim or as_int(x.shape[n.axis(1, "dim", x.ndim)]) == 0:
        return x
    axis, element = n.axis(1, "dim", x.ndim), f32 if x.dtype.is_half else x.dtype
    place = w.emit(Iota(x.shape[axis]))
    own = w.emit(ExpandDims((1,)), place)
    found = take(w, as_value(w, x, element), axis, w.emit(Minimum(), place, own))
    limit = -element.lowest
    top = clip(w, w.emit(MaxOrLowest((axis + 1,), True), found), element, -limit, limit)
    ahead = w.emit(LessEqual(), place, own)
    ahead = w.reshape(ahead, [x.shape[axis], x.shape[axis], *[const(1)] * (x.ndim - 1 - axis)])
    powers = w.emit(Where(), ahead, w.emit(Exp(), w.emit(Sub(), found, top)), w.literal(0, element))
    total = w.emit(Add(), w.emit(Log(), w.emit(Sum((axis + 1,), True), powers)), top)
    return w.of(cast_to(w, w.reshape(total, x.shape), element, n.dtype))


HANDLERS: Mapping[str, Handler] = {
    "aten.logcumsumexp.default": _running_log_sum,
    "aten.cummax.default": _running_extreme(False), "aten.cummin.default": _running_extreme(True),
    "aten.kthvalue.default": _kth, "aten.median.dim": _median, "aten.nanmedian.dim": _median,
    "aten.median.default": _median_of_all, "aten.nanmedian.default": _median_of_all,
    "aten.searchsorted.Tensor": search(False), "aten.searchsorted.Scalar": search(False),
    "aten.bucketize.Tensor": search(True), "aten.bucketize.Scalar": search(True),
    "aten.masked_scatter.default": _masked_scatter, "aten.diagonal_scatter.default": _diagonal_scatter,
}  # fmt: skip
