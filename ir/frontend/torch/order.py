"""ATen order statistics, searches in sorted tensors, and elements that a mask or a diagonal picks.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core.dtype import bool_, i64
from relax_tune.ir.core.expr import Expr, as_int, const, floordiv, ge, maximum, sub
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.math import clip, work_type
from relax_tune.ir.frontend.shared.handlers.reduce import ordered
from relax_tune.ir.frontend.shared.handlers.sizes import flat
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.indexing import diagonal_places, scattered
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, common_type
from relax_tune.ir.frontend.torch.reduce import first_of_all
from relax_tune.ir.frontend.torch.sizes import masked_rows
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.math.logic import Less, LessEqual
from relax_tune.ir.op.reduction.reduce import MinOrHighest


def _picked(w: Writer, n: TorchNode, x: ImportedValue, axis: int, where: Value) -> list[ImportedValue]:
    """Return (values, indices) of one element along an axis, at indices that keep it."""
    value = w.gather_elements(w.tensor(x), where, axis)
    return [w.of(w.reshape(value, n.dims), x.natural), w.of(w.reshape(where, n.dims), True)]


def _at(w: Writer, places: Value, axis: int, k: Expr) -> Value:
    return w.slice(places, axis, k, w.simplify(plus(k, 1)))


def _kth(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import the k-th smallest element along an axis; NaN is the largest."""
    x, k = n.item(0), n.number(1, "k")
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis_at(2, "dim", x.ndim, -1)
    return _picked(w, n, x, axis, _at(w, w.top_k(ordered(w, x), const(k), axis, False), axis, const(k - 1)))


def _middle(w: Writer, n: TorchNode, x: ImportedValue, axis: int) -> Value:
    """Return the place of the median, the lower of two, with an axis of 1; the place of a NaN if one is not left out."""
    size, value = x.shape[axis], ordered(w, x)
    if not w.require(ge(size, 1)):
        raise n.refuse(f"expected at least one element along axis {axis}, got none")
    places = w.top_k(value, size, axis, False)
    if not x.dtype.is_float:
        return _at(w, places, axis, w.simplify(floordiv(sub(size, 1), const(2))))
    # NaN is the largest, so the numbers come first, and their middle is the median without NaN.
    if "nanmedian" in n.op:
        numbers = w.sum(w.cast(w.equal(value, value), i64), (axis,), True)
        last = w.maximum(w.add(numbers, -1), 0)
        return w.gather_elements(places, w.quotient(last, 2), axis)
    place = _at(w, places, axis, w.simplify(floordiv(sub(size, 1), const(2))))
    some = w.max_or_lowest(w.cast(w.not_equal(value, value), i64), (axis,), True)
    first = w.reshape(w.arg_max(value, axis), tensor_dims(place))
    return w.where(w.less(0, some), first, place)


def _median(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis_at(1, "dim", x.ndim)
    return _picked(w, n, x, axis, _middle(w, n, x, axis))


def _median_of_all(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the median of all elements; of none it is NaN, or the smallest integer."""
    x = n.item(0)
    size = w.simplify(product(x.shape))
    row = w.of(w.reshape(w.tensor(x), [size]), x.natural)
    if w.g.deduction.proves(ge(size, 1)) is Proof.YES:
        return _picked(w, n, row, 0, _middle(w, n, row, 0))[0]
    least = math.nan if x.dtype.is_float else False if x.dtype is bool_ else x.dtype.limits[0]
    missing = w.simplify(maximum(sub(1, size), 0))
    filled = w.of(w.concat(0, w.tensor(row), w.full([missing], least, x.dtype)))
    return _picked(w, n, filled, 0, _middle(w, n, filled, 0))[0]


def search(values_first: bool) -> Handler:
    """Make a handler of the first place in sorted rows that is not below a value. values_first: Whether the values are argument 0."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        values_argument, rows = n.args[0 if values_first else 1], n.item(1 if values_first else 0)
        element = common_type(rows, values_argument)
        table, values = as_value(w, rows, element), as_value(w, values_argument, element)
        if n.kwargs.get("sorter") is not None:
            table = w.gather_elements(table, w.tensor(n.kwargs["sorter"]), rows.ndim - 1)
        above = bool(n.kwargs.get("right", False)) or n.kwargs.get("side") == "right"
        size, count = rows.shape[-1], len(tensor_dims(values))
        table = w.expand_dims(table, (rows.ndim - 1,)) if rows.ndim > 1 else table
        values = w.expand_dims(values, (count,))
        # A comparison with every element instead of a binary search: all devices do it in one pass without branches.
        reached = w.emit(Less() if above else LessEqual(), values, table)
        place = w.where(reached, w.iota(size), w.size(size))
        index = w.minimum(w.emit(MinOrHighest((count,)), place), w.size(size))
        return w.of(w.cast(index, n.dtype), True)

    return handler


def _masked_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x` with the elements that a mask picks replaced by the elements of a source, in order."""
    x, source = n.item(0), n.item(2)
    mask = w.broadcast_to(as_value(w, n.item(1), bool_), n.dims)
    rows = masked_rows(w, flat(w, mask), flat(w, as_value(w, source, n.dtype)))
    return w.of(w.where(mask, w.reshape(rows, n.dims), w.tensor(x)))


def _diagonal_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x` with the diagonal of two dims replaced."""
    x, offset = n.item(0), n.number(2, "offset", 0)
    axes = (n.axis_at(3, "dim1", x.ndim, 0), n.axis_at(4, "dim2", x.ndim, 1))
    order = [*axes, *(p for p in range(x.ndim) if p not in axes)]
    source = n.operand(w, 1)
    last = len(tensor_dims(source)) - 1
    updates = w.permute(source, [last, *range(last)])
    where = diagonal_places(w, tensor_dims(source)[-1], offset)
    y = scattered(w, ScatterND("replace"), w.of(w.permute(w.tensor(x), order)), where, updates)
    return w.of(w.permute(w.tensor(y), [order.index(p) for p in range(x.ndim)]))


def _prefixes(w: Writer, x: Value, axis: int) -> tuple[Value, Value, Value]:
    """Return a square of the elements up to each one, with the places (n,) and row numbers (n, 1).

    Row `i` repeats element `i` after it, which changes no extreme. Without elements there is one place, and no row.
    """
    size = tensor_dims(x)[axis]
    place = w.iota(w.simplify(maximum(size, 1)))
    row_number = w.expand_dims(w.iota(size), (1,))
    return w.take(x, axis, w.minimum(place, row_number)), place, row_number


def _running_extreme(least: bool) -> Handler:
    """Make a handler of (values, indices) of the extreme up to each element, the last of equal ones; NaN is the extreme."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue]:
        x = n.item(0)
        if not x.ndim:
            return first_of_all(w, x)
        axis = n.axis_at(1, "dim", x.ndim)
        if as_int(x.shape[axis]) == 0:
            return [x, w.of(w.full(x.shape, 0, i64), True)]
        square, _, row_number = _prefixes(w, ordered(w, x), axis)
        where = w.arg_max(square, axis + 1, least, last=True)
        where = w.minimum(where, w.reshape(row_number, [x.shape[axis], *[const(1)] * (x.ndim - 1 - axis)]))
        return _picked(w, n, x, axis, where)

    return handler


def _running_log_sum(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the logarithm of running sums of exponentials, each shifted by the largest element up to its own."""
    x = n.item(0)
    if not x.ndim or as_int(x.shape[n.axis_at(1, "dim", x.ndim)]) == 0:
        return x
    axis, element = n.axis_at(1, "dim", x.ndim), work_type(x.dtype)
    square, place, row_number = _prefixes(w, as_value(w, x, element), axis)
    # An infinite maximum would give inf - inf. Any finite shift cancels.
    limit = -element.lowest
    top = clip(w, w.max_or_lowest(square, (axis + 1,), True), -limit, limit)
    ahead = w.less_equal(place, row_number)
    ahead = w.reshape(ahead, [*tensor_dims(ahead), *[const(1)] * (x.ndim - 1 - axis)])
    powers = w.where(ahead, w.exp(w.sub(square, top)), 0)
    total = w.add(w.log(w.sum(powers, (axis + 1,), True)), top)
    return w.of(w.cast(w.reshape(total, x.shape), n.dtype))


HANDLERS: Mapping[str, Handler] = {
    "aten.logcumsumexp.default": _running_log_sum,
    "aten.cummax.default": _running_extreme(False), "aten.cummin.default": _running_extreme(True),
    "aten.kthvalue.default": _kth, "aten.median.dim": _median, "aten.nanmedian.dim": _median,
    "aten.median.default": _median_of_all, "aten.nanmedian.default": _median_of_all,
    "aten.searchsorted.Tensor": search(False), "aten.searchsorted.Scalar": search(False),
    "aten.bucketize.Tensor": search(True), "aten.bucketize.Scalar": search(True),
    "aten.masked_scatter.default": _masked_scatter, "aten.diagonal_scatter.default": _diagonal_scatter,
}  # fmt: skip
