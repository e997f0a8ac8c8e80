"""Convolutions and pooling of both formats: paddings as expressions over the shape symbols.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.ir.core.expr import Expr, add, as_int, ceildiv, const, expr, floordiv, lt, maximum, mul, select, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.math import work_type
from relax_tune.ir.frontend.shared.handlers.shape import pad
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.window import Conv, Pool, PoolPositions

Pads = Sequence[tuple[Expr, Expr]]


def reach(kernel: Expr, dilation: int) -> Expr:
    """Return the number of elements from the first to the last of a window."""
    return add(mul(sub(kernel, 1), dilation), 1)


def beyond(size: Expr, pads: tuple[Expr, Expr], extent: Expr, stride: int) -> Expr:
    """Return the number of elements beyond the padding that the last, partial window reaches.

    A window must start within the input or its padding in front."""
    if stride == 1:
        return const(0)
    before, after = pads
    room = sub(add(size, add(before, after)), extent)
    last = mul(ceildiv(room, stride), stride)
    last = select(lt(last, add(size, before)), last, sub(last, stride))
    return maximum(sub(last, room), 0)


def same_pads(size: Expr, extent: Expr, stride: int, upper: bool) -> tuple[Expr, Expr]:
    """Return the padding that gives `size / stride` windows, rounded up; the odd element is at the end if `upper`."""
    total = maximum(sub(add(mul(sub(ceildiv(size, stride), 1), stride), extent), size), 0)
    less = floordiv(total, const(2))
    return (less, sub(total, less)) if upper else (sub(total, less), less)


def padded(w: Writer, value: Value, pads: Pads, fill: float) -> Value:
    """Pad `value` with (before, after) elements of `fill` along each of the last axes."""
    return pad(w, value, [(0, 0)] * (len(tensor_dims(value)) - len(pads)) + list(pads), fill)


@dataclass(frozen=True, slots=True)
class SpatialWindow:
    """The windows of a convolution or of pooling over the last dims of a tensor.

    Attributes:
        sizes: Dims that the windows move over.
        kernel: Elements of a window.
        strides, dilations: Distances of windows and of the elements of one.
        pads: Padding (before, after).
        partial: Elements after the padding that the last, partial window reaches, which count as nothing.
    """

    sizes: tuple[Expr, ...]
    kernel: tuple[Expr, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    partial: tuple[Expr, ...]

    @property
    def attributes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, strides and dilations as attributes of operators: the kernel of pooling is known."""
        return tuple(as_int(k) or 1 for k in self.kernel), self.strides, self.dilations

    def reach(self, axis: int) -> Expr:
        return reach(self.kernel[axis], self.dilations[axis])

    def padded(self, w: Writer, value: Value, fill: float) -> Value:
        """Pad a tensor, also up to the end of partial windows."""
        pads = zip(self.pads, self.partial, strict=True)
        return padded(w, value, [(a, w.simplify(add(b, e))) for (a, b), e in pads], fill)


def make_window(
    w: Writer,
    sizes: Sequence[Expr],
    kernel: Sequence[Expr],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: Pads,
    partial: bool,
) -> SpatialWindow:
    """Make the windows over dims. partial: Whether the last window may reach beyond the padding (`ceil_mode`)."""
    extra = tuple(
        w.simplify(beyond(size, pair, reach(k, d), s)) if partial else const(0)
        for size, pair, k, d, s in zip(sizes, pads, kernel, dilations, strides, strict=True)
    )
    return SpatialWindow(tuple(sizes), tuple(kernel), strides, dilations, pads, extra)


def convolved(w: Writer, x: Value, weight: Value, window: SpatialWindow, groups: int) -> Value:
    return w.emit(Conv(window.strides, window.dilations, groups), window.padded(w, x, 0), weight)


def max_pool(w: Writer, x: ImportedValue, window: SpatialWindow) -> Value:
    """Emit the largest elements of the windows of x (n, c, dims...)."""
    low = -np.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    return w.emit(Pool(*window.attributes), window.padded(w, w.tensor(x), low))


def positions(w: Writer, x: ImportedValue, largest: Value, window: SpatialWindow) -> Value:
    """Emit where in the dims of x, counted row by row, the largest elements of its windows are."""
    before = tuple(w.simplify(pair[0]) for pair in window.pads)
    return w.emit(PoolPositions(*window.attributes, before), w.tensor(x), largest)


def average_pool(
    w: Writer, x: ImportedValue, window: SpatialWindow, counted: bool, divisor: int | None = None
) -> Value:
    """Emit the means of the windows of x (n, c, dims...), of integers rounded towards zero.

    Args:
        counted: Whether the padding counts as elements.
        divisor: What every sum is divided by, in place of the number of elements.
    """
    summed = Pool(*window.attributes, largest=False)
    work = work_type(x.dtype)
    total = w.emit(summed, window.padded(w, w.cast(w.tensor(x), work), 0))
    none = all(as_int(w.simplify(e)) == 0 for e in window.partial)
    bare = all(as_int(w.simplify(e)) == 0 for pair in window.pads for e in pair)
    if divisor is not None or (none and (counted or bare)):
        size = divisor or int(np.prod(window.attributes[0]))
        return w.quotient(total, size) if work.is_int else w.cast(w.div(total, size), x.dtype)
    spatial = x.shape[x.ndim - len(window.pads) :]
    ones = w.full([*[const(1)] * (x.ndim - len(window.pads)), *spatial], 1, work)
    elements = padded(w, padded(w, ones, window.pads, int(counted)), [(const(0), e) for e in window.partial], 0)
    count = w.emit(summed, elements)
    return w.cast(w.quotient(total, count) if work.is_int else w.div(total, count), x.dtype)


def col2im(w: Writer, x: ImportedValue, window: SpatialWindow) -> Value:
    """Emit the sums of windows (n, channels * kernel, windows) as images with dims `window.sizes`."""
    counts = [
        w.simplify(add(floordiv(sub(add(size, add(*pair)), window.reach(a)), const(stride)), 1))
        for a, (size, pair, stride) in enumerate(zip(window.sizes, window.pads, window.strides, strict=True))
    ]
    channels = w.simplify(floordiv(x.shape[1], product(window.kernel)))
    value = w.reshape(w.tensor(x), [x.shape[0], channels, *window.kernel, *counts])
    before = tuple(a for a, _ in window.pads)
    return w.emit(Fold(tuple(map(w.simplify, window.sizes)), window.strides, window.dilations, before), value)


def transposed(
    w: Writer,
    x: ImportedValue,
    weight: ImportedValue,
    strides: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    before: Sequence[Expr],
    sizes: Sequence[Expr],
) -> Value:
    """Emit a transposed convolution: products with every window, folded.

    Args:
        x: (n, channels, dims...).
        weight: (channels, out channels / groups, kernel...).
        before: Elements cropped in front.
    """
    # one product for all windows and a sum of overlaps: a convolution of x with zeros in between would multiply zeros
    kernel, dims = weight.shape[2:], x.shape[2:]
    taps, places = w.simplify(product(kernel)), w.simplify(product(dims))
    each, out = w.simplify(floordiv(x.shape[1], const(groups))), weight.shape[1]
    work = work_type(x.dtype)
    group = [const(groups)] if groups > 1 else []
    filters = w.reshape(w.cast(w.tensor(weight), work), [*group, each, w.simplify(mul(out, taps))])
    filters = w.permute(filters, [0, 2, 1] if groups > 1 else [1, 0])
    columns = w.reshape(w.cast(w.tensor(x), work), [x.shape[0], *group, each, places])
    products = w.matmul(filters, columns)
    products = w.reshape(products, [x.shape[0], w.simplify(mul(out, groups)), *kernel, *dims])
    fold = Fold(
        tuple(map(w.simplify, sizes)), tuple(strides), tuple(dilations), tuple(w.simplify(expr(b)) for b in before)
    )
    return w.cast(w.emit(fold, products), x.dtype)
