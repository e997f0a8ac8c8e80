"""Matrix products, normalisations and attention of both formats.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

from relax_tune.ir.core.expr import Expr, as_int, const, floordiv
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.node import Node
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax


def matmul(w: Writer, n: Node) -> ImportedValue:
    """Import a matrix product, also of vectors."""
    a, b = w.tensor(n.item(0)), w.tensor(n.item(1))
    row, column = len(tensor_dims(a)) == 1, len(tensor_dims(b)) == 1
    y = w.matmul(w.expand_dims(a, (0,)) if row else a, w.expand_dims(b, (1,)) if column else b)
    dims = list(tensor_dims(y))
    if column:
        del dims[-1]
    if row:
        del dims[len(dims) - (1 if column else 2)]
    return w.of(w.reshape(y, dims))


def along_last_axis(w: Writer, x: Value, axis: int, write: Callable[[Value], Value]) -> Value:
    """Apply a row operator along any axis."""
    n = len(tensor_dims(x))
    order = [*(p for p in range(n) if p != axis), axis]
    return w.permute(write(w.permute(x, order)), [order.index(p) for p in range(n)])


def softmax(w: Writer, n: Node) -> ImportedValue:
    x = n.typed(w, 0)
    axis = n.axis(x.ndim)
    if not x.ndim:
        return w.of(w.full((), 1.0, x.dtype))
    return w.of(along_last_axis(w, w.tensor(x), axis, lambda v: w.emit(Softmax(), v)))


def log_softmax(w: Writer, n: Node) -> ImportedValue:
    x = n.typed(w, 0)
    value, axes = w.tensor(x), (n.axis(x.ndim),)
    low = w.sub(value, w.max_or_lowest(value, axes, True))
    return w.of(w.sub(low, w.log(w.sum(w.exp(low), axes, True))))


def layer_norm(
    w: Writer, x: ImportedValue, axis: int, gamma: ImportedValue | None, beta: ImportedValue | None, eps: float
) -> Value:
    """Emit layer normalisation (Ba et al. 2016) over the dims from `axis` on, with weights that broadcast to them."""
    tail = x.shape[axis:]
    width = w.simplify(product(tail))
    rows = w.tensor(x) if len(tail) == 1 else w.reshape(w.tensor(x), [*x.shape[:axis], width])
    weights = [
        w.full((width,), neutral, x.dtype) if item is None else w.reshape(w.broadcast(w.tensor(item), tail), [width])
        for item, neutral in ((gamma, 1.0), (beta, 0.0))
    ]
    return w.reshape(w.emit(LayerNorm(eps), rows, *weights), x.shape)


def moments(w: Writer, x: Value, axes: tuple[int, ...], keepdims: bool = True) -> tuple[Value, Value, Value]:
    """Emit the mean, with axes of 1, the differences from it, and the variance: the mean of their squares.

    The mean of the squares minus the square of the mean would cancel.
    """
    mean = w.mean(x, axes, True)
    centred = w.sub(x, mean)
    return mean, centred, w.mean(w.mul(centred, centred), axes, keepdims)


def per_channel(w: Writer, value: Value, ndim: int) -> Value:
    """Reshape (channels,) to broadcast against (batch, channels, dims...) of `ndim` dims."""
    return w.reshape(value, [tensor_dims(value)[0], *[const(1)] * (ndim - 2)])


def batch_norm(
    w: Writer, x: Value, gamma: Value | None, beta: Value | None, mean: Value, var: Value, eps: float
) -> Value:
    """Emit batch normalisation at inference (Ioffe and Szegedy 2015): one factor and one summand for each channel."""
    scale = w.rsqrt(w.add(var, eps))
    scale = scale if gamma is None else w.mul(scale, gamma)
    shift = w.mul(w.mul(mean, scale), -1.0)
    shift = shift if beta is None else w.add(beta, shift)
    ndim = len(tensor_dims(x))
    return w.add(w.mul(x, per_channel(w, scale, ndim)), per_channel(w, shift, ndim))


def inferred_batch_norm(w: Writer, n: Node) -> list[Union[ImportedValue, None]]:
    """Import batch normalisation at inference. Arguments: x, weight, bias, mean, variance."""
    x = n.item(0)
    element = work_type(x.dtype)
    given = (n.optional(1), n.optional(2), n.item(3), n.item(4))
    gamma, beta, mean, var = (None if item is None else w.cast(w.tensor(item), element) for item in given)
    assert mean is not None and var is not None
    y = batch_norm(w, w.cast(w.tensor(x), element), gamma, beta, mean, var, n.real("epsilon", 1e-5))
    return [w.of(w.cast(y, x.dtype)), None, None]


def group_norm(w: Writer, x: Value, groups: Expr, gamma: Value | None, beta: Value | None, eps: float) -> Value:
    """Emit group normalisation (Wu and He 2018) of (batch, channels, dims...), with as many groups as channels of instances.

    Args:
        gamma, beta: Weights (channels,), or None.
    """
    dims = tensor_dims(x)
    each = w.simplify(floordiv(dims[1], groups))

    def weight(value: Value | None, neutral: float) -> Value:
        if value is None:
            return w.full([const(1)], neutral, element_of(x))
        return w.reshape(value, [groups, each, const(1)])

    grouped = w.reshape(x, [dims[0], groups, each, product(dims[2:])])
    return w.reshape(w.emit(LayerNorm(eps, 2), grouped, weight(gamma, 1.0), weight(beta, 0.0)), dims)


def scaled_queries(w: Writer, q: Value, scale: float | None) -> tuple[Value, float]:
    """Return queries and the scale of their scores: by default the inverse root of their width.

    A width that is a symbol scales the queries themselves.
    """
    width = tensor_dims(q)[-1]
    size = as_int(width)
    if scale is not None or size:
        return q, float((size or 1) ** -0.5 if scale is None else scale)
    element = work_type(element_of(q))
    root = w.rsqrt(w.cast(w.size(width), element))
    return w.cast(w.mul(w.cast(q, element), root), element_of(q)), 1.0
