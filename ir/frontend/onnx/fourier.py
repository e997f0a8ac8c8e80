"""ONNX operators on signals: DFT, STFT, MelWeightMatrix. The last dim of a signal has its real and its imaginary part."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, ge, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.fourier import (
    Parts,
    frames,
    half,
    multiplied,
    real_inverse,
    scaled,
    transform,
)
from relax_tune.ir.frontend.shared.handlers.shape import pad
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Array, ImportedValue, Writer
from relax_tune.ir.rewrite.emitter import tensor_info


def _parts(w: Writer, node: OnnxNode) -> Parts:
    """Return the parts of a signal; 16-bit floats are transformed in 32 bits."""
    x = node.item(0)
    count = as_int(x.shape[-1]) if x.ndim > 1 else None
    if count not in (1, 2):
        raise node.refuse(
            f"expected a signal whose last dim is 1 for real or 2 for complex numbers, got {x.info!r}; reshape it to that"
        )
    value, last = w.cast(w.tensor(x), f32 if x.dtype.is_half else x.dtype), x.ndim - 1
    parts = [w.reshape(w.slice(value, last, const(p), const(p + 1)), x.shape[:-1]) for p in range(count)]
    return parts[0], parts[1] if count == 2 else None


def _joined(w: Writer, node: OnnxNode, *parts: Value) -> ImportedValue:
    """Return the parts as the last dim."""
    x, last = node.item(0), node.item(0).ndim - 1 + (node.op == "STFT")
    columns = [w.expand_dims(w.cast(p, x.dtype), (last,)) for p in parts]
    return w.of(columns[0] if len(columns) == 1 else w.concat(last, *columns))


def _sized(w: Writer, value: Value, axis: int, size: Expr) -> Value:
    """Pad a value with zeros at the end of an axis, or crop it, to a size."""
    dims = tensor_dims(value)
    more = [(0, sub(size, d) if p == axis else const(0)) for p, d in enumerate(dims)]
    return value if w.g.deduction.same(dims[axis], size) else pad(w, value, more)


def _size(w: Writer, node: OnnxNode, position: int, default: Expr) -> Expr:
    """Return a length of at least 1 that an input without dims may state."""
    if not node.has(position):
        return default
    sizes = node.expressions(w, position)
    if len(sizes) != 1 or not w.require(ge(sizes[0], 1)):
        raise node.refuse(f"expected one length of at least 1 as input {position}, got {sizes}")
    return w.simplify(sizes[0])


def _transform(w: Writer, node: OnnxNode) -> ImportedValue:
    re, im = _parts(w, node)
    dims = tensor_dims(re)
    inverse, onesided = (node.flag(a) for a in ("inverse", "onesided"))
    if node.opset < 20:
        axis = node.integer("axis", 1)
    else:
        axis = node.integers(w, 2)[0] if node.has(2) else -2
    axis = node.normalised(axis, node.item(0).ndim)
    if axis == len(dims):
        raise node.refuse("expected an axis but the last, which has the parts of the numbers")
    back = inverse and onesided
    size = _size(w, node, 1, w.simplify(mul(sub(dims[axis], 1), 2)) if back else dims[axis])
    # A real signal of n elements is determined by its first n // 2 + 1 frequencies.
    bins = half(w, size) if back else size
    re, im = _sized(w, re, axis, bins), None if im is None else _sized(w, im, axis, bins)
    if back:
        im = w.full(tensor_dims(re), 0.0, tensor_info(re).dtype or f32) if im is None else im
        return _joined(w, node, scaled(w, real_inverse(w, (re, im), axis, size), [size]))
    parts = transform(w, (re, im), axis, size, inverse, onesided)
    return _joined(w, node, *(scaled(w, v, [size]) if inverse else v for v in parts))


def _short_time(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import transforms of windows of a signal (batch, length, parts): (batch, windows, frequencies, 2)."""
    signal = node.item(0)
    if signal.ndim != 3:
        raise node.refuse(f"expected a signal (batch, length, 1 or 2), got {signal.info!r}; reshape it to that")
    window = node.item(2) if node.has(2) else None
    length = signal.shape[1]
    size = _size(w, node, 3, length if window is None else window.shape[0])
    (step,) = node.integers(w, 1)
    if step < 1:
        raise node.refuse(f"expected a frame_step of at least 1, got {step}")
    if not w.require(ge(length, size)):
        raise node.refuse(f"expected a signal of at least {size!r} elements, got {length!r}; pad it first")
    count = w.simplify(add(floordiv(sub(length, size), const(step)), 1))
    re, im = _parts(w, node)
    x: Parts = (frames(w, re, count, size, step), None if im is None else frames(w, im, count, size, step))
    if window is not None:
        work = tensor_info(re).dtype or f32
        x = multiplied(w, x, (w.cast(w.tensor(window), work), None))
    return _joined(w, node, *transform(w, x, 2, size, onesided=node.flag("onesided", True)))


def _mel_weights(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import the weights of mel bands as a constant of (frequencies, bands)."""
    numbers: list[float] = []
    for p in range(5):
        array = w.numbers(node.item(p))
        if array is None or array.size != 1:
            raise node.refuse(f"expected input {p} to be one constant, got {node.item(p).info!r}")
        numbers.append(array.reshape(-1)[0].item())
    target = node.element("output_datatype", f32)
    bands, size, rate, low, high = numbers
    return w.constant(_triangles(int(bands), int(size), rate, low, high).astype(target.numpy), node.outputs[0])


def _triangles(bands: int, size: int, rate: float, low: float, high: float) -> Array:
    """Return triangles between neighbouring edges that are evenly spaced on the mel scale; see ONNX, MelWeightMatrix."""
    # The mel scale of the standard (MelWeightMatrix): 2595 * log10(1 + f / 700).
    lowest, highest = (2595 * math.log10(1 + hertz / 700) for hertz in (low, high))
    # Divided by bands + 2, not by bands + 1: the last edge is one step below `high`, as in the formula of the
    # standard.
    mels = lowest + np.arange(bands + 2) * (highest - lowest) / (bands + 2)
    edges = np.floor((size + 1) * (700 * (10 ** (mels / 2595) - 1)) / rate).astype(np.int64)
    weights = np.zeros((size // 2 + 1, bands))
    for band in range(bands):
        left, centre, right = edges[band : band + 3]
        places = np.arange(left, centre + 1)
        # At low frequencies neighbouring edges may fall into one bin, which would be a division by 0.
        weights[left : centre + 1, band] = (places - left) / (centre - left) if left < centre else 1.0
        if centre < right:
            weights[centre:right, band] = (right - np.arange(centre, right)) / (right - centre)
    return weights


HANDLERS: Mapping[str, Handler] = {
    "DFT": _transform, "STFT": _short_time, "MelWeightMatrix": _mel_weights,
}  # fmt: skip
