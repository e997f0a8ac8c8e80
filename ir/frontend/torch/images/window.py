"""ATen convolutions and pooling (padding, then windows), normalisation by batch and by group."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, ge, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared import windows
from relax_tune.ir.frontend.shared.compositions import batch_norm, cast_to, group_norm, pad, take
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim, number_of
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import ExpandDims
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Minimum, Mul, Rsqrt, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, Where
from relax_tune.ir.op.math.numeric import Quotient
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.reduce import Mean, Sum
from relax_tune.ir.op.reduction.scan import ArgMax


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
    gamma, beta = (None if v is None else w.tensor(v) for v in (n.given(1, "weight"), n.given(2, "bias")))
    y = batch_norm(w, w.tensor(x), gamma, beta, w.tensor(n.item(3)), w.tensor(n.item(4)), eps)
    return [w.of(y), None, None]


def _grouped_norm(w: Writer, n: TorchNode, groups: Expr, eps: object) -> Value:
    """Import a normalisation over the channels of a group and all dims behind them, with weights by channel."""
    x, width = n.item(0), number_of(eps)
    if width is None:
        raise n.refuse("wanted eps as a number")
    element = f32 if x.dtype.is_half else x.dtype  # squares of 16-bit floats overflow
    gamma, beta = (
        None if given is None else as_value(w, given, element) for given in (n.given(1, "weight"), n.given(2, "bias"))
    )
    return cast_to(w, group_norm(w, as_value(w, x, element), groups, gamma, beta, width), element, x.dtype)


def _group_norm(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    return [w.of(_grouped_norm(w, n, const(n.number(6, "group")), n.args[7])), None, None]


def _own_batch_norm(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import batch normalisation by the statistics of x itself, as instance normalisation uses it."""
    x, eps = n.item(0), number_of(n.args[5])
    if as_int(x.shape[0]) == 1:
        return [w.of(_grouped_norm(w, n, x.shape[1], n.args[5])), None, None]
    if eps is None:
        raise n.refuse("wanted eps as a number")
    element, axes = f32 if x.dtype.is_half else x.dtype, (0, *range(2, x.ndim))
    value = as_value(w, x, element)
    centred = w.emit(Sub(), value, w.emit(Mean(axes, True), value))
    spread = w.emit(Mean(axes, True), w.emit(Mul(), centred, centred))
    y = w.emit(Mul(), centred, w.emit(Rsqrt(), w.emit(AddScalar(eps), spread)))
    for given, op in ((n.given(1, "weight"), Mul()), (n.given(2, "bias"), Add())):
        y = y if given is None else w.emit(op, y, _per_channel(w, as_value(w, given, element), x))
    return [w.of(cast_to(w, y, element, x.dtype)), None, None]


def _adaptive_average(axes: int) -> Handler:
    """Make a handler of means over windows that divide a dim.

    Window `i` of `count` goes from `i * size / count`, rounded down, to `(i + 1) * size / count`, rounded up."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, element = n.item(0), f32 if n.dtype.is_half else n.dtype
        value = as_value(w, x, element)
        for axis, count in zip(range(x.ndim - axes, x.ndim), n.dims[x.ndim - axes :]):
            size = x.shape[axis]
            if not w.require(ge(size, 1)):
                raise n.refuse("wanted dims of at least 1 element, found none")
            i, places, many = w.emit(Iota(count)), w.emit(Iota(size)), w.size(count)
            scaled = w.emit(Mul(), i, w.size(size))
            begin = w.emit(Quotient(), scaled, many)
            end = w.emit(Quotient(), w.emit(Add(), scaled, w.size(w.simplify(sub(add(size, count), 1)))), many)
            inside = w.emit(
                LogicalAnd(),
                w.emit(LessEqual(), w.emit(ExpandDims((1,)), begin), places),
                w.emit(Less(), places, w.emit(ExpandDims((1,)), end)),
            )
            ones: list[Expr] = [const(1)] * (x.ndim - 1 - axis)
            kept = w.emit(
                Where(),
                w.reshape(inside, [count, size, *ones]),
                w.emit(ExpandDims((axis,)), value),
                w.literal(0, element),
            )
            number = w.reshape(w.emit(Cast(element), w.emit(Sub(), end, begin)), [count, *ones])
            value = w.emit(Div(), w.emit(Sum((axis + 1,), False), kept), number)
        return w.of(cast_to(w, value, element, n.dtype))

    return handler


def _adaptive_max(axes: int) -> Handler:
    """Make a handler of (values, places) of the largest elements of windows that divide a dim, along one axis after the other.

    Window `i` of `count` goes from `i * size / count`, rounded down, to `(i + 1) * size / count`, rounded up."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
        x = n.item(0)
        value, where = w.tensor(x), None
        for axis in range(x.ndim - 1, x.ndim - 1 - axes, -1):
            size, count = x.shape[axis], n.dims[axis]
            if not w.require(ge(size, 1)):
                raise n.refuse("wanted dims of at least 1 element, found none")
            most = w.simplify(add(floordiv(sub(add(size, count), 1), count), 1))
            scaled, many = w.emit(Mul(), w.emit(Iota(count)), w.size(size)), w.size(count)
            begin = w.emit(Quotient(), scaled, many)
            end = w.emit(Quotient(), w.emit(Add(), scaled, w.size(w.simplify(sub(add(size, count), 1)))), many)
            places = w.emit(Add(), w.emit(ExpandDims((1,)), begin), w.emit(Iota(most)))
            # behind the last element of a window stands that again
            places = w.emit(Minimum(), places, w.emit(AddScalar(-1), w.emit(ExpandDims((1,)), end)))
            ones: list[Expr] = [const(1)] * (x.ndim - 1 - axis)
            found = take(w, value, axis, places)
            best = w.emit(ArgMax(axis + 1), found)
            best = w.emit(Add(), best, w.reshape(begin, [count, *ones]))
            if x.dtype.is_float:  # of several NaN the last
                end = w.reshape(w.emit(AddScalar(-1), end), [count, *ones])
                last = w.emit(Add(), w.emit(ArgMax(axis + 1, last=True), found), w.reshape(begin, [count, *ones]))
                top = w.emit(GatherElements(axis), value, best)
                best = w.emit(Where(), w.emit(Equal(), top, top), best, w.emit(Minimum(), last, end))
            value = w.emit(GatherElements(axis), value, best)
            if where is None:
                where = best
            else:
                behind = w.simplify(product(x.shape[axis + 1 :]))
                where = w.emit(Add(), w.emit(GatherElements(axis), where, best), w.emit(Mul(), best, w.size(behind)))
        assert where is not None
        return [w.of(value, x.natural), w.of(where, True)]

    return handler


HANDLERS: Mapping[str, Handler] = {
    "aten.convolution.default": _convolution, "aten.max_pool2d_with_indices.default": _max_pool(2),
    "aten.max_pool3d_with_indices.default": _max_pool(3), "aten.avg_pool1d.default": _average_pool(1),
    "aten.avg_pool2d.default": _average_pool(2), "aten.avg_pool3d.default": _average_pool(3),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm, "aten.native_group_norm.default": _group_norm,
    "aten._native_batch_norm_legit.no_stats": _own_batch_norm,
    "aten.adaptive_avg_pool1d.default": _adaptive_average(1), "aten._adaptive_avg_pool2d.default": _adaptive_average(2),
    "aten._adaptive_avg_pool3d.default": _adaptive_average(3), "aten.adaptive_max_pool2d.default": _adaptive_max(2),
    "aten.adaptive_max_pool3d.default": _adaptive_max(3),
}  # fmt: skip
