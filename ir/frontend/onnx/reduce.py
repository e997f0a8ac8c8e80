"""ONNX reductions, arg-extremes, top-k and running sums.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.core.dtype import bool_, f64
from relax_tune.ir.core.expr import const, le
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.old_forms import rows
from relax_tune.ir.frontend.shared.handlers.math import clip, square
from relax_tune.ir.frontend.shared.handlers.reduce import elements_at, reduced
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.reduction.reduce import Max, MaxOrLowest, Mean, Min, MinOrHighest, Reduce, Sum
from relax_tune.ir.op.reduction.scan import CumProd, CumSum, Prod


def _log_sum_exp(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ReduceLogSumExp, shifted by the largest element against overflow."""
    x, value = node.item(0), node.operand(w, 0)
    axes, keepdims = node.reduction(w, x.ndim)
    if not axes:
        return w.of(value)
    # An infinite maximum would give inf - inf. Any finite shift cancels.
    limit = -x.dtype.lowest
    top = clip(w, w.max_or_lowest(value, axes, True), -limit, limit)
    y = w.add(w.log(w.sum(w.exp(w.sub(value, top)), axes, True)), top)
    return w.of(y if keepdims else w.reshape(y, [d for p, d in enumerate(tensor_dims(y)) if p not in axes]))


def _cut(handler: Handler) -> Handler:
    """Make a handler of a reduction to numbers that are not whole: of integers, it gives their integer part."""

    def handle(w: Writer, node: OnnxNode) -> ImportedValue | Sequence[ImportedValue | None]:
        x = node.item(0)
        if not x.dtype.is_int:
            return handler(w, node)
        # float64 holds every int32 exactly; float32 would round from 2^24 on.
        wide = w.of(w.cast(w.tensor(x), f64))
        y = handler(w, replace(node, inputs=(wide, *node.inputs[1:])))
        assert isinstance(y, ImportedValue)
        return w.of(w.cast(w.tensor(y), x.dtype))

    return handle


def _extreme(strict: type[Reduce], total: type[Reduce]) -> Handler:
    """Make a handler of a maximum or minimum. From opset 20 on, and of bools, it has a value over no elements: `total`."""
    return lambda w, node: reduced(total if node.opset >= 20 or node.item(0).dtype is bool_ else strict)(w, node)


def _global(make: Callable[[tuple[int, ...], bool], Reduce]) -> Handler:
    return lambda w, node: w.of(w.emit(make(tuple(range(2, node.item(0).ndim)), True), node.operand(w, 0)))


def _arg(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = node.axis(x.ndim, 0)
    places = w.arg_max(w.tensor(x), axis, node.op == "ArgMin", node.flag("select_last_index"))
    return w.of(_with_axis(w, places, x, axis) if node.flag("keepdims", True) else places, True)


def _with_axis(w: Writer, places: Value, x: ImportedValue, axis: int) -> Value:
    """Insert an axis of 1 where an axis of `x` was reduced."""
    return w.reshape(places, [const(1) if p == axis else d for p, d in enumerate(x.shape)])


def _hardmax(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Hardmax: 1 at the first largest element along an axis, 0 at the others."""
    x = node.item(0)
    axis = node.integer("axis")
    best = _with_axis(w, w.arg_max(w.tensor(x), axis), x, axis)
    slots = w.reshape(w.iota(x.shape[axis]), [x.shape[axis], *[const(1)] * (x.ndim - 1 - axis)])
    return w.of(w.cast(w.equal(best, slots), x.dtype))


def _top_k(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x = node.item(0)
    axis = node.axis(x.ndim, -1)
    (k,) = node.sizes(w, 1, scalar=True)
    value, count = w.tensor(x), w.simplify(k)
    from_data = w.scalars(node.item(1)) is None
    # unsorted results may have any order
    where = w.top_k(value, x.shape[axis] if from_data else count, axis, node.flag("largest", True))
    if from_data:  # all are sorted, as the memory of a size that data decide has no other bound
        w.require(le(count, x.shape[axis]))
        dims = [count if p == axis else d for p, d in enumerate(x.shape)]
        where = w.reshape(w.slice(where, axis, const(0), count), dims)
    return elements_at(w, x, where, axis)


def _running(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = node.normalised(node.integers(w, 1)[0], x.ndim)
    make = CumSum if node.op == "CumSum" else CumProd
    flags = (node.flag(name) for name in ("exclusive", "reverse"))
    return w.of(w.emit(make(axis, *flags), w.tensor(x)))


HANDLERS: Mapping[str, Handler] = {
    "ReduceSum": reduced(Sum), "ReduceMean": _cut(reduced(Mean)), "ReduceMax": _extreme(Max, MaxOrLowest),
    "ReduceMin": _extreme(Min, MinOrHighest), "ReduceProd": reduced(Prod), "ReduceSumSquare": reduced(Sum, square),
    "ReduceL1": reduced(Sum, Writer.abs), "ReduceL2": _cut(reduced(Sum, square, Writer.sqrt)),
    "ReduceLogSum": _cut(reduced(Sum, after=Writer.log)),
    "ReduceLogSumExp": _cut(_log_sum_exp), "GlobalAveragePool": _global(Mean), "GlobalMaxPool": _global(Max), "ArgMax": _arg,
    "ArgMin": _arg, "Hardmax": rows(_hardmax), "TopK": _top_k, "CumSum": _running, "CumProd": _running,
}  # fmt: skip
