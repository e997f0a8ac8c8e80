"""ATen convolutions, pooling and batch normalisation: padding, then windows."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.expr import Expr, add, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared import windows
from relax_tune.ir.frontend.shared.compositions import pad
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim, number_of
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, Rsqrt, Sub
from relax_tune.ir.op.neural.window import Conv


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
    strides, pads, dilations = (
        _sizes(n, p, name, default, axes)
        for p, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = n.number(8, "groups", 1)
    if n.given(6, "transposed", False):
        before = [const(p) for p in pads]
        y = w.of(windows.transposed(w, x, weight, strides, dilations, groups, before, n.dims[2:]))
    else:
        y = w.of(w.emit(Conv(strides, dilations, groups), _padded(w, x, pads, 0.0), w.tensor(weight)))
    return y if bias is None else w.of(w.emit(Add(), w.tensor(y), _per_channel(w, as_value(w, bias, n.dtype), y)))


class _Windows:
    """Attributes of pooling over `axes` dims; an image without a batch gets one of 1."""

    def __init__(self, w: Writer, n: TorchNode, axes: int, ceil: int, dilations: tuple[int, ...]) -> None:
        x = n.item(0)
        if x.ndim not in (axes + 1, axes + 2):
            raise n.refuse(f"wanted (batch, channels, {axes} dims), found {x.info!r}")
        self.x = x if x.ndim == axes + 2 else w.of(w.reshape(w.tensor(x), [const(1), *x.shape]), x.natural)
        self.kernel = _sizes(n, 1, "kernel_size", 1, axes)
        self.strides = _sizes(n, 2, "stride", 1, axes) if n.given(2, "stride", None) else self.kernel
        self.dilations = dilations
        self.pads = [(const(p), const(p)) for p in _sizes(n, 3, "padding", 0, axes)]
        self.extra = [
            w.simplify(windows.beyond(size, pair, windows.reach(const(k), d), s))
            if n.given(ceil, "ceil_mode", False) else const(0)
            for size, pair, k, d, s in zip(self.x.shape[2:], self.pads, self.kernel, dilations, self.strides)
        ]  # fmt: skip

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, strides and dilations."""
        return self.kernel, self.strides, self.dilations


def _max_pool(axes: int) -> Handler:
    def handler(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
        own = _Windows(w, n, axes, 5, _sizes(n, 4, "dilation", 1, axes))
        pads = [(a, w.simplify(add(b, e))) for (a, b), e in zip(own.pads, own.extra)]
        top = windows.max_pool(w, own.x, *own.sizes, pads)
        where = windows.positions(w, own.x, top, *own.sizes, own.pads)
        return [w.of(w.reshape(top, n.dims), own.x.natural), w.of(w.reshape(where, n.dims), True)]

    return handler


def _average_pool(axes: int) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        own = _Windows(w, n, axes, 4, (1,) * axes)
        divisor = n.given(6, "divisor_override")
        by = None if divisor is None else n.number(6, "divisor_override")
        counted = bool(n.given(5, "count_include_pad", True))
        return w.of(w.reshape(windows.average_pool(w, own.x, own.sizes, own.pads, own.extra, counted, by), n.dims))

    return handler


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
    "aten.convolution.default": _convolution, "aten.max_pool2d_with_indices.default": _max_pool(2),
    "aten.max_pool3d_with_indices.default": _max_pool(3), "aten.avg_pool1d.default": _average_pool(1),
    "aten.avg_pool2d.default": _average_pool(2), "aten.avg_pool3d.default": _average_pool(3),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
}  # fmt: skip
