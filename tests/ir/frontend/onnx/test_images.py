"""Convolutions of integers, deformable ones and pools of regions, at several sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model
from tests.support.meaning import own_results

from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


def f(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def direct_sums(
    x: Any, k: Array, pads: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...], groups: int
) -> Array:
    """The sums of a convolution of int64, window by window."""
    n, spatial = len(strides), x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:])])
    counts = [(x.shape[2 + a] - (k.shape[2 + a] - 1) * dilations[a] - 1) // strides[a] + 1 for a in range(spatial)]
    y = np.zeros((x.shape[0], k.shape[0], *counts), np.int64)
    each, out = k.shape[1], k.shape[0] // groups
    for place in np.ndindex(*counts):
        window = x[(slice(None), slice(None), *(slice(p * s, p * s + (q - 1) * d + 1, d) for p, s, q, d in zip(
            place, strides, k.shape[2:], dilations)))]  # fmt: skip
        for o in range(k.shape[0]):
            g = o // out
            y[(slice(None), o, *place)] = (window[:, g * each : (g + 1) * each] * k[o]).reshape(len(x), -1).sum(1)
    return y


@pytest.mark.parametrize("dims, kernel", [((1,), (1,)), ((7,), (3,)), ((5, 3), (2, 3)), ((3, 5, 4), (2, 1, 3))])
@pytest.mark.parametrize("zeros", ["none", "one", "each"])
def test_conv_integer_is_exact(dims: tuple[int, ...], kernel: tuple[int, ...], zeros: str) -> None:
    n, axes = len(dims), "hwd"[: len(dims)]
    x = RNG.integers(0, 256, (2, 4, *dims)).astype(np.uint8)
    k = RNG.integers(-128, 128, (6, 2, *kernel)).astype(np.int8)
    zx, zk = np.uint8(200), RNG.integers(-128, 128, 6).astype(np.int8) if zeros == "each" else np.int8(-7)
    pads = (1,) * n + (2,) * n
    kinds = ", uint8 z, int8[6] o" if zeros == "each" else ", uint8 z, int8 o" if zeros == "one" else ""
    out = ", ".join(f"o{a}" for a in axes)
    text = (
        f"(uint8[n, 4, {', '.join(axes)}] x, int8[6, 2, {', '.join(map(str, kernel))}] k{kinds}) => (int32[n, 6, {out}] y) {{ "
        f"y = ConvInteger<group = 2, pads = [{', '.join(map(str, pads))}], strides = [{', '.join('2' * n)}]>"
        f"(x, k{', z, o' if kinds else ''}) }}"
    )
    first, second = (0, 0) if not kinds else (int(zx), zk.astype(np.int64).reshape(-1, *[1] * (n + 1)))
    wanted: Any = direct_sums(x.astype(np.int64) - first, k.astype(np.int64) - second, pads, (2,) * n, (1,) * n, 2)
    module = load_onnx(model(text, 10))
    for form in (module, lower(module).module):
        found = evaluate_function(form, [x, k, *([np.asarray(zx), np.asarray(zk)] if kinds else [])])
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 7, 5)])
def test_deform_conv_without_offsets_is_a_convolution(size: tuple[int, int, int]) -> None:
    n, h, wide = size
    attributes = "pads = [1, 2, 0, 1], strides = [1, 2], dilations = [2, 1], group = 2"
    oh, ow = h + 1 - 2, (wide + 3 - 3) // 2 + 1
    x, k = f(n, 4, h, wide), f(6, 2, 2, 3)
    if oh < 1:
        x, oh = f(n, 4, 2, wide), 1
    shape = "(float[n, 4, h, w] x, float[6, 2, 2, 3] k, float[n, 12, p, q] o) => (float[n, 6, p, q] y)"
    own = model(f"{shape} {{ y = DeformConv<{attributes}>(x, k, o) }}")
    same = model(f"{shape} {{ z = Conv<{attributes}>(x, k)\n e = ReduceSum(o)\n y = Add(z, e) }}")
    check(own, [x, k, np.zeros((n, 12, oh, ow), np.float32)], same_as=same)


@pytest.mark.parametrize("h, wide", [(1, 1), (3, 7)])
def test_deform_conv_of_one_dim_moves_taps(h: int, wide: int) -> None:
    x, k, o = f(h, 2, wide), f(3, 2, 2), 2 * f(h, 2, wide + 1)
    text = "(float[n, 2, w] x, float[3, 2, 2] k, float[n, t, p] o) => (float[n, 3, p] y) { y = DeformConv<pads = [1, 1]>(x, k, o) }"
    module = load_onnx(model(text))
    padded = np.pad(x, [(0, 0), (0, 0), (8, 8)]).astype(np.float64)
    wanted = np.zeros((h, 3, wide + 1))
    for n, p, q in itertools.product(range(h), range(wide + 1), range(2)):
        at = np.clip(p - 1 + q + float(o[n, q, p]), -4, wide + 3) + 8
        low = int(np.floor(at))
        value = padded[n, :, low] * (1 - (at - low)) + padded[n, :, low + 1] * (at - low)
        wanted[n, :, p] += k[:, :, q] @ value
    for form in (module, lower(module).module):
        np.testing.assert_allclose(evaluate_function(form, [x, k, o]), wanted, rtol=1e-4, atol=1e-5)


def pooled_regions(x: Array, rois: Array, bins: tuple[int, int], scale: float) -> Array:
    """MaxRoiPool as ONNX Runtime computes it."""
    y = np.zeros((len(rois), x.shape[1], *bins), x.dtype)
    for r, roi in enumerate(rois):
        first, last = ([int(np.floor(v * scale + 0.5)) for v in roi[k : k + 2]] for k in (1, 3))
        spans = [np.float32(max(b - a + 1, 1)) for a, b in zip(first, last)]
        for place in np.ndindex(*bins):
            part = []
            for p, axis in zip(place, (1, 0)):
                step = spans[axis] / np.float32(bins[1 - axis])
                edge = np.array([np.floor(p * step), np.ceil((p + 1) * step)]) + first[axis]
                part.append(slice(*np.clip(edge, 0, x.shape[3 - axis]).astype(int)))
            window = x[int(roi[0]), :, part[0], part[1]]
            y[(r, slice(None), *place)] = window.max((1, 2)) if window.size else 0
    return y


@pytest.mark.parametrize("h, wide", [(1, 1), (6, 5), (7, 13)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_max_roi_pool(h: int, wide: int, scale: float) -> None:
    rois = np.array([[0, 1, 2, 8, 9], [1, 0, 0, 3, 30], [0, 4, 4, 4, 4], [1, 0.25, 0.75, 9.5, 8.5], [1, 3, 3, 1, 1],
                     [0, 60, 2, 70, 9], [1, 2, 1, 13, 11]], np.float32)  # fmt: skip
    x = f(2, 3, h, wide)
    text = (
        "(float[b, c, h, w] x, float[r, 5] i) => (float[r, c, 2, 3] y) "
        f"{{ y = MaxRoiPool<pooled_shape = [2, 3], spatial_scale = {scale}>(x, i) }}"
    )
    module = load_onnx(model(text))
    for form in (module, lower(module).module):
        (found,) = own_results(evaluate_function(form, [x, rois]), module)
        np.testing.assert_array_equal(found, pooled_regions(x, rois, (2, 3), scale))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("h, wide", [(1, 1), (2, 3), (11, 13)])
def test_roi_align_with_as_many_samples_as_regions_are_large(mode: str, h: int, wide: int) -> None:
    corners = np.sort(RNG.uniform(-4, 30, (23, 2, 2)), axis=1).reshape(23, 4).astype(np.float32)
    rois = np.concatenate([corners, corners[:3, ::-1]])
    text = ("(float[b, c, h, w] x, float[r, 4] i, int64[r] j) => (float[r, c, 3, 2] y) { y = RoiAlign<output_height = 3, "
            f'output_width = 2, coordinate_transformation_mode = "{mode}">(x, i, j) }}')  # fmt: skip
    check(model(text), [f(2, 2, h, wide), rois, RNG.integers(0, 2, len(rois))], rtol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 4), (2, 1, 3), (1, 1, 1)])
def test_aligned_place_of_single_element_equals_onnx_runtime(sizes: tuple[int, ...]) -> None:
    n = len(sizes)
    theta = RNG.standard_normal((2, n, n + 1))
    # ONNX Runtime's: from -1 to 1, and 1 for a single element
    places = np.stack(np.meshgrid(*(np.linspace(-1, 1, s) if s > 1 else np.ones(1) for s in sizes), indexing="ij"), -1)
    plain = np.concatenate([places[..., ::-1], np.ones((*sizes, 1))], -1).reshape(-1, n + 1)
    text = (
        f"(double[b, d, e] t) => (double[b, {', '.join('xyz'[:n])}, d] y) "
        f"<int64[{n + 2}] s = {{2, 3, {', '.join(map(str, sizes))}}}> {{ y = AffineGrid<align_corners = 1>(t, s) }}"
    )
    module = lower(load_onnx(model(text, 20))).module
    (y,) = own_results(evaluate_function(module, [theta]), module)
    np.testing.assert_allclose(y, (plain @ theta.transpose(0, 2, 1)).reshape(2, *sizes, n), rtol=1e-12, atol=1e-12)
