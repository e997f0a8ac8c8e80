"""ATen operators: matrix products, reductions, normalisations and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from relax_tune.ir.core.dtype import DType, bool_, f32, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import along_last_axis, cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.control.data_sizes import ordered
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, number_of
from relax_tune.ir.frontend.torch.select import first_of_all
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import ExpandDims
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    Exp,
    MaximumScalar,
    Mul,
    MulScalar,
    Rsqrt,
    Sqrt,
    Sub,
)
from relax_tune.ir.op.math.logic import NotEqual
from relax_tune.ir.op.math.numeric import Abs, Log, Power
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Max, MaxOrLowest, Mean, Min, MinOrHighest, Reduce, Softmax, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, CumSum, Prod, TopK


def _linear(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x @ W.T + bias`; a weight that only linear layers read is transposed to (in, out)."""
    x, weight, bias = n.item(0), n.item(1), n.given(2, "bias")
    value = w.tensor(x) if x.ndim > 1 else w.emit(ExpandDims((0,)), w.tensor(x))
    if weight.name in n.plain_weights and weight.ndim == 2:
        y = w.emit(Matmul(), value, w.transposed(weight))
    else:
        rows = w.tensor(weight) if weight.ndim > 1 else w.emit(ExpandDims((0,)), w.tensor(weight))
        y = w.emit(Matmul(transpose_b=True), value, rows)
    y = w.reshape(y, n.dims) if min(x.ndim, weight.ndim) < 2 else y
    return w.of(y if bias is None else w.emit(Add(), y, w.tensor(bias)))


def _matmul(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a matrix product, also of vectors."""
    a, b = w.tensor(n.item(0)), w.tensor(n.item(1))
    one_a, one_b = len(tensor_dims(a)) == 1, len(tensor_dims(b)) == 1
    a = w.emit(ExpandDims((0,)), a) if one_a else a
    b = w.emit(ExpandDims((1,)), b) if one_b else b
    return w.of(w.reshape(w.emit(Matmul(), a, b), n.dims))


def _einsum(w: Writer, n: TorchNode) -> ImportedValue:
    operands = n.items(1)
    return w.of(w.emit(Einsum(str(n.args[0])), *(as_value(w, i, n.dtype) for i in operands)))


def _addmm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `beta * bias + alpha * (a @ b)`, also of a vector `b`, or summed over the batch (addbmm).

    A bias times 0 does not count, also beside NaN."""
    bias, a, b = (w.tensor(n.item(p)) for p in range(3))
    beta, alpha = (number_of(n.given(p, name, 1)) for p, name in ((3, "beta"), (4, "alpha")))
    if beta is None or alpha is None:
        raise n.refuse("wanted alpha and beta as numbers")
    if len(tensor_dims(b)) == 1:
        y = w.reshape(w.emit(Matmul(), a, w.emit(ExpandDims((1,)), b)), n.dims)
    else:
        y = w.emit(Matmul(), a, b)
    y = w.emit(Sum((0,)), y) if n.op == "aten.addbmm.default" else y
    y = y if alpha == 1 else w.emit(MulScalar(alpha), y)
    if beta == 0:
        return w.of(y)
    bias = bias if beta == 1 else w.emit(MulScalar(beta), bias)
    return w.of(w.emit(Add(), y, bias))


def _trilinear(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the sum of products of three tensors, each with dims of 1 added."""
    parts = []
    for p in range(3):
        value = w.tensor(n.item(p))
        for axis in sorted(int(a) for a in n.args[3 + p]):
            value = w.emit(ExpandDims((axis,)), value)
        parts.append(value)
    both = w.emit(Mul(), w.emit(Mul(), parts[0], parts[1]), parts[2])
    axes = tuple(int(a) for a in n.args[6])
    return w.of(w.emit(Sum(axes), both) if axes else both)


def _plain_product(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(Matmul(), w.tensor(n.item(0)), w.tensor(n.item(1))))


# attention


def _attention(w: Writer, n: TorchNode) -> ImportedValue:
    """Import scaled dot-product attention; fully masked rows give 0, as in torch."""
    q, k, v = (w.tensor(n.item(p)) for p in range(3))
    mask, causal = n.given(3, "attn_mask"), bool(n.given(5, "is_causal", False))
    if number_of(n.given(4, "dropout_p", 0.0)):
        raise n.refuse("wanted inference (dropout_p 0); export the model in eval mode")
    scale = number_of(n.given(6, "scale"))
    if scale is None:
        width = as_int(tensor_dims(q)[-1])
        if width:
            scale = float(width**-0.5)
        else:  # a width that is a symbol scales the queries
            root = w.emit(Rsqrt(), cast_to(w, w.size(tensor_dims(q)[-1]), i64, f32))
            q, scale = cast_to(w, w.emit(Mul(), cast_to(w, q, n.dtype, f32), root), f32, n.dtype), 1.0
    truth = isinstance(mask, ImportedValue) and mask.dtype is bool_
    given = () if mask is None else (as_value(w, mask, bool_ if truth else n.dtype),)
    return w.of(w.emit(Attention(scale, causal), q, k, v, *given))


# rows


def _softmax(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_item(w, n.item(0), n.dtype)
    axis = n.axis(1, "dim", x.ndim)
    if not x.ndim:
        return w.of(w.full((), 1.0, n.dtype))
    return w.of(along_last_axis(w, w.tensor(x), axis, lambda v: w.emit(Softmax(), v)))


def _log_softmax(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_item(w, n.item(0), n.dtype)
    axis = (n.axis(1, "dim", x.ndim),)
    value = w.tensor(x)
    low = w.emit(Sub(), value, w.emit(MaxOrLowest(axis, True), value))
    return w.of(w.emit(Sub(), low, w.emit(Log(), w.emit(Sum(axis, True), w.emit(Exp(), low)))))


def _layer_norm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import layer normalisation over the last dims, as many as `normalized_shape` has."""
    x, count = n.item(0), len(n.args[1])
    tail = x.shape[x.ndim - count :]
    width = w.simplify(product(tail))
    eps = number_of(n.given(4, "eps", 1e-5))
    flat = w.tensor(x) if count == 1 else w.reshape(w.tensor(x), [*x.shape[: x.ndim - count], width])
    gamma, beta = (
        w.full((width,), plain, x.dtype) if given is None else w.reshape(w.tensor(given), [width])
        for given, plain in ((n.given(2, "weight"), 1.0), (n.given(3, "bias"), 0.0))
    )
    if eps is None:
        raise n.refuse("wanted eps as a number")
    found = w.emit(LayerNorm(float(eps)), flat, gamma, beta)
    return w.of(found if count == 1 else w.reshape(found, x.shape))


def _native_layer_norm(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    return [_layer_norm(w, n), None, None]


def _rms_norm(w: Writer, n: TorchNode) -> ImportedValue:
    x, count = n.item(0), len(n.args[1])
    given = number_of(n.given(3, "eps"))
    eps = x.dtype.epsilon if given is None else float(given)
    element = f32 if x.dtype.is_half else x.dtype  # squares of 16-bit floats overflow
    value = as_value(w, x, element)
    spread = w.emit(Mean(tuple(range(x.ndim - count, x.ndim)), True), w.emit(Mul(), value, value))
    y = w.emit(Mul(), value, w.emit(Rsqrt(), w.emit(AddScalar(eps), spread)))
    weight = n.given(2, "weight")
    y = y if weight is None else w.emit(Mul(), y, as_value(w, weight, element))
    return w.of(cast_to(w, y, element, n.dtype))


# reductions


def reduced(make: Callable[[tuple[int, ...], bool], Reduce], keep: int = 2, truth: bool = False) -> Handler:
    """Make a handler of a reduction over the axes of argument 1; all when it names none.

    keep: position of keepdim
    truth: operand is bool
    """

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x = n.item(0)
        axes = n.axes(1, "dim", x.ndim)
        kept = bool(n.given(keep, "keepdim", False)) if len(n.dims) == x.ndim else False
        if truth:
            value = w.emit(Cast(u8), as_value(w, x, bool_))
            return w.of(cast_to(w, w.emit(make(axes, kept), value), u8, bool_) if axes else as_value(w, x, bool_))
        if n.dtype is bool_ and axes:
            return w.of(cast_to(w, w.emit(make(axes, kept), cast_to(w, w.tensor(x), bool_, u8)), u8, bool_))
        value = as_value(w, x, n.dtype)
        return w.of(w.emit(make(axes, kept), value) if axes else value, x.natural)

    return handler


def _mean(w: Writer, n: TorchNode) -> ImportedValue:
    return reduced(Mean)(w, n)  # type: ignore[return-value]


def _variance(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the variance: squared differences from the mean, divided by the number of elements less the correction."""
    x = n.item(0)
    axes = n.axes(1, "dim", x.ndim)
    kept, correction = bool(n.kwargs.get("keepdim", False)), number_of(n.kwargs.get("correction", 1))
    element = f32 if x.dtype.is_half else x.dtype  # squares of 16-bit floats overflow
    value = as_value(w, x, element)
    centred = w.emit(Sub(), value, w.emit(Mean(axes, True), value))
    found = w.emit(Mean(axes, kept), w.emit(Mul(), centred, centred))
    if correction is None:
        raise n.refuse(f"wanted correction as a number, found {n.kwargs.get('correction')}")
    size = w.simplify(product([x.shape[a] for a in axes]))
    count = as_int(size)
    if correction and count is not None and count > correction:
        found = w.emit(MulScalar(count / (count - correction)), found)
    elif correction:
        found = w.emit(Mul(), found, _freedom(w, size, correction, element))
    return w.of(cast_to(w, found, element, n.dtype))


def _freedom(w: Writer, size: Expr, correction: float, element: DType) -> Value:
    """Return `size / max(size - correction, 0)`."""
    count = as_value(w, size, element)
    rest = w.emit(MaximumScalar(0.0), w.emit(AddScalar(-correction), count))
    return w.emit(Div(), count, rest)


def _variance_and_mean(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    axes, kept = n.axes(1, "dim", x.ndim), bool(n.kwargs.get("keepdim", False))
    return [_variance(w, n), w.of(w.emit(Mean(axes, kept), w.tensor(x)))]


def extreme(make: type[Max] | type[Min]) -> Handler:
    """Make a handler of (values, indices) along one axis."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue]:
        x = n.item(0)
        axis, kept = n.axis(1, "dim", x.ndim), bool(n.given(2, "keepdim", False))
        if not x.ndim:
            return first_of_all(w, x)
        value = ordered(w, x)
        where = w.emit(ArgMax(axis, make is Min), value)
        best = w.emit(make((axis,), kept), value)
        best = cast_to(w, best, u8, bool_) if x.dtype is bool_ else best
        return [w.of(best, x.natural), w.of(w.reshape(where, n.dims), True)]

    return handler


def arg(least: bool) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, given = n.item(0), n.given(1, "dim")
        if not x.ndim:
            return first_of_all(w, x)[1]
        if given is None:
            flat = w.reshape(w.tensor(x), [w.simplify(product(x.shape))])
            return w.of(w.reshape(w.emit(ArgMax(0, least), flat), n.dims), True)
        found = w.emit(ArgMax(n.axis(1, "dim", x.ndim), least), w.tensor(x))
        return w.of(w.reshape(found, n.dims), True)

    return handler


def _top_k(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x, k = n.item(0), n.number(1, "k")
    if not x.ndim and k == 1:
        return first_of_all(w, x)
    axis = n.axis(2, "dim", x.ndim, -1)
    value = w.tensor(x)
    where = w.emit(TopK(const(k), axis, bool(n.given(3, "largest", True))), ordered(w, x))
    return [w.of(w.emit(GatherElements(axis), value, where), x.natural), w.of(where, True)]


def _cumsum(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_item(w, n.item(0), n.dtype)
    return w.of(w.emit(CumSum(n.axis(1, "dim", x.ndim)), w.tensor(x)), x.natural) if x.ndim else x


def _norm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the norm of an order: extremes for infinite ones, the number of elements that are not 0 for 0."""
    x = n.item(0)
    element = f32 if n.dtype.is_half else n.dtype
    value, kept = as_value(w, x, element), bool(n.given(3, "keepdim", False))
    return _norm_of(w, n, value, n.given(1, "ord", 2), n.axes(2, "dim", x.ndim), kept)


def _distance(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the norm of a difference."""
    element = f32 if n.dtype.is_half else n.dtype
    value = w.emit(Sub(), as_value(w, n.item(0), element), as_value(w, n.item(1), element))
    return _norm_of(w, n, value, n.given(2, "p", 2), tuple(range(len(tensor_dims(value)))), False)


def _norm_of(w: Writer, n: TorchNode, value: Value, given: Any, axes: tuple[int, ...], kept: bool) -> ImportedValue:
    order, element = number_of(given), f32 if n.dtype.is_half else n.dtype
    if order is None:
        raise n.refuse(f"wanted the order as a number, found {given}")
    if not axes:
        value, axes, kept = w.reshape(value, [const(1)]), (0,), False
    if order == 2:
        found = w.emit(Sqrt(), w.emit(Sum(axes, kept), w.emit(Mul(), value, value)))
    elif order == 0:
        found = w.emit(Sum(axes, kept), w.emit(Cast(element), w.emit(NotEqual(), value, w.literal(0, element))))
    elif math.isinf(order):
        found = w.emit((Max if order > 0 else Min)(axes, kept), w.emit(Abs(), value))
    else:
        size = w.emit(Abs(), value)
        powers = size if order == 1 else w.emit(Power(), size, w.literal(order, element))
        found = w.emit(Sum(axes, kept), powers)
        found = found if order == 1 else w.emit(Power(), found, w.literal(1 / order, element))
    return w.of(cast_to(w, found, element, n.dtype))


HANDLERS: Mapping[str, Handler] = {
    "aten.linear.default": _linear, "aten.matmul.default": _matmul, "aten.bmm.default": _matmul, "aten.mm.default": _plain_product,
    "aten.einsum.default": _einsum,
    "aten.addmm.default": _addmm, "aten.baddbmm.default": _addmm, "aten.addmv.default": _addmm,
    "aten.addbmm.default": _addmm, "aten._trilinear.default": _trilinear, "aten.scaled_dot_product_attention.default": _attention,
    "aten.softmax.int": _softmax, "aten._softmax.default": _softmax, "aten._safe_softmax.default": _softmax,
    "aten.log_softmax.int": _log_softmax, "aten._log_softmax.default": _log_softmax, "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _native_layer_norm, "aten.rms_norm.default": _rms_norm,
    "aten.sum.dim_IntList": reduced(Sum), "aten.sum.default": reduced(Sum), "aten.mean.dim": _mean, "aten.mean.default": _mean,
    "aten.amax.default": reduced(Max), "aten.amin.default": reduced(Min),
    "aten.max.default": reduced(Max), "aten.min.default": reduced(Min), "aten.prod.dim_int": reduced(Prod),
    "aten.prod.default": reduced(Prod), "aten.any.dim": reduced(MaxOrLowest, truth=True), "aten.any.dims": reduced(MaxOrLowest, truth=True),
    "aten.any.default": reduced(MaxOrLowest, truth=True), "aten.all.dim": reduced(MinOrHighest, truth=True),
    "aten.all.default": reduced(MinOrHighest, truth=True), "aten.var.correction": _variance,
    "aten.var_mean.correction": _variance_and_mean, "aten.max.dim": extreme(Max),
    "aten.min.dim": extreme(Min), "aten.argmax.default": arg(False), "aten.argmin.default": arg(True),
    "aten.topk.default": _top_k, "aten.cumsum.default": _cumsum, "aten.linalg_vector_norm.default": _norm,
    "aten.dist.default": _distance,
}  # fmt: skip
