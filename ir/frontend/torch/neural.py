"""ATen matrix products, normalisations and attention.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, add, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.linalg import determinant, sign_and_log_determinant
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.handlers.neural import (
    group_norm,
    inferred_batch_norm,
    layer_norm,
    log_softmax,
    matmul,
    moments,
    per_channel,
    scaled_queries,
    softmax,
)
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, with_attributes
from relax_tune.ir.op.base import product
from relax_tune.ir.op.math.elementwise import Add, Mul
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul


def _linear(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x @ W.T + bias`; a weight that only linear layers read is transposed to (in, out)."""
    x, weight, bias = n.item(0), n.item(1), n.argument(2, "bias")
    value = w.tensor(x) if x.ndim > 1 else w.expand_dims(w.tensor(x), (0,))
    # Another reader needs the weight as it is stored, and two copies would take twice the memory.
    if weight.name in n.plain_weights and weight.ndim == 2:
        y = w.matmul(value, w.transposed(weight))
    else:
        rows = w.tensor(weight) if weight.ndim > 1 else w.expand_dims(w.tensor(weight), (0,))
        y = w.emit(Matmul(transpose_b=True), value, rows)
    y = w.reshape(y, n.dims) if min(x.ndim, weight.ndim) < 2 else y
    return w.of(y if bias is None else w.add(y, w.tensor(bias)))


def _einsum(w: Writer, n: TorchNode) -> ImportedValue:
    operands = n.items(1)
    return w.of(w.emit(Einsum(str(n.args[0])), *(as_value(w, i, n.dtype) for i in operands)))


def _addmm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `beta * bias + alpha * (a @ b)`, also of a vector `b`, or summed over the batch (addbmm).

    A bias times 0 does not count, even if it is NaN."""
    bias, a, b = (w.tensor(n.item(p)) for p in range(3))
    beta, alpha = (number_of(n.argument(p, name, 1)) for p, name in ((3, "beta"), (4, "alpha")))
    if beta is None or alpha is None:
        raise n.refuse("expected alpha and beta as numbers")
    if len(tensor_dims(b)) == 1:
        y = w.reshape(w.matmul(a, w.expand_dims(b, (1,))), n.dims)
    else:
        y = w.matmul(a, b)
    y = w.sum(y, (0,)) if n.op == "aten.addbmm.default" else y
    y = y if alpha == 1 else w.mul(y, alpha)
    # As in BLAS: the bias is not read then, so that NaN in it does not count.
    if beta == 0:
        return w.of(y)
    bias = bias if beta == 1 else w.mul(bias, beta)
    return w.of(w.add(y, bias))


def _trilinear(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the sum of products of three tensors, each with dims of 1 added."""
    parts = []
    for p in range(3):
        value = w.tensor(n.item(p))
        for axis in sorted(int(a) for a in n.args[3 + p]):
            value = w.expand_dims(value, (axis,))
        parts.append(value)
    both = w.mul(w.mul(parts[0], parts[1]), parts[2])
    axes = tuple(int(a) for a in n.args[6])
    return w.of(w.sum(both, axes) if axes else both)


# attention


def _attention(w: Writer, n: TorchNode) -> ImportedValue:
    """Import scaled dot-product attention; fully masked rows give 0, as in torch."""
    q, k, v = (w.tensor(n.item(p)) for p in range(3))
    mask, causal = n.optional(3), bool(n.argument(5, "is_causal", False))
    if number_of(n.argument(4, "dropout_p", 0.0)):
        raise n.refuse("expected inference (dropout_p 0); export the model in eval mode")
    q, scale = scaled_queries(w, q, number_of(n.argument(6, "scale")))
    masks = [] if mask is None else [as_value(w, mask, bool_ if mask.dtype is bool_ else n.dtype)]
    return w.of(w.emit(Attention(scale, causal), q, k, v, *masks))


# normalisations


def _layer_norm(w: Writer, n: TorchNode) -> ImportedValue:
    """Import layer normalisation over the last dims, as many as `normalized_shape` has."""
    x = n.item(0)
    return w.of(layer_norm(w, x, x.ndim - len(n.args[1]), n.optional(2), n.optional(3), n.real("epsilon", 1e-5)))


def _native_layer_norm(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import layer normalisation, the mean, and the inverse of the standard deviation, of the type of computation."""
    x = n.item(0)
    axes = tuple(range(x.ndim - len(n.args[1]), x.ndim))
    mean, _, variance = moments(w, w.cast(w.tensor(x), work_type(x.dtype)), axes)
    inverse = w.rsqrt(w.add(variance, n.real("epsilon", 1e-5)))
    kinds = [
        info.dtype if info is not None and info.dtype is not None else work_type(x.dtype) for info in n.results[1:]
    ]
    return [_layer_norm(w, n), *(w.of(w.cast(v, kind)) for v, kind in zip((mean, inverse), kinds, strict=True))]


def _rms_norm(w: Writer, n: TorchNode) -> ImportedValue:
    x, count = n.item(0), len(n.args[1])
    eps = n.real("epsilon", x.dtype.epsilon)
    element = work_type(x.dtype)  # squares of 16-bit floats overflow
    value = as_value(w, x, element)
    mean_square = w.mean(w.mul(value, value), tuple(range(x.ndim - count, x.ndim)), True)
    y = w.mul(value, w.rsqrt(w.add(mean_square, eps)))
    weight = n.argument(2, "weight")
    y = y if weight is None else w.mul(y, as_value(w, weight, element))
    return w.of(w.cast(y, n.dtype))


def _grouped(w: Writer, n: TorchNode, groups: Expr) -> list[ImportedValue | None]:
    """Import a normalisation over the channels of a group and all dims after them, with weights by channel."""
    x, gamma, beta = n.item(0), n.optional(1), n.optional(2)
    element = work_type(x.dtype)  # squares of 16-bit floats overflow
    scale, shift = (None if item is None else as_value(w, item, element) for item in (gamma, beta))
    y = group_norm(w, as_value(w, x, element), groups, scale, shift, n.real("epsilon"))
    return [w.of(w.cast(y, x.dtype)), None, None]


def _group_norm(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    return _grouped(w, n, const(n.number(6, "group")))


def _batch_norm_without_statistics(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import batch normalisation by the statistics of x itself, as instance normalisation uses it."""
    x = n.item(0)
    # With one row, the statistics of a channel are a norm of groups of one channel.
    if as_int(x.shape[0]) == 1:
        return _grouped(w, n, x.shape[1])
    return [_by_own_statistics(w, n)[0], None, None]


def _by_own_statistics(w: Writer, n: TorchNode) -> tuple[ImportedValue, Value, Value]:
    """Return batch normalisation by the statistics of x itself; their mean and variance, with dims of 1."""
    x = n.item(0)
    element = work_type(x.dtype)
    mean, centred, variance = moments(w, as_value(w, x, element), (0, *range(2, x.ndim)))
    y = w.mul(centred, w.rsqrt(w.add(variance, n.real("epsilon"))))
    for item, op in ((n.optional(1), Mul()), (n.optional(2), Add())):
        y = y if item is None else w.emit(op, y, per_channel(w, as_value(w, item, element), x.ndim))
    return w.of(w.cast(y, x.dtype)), mean, variance


def _batch_norm_with_statistics(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import batch normalisation in training: the statistics of x, and the running ones moved towards them by the momentum."""
    if n.argument(5, "training", True) is False:
        return [*inferred_batch_norm(w, n), n.item(3), n.item(4)]
    x, momentum = n.item(0), number_of(n.argument(6, "momentum", 0.1))
    if momentum is None:
        raise n.refuse("expected momentum as a number; give BatchNorm a momentum")
    y, mean, variance = _by_own_statistics(w, n)
    element, count = work_type(x.dtype), w.simplify(product((x.shape[0], *x.shape[2:])))
    freedom = w.cast(w.size(w.simplify(add(count, -1))), element)
    # The running variance of torch is the unbiased one, divided by n - 1; the norm itself divides by n.
    unbiased = w.div(w.mul(variance, w.cast(w.size(count), element)), freedom)
    moved = []
    for position, value in ((3, mean), (4, unbiased)):
        running = n.item(position)
        step = w.mul(w.reshape(value, running.shape), float(momentum))
        moved.append(
            w.of(w.cast(w.add(w.mul(as_value(w, running, element), 1 - float(momentum)), step), running.dtype))
        )
    return [y, None, None, *moved]


def _log_determinant(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    return [*map(w.of, sign_and_log_determinant(w, n.operand(w, 0))), None, None]


HANDLERS: Mapping[str, Handler] = {
    "aten._linalg_det.default": lambda w, n: [w.of(determinant(w, n.operand(w, 0))), None, None],
    "aten._linalg_slogdet.default": _log_determinant, "aten.linear.default": _linear, "aten.matmul.default": matmul,
    "aten.bmm.default": matmul,
    "aten.mm.default": matmul, "aten.einsum.default": _einsum, "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm, "aten.addmv.default": _addmm, "aten.addbmm.default": _addmm,
    "aten._trilinear.default": _trilinear, "aten.scaled_dot_product_attention.default": _attention,
    **dict.fromkeys(
        ("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default"), with_attributes(softmax, axis=(1, "dim"))
    ),
    **dict.fromkeys(("aten.log_softmax.int", "aten._log_softmax.default"), with_attributes(log_softmax, axis=(1, "dim"))),
    "aten.layer_norm.default": with_attributes(_layer_norm, epsilon=(4, "eps")),
    "aten.native_layer_norm.default": with_attributes(_native_layer_norm, epsilon=(4, "eps")),
    "aten.rms_norm.default": with_attributes(_rms_norm, epsilon=(3, "eps")),
    "aten._native_batch_norm_legit_no_training.default": with_attributes(inferred_batch_norm, epsilon=(6, "eps")),
    "aten.native_group_norm.default": with_attributes(_group_norm, epsilon=(7, "eps")),
    "aten._native_batch_norm_legit_functional.default": with_attributes(_batch_norm_with_statistics, epsilon=(7, "eps")),
    "aten._native_batch_norm_legit.no_stats": with_attributes(_batch_norm_without_statistics, epsilon=(5, "eps")),
}  # fmt: skip
