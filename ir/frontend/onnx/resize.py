"""ONNX Resize: scales, sizes and regions as exact quotients of expressions over the shape symbols.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `test_resize.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, floordiv, le, mul, select
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.resize import WHOLE, Region, Scale, by_factor, by_size, resampled, simplest
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

CAST = "cast the input to float32 before the node, and its result back, rounded as you need"
POLICIES = ("stretch", "not_larger", "not_smaller")


COORDINATES = (
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "half_pixel_symmetric",
    "tf_crop_and_resize",
)


def _by_aspect(w: Writer, sizes: Sequence[Expr], targets: Sequence[Expr], larger: bool) -> list[Scale]:
    """Return one scale for all axes: the largest or smallest with which one axis gets its size of `targets`."""
    over, under = targets[0], sizes[0]
    for size, want in zip(sizes[1:], targets[1:]):
        # The quotients over / under and want / size are compared by products, which are exact for symbols too.
        current, other = mul(over, size), mul(want, under)
        better = le(current, other) if larger else le(other, current)
        over, under = w.simplify(select(better, want, over)), w.simplify(select(better, size, under))
    scales = []
    for size in sizes:
        # (2 * over * size + under) // (2 * under) rounds over * size / under to the nearest whole number.
        rounded = floordiv(add(mul(mul(over, size), 2), under), mul(under, 2))
        scales.append(Scale(over, under, mul(over, size), under, w.simplify(rounded)))
    return scales


def _floats(w: Writer, node: OnnxNode, at: int, what: str) -> list[float]:
    """Return an input of constant numbers, none where it is left out."""
    if not node.has(at):
        return []
    array = w.numbers(node.item(at))
    if array is None:
        raise node.refuse(f"expected constant {what}, got them computed from tensors")
    return [float(v) for v in array.reshape(-1)]


def _scales(w: Writer, node: OnnxNode, x: ImportedValue, axes: Sequence[int], factors: Sequence[float]) -> list[Scale]:
    dims = [x.shape[a] for a in axes]
    if factors:
        if len(factors) != len(axes) or not all(np.isfinite(v) and v > 0 for v in factors):
            raise node.refuse(f"expected {len(axes)} scales above 0, got {factors}")
        return [by_factor(w, n, simplest(v)) for n, v in zip(dims, factors)]
    sizes = node.expressions(w, 3)
    if len(sizes) != len(axes):
        raise node.refuse(f"expected {len(axes)} sizes, got {len(sizes)}")
    policy = node.choice("keep_aspect_ratio_policy", *POLICIES)
    if policy == "stretch":
        return [by_size(n, size) for n, size in zip(dims, sizes)]
    return _by_aspect(w, dims, sizes, policy == "not_smaller")


def _resize(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    kernel = node.choice("mode", "nearest", "linear", "cubic")
    old = node.op == "Upsample" or node.opset < 11  # asymmetric, downwards, the scales as input 1 or an attribute
    mode = "asymmetric" if old else node.choice("coordinate_transformation_mode", *COORDINATES)
    rounding = node.choice("nearest_mode", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    axes = [node.normalised(int(a), x.ndim) for a in node.attributes.get("axes") or range(x.ndim)]
    factors = [float(v) for v in node.attributes.get("scales", ())] or _floats(w, node, 1 if old else 2, "scales")
    scales = _scales(w, node, x, axes, factors)
    cropped = mode == "tf_crop_and_resize"
    roi = _floats(w, node, 1, "regions") if cropped else []
    if cropped and len(roi) != 2 * len(axes):
        raise node.refuse(f"expected a start and an end of the region for {len(axes)} axes, got {roi}")
    antialias = node.flag("antialias")
    if antialias and kernel == "nearest":
        raise node.refuse("expected antialias with mode 'linear' or 'cubic', got 'nearest'")
    whole = kernel != "nearest" and not x.dtype.is_float
    if whole and (kernel, antialias) != ("linear", False):
        raise node.refuse(f"expected floats for mode {kernel!r}, got {x.info!r}", CAST)
    resized: list[tuple[int, Scale, Region]] = []
    for k, (axis, s) in enumerate(zip(axes, scales)):
        region = (simplest(roi[k]), simplest(roi[k + len(axes)])) if cropped else WHOLE
        # A resize to the same size copies the elements, unless a scale was stated that differs from the quotient of
        # sizes.
        if (
            region == WHOLE
            and w.g.deduction.same(s.size, x.shape[axis])
            and w.g.deduction.same(s.wide, mul(s.size, s.one))
        ):
            continue  # the elements as they are
        resized.append((axis, s, region))
    if not resized:
        return x
    outside = node.real("extrapolation_value", 0.0) if cropped else None
    by_rounding: dict[str, list[tuple[int, Scale, Region]]] = {rounding: resized}
    if old:  # in the forms before opset 11, ONNX Runtime rounds up along dims that become smaller
        smaller = {axis for axis, factor in zip(axes, factors) if factor < 1} if kernel == "nearest" else set()
        by_rounding = {
            "floor": [r for r in resized if r[0] not in smaller],
            "ceil": [r for r in resized if r[0] in smaller],
        }
    y = w.of(w.cast(w.tensor(x), f32)) if whole else x
    for way, part in by_rounding.items():
        if part:
            resized_part = resampled(
                w, y, part, mode, kernel, antialias, rounding=way, sharpness=node.real("cubic_coeff_a", -0.75),
                within=node.flag("exclude_outside"), fill=outside,
            )  # fmt: skip
            y = w.of(resized_part, x.natural and kernel == "nearest")
    # ONNX Runtime rounds means of integers towards 0.
    return w.of(w.cast(w.tensor(y), x.dtype), False) if whole else y


HANDLERS: Mapping[str, Handler] = {
    "Resize": _resize, "Upsample": _resize,
}  # fmt: skip
