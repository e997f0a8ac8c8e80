"""ATen resampling and sampling of images.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, const, maximum, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.resize import WHOLE, Scale, by_size, resampled, simplest
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.resize import Resize


def _factors(n: TorchNode, argument: Any, axes: int) -> list[float | None]:
    """Return the scale of each axis, None where only the size decides."""
    listed = list(argument) if isinstance(argument, (list, tuple)) else [argument] * axes
    factors = [None if v is None else number_of(v) for v in listed]
    if any(f is None and v is not None for f, v in zip(factors, listed)) or len(factors) != axes:
        raise n.refuse(f"expected {axes} scales as numbers, got {argument}")
    return [None if f is None else float(f) for f in factors]


def _smooth(kernel: str, scales: int | None, antialias: bool = False) -> Handler:
    """Make a handler of linear or cubic resampling. scales: position of the list of scales; None: one argument each."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, axes = n.item(0), n.item(0).ndim - 2
        aligned = bool(n.argument(2, "align_corners", False))
        if aligned and antialias:
            raise n.refuse("expected antialiasing without align_corners, got both")
        scales_argument = (
            n.argument(scales, "scale_factors") if scales else [n.argument(3 + k, "scales") for k in range(axes)]
        )
        mode = "align_corners" if aligned else "half_pixel"
        resized = []
        for k, factor in enumerate(_factors(n, scales_argument, axes)):
            size, dim_of_x = n.dims[2 + k], x.shape[2 + k]
            s = by_size(dim_of_x, size)
            if factor is not None and not aligned:
                exact = simplest(factor)
                over, under = const(exact.numerator), const(exact.denominator)
                s = Scale(over, under, mul(dim_of_x, over), under, size)
            resized.append((2 + k, s, WHOLE))
        attributes = {"sharpness": -0.5 if antialias else -0.75, "within": antialias}
        return w.of(resampled(w, x, resized, mode, kernel, antialias, **attributes))

    return handler


def _nearest(exact: bool) -> Handler:
    """Make a handler of nearest neighbours, at float32 positions as torch computes them."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, axes = n.item(0), n.item(0).ndim - 2
        value = w.tensor(x)
        for k, factor in enumerate(_factors(n, n.argument(2, "scale_factors"), axes)):
            size, dim_of_x = n.dims[2 + k], x.shape[2 + k]
            if w.g.deduction.same(size, dim_of_x):
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
            value = w.take(value, 2 + k, _rounded_down(w, size, dim_of_x, factor, exact))
        return w.of(value, x.natural)

    return handler


def _rounded_down(w: Writer, size: Expr, dim_of_x: Expr, factor: float | None, exact: bool) -> Value:
    """Return `floor(i * scale)` in float32, at most the last element; with `exact` of the centre of each element."""
    at = w.cast(w.iota(size), f32)
    at = w.add(at, 0.5) if exact else at
    if factor is not None:
        at = w.mul(at, float(np.float32(1 / factor)))
    else:
        scale = w.div(*(w.cast(w.size(e), f32) for e in (dim_of_x, w.simplify(maximum(size, 1)))))
        at = w.mul(at, scale)
    last = w.size(w.simplify(maximum(sub(dim_of_x, 1), 0)))
    return w.minimum(w.cast(w.floor(at), i64), last)


def _grid_sampler(w: Writer, n: TorchNode) -> ImportedValue:
    kernel = ("linear", "nearest", "cubic")[n.number(2, "interpolation_mode")]
    padding = ("zeros", "border", "reflection")[n.number(3, "padding_mode")]
    op = GridSample(kernel, padding, bool(n.argument(4, "align_corners", False)))
    return w.of(w.emit(op, w.tensor(n.item(0)), w.tensor(n.item(1))))


HANDLERS: Mapping[str, Handler] = {
    "aten.upsample_nearest1d.vec": _nearest(False), "aten.upsample_nearest2d.vec": _nearest(False),
    "aten.upsample_nearest3d.vec": _nearest(False), "aten._upsample_nearest_exact2d.vec": _nearest(True),
    "aten.upsample_bilinear2d.vec": _smooth("linear", 3), "aten.upsample_bicubic2d.vec": _smooth("cubic", 3),
    "aten._upsample_bilinear2d_aa.default": _smooth("linear", None, True),
    "aten._upsample_bicubic2d_aa.default": _smooth("cubic", None, True), "aten.grid_sampler_2d.default": _grid_sampler,
    "aten.grid_sampler_3d.default": _grid_sampler,
}  # fmt: skip
