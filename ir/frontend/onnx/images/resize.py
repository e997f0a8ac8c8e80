"""ONNX Resize: scales, sizes and regions as exact quotients of expressions over the shape symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from relax_tune.ir.core.expr import Expr, add, floordiv, le, maximum, mul, select
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of, expressions
from relax_tune.ir.frontend.shared.resampling import Scale, by_factor, by_size, position, simplest
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.neural.resize import Resize

POLICIES = ("stretch", "not_larger", "not_smaller")
COORDINATES = (
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "half_pixel_symmetric",
    "tf_crop_and_resize",
)


def _by_aspect(w: Writer, sizes: Sequence[Expr], wanted: Sequence[Expr], larger: bool) -> list[Scale]:
    """Return one scale for all axes, the largest or smallest that gives one of the sizes `wanted`."""
    over, under = wanted[0], sizes[0]
    for size, want in zip(sizes[1:], wanted[1:]):
        mine, other = mul(over, size), mul(want, under)
        better = le(mine, other) if larger else le(other, mine)
        over, under = w.simplify(select(better, want, over)), w.simplify(select(better, size, under))
    found = []
    for size in sizes:
        rounded = floordiv(add(mul(mul(over, size), 2), under), mul(under, 2))
        found.append(Scale(over, under, mul(over, size), under, w.simplify(rounded)))
    return found


def _floats(node: OnnxNode, at: int, what: str) -> list[float]:
    """Return an input of constant numbers, none where it is left out."""
    if not node.has(at):
        return []
    found = node.item(at).array
    if found is None:
        raise node.refuse(f"wanted constant {what}, found them computed from tensors")
    return [float(v) for v in found.reshape(-1)]


def _scales(w: Writer, node: OnnxNode, x: ImportedValue, axes: Sequence[int], given: Sequence[float]) -> list[Scale]:
    dims = [x.shape[a] for a in axes]
    if given:
        if len(given) != len(axes) or not all(np.isfinite(v) and v > 0 for v in given):
            raise node.refuse(f"wanted {len(axes)} scales above 0, found {given}")
        return [by_factor(w, n, simplest(v)) for n, v in zip(dims, given)]
    sizes = expressions(w, node, 3)
    if len(sizes) != len(axes):
        raise node.refuse(f"wanted {len(axes)} sizes, found {len(sizes)}")
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
    rounding = "floor" if old else rounding
    axes = [axis_of(node, int(a), x.ndim) for a in node.attributes.get("axes") or range(x.ndim)]
    given = [float(v) for v in node.attributes.get("scales", ())] or _floats(node, 1 if old else 2, "scales")
    scales = _scales(w, node, x, axes, given)
    cropped = mode == "tf_crop_and_resize"
    roi = _floats(node, 1, "regions") if cropped else []
    if cropped and len(roi) != 2 * len(axes):
        raise node.refuse(f"wanted a start and an end of the region for {len(axes)} axes, found {roi}")
    antialias = bool(node.attributes.get("antialias", 0))
    if antialias and kernel == "nearest":
        raise node.refuse("wanted antialias with mode 'linear' or 'cubic', found 'nearest'")
    if kernel != "nearest" and not x.dtype.is_float:
        raise node.refuse(f"wanted floats for mode {kernel!r}, found {x.info!r}; cast them first")
    kept = []
    for k, (axis, s) in enumerate(zip(axes, scales)):
        region = (simplest(roi[k]), simplest(roi[k + len(axes)])) if cropped else (Fraction(0), Fraction(1))
        if (
            region == (Fraction(0), Fraction(1))
            and w.g.deduction.same(s.size, x.shape[axis])
            and w.g.deduction.same(s.wide, mul(s.size, s.one))
        ):
            continue  # the elements as they are
        step, start, part = position(mode, x.shape[axis], s, region)
        found = (s.size, step, start, *(maximum(e, 1) for e in (part, s.under, s.over)))
        kept.append((axis, *map(w.simplify, found)))
    if not kept:
        return x
    taken, sizes, steps, starts, parts, wide, narrow = zip(*kept)
    smooth = (wide, narrow) if antialias else ((), ())
    op = Resize(
        taken, sizes, steps, starts, parts, kernel, rounding, float(node.attributes.get("cubic_coeff_a", -0.75)),
        bool(node.attributes.get("exclude_outside", 0)), *smooth,
        float(node.attributes.get("extrapolation_value", 0.0)) if cropped else None,
    )  # fmt: skip
    return w.of(w.emit(op, w.tensor(x)), x.natural and kernel == "nearest")


HANDLERS: Mapping[str, Handler] = {"Resize": _resize, "Upsample": _resize}
