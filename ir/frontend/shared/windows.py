"""Convolutions and pooling for importers of every format: paddings as expressions over the shape symbols."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, as_int, ceildiv, const, expr, floordiv, lt, maximum, mul, select, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, pad, permute
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.math.elementwise import Div, MulScalar
from relax_tune.ir.op.math.numeric import Quotient
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.window import Pool, PoolPositions
from relax_tune.ir.op.reduction.linalg import Matmul

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
    """Return the padding that gives `size / stride` windows, rounded up; the odd element is behind if `upper`."""
    total = maximum(sub(add(mul(sub(ceildiv(size, stride), 1), stride), extent), size), 0)
    less = floordiv(total, const(2))
    return (less, sub(total, less)) if upper else (sub(total, less), less)


def padded(w: Writer, value: Value, pads: Pads, fill: float) -> Value:
    """Pad `value` with (before, after) elements of `fill` along each of the last axes."""
    return pad(w, value, [(0, 0)] * (len(tensor_dims(value)) - len(pads)) + list(pads), fill)


def max_pool(
    w: Writer, x: ImportedValue, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Pads
) -> Value:
    """Emit the largest elements of the windows of x (n, c, dims...)."""
    low = -np.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    return w.emit(Pool(tuple(kernel), tuple(strides), tuple(dilations)), padded(w, w.tensor(x), pads, low))


def positions(
    w: Writer,
    x: ImportedValue,
    top: Value,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Pads,
) -> Value:
    """Emit where in the dims of x, counted row by row, the elements `top` of its windows are."""
    before = tuple(w.simplify(p[0]) for p in pads)
    return w.emit(PoolPositions(tuple(kernel), tuple(strides), tuple(dilations), before), w.tensor(x), top)


def average_pool(
    w: Writer,
    x: ImportedValue,
    windows: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    pads: Pads,
    extra: Sequence[Expr],
    counted: bool,
    divisor: int | None = None,
) -> Value:
    """Emit the means of the windows of x (n, c, dims...), of integers rounded towards zero.

    windows: kernel, strides and dilations
    extra: elements beyond the padding, which count as nothing
    counted: the padding counts as elements
    divisor: what every sum is divided by
    """
    summed = Pool(*windows, largest=False)
    work = f32 if x.dtype.is_half else x.dtype
    more = [(a, w.simplify(add(b, e))) for (a, b), e in zip(pads, extra, strict=True)]
    total = w.emit(summed, padded(w, cast_to(w, w.tensor(x), x.dtype, work), more, 0))
    none = all(as_int(w.simplify(e)) == 0 for e in extra)
    bare = all(as_int(w.simplify(e)) == 0 for pair in pads for e in pair)
    if divisor is not None or (none and (counted or bare)):
        size = divisor or int(np.prod(windows[0]))
        if work.is_int:
            return w.emit(Quotient(), total, w.literal(size, work))
        return cast_to(w, w.emit(MulScalar(1 / size), total), work, x.dtype)
    spatial = x.shape[x.ndim - len(pads) :]
    ones = w.full([*[const(1)] * (x.ndim - len(pads)), *spatial], 1, work)
    count = padded(w, padded(w, ones, pads, int(counted)), [(const(0), e) for e in extra], 0)
    return cast_to(w, w.emit(Quotient() if work.is_int else Div(), total, w.emit(summed, count)), work, x.dtype)


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

    x: (n, channels, dims...); weight: (channels, out channels / groups, kernel...); before: elements cropped in front"""
    kernel, dims = weight.shape[2:], x.shape[2:]
    taps, places = w.simplify(product(kernel)), w.simplify(product(dims))
    each, out = w.simplify(floordiv(x.shape[1], const(groups))), weight.shape[1]
    work = f32 if x.dtype.is_half else x.dtype
    group = [const(groups)] if groups > 1 else []
    filters = w.reshape(cast_to(w, w.tensor(weight), weight.dtype, work), [*group, each, w.simplify(mul(out, taps))])
    filters = permute(w, filters, [0, 2, 1] if groups > 1 else [1, 0])
    columns = w.reshape(cast_to(w, w.tensor(x), x.dtype, work), [x.shape[0], *group, each, places])
    found = w.emit(Matmul(), filters, columns)
    every = w.simplify(mul(out, groups))
    found = w.reshape(found, [x.shape[0], every, *kernel, *dims])
    fold = Fold(
        tuple(map(w.simplify, sizes)), tuple(strides), tuple(dilations), tuple(w.simplify(expr(b)) for b in before)
    )
    return cast_to(w, w.emit(fold, found), work, x.dtype)
