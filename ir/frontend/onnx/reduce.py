"""ONNX operators: matrix products, reductions, normalisations and gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.dtype import bool_, f32, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import literal_of
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.old_forms import rows
from relax_tune.ir.frontend.onnx.shape import axes_of, axis_of, expressions, integers
from relax_tune.ir.frontend.onnx.tensors import element_type
from relax_tune.ir.frontend.shared.compositions import (
    along_last_axis,
    batch_norm,
    cast_to,
    clip,
    group_norm,
    permute,
    slice_axis,
    triangle,
)
from relax_tune.ir.frontend.shared.indexing import gather, gather_elements, gather_nd, natural_indices
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, ExpandDims
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Exp, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.logic import Equal, Where
from relax_tune.ir.op.math.numeric import Abs, Log
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Max, MaxOrLowest, Mean, Min, MinOrHighest, Reduce, Softmax, Sum
from relax_tune.ir.op.reduction.scan import Prod


def _matmul(w: Writer, node: OnnxNode) -> ImportedValue:
    a, b = w.tensor(node.item(0)), w.tensor(node.item(1))
    one_a, one_b = len(tensor_dims(a)) == 1, len(tensor_dims(b)) == 1
    a = w.emit(ExpandDims((0,)), a) if one_a else a
    b = w.emit(ExpandDims((1,)), b) if one_b else b
    c = w.emit(Matmul(), a, b)
    dims = list(tensor_dims(c))
    if one_b:
        del dims[-1]
    if one_a:
        del dims[len(dims) - (1 if one_b else 2)]
    return w.of(w.reshape(c, dims) if one_a or one_b else c)


def _gemm(w: Writer, node: OnnxNode) -> ImportedValue:
    a, b = w.tensor(node.item(0)), w.tensor(node.item(1))
    alpha, beta = float(node.attributes.get("alpha", 1.0)), float(node.attributes.get("beta", 1.0))
    if node.attributes.get("transA", 0):
        a = permute(w, a, (1, 0))
    if node.attributes.get("transB", 0):
        b = permute(w, b, (1, 0))
    c = w.emit(Matmul(), a, b)
    if alpha != 1.0:
        c = w.emit(MulScalar(alpha), c)
    if node.has(2):
        bias = w.tensor(node.item(2))
        c = w.emit(Add(), c, w.emit(MulScalar(beta), bias) if beta != 1.0 else bias)
    return w.of(c)


def _einsum(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.emit(Einsum(node.text("equation", "")), *(w.tensor(node.item(p)) for p in range(len(node.inputs)))))


def _softmax(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(
        along_last_axis(w, w.tensor(node.item(0)), int(node.attributes["axis"]), lambda v: w.emit(Softmax(), v))
    )


def _log_softmax(w: Writer, node: OnnxNode) -> ImportedValue:
    axis = (int(node.attributes["axis"]),)
    value = w.tensor(node.item(0))
    low = w.emit(Sub(), value, w.emit(MaxOrLowest(axis, True), value))
    return w.of(w.emit(Sub(), low, w.emit(Log(), w.emit(Sum(axis, True), w.emit(Exp(), low)))))


def _layer_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    if node.wants(1) or node.wants(2):
        raise node.refuse("wanted only the normalised output, found a reader of the mean or deviation")
    x = node.item(0)
    axis = axis_of(node, int(node.attributes.get("axis", -1)), x.ndim)
    tail = x.shape[axis:]
    width = w.simplify(product(tail))
    value = w.tensor(x)
    flat = value if len(tail) == 1 else w.reshape(value, [*x.shape[:axis], width])
    gamma = _row(w, w.tensor(node.item(1)), tail, width)
    beta = _row(w, w.tensor(node.item(2)), tail, width) if node.has(2) else w.full((width,), 0.0, x.dtype)
    found = w.emit(LayerNorm(float(node.attributes.get("epsilon", 1e-5))), flat, gamma, beta)
    return w.of(found if len(tail) == 1 else w.reshape(found, x.shape))


def _row(w: Writer, value: Value, tail: Sequence[Expr], width: Expr) -> Value:
    """Reshape the scales of the normalised dims to one row."""
    own = tensor_dims(value)
    if len(own) < len(tail) or any(as_int(d) == 1 and as_int(t) != 1 for d, t in zip(own, tail, strict=False)):
        value = w.emit(BroadcastTo(tuple(tail)), value)
    return w.reshape(value, [width])


def reduced(make: Callable[[tuple[int, ...], bool], Reduce], before: str = "", after: str = "") -> Handler:
    """Make a handler of a reduction over axes, given as attribute or input. before: `square` or `abs`; after: `sqrt` or `log`."""

    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        x = node.item(0)
        axes = axes_of(w, node, 1, x.ndim)
        value = w.tensor(x)
        if not axes:
            if node.attributes.get("noop_with_empty_axes", 0):
                axes = ()
            else:
                axes = tuple(range(x.ndim))
        if x.dtype is bool_:
            # over no elements, the maximum of uint8 is 0 (false) and the minimum 255 (true)
            value = w.emit(Cast(u8), value)
        if before == "square":
            value = w.emit(Mul(), value, value)
        elif before == "abs":
            value = w.emit(Abs(), value)
        if axes:
            value = w.emit(make(axes, bool(node.attributes.get("keepdims", 1))), value)
        if after:
            value = w.emit(Sqrt() if after == "sqrt" else Log(), value)
        return w.of(cast_to(w, value, u8, bool_) if x.dtype is bool_ else value)

    return handler


def _log_sum_exp(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ReduceLogSumExp, shifted by the largest element against overflow."""
    x = node.item(0)
    axes = axes_of(w, node, 1, x.ndim)
    value = w.tensor(x)
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        return w.of(w.emit(Log(), w.emit(Exp(), value)))
    axes = axes or tuple(range(x.ndim))
    limit = -x.dtype.lowest
    top = clip(w, w.emit(MaxOrLowest(axes, True), value), x.dtype, -limit, limit)
    total = w.emit(Sum(axes, True), w.emit(Exp(), w.emit(Sub(), value, top)))
    found = w.emit(Add(), w.emit(Log(), total), top)
    if not node.attributes.get("keepdims", 1):
        found = w.reshape(found, [d for p, d in enumerate(tensor_dims(found)) if p not in axes])
    return w.of(found)


def _extreme(makes: tuple[type[Reduce], type[Reduce]]) -> Handler:
    """Make a handler of a maximum or minimum. From version 20 on, and of bools, it has a value over no elements: `makes[1]`."""

    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        return reduced(makes[node.opset >= 20 or node.item(0).dtype is bool_])(w, node)  # type: ignore[return-value]

    return handler


def _global(make: Callable[[tuple[int, ...], bool], Reduce]) -> Handler:
    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        x = node.item(0)
        return w.of(w.emit(make(tuple(range(2, x.ndim)), True), w.tensor(x)))

    return handler


def _channels(w: Writer, item: ImportedValue, ndim: int) -> Value:
    """Reshape (c,) to (c, 1, ...), to broadcast along the positions."""
    return w.reshape(w.tensor(item), [item.shape[0], *[const(1)] * (ndim - 2)])


def _trained_batch_norm(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import batch normalisation in training: by the statistics of the batch, and the running ones moved towards them."""
    x, part = node.item(0), float(node.attributes.get("momentum", 0.9))
    work = f32 if x.dtype.is_half else x.dtype
    axes, value = (0, *range(2, x.ndim)), cast_to(w, w.tensor(x), x.dtype, work)
    mean = w.emit(Mean(axes, True), value)
    centred = w.emit(Sub(), value, mean)
    spread = w.emit(Mean(axes, False), w.emit(Mul(), centred, centred))
    mean = w.reshape(mean, [x.shape[1]])
    given = [cast_to(w, w.tensor(node.item(p)), node.item(p).dtype, work) for p in range(1, 5)]
    y = batch_norm(w, value, given[0], given[1], mean, spread, float(node.attributes.get("epsilon", 1e-5)))
    found = [w.of(cast_to(w, y, work, x.dtype))]
    for position, (old, new) in enumerate(zip(given[2:], (mean, spread), strict=True), 3):
        moved = w.emit(Add(), w.emit(MulScalar(part), old), w.emit(MulScalar(1 - part), new))
        found.append(w.of(cast_to(w, moved, work, node.item(position).dtype)))
    return [*found]


def _batch_norm(w: Writer, node: OnnxNode) -> ImportedValue | Sequence[ImportedValue | None]:
    if node.attributes.get("training_mode", 0):
        return _trained_batch_norm(w, node)
    if int(node.attributes.get("spatial", 1)) != 1:
        raise node.refuse("wanted statistics by channel (spatial 1), found those by element")
    if (node.version or 0) < 14 and any(node.wants(p) for p in range(1, 5)):
        raise node.refuse("wanted inference, found results of training; export the model for inference")
    x = node.item(0)
    gamma, beta, mean, var = (w.tensor(node.item(p)) for p in range(1, 5))
    eps = float(node.attributes.get("epsilon", 1e-5))
    return w.of(batch_norm(w, w.tensor(x), gamma, beta, mean, var, eps))


def _instance_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    return _grouped(w, node, node.item(0).shape[1])


def _group_norm(w: Writer, node: OnnxNode) -> ImportedValue:
    groups = int(node.attributes.get("num_groups", 0))
    channels = as_int(node.item(0).shape[1])
    if groups < 1 or channels is None or channels % groups:
        raise node.refuse(f"wanted num_groups that divides the channels, found {groups} of {node.item(0).shape[1]!r}")
    return _grouped(w, node, const(groups))


def _grouped(w: Writer, node: OnnxNode, groups: Expr) -> ImportedValue:
    x, eps = node.item(0), float(node.attributes.get("epsilon", 1e-5))
    scale, bias = (w.tensor(node.item(p)) for p in (1, 2))
    return w.of(group_norm(w, w.tensor(x), groups, scale, bias, eps))


def _gather(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return gather(w, x, axis_of(node, int(node.attributes.get("axis", 0)), x.ndim), node.item(1))


def _gather_elements(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return gather_elements(w, x, axis_of(node, int(node.attributes.get("axis", 0)), x.ndim), node.item(1))


def _gather_nd(w: Writer, node: OnnxNode) -> ImportedValue:
    if node.attributes.get("batch_dims", 0):
        raise node.refuse(f"wanted batch_dims 0, found {node.attributes['batch_dims']}")
    return gather_nd(w, node.item(0), node.item(1))


def _trilu(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Trilu: zero above or below a diagonal."""
    k = integers(w, node, 1)[0] if node.has(1) else 0
    return triangle(w, node.item(0), k, bool(node.attributes.get("upper", 1)))


def _eye_like(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import EyeLike: ones on the diagonal `k` places right of the main one, in the dims of a matrix."""
    x = node.item(0)
    number = int(node.attributes.get("dtype", 0))
    target = element_type(number, f"node {node.name!r}") if number else x.dtype
    rows, columns = (w.emit(Iota(d)) for d in x.shape)
    rows = w.emit(ExpandDims((1,)), w.emit(AddScalar(int(node.attributes.get("k", 0))), rows))
    return w.of(cast_to(w, w.emit(Equal(), rows, columns), bool_, target), target.is_int)


def _one_hot(w: Writer, node: OnnxNode) -> ImportedValue:
    indices, pair = node.item(0), node.item(2)
    count = literal_of(node.item(1))
    depth = expressions(w, node, 1)[0] if count is None else const(int(count))
    axis = axis_of(node, int(node.attributes.get("axis", -1)), indices.ndim + 1)
    whole = w.of(cast_to(w, w.tensor(indices), indices.dtype, i64), indices.natural and indices.dtype.is_int)
    # before version 11 an index below 0 is outside
    where = w.tensor(whole) if (node.version or 11) < 11 else natural_indices(w, whole, depth)
    where = w.emit(ExpandDims((axis,)), where)
    slots = w.reshape(w.emit(Iota(depth)), [depth, *[const(1)] * (indices.ndim - axis)])
    off, on = (w.reshape(slice_axis(w, w.tensor(pair), 0, const(p), const(p + 1)), []) for p in (0, 1))
    return w.of(w.emit(Where(), w.emit(Equal(), where, slots), on, off))


HANDLERS: Mapping[str, Handler] = {
    "MatMul": _matmul, "Gemm": _gemm, "Einsum": _einsum, "Softmax": rows(_softmax), "LogSoftmax": rows(_log_softmax),
    "LayerNormalization": _layer_norm,
    "ReduceSum": reduced(Sum), "ReduceMean": reduced(Mean), "ReduceMax": _extreme((Max, MaxOrLowest)),
    "ReduceMin": _extreme((Min, MinOrHighest)), "ReduceProd": reduced(Prod),
    "ReduceSumSquare": reduced(Sum, "square"), "ReduceL1": reduced(Sum, "abs"), "ReduceL2": reduced(Sum, "square", "sqrt"),
    "ReduceLogSum": reduced(Sum, "", "log"), "ReduceLogSumExp": _log_sum_exp, "GlobalAveragePool": _global(Mean),
    "GlobalMaxPool": _global(Max), "BatchNormalization": _batch_norm, "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Trilu": _trilu,
    "EyeLike": _eye_like, "OneHot": _one_hot,
}  # fmt: skip
