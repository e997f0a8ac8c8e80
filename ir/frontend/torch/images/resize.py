"""ATen resampling and sampling of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, maximum, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, take
from relax_tune.ir.frontend.shared.resampling import Scale, by_size, position, simplest
from relax_tune.ir.frontend.shared.windows import reach
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, dim, number_of
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.math.elementwise import AddScalar, Cast, Div, Minimum, Mul, MulScalar
from relax_tune.ir.op.math.numeric import Floor
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.resize import Resize


def _factors(n: TorchNode, given: Any, axes: int) -> list[float | None]:
    """Return the scale of each axis, None where the size alone decides."""
    listed = list(given) if isinstance(given, (list, tuple)) else [given] * axes
    found = [None if v is None else number_of(v) for v in listed]
    if any(f is None and v is not None for f, v in zip(found, listed)) or len(found) != axes:
        raise n.refuse(f"wanted {axes} scales as numbers, found {given}")
    return [None if f is None else float(f) for f in found]


def _smooth(kernel: str, scales: int | None, antialias: bool = False) -> Handler:
    """Make a handler of linear or cubic resampling. scales: position of the list of scales; None: one argument each."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, axes = n.item(0), n.item(0).ndim - 2
        aligned = bool(n.given(2, "align_corners", False))
        if aligned and antialias:
            raise n.refuse("wanted antialiasing without align_corners, found both")
        given = n.given(scales, "scale_factors") if scales else [n.given(3 + k, "scales") for k in range(axes)]
        mode = "align_corners" if aligned else "half_pixel"
        rows: list[tuple[Any, ...]] = []
        for k, factor in enumerate(_factors(n, given, axes)):
            size, own = n.dims[2 + k], x.shape[2 + k]
            s = by_size(own, size)
            if factor is not None and not aligned:
                exact = simplest(factor)
                over, under = const(exact.numerator), const(exact.denominator)
                s = Scale(over, under, mul(own, over), under, size)
            step, start, part = position(mode, own, s, (simplest(0.0), simplest(1.0)))
            found = (step, start, *(maximum(e, 1) for e in (part, s.under, s.over)))
            rows.append((2 + k, size, *map(w.simplify, found)))
        taken, sizes, steps, starts, parts, wides, narrows = zip(*rows)
        op = Resize(
            taken, sizes, steps, starts, parts, kernel, sharpness=-0.5 if antialias else -0.75, within=antialias,
            wide=wides if antialias else (), narrow=narrows if antialias else (),
        )  # fmt: skip
        return w.of(w.emit(op, w.tensor(x)))

    return handler


def _nearest(exact: bool) -> Handler:
    """Make a handler of nearest neighbours, at float32 positions as torch computes them."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, axes = n.item(0), n.item(0).ndim - 2
        value = w.tensor(x)
        for k, factor in enumerate(_factors(n, n.given(2, "scale_factors"), axes)):
            size, own = n.dims[2 + k], x.shape[2 + k]
            if w.g.deduction.same(size, own):
                continue
            ratio = None if factor is None else simplest(factor)
            if (
                not exact
                and ratio is not None
                and ratio.denominator == 1
                and ratio.numerator & (ratio.numerator - 1) == 0
            ):
                one, times = (const(1),), (const(ratio.numerator),)
                value = w.emit(Resize((2 + k,), (size,), one, (const(0),), times, "nearest"), value)
                continue
            value = take(w, value, 2 + k, _rounded_down(w, size, own, factor, exact))
        return w.of(value, x.natural)

    return handler


def _rounded_down(w: Writer, size: Expr, own: Expr, factor: float | None, exact: bool) -> Value:
    """Return `floor(i * scale)` in float32, at most the last element; with `exact` of the centre of each element."""
    at = w.emit(Cast(f32), w.emit(Iota(size)))
    at = w.emit(AddScalar(0.5), at) if exact else at
    if factor is not None:
        at = w.emit(MulScalar(float(np.float32(1 / factor))), at)
    else:
        scale = w.emit(Div(), *(cast_to(w, w.size(e), i64, f32) for e in (own, w.simplify(maximum(size, 1)))))
        at = w.emit(Mul(), at, scale)
    last = w.size(w.simplify(maximum(sub(own, 1), 0)))
    return w.emit(Minimum(), w.emit(Cast(i64), w.emit(Floor(), at)), last)


def _grid_sampler(w: Writer, n: TorchNode) -> ImportedValue:
    kernel = ("linear", "nearest", "cubic")[n.number(2, "interpolation_mode")]
    padding = ("zeros", "border", "reflection")[n.number(3, "padding_mode")]
    op = GridSample(kernel, padding, bool(n.given(4, "align_corners", False)))
    return w.of(w.emit(op, w.tensor(n.item(0)), w.tensor(n.item(1))))


def _col2im(w: Writer, n: TorchNode) -> ImportedValue:
    """Import fold: (n, channels * kernel, windows) to images, the sums of their windows."""
    x = n.item(0)
    if x.ndim != 3:
        raise n.refuse(f"wanted (n, channels * kernel, windows), found {x.info!r}")
    sizes: list[Expr] = [dim(v) for v in n.args[1]]
    kernel, dilations, pads, strides = (_numbers(n, p) for p in (2, 3, 4, 5))
    counts = []
    for a, size in enumerate(sizes):
        room = sub(add(size, 2 * pads[a]), reach(const(kernel[a]), dilations[a]))
        counts.append(w.simplify(add(floordiv(room, const(strides[a])), 1)))
    taps: Sequence[Expr] = [const(k) for k in kernel]
    value = w.reshape(w.tensor(x), [x.shape[0], w.simplify(floordiv(x.shape[1], product(taps))), *taps, *counts])
    return w.of(w.emit(Fold(tuple(sizes), tuple(strides), tuple(dilations), tuple(map(const, pads))), value))


def _numbers(n: TorchNode, position: int) -> list[int]:
    found = [as_int(dim(v)) for v in n.args[position]]
    known = [f for f in found if f is not None]
    if len(known) != len(found):
        raise n.refuse(f"wanted argument {position} as numbers, found {n.args[position]}")
    return known


HANDLERS: Mapping[str, Handler] = {
    "aten.upsample_nearest1d.vec": _nearest(False), "aten.upsample_nearest2d.vec": _nearest(False),
    "aten.upsample_nearest3d.vec": _nearest(False), "aten._upsample_nearest_exact2d.vec": _nearest(True),
    "aten.upsample_bilinear2d.vec": _smooth("linear", 3), "aten.upsample_bicubic2d.vec": _smooth("cubic", 3),
    "aten._upsample_bilinear2d_aa.default": _smooth("linear", None, True),
    "aten._upsample_bicubic2d_aa.default": _smooth("cubic", None, True),
    "aten.grid_sampler_2d.default": _grid_sampler, "aten.grid_sampler_3d.default": _grid_sampler,
    "aten.col2im.default": _col2im,
}  # fmt: skip
