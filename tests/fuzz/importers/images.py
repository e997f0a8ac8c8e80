"""Random uses of ONNX operators on windows, images and signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.fuzz.importers.builder import F32, FLOATS, I64, Builder, types_of, within
from tests.fuzz.importers.elementwise import Use, positive, zero_range


def _windows(b: Builder, rank: int, pads: bool = True) -> dict[str, Any]:
    """Return random attributes of windows in `rank` dims."""
    kernel = [b.choose((1, 2, 3)) for _ in range(rank)]
    result: dict[str, Any] = {"kernel_shape": kernel}
    if b.chance(0.6):
        result["strides"] = [b.choose((1, 2, 3)) for _ in range(rank)]
    if pads and b.chance(0.5):
        result["pads"] = [b.rng.randrange(k) for k in kernel * 2]
    elif pads and b.chance(0.3):
        result["auto_pad"] = b.choose(("SAME_UPPER", "SAME_LOWER", "VALID"))
    return result


def _dilations(b: Builder, windows: dict[str, Any]) -> None:
    if "auto_pad" not in windows and b.chance(0.3):
        windows["dilations"] = [b.choose((1, 2)) for _ in windows["kernel_shape"]]


def conv(b: Builder, op: str) -> None:
    rank = b.choose((1, 2, 2, 3))
    groups = b.choose((1, 1, 2, 3))
    c, m = groups * b.choose((1, 2)), groups * b.choose((1, 2))
    w = _windows(b, rank)
    _dilations(b, w)
    k = w["kernel_shape"]
    if b.chance(0.3):
        del w["kernel_shape"]
    else:
        b.p.stated |= {*k}
    # the reference loops over the elements of a transposed convolution
    sizes = (5, 8) if op == "Conv" else (2, 4)
    x = b.x(op, shape=(b.size(1, 3), c, *(b.size(*sizes) for _ in range(rank))))
    dtype = b.get(x).dtype
    more = dict(w, group=groups if groups > 1 or b.chance(0.3) else None)
    if op == "ConvTranspose":
        if more.pop("auto_pad", None) and b.chance(0.5):
            more["auto_pad"] = b.choose(("SAME_UPPER", "SAME_LOWER"))
        if "strides" in more and b.chance(0.3):
            more["output_padding"] = [b.rng.randrange(s) for s in more["strides"]]
        weights = (c, m // groups, *k)
    else:
        weights = (m, c // groups, *k)
    inputs = [x, b.given(weights, dtype), *([b.given((m,), dtype)] if b.chance(0.6) else [])]
    b.node(op, inputs, **more)


def conv_integer(b: Builder, op: str) -> None:
    w = _windows(b, 2)
    w.pop("auto_pad", None)
    x_kind = np.dtype("u1") if op == "ConvInteger" or b.chance(0.5) else np.dtype("i1")
    w_kind = b.choose((np.dtype("u1"), np.dtype("i1"))) if op == "ConvInteger" else x_kind
    c, m = b.choose((1, 2)), b.choose((1, 2, 3))
    x = b.given((b.size(1, 2), c, b.size(4, 7), b.size(4, 7)), x_kind)
    weights = b.given((m, c, *w["kernel_shape"]), w_kind)
    b.p.stated |= {*w["kernel_shape"]}
    zeros = [b.given((), k, within(*zero_range(k), k), True) for k in (x_kind, w_kind)]
    if op == "ConvInteger":
        b.node(op, [x, weights, *(zeros if b.chance(0.6) else [])], **w)
        return
    scales = [b.given((), F32, positive(F32), True) for _ in range(3)]
    inputs = [
        x,
        scales[0],
        zeros[0],
        weights,
        scales[1],
        zeros[1],
        scales[2],
        b.given((), x_kind, within(0, 9, x_kind), True),
    ]
    if b.chance(0.5):
        inputs.append(b.given((m,), np.dtype("i4"), within(-99, 99, np.dtype("i4"))))
    b.node(op, inputs, **w)


def pool(b: Builder, op: str) -> None:
    rank = b.choose((1, 2, 2, 3)) if op != "LpPool" else b.choose((1, 2))
    w = _windows(b, rank)
    if (op == "MaxPool" and b.opset >= 10) or (b.opset >= 19 and op == "AveragePool"):
        _dilations(b, w)
    if b.opset >= 10 and op != "LpPool" and "auto_pad" not in w and b.chance(0.3):
        w["ceil_mode"] = 1
    if op == "AveragePool" and b.chance(0.4):
        w["count_include_pad"] = 1
    if op == "LpPool":
        w["p"] = b.choose((1, 2, 3))
    x = b.x(op, shape=(b.size(1, 3), b.size(1, 3), *(b.size(5, 8) for _ in range(rank))))
    b.node(op, [x], 2 if op == "MaxPool" and b.chance(0.3) else 1, **w)


def global_pool(b: Builder, op: str) -> None:
    x = b.x(op, shape=(b.size(1, 3), b.size(1, 3), *(b.size(1, 8) for _ in range(b.choose((1, 2, 2))))))
    b.node(op, [x], **({"p": b.choose((1, 2, 3))} if op == "GlobalLpPool" else {}))


def max_unpool(b: Builder, op: str) -> None:
    dtype = b.dtype(op)
    x = b.given((b.size(1, 2), b.size(1, 2), 2 * b.size(1, 4), 2 * b.size(1, 4)), dtype)
    y, at = b.node("MaxPool", [x], 2, kernel_shape=[2, 2], strides=[2, 2])
    b.node(op, [y, at], kernel_shape=[2, 2], strides=[2, 2])


def resize(b: Builder, op: str) -> None:
    rank = b.choose((1, 2))
    x = b.x(
        op,
        shape=(b.size(1, 2), b.size(1, 2), *(b.size(2, 7) for _ in range(rank))),
        among=FLOATS if b.chance(0.8) else (),
    )
    mode = b.choose(("nearest", "linear", "cubic") if b.opset >= 11 else ("nearest", "linear"))
    if mode == "cubic" and rank != 2:
        mode = "linear"
    scales = [1.0, 1.0, *(b.choose((0.5, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0)) for _ in range(rank))]
    if op == "Upsample":
        scales = [max(1.0, s) for s in scales]
        if b.opset < 9:
            b.node(op, [x], mode=mode, scales=scales)
        else:
            b.node(op, [x, b.literal(np.array(scales, F32))], mode=mode)
        return
    if b.opset < 11:
        b.node(op, [x, b.literal(np.array(scales, F32))], mode=mode)
        return
    more: dict[str, Any] = {"mode": mode}
    coordinates = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"] + ["half_pixel_symmetric"] * (
        b.opset >= 19
    )
    more["coordinate_transformation_mode"] = b.choose(coordinates)
    if mode == "nearest":
        more["nearest_mode"] = b.choose((None, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
    if mode == "cubic":
        more["cubic_coeff_a"], more["exclude_outside"] = b.choose((None, -0.5)), b.choose((None, 1))
    if b.opset >= 18 and mode != "nearest" and b.chance(0.25):
        more["antialias"] = 1
    if b.chance(0.5):
        sizes = [*b.get(x).shape[:2], *(b.size(1, 8) for _ in range(rank))]
        b.node(op, [x, "" if b.opset >= 13 else b.literal(np.zeros(0, F32)), "" if b.opset >= 13 else b.literal(np.zeros(0, F32)),
                    b.ints(sizes)], **more)  # fmt: skip
        return
    b.node(op, [x, "" if b.opset >= 13 else b.literal(np.zeros(0, F32)), b.literal(np.array(scales, F32))], **more)


def grid_sample(b: Builder, op: str) -> None:
    rank = 2 if b.opset < 20 else b.choose((2, 2, 3))
    dtype = b.dtype(op, among=FLOATS)
    n = b.size(1, 2)
    x = b.given((n, b.size(1, 2), *(b.size(2, 5) for _ in range(rank))), dtype)
    grid = b.given((n, *(b.size(1, 4) for _ in range(rank)), rank), dtype, within(-1.4, 1.4, dtype))
    modes = ("bilinear", "nearest", "bicubic") if b.opset < 20 else ("linear", "nearest", "cubic")
    mode = b.choose(modes[: 2 if rank == 3 else 3])
    padding = b.choose((None, "zeros", "border", "reflection"))
    b.node(op, [x, grid], mode=mode, padding_mode=padding, align_corners=b.choose((None, 0, 1)))


def affine_grid(b: Builder, op: str) -> None:
    rank, n = b.choose((2, 3)), b.size(1, 2)
    dtype = b.dtype(op)
    theta = b.given((n, rank, rank + 1), dtype)
    sizes = b.ints([n, 2, *(b.size(1, 5) for _ in range(rank))])
    b.node(op, [theta, sizes], align_corners=b.choose((None, 0, 1)))


def _boxes(b: Builder, count: int, dtype: Any) -> Any:
    low = b.np_rng.random((count, 2)) * 5
    high = low + b.np_rng.random((count, 2)) * 6 + 0.5
    return np.concatenate([low, high], 1).astype(dtype)


def roi_align(b: Builder, op: str) -> None:
    dtype = b.dtype(op)
    n, count = b.size(1, 2), b.size(1, 4)
    x = b.given((n, b.size(1, 2), b.size(4, 8), b.size(4, 8)), dtype)
    rois = b.literal(_boxes(b, count, dtype), False)
    indices = b.given((count,), I64, within(0, n, I64))
    more: dict[str, Any] = {
        "output_height": b.choose((1, 2, 3)),
        "output_width": b.choose((1, 2, 7)),
        "mode": b.choose(("avg", "max")),
    }
    more |= {"sampling_ratio": b.choose((0, 1, 2)), "spatial_scale": b.choose((None, 0.5))}
    if b.opset >= 16:
        more["coordinate_transformation_mode"] = b.choose((None, "half_pixel", "output_half_pixel"))
    b.node(op, [x, rois, indices], **more)


def max_roi_pool(b: Builder, op: str) -> None:
    dtype = b.dtype(op, among=(F32,))
    n, count = b.size(1, 2), b.size(1, 4)
    x = b.given((n, b.size(1, 2), b.size(4, 8), b.size(4, 8)), dtype)
    rows = np.concatenate([b.np_rng.integers(0, n, (count, 1)), np.floor(_boxes(b, count, dtype))], 1).astype(dtype)
    b.node(
        op,
        [x, b.literal(rows, False)],
        pooled_shape=[b.choose((1, 2)), b.choose((1, 2, 3))],
        spatial_scale=b.choose((None, 0.5)),
    )


def deform_conv(b: Builder, op: str) -> None:
    dtype = b.dtype(op, among=(F32, np.dtype("f8")))
    n, c, m, h, w = b.size(1, 2), b.choose((1, 2)), b.choose((1, 2)), b.size(4, 6), b.size(4, 6)
    k = b.choose((1, 2, 3))
    oh, ow = h - k + 1, w - k + 1
    inputs = [
        b.given((n, c, h, w), dtype),
        b.given((m, c, k, k), dtype),
        b.given((n, 2 * k * k, oh, ow), dtype, within(-1, 1, dtype)),
    ]
    if b.chance(0.6):
        inputs.append(b.given((m,), dtype))
        if b.chance(0.6):
            inputs.append(b.given((n, k * k, oh, ow), dtype))
    b.node(op, inputs, kernel_shape=b.choose((None, [k, k])))


def col2im(b: Builder, op: str) -> None:
    block = [b.choose((1, 2)), b.choose((1, 2, 3))]
    image = [b.size(3, 6), b.size(3, 6)]
    strides, pads = [b.choose((1, 2)), b.choose((1, 2))], [b.choose((0, 1)) for _ in range(4)]
    counts = [(image[d] + pads[d] + pads[d + 2] - block[d]) // strides[d] + 1 for d in range(2)]
    x = b.x(op, shape=(b.size(1, 2), 2 * int(np.prod(block)), int(np.prod(counts))), among=FLOATS)
    b.node(op, [x, b.ints(image), b.ints(block)], strides=strides, pads=pads)


def suppression(b: Builder, op: str) -> None:
    n, classes, boxes = b.size(1, 2), b.size(1, 2), b.size(1, 6)
    corners = np.stack([_boxes(b, boxes, F32) for _ in range(n)])
    scores = b.literal(b.np_rng.permutation(n * classes * boxes).reshape(n, classes, boxes).astype(F32) / 50, False)
    inputs = [
        b.literal(corners, False),
        scores,
        b.literal(np.array([b.choose((1, 2, 5))])),
        b.literal(np.array([0.4], F32)),
    ]
    if b.chance(0.5):
        inputs.append(b.literal(np.array([0.1], F32)))
    b.node(op, inputs, center_point_box=b.choose((None, 0, 1)))


def dft(b: Builder, op: str) -> None:
    dtype = b.dtype(op, among=(F32, np.dtype("f8")))
    length, parts = b.size(1, 8), b.choose((1, 2))
    x = b.given((b.size(1, 3), length, parts), dtype)
    inverse = b.choose((None, 0, 1)) if parts == 2 else None
    onesided = 1 if parts == 1 and b.chance(0.4) else None
    size = b.literal(np.int64(b.choose((length, length + 2, max(1, length - 1))))) if b.chance(0.3) else ""
    if b.opset >= 20:
        b.node(op, [x, size, b.literal(np.int64(1))], inverse=inverse, onesided=onesided)
        return
    b.node(op, [x, size] if size else [x], axis=1, inverse=inverse, onesided=onesided)


def stft(b: Builder, op: str) -> None:
    dtype = b.dtype(op, among=(F32, np.dtype("f8")))
    length = b.choose((2, 3, 4, 5))
    x = b.given((b.size(1, 2), length + b.size(1, 8), 1), dtype)
    window = b.given((length,), dtype) if b.chance(0.5) else ""
    b.node(
        op,
        [x, b.literal(np.int64(b.choose((1, 2, 3)))), window, b.literal(np.int64(length))],
        onesided=b.choose((None, 0, 1)),
    )


def mel(b: Builder, op: str) -> None:
    ints = [b.literal(np.int64(v)) for v in (b.choose((2, 4)), b.choose((8, 12, 16)), b.choose((8000, 16000)))]
    reals = [b.literal(np.asarray(v, F32)) for v in (b.choose((0.0, 60.0)), b.choose((3000.0, 4000.0)))]
    b.node(op, [*ints, *reals])


def windows_of_signals(b: Builder, op: str) -> None:
    size = b.literal(np.asarray(b.choose((1, 2, 5, 8)), b.choose([t for t in types_of(op, b.opset) if t.itemsize > 1])))
    b.node(op, [size], periodic=b.choose((None, 0, 1)))


USES: Mapping[str, Use] = {
    "Conv": conv, "ConvTranspose": conv, "ConvInteger": conv_integer, "QLinearConv": conv_integer,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), global_pool), "MaxUnpool": max_unpool,
    "Resize": resize, "Upsample": resize, "GridSample": grid_sample, "AffineGrid": affine_grid, "RoiAlign": roi_align,
    "MaxRoiPool": max_roi_pool, "DeformConv": deform_conv, "Col2Im": col2im, "NonMaxSuppression": suppression, "DFT": dft, "STFT": stft,
    "MelWeightMatrix": mel, **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), windows_of_signals),
}  # fmt: skip
