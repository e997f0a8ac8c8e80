"""ATen convolutions, pooling and batch normalisation: padding, then windows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import pad
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim, number_of
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, MulScalar, Rsqrt, Sub
from relax_tune.ir.op.neural.window import Conv, Pool


def _sizes(n: TorchNode, position: int, name: str, default: int, axes: int) -> tuple[int, ...]:
    """Return a number for each of the last `axes` dims, given once or one by one."""
    given = n.given(position, name, None) or [default] * axes
    found = [as_int(dim(g)) for g in (given if isinstance(given, list) else [given])]
    known = [f for f in found if f is not None]
    if len(known) != len(found) or len(known) not in (1, axes):
        raise n.refuse(f"wanted {name} as {axes} numbers, found {given}")
    return tuple(known * axes if len(known) == 1 else known)


def _padded(w: Writer, x: ImportedValue, pads: tuple[int, ...], fill: float) -> Value:
    return pad(w, w.tensor(x), [(0, 0)] * (x.ndim - len(pads)) + [(p, p) for p in pads], fill)


def _per_channel(w: Writer, value: Value, x: ImportedValue) -> Value:
    """Reshape (channels,) to broadcast against (batch, channels, dims...)."""
    ones: list[Expr] = [const(1)] * (x.ndim - 2)
    return w.reshape(value, [x.shape[1], *ones])


def _convolution(w: Writer, n: TorchNode) -> ImportedValue:
    x, weight, bias = n.item(0), n.item(1), n.given(2, "bias")
    axes = x.ndim - 2
    if n.given(6, "transposed", False):
        raise n.refuse("wanted a convolution, found a transposed one")
    strides, pads, dilations = (
        _sizes(n, p, name, default, axes)
        for p, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = n.number(8, "groups", 1)
    y = w.of(w.emit(Conv(strides, dilations, groups), _padded(w, x, pads, 0.0), w.tensor(weight)))
    return y if bias is None else w.of(w.emit(Add(), w.tensor(y), _per_channel(w, as_value(w, bias, n.dtype), y)))


def _pool(w: Writer, n: TorchNode, x: ImportedValue, ceil: int, dilations: tuple[int, ...], largest: bool) -> Value:
    axes = len(dilations)
    kernel = _sizes(n, 1, "kernel_size", 1, axes)
    strides = _sizes(n, 2, "stride", 1, axes) if n.given(2, "stride", None) else kernel
    if n.given(ceil, "ceil_mode", False):
        raise n.refuse("wanted whole windows (ceil_mode false)")
    if x.ndim != axes + 2:
        raise n.refuse(f"wanted (batch, channels, {axes} dims), found {x.info!r}")
    fill = -math.inf if largest else 0.0
    return w.emit(Pool(kernel, strides, dilations, largest), _padded(w, x, _sizes(n, 3, "padding", 0, axes), fill))


def _max_pool(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    x = n.item(0)
    return [w.of(_pool(w, n, x, 5, _sizes(n, 4, "dilation", 1, 2), True)), None]


def _average_pool(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    if n.given(6, "divisor_override") is not None or not (
        n.given(5, "count_include_pad", True) or not any(_sizes(n, 3, "padding", 0, 2))
    ):
        raise n.refuse("wanted windows divided by their size, padding counted")
    kernel = _sizes(n, 1, "kernel_size", 1, 2)
    return w.of(w.emit(MulScalar(1 / math.prod(kernel)), _pool(w, n, x, 4, (1, 1), False)))


def _batch_norm(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import batch normalisation at inference: `(x - mean) / sqrt(var + eps) * weight + bias`, by channel."""
    x, eps = n.item(0), number_of(n.given(6, "eps", 1e-5))
    if eps is None:
        raise n.refuse("wanted eps as a number")
    scale = w.emit(Rsqrt(), w.emit(AddScalar(eps), w.tensor(n.item(4))))
    weight, bias = n.given(1, "weight"), n.given(2, "bias")
    scale = scale if weight is None else w.emit(Mul(), scale, w.tensor(weight))
    centred = w.emit(Sub(), w.tensor(x), _per_channel(w, w.tensor(n.item(3)), x))
    y = w.emit(Mul(), centred, _per_channel(w, scale, x))
    return [w.of(y if bias is None else w.emit(Add(), y, _per_channel(w, w.tensor(bias), x))), None, None]


HANDLERS: Mapping[str, Handler] = {
    "aten.convolution.default": _convolution, "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.avg_pool2d.default": _average_pool, "aten._native_batch_norm_legit_no_training.default": _batch_norm,
}  # fmt: skip
