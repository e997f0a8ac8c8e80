"""ATen convolutions and pooling: padding, then windows.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, ge, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers import window as windows
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.handlers.neural import per_channel
from relax_tune.ir.frontend.shared.handlers.window import SpatialWindow
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim
from relax_tune.ir.op.base import product


def _sizes(n: TorchNode, position: int, name: str, default: int, axes: int) -> tuple[int, ...]:
    """Return a number for each of the last `axes` dims, given once or one by one."""
    argument = n.argument(position, name, None) or [default] * axes
    numbers = [as_int(dim(g)) for g in (argument if isinstance(argument, list) else [argument])]
    known = [f for f in numbers if f is not None]
    if len(known) != len(numbers) or len(known) not in (1, axes):
        raise n.refuse(f"expected {name} as {axes} numbers, got {argument}")
    return tuple(known * axes if len(known) == 1 else known)


def _convolution(w: Writer, n: TorchNode) -> ImportedValue:
    x, weight, bias = n.item(0), n.item(1), n.optional(2)
    axes, groups = x.ndim - 2, n.number(8, "groups", 1)
    strides, pads, dilations = (
        _sizes(n, p, name, default, axes)
        for p, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    before = [const(p) for p in pads]
    if n.argument(6, "transposed", False):
        y = windows.transposed(w, x, weight, strides, dilations, groups, before, n.dims[2:])
    else:
        window = windows.make_window(
            w, x.shape[2:], weight.shape[2:], strides, dilations, [(p, p) for p in before], False
        )
        y = windows.convolved(w, w.tensor(x), w.tensor(weight), window, groups)
    return w.of(y if bias is None else w.add(y, per_channel(w, n.operand(w, 2), len(n.dims))))


def _pooled(
    w: Writer, n: TorchNode, axes: int, ceil: int, dilations: tuple[int, ...]
) -> tuple[ImportedValue, SpatialWindow]:
    """Return the images, with a batch of 1 for a single image, and the windows over the last `axes` dims.

    Args:
        ceil: Position of `ceil_mode`.
    """
    x = n.item(0)
    if x.ndim not in (axes + 1, axes + 2):
        raise n.refuse(f"expected (batch, channels, {axes} dims), got {x.info!r}")
    x = x if x.ndim == axes + 2 else w.of(w.reshape(w.tensor(x), [const(1), *x.shape]), x.natural)
    kernel = _sizes(n, 1, "kernel_size", 1, axes)
    strides = _sizes(n, 2, "stride", 1, axes) if n.argument(2, "stride", None) else kernel
    pads = [(const(p), const(p)) for p in _sizes(n, 3, "padding", 0, axes)]
    partial = bool(n.argument(ceil, "ceil_mode", False))
    return x, windows.make_window(w, x.shape[2:], [const(k) for k in kernel], strides, dilations, pads, partial)


def _max_pool(axes: int) -> Handler:
    def handler(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
        x, window = _pooled(w, n, axes, 5, _sizes(n, 4, "dilation", 1, axes))
        largest = windows.max_pool(w, x, window)
        places = windows.positions(w, x, largest, window)
        return [w.of(w.reshape(largest, n.dims), x.natural), w.of(w.reshape(places, n.dims), True)]

    return handler


def _average_pool(axes: int) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, window = _pooled(w, n, axes, 4, (1,) * axes)
        divisor = None if n.argument(6, "divisor_override") is None else n.number(6, "divisor_override")
        counted = bool(n.argument(5, "count_include_pad", True))
        return w.of(w.reshape(windows.average_pool(w, x, window, counted, divisor), n.dims))

    return handler


def _col2im(w: Writer, n: TorchNode) -> ImportedValue:
    """Import fold: (n, channels * kernel, windows) to images, the sums of their windows."""
    x = n.item(0)
    if x.ndim != 3:
        raise n.refuse(f"expected (n, channels * kernel, windows), got {x.info!r}")
    sizes = [dim(v) for v in n.args[1]]
    names = {2: "kernel_size", 3: "dilation", 4: "padding", 5: "stride"}
    kernel, dilations, pads, strides = (_sizes(n, p, name, 1, len(sizes)) for p, name in names.items())
    pairs = [(const(p), const(p)) for p in pads]
    return w.of(
        windows.col2im(
            w, x, windows.make_window(w, sizes, [const(k) for k in kernel], strides, dilations, pairs, False)
        )
    )


def _window_ends(w: Writer, n: TorchNode, size: Expr, count: Expr) -> tuple[Value, Value]:
    """Return the begin and end (count,) of `count` windows that divide a dim.

    Window `i` extends from `i * size / count`, rounded down, to `(i + 1) * size / count`, rounded up.
    """
    if not w.require(ge(size, 1)):
        raise n.refuse("expected dims of at least 1 element, got none")
    scaled, divisor = w.mul(w.iota(count), w.size(size)), w.size(count)
    end = w.add(scaled, w.size(w.simplify(sub(add(size, count), 1))))
    # Window k of `count` is [floor(k n / count), ceil((k + 1) n / count)); the sum above rounds the division up.
    return w.quotient(scaled, divisor), w.quotient(end, divisor)


def _adaptive_average(axes: int) -> Handler:
    """Make a handler of means over windows that divide a dim."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, element = n.item(0), work_type(n.dtype)
        value = as_value(w, x, element)
        for axis, count in zip(range(x.ndim - axes, x.ndim), n.dims[x.ndim - axes :]):
            size = x.shape[axis]
            begin, end = _window_ends(w, n, size, count)
            places = w.iota(size)
            inside = w.logical_and(
                w.less_equal(w.expand_dims(begin, (1,)), places), w.less(places, w.expand_dims(end, (1,)))
            )
            ones: list[Expr] = [const(1)] * (x.ndim - 1 - axis)
            # Windows of a symbolic dim differ in length, so each is a sum over the whole axis with a condition.
            selected = w.where(w.reshape(inside, [count, size, *ones]), w.expand_dims(value, (axis,)), 0)
            number = w.reshape(w.cast(w.sub(end, begin), element), [count, *ones])
            value = w.div(w.sum(selected, (axis + 1,), False), number)
        return w.of(w.cast(value, n.dtype))

    return handler


def _adaptive_max(axes: int) -> Handler:
    """Make a handler of (values, places) of the largest elements of windows that divide a dim, along one axis after the other."""

    def handler(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
        x = n.item(0)
        value, where = w.tensor(x), None
        for axis in range(x.ndim - 1, x.ndim - 1 - axes, -1):
            size, count = x.shape[axis], n.dims[axis]
            # No window is longer than ceil(n / count) + 1.
            most = w.simplify(add(floordiv(sub(add(size, count), 1), count), 1))
            begin, end = _window_ends(w, n, size, count)
            places = w.add(w.expand_dims(begin, (1,)), w.iota(most))
            # after the last element of a window the element is repeated
            places = w.minimum(places, w.add(w.expand_dims(end, (1,)), -1))
            ones: list[Expr] = [const(1)] * (x.ndim - 1 - axis)
            windows_of_axis = w.take(value, axis, places)
            best = w.arg_max(windows_of_axis, axis + 1)
            best = w.add(best, w.reshape(begin, [count, *ones]))
            if x.dtype.is_float:  # of several NaN the last
                end = w.reshape(w.add(end, -1), [count, *ones])
                last = w.add(w.arg_max(windows_of_axis, axis + 1, last=True), w.reshape(begin, [count, *ones]))
                top = w.gather_elements(value, best, axis)
                best = w.where(w.equal(top, top), best, w.minimum(last, end))
            value = w.gather_elements(value, best, axis)
            if where is None:
                where = best
            else:
                inner = w.simplify(product(x.shape[axis + 1 :]))
                # Places count row by row in the plane, so the outer axis counts in strides of the inner ones.
                where = w.add(w.gather_elements(where, best, axis), w.mul(best, w.size(inner)))
        assert where is not None
        return [w.of(value, x.natural), w.of(where, True)]

    return handler


HANDLERS: Mapping[str, Handler] = {
    "aten.convolution.default": _convolution, "aten.col2im.default": _col2im,
    "aten.max_pool2d_with_indices.default": _max_pool(2),
    "aten.max_pool3d_with_indices.default": _max_pool(3), "aten.avg_pool1d.default": _average_pool(1),
    "aten.avg_pool2d.default": _average_pool(2), "aten.avg_pool3d.default": _average_pool(3),
    "aten.adaptive_avg_pool1d.default": _adaptive_average(1), "aten._adaptive_avg_pool2d.default": _adaptive_average(2),
    "aten._adaptive_avg_pool3d.default": _adaptive_average(3), "aten.adaptive_max_pool2d.default": _adaptive_max(2),
    "aten.adaptive_max_pool3d.default": _adaptive_max(3),
}  # fmt: skip
