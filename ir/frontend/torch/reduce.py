"""ATen reductions, arg-extremes, top-k, running sums and norms.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relax_tune.ir.core.dtype import bool_, i64, u8
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.handlers.reduce import elements_at, ordered, reduced
from relax_tune.ir.frontend.shared.node import SharedHandler, number_of
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim, with_attributes
from relax_tune.ir.op.base import product
from relax_tune.ir.op.reduction.reduce import Max, MaxOrLowest, Mean, Min, MinOrHighest, Sum
from relax_tune.ir.op.reduction.scan import CumProd, CumSum, Prod


def _variance(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the variance: squared differences from the mean, divided by the number of elements less the correction."""
    x = n.item(0)
    axes = n.axes(1, "dim", x.ndim)
    keepdims, correction = bool(n.kwargs.get("keepdim", False)), number_of(n.kwargs.get("correction", 1))
    element = work_type(x.dtype)  # squares of 16-bit floats overflow
    value = as_value(w, x, element)
    centred = w.sub(value, w.mean(value, axes, True))
    if correction is None:
        raise n.refuse(f"expected correction as a number, got {n.kwargs.get('correction')}")
    squares = w.mul(centred, centred)
    if not correction:
        return w.of(w.cast(w.mean(squares, axes, keepdims), n.dtype))
    size = w.simplify(product([x.shape[a] for a in axes]))
    count, total = as_int(size), w.sum(squares, axes, keepdims)
    if count is not None:
        # At most as many elements as the correction give a division by 0, NaN or infinity as in torch.
        return w.of(w.cast(w.div(total, max(count - correction, 0.0)), n.dtype))
    freedom = w.maximum(w.add(as_value(w, size, element), -correction), 0.0)
    return w.of(w.cast(w.div(total, freedom), n.dtype))


def _variance_and_mean(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    axes, keepdims = n.axes(1, "dim", x.ndim), bool(n.kwargs.get("keepdim", False))
    return [_variance(w, n), w.of(w.mean(w.tensor(x), axes, keepdims))]


def extreme(make: type[Max] | type[Min]) -> Handler:
    """Make a handler of (values, indices) along one axis."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue]:
        x = n.item(0)
        axis, keepdims = n.axis_at(1, "dim", x.ndim), bool(n.argument(2, "keepdim", False))
        if not x.ndim:
            return first_of_all(w, x)
        value = ordered(w, x)
        where = w.arg_max(value, axis, make is Min)
        best = w.emit(make((axis,), keepdims), value)
        best = w.cast(best, x.dtype)
        return [w.of(best, x.natural), w.of(w.reshape(where, n.dims), True)]

    return handler


def arg(least: bool) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, axis_argument = n.item(0), n.argument(1, "dim")
        if not x.ndim:
            return first_of_all(w, x)[1]
        if axis_argument is None:
            flat = w.reshape(w.tensor(x), [w.simplify(product(x.shape))])
            return w.of(w.reshape(w.arg_max(flat, 0, least), n.dims), True)
        places = w.arg_max(w.tensor(x), n.axis_at(1, "dim", x.ndim), least)
        return w.of(w.reshape(places, n.dims), True)

    return handler


def _top_k(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x, k = n.item(0), dim(n.argument(1, "k"))
    if not x.ndim and as_int(k) == 1:
        return first_of_all(w, x)
    axis = n.axis_at(2, "dim", x.ndim, -1)
    return elements_at(w, x, w.top_k(ordered(w, x), k, axis, bool(n.argument(3, "largest", True))), axis)


def _norm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the norm of an order: extremes for infinite ones, the number of elements that are not 0 for 0."""
    x = n.item(0)
    element = work_type(n.dtype)
    value, keepdims = as_value(w, x, element), bool(n.argument(3, "keepdim", False))
    return _norm_of(w, n, value, n.argument(1, "ord", 2), n.axes(2, "dim", x.ndim), keepdims)


def _distances(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the norms of the differences of all pairs of rows: x (..., p, m), y (..., r, m)."""
    element = work_type(n.dtype)
    x, y = (as_value(w, n.item(p), element) for p in range(2))
    a, b = len(tensor_dims(x)), len(tensor_dims(y))
    value = w.sub(w.expand_dims(x, (a - 1,)), w.expand_dims(y, (b - 2,)))
    return _norm_of(w, n, value, n.argument(2, "p", 2), (len(tensor_dims(value)) - 1,), False)


def _log_sum_exp(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the logarithm of a sum of exponentials; -inf over no elements."""
    x = n.item(0)
    element = work_type(n.dtype)
    value, axes = as_value(w, x, element), n.axes(1, "dim", x.ndim)
    top = w.max_or_lowest(value, axes, True)
    # the largest may be infinite
    top = w.where(w.less(w.abs(top), math.inf), top, 0.0)
    total = w.add(w.log(w.sum(w.exp(w.sub(value, top)), axes, True)), top)
    return w.of(w.cast(w.reshape(total, n.dims), n.dtype))


def _all_true(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    wrong = w.cast(w.logical_not(w.cast(w.tensor(x), bool_)), i64)
    return w.of(w.equal(w.sum(wrong, tuple(range(x.ndim))), 0))


def _mode(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import the most frequent element along an axis, of equally frequent ones the smallest, and its last index."""
    x = n.item(0)
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis_at(1, "dim", x.ndim, -1)
    order = [*(p for p in range(x.ndim) if p != axis), axis]
    rows = w.permute(ordered(w, x), order)
    size = x.shape[axis]
    # All pairs of a row are compared: quadratic in its length, but the same at every length and device.
    same = w.equal(w.expand_dims(rows, (x.ndim,)), w.expand_dims(rows, (x.ndim - 1,)))
    counts = w.sum(w.cast(same, i64), (x.ndim,))
    most = w.max(counts, (x.ndim - 1,), True)
    ranks = w.top_k(rows, size, x.ndim - 1, False)
    # the first of the most frequent elements in ascending order
    frequent = w.equal(w.gather_elements(counts, ranks, x.ndim - 1), most)
    first = w.arg_max(w.cast(frequent, i64), x.ndim - 1)
    place = w.gather_elements(ranks, w.expand_dims(first, (x.ndim - 1,)), x.ndim - 1)
    value = w.gather_elements(rows, place, x.ndim - 1)
    last = w.arg_max(w.cast(w.equal(rows, value), i64), x.ndim - 1, last=True)
    values = w.cast(w.reshape(value, n.dims), x.dtype)
    return [w.of(values, x.natural), w.of(w.reshape(last, n.dims), True)]


def _distance(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the norm of a difference."""
    element = work_type(n.dtype)
    value = w.sub(as_value(w, n.item(0), element), as_value(w, n.item(1), element))
    return _norm_of(w, n, value, n.argument(2, "p", 2), tuple(range(len(tensor_dims(value)))), False)


def _norm_of(
    w: Writer, n: TorchNode, value: Value, order_argument: Any, axes: tuple[int, ...], keepdims: bool
) -> ImportedValue:
    order, element = number_of(order_argument), work_type(n.dtype)
    if order is None:
        raise n.refuse(f"expected the order as a number, got {order_argument}")
    if not axes:
        value, axes, keepdims = w.reshape(value, [const(1)]), (0,), False
    if order == 2:
        y = w.sqrt(w.sum(w.mul(value, value), axes, keepdims))
    elif order == 0:
        y = w.sum(w.cast(w.not_equal(value, 0), element), axes, keepdims)
    elif math.isinf(order):
        y = w.emit((Max if order > 0 else Min)(axes, keepdims), w.abs(value))
    else:
        size = w.abs(value)
        powers = size if order == 1 else w.power(size, order)
        y = w.sum(powers, axes, keepdims)
        y = y if order == 1 else w.power(y, 1 / order)
    return w.of(w.cast(y, n.dtype))


def first_of_all(w: Writer, x: ImportedValue) -> list[ImportedValue]:
    """Return (value, index) of the only element of a tensor without dims."""
    return [x, w.of(w.literal(0, i64), True)]


def _sort(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import a sort as the places of all elements, best first; it is always stable."""
    x = n.item(0)
    at = 2 if n.op == "aten.sort.stable" else 1
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis_at(at, "dim", x.ndim, -1)
    return elements_at(
        w, x, w.top_k(ordered(w, x), x.shape[axis], axis, bool(n.argument(at + 1, "descending", False))), axis
    )


def running(make: type[CumSum] | type[CumProd]) -> Handler:
    """Make a handler of running sums or products along an axis."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x = n.typed(w, 0)
        return w.of(w.emit(make(n.axis_at(1, "dim", x.ndim)), w.tensor(x)), x.natural) if x.ndim else x

    return handler


def truth(make: type[MaxOrLowest] | type[MinOrHighest]) -> Handler:
    """Make a handler of `any` or `all`. Of uint8 the result is uint8, too: 1 for every number but 0."""
    ones, plain = reduced(make, lambda w, x: w.cast(w.not_equal(x, 0), u8)), reduced(make)
    return with_attributes(lambda w, n: (ones if n.dtype is u8 else plain)(w, n), keepdims=(2, "keepdim"))


REDUCTIONS: Mapping[str, SharedHandler] = {
    **dict.fromkeys(("sum.dim_IntList", "sum.default"), reduced(Sum)),
    **dict.fromkeys(("mean.dim", "mean.default"), reduced(Mean)),
    **dict.fromkeys(("amax.default", "max.default"), reduced(Max)),
    **dict.fromkeys(("amin.default", "min.default"), reduced(Min)),
    **dict.fromkeys(("prod.dim_int", "prod.default"), reduced(Prod)),
}  # fmt: skip
HANDLERS: Mapping[str, Handler] = {
    **{f"aten.{name}": with_attributes(handler, keepdims=(2, "keepdim")) for name, handler in REDUCTIONS.items()},
    **dict.fromkeys(("aten.any.dim", "aten.any.dims", "aten.any.default"), truth(MaxOrLowest)),
    **dict.fromkeys(("aten.all.dim", "aten.all.default"), truth(MinOrHighest)),
    "aten.var.correction": _variance, "aten.var_mean.correction": _variance_and_mean, "aten.max.dim": extreme(Max),
    "aten.min.dim": extreme(Min), "aten.argmax.default": arg(False), "aten.argmin.default": arg(True),
    "aten.topk.default": _top_k, "aten.cumsum.default": running(CumSum), "aten.cumprod.default": running(CumProd),
    "aten.linalg_vector_norm.default": _norm, "aten.dist.default": _distance,
    "aten._cdist_forward.default": _distances, "aten.logsumexp.default": _log_sum_exp,
    "aten._is_all_true.default": _all_true, "aten.mode.default": _mode,
     "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
}  # fmt: skip
