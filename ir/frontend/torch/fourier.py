"""ATen Fourier transforms, their inverses and real forms, stft, istft, and the windows of transforms.

Tests: `tests/ir/frontend/torch/test_complex.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, as_int, const, maximum, minimum, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.fourier import Parts, frames, multiplied, real_inverse, scaled, transform
from relax_tune.ir.frontend.shared.handlers.shape import pad
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Array, ImportedValue, Writer
from relax_tune.ir.frontend.torch.complex import as_real, complex_of, parts_of
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, Result, TorchNode, as_value, dim
from relax_tune.ir.op.neural.fold import Fold

NONE, ROOT = 0, 1
"""Normalisations by number: without, by the root of the size, by the size."""


def _operand(w: Writer, n: TorchNode, position: int = 0) -> Parts:
    """Return the parts of a signal; 16-bit floats are transformed in 32 bits."""
    real, imag = parts_of(n.args[position])
    work = f32 if n.dtype.is_half else n.dtype
    return as_value(w, real, work), None if imag is None else as_value(w, imag, work)


def _normalised(w: Writer, n: TorchNode, parts: Sequence[Value], sizes: Sequence[Expr], mode: int) -> list[Value]:
    scaled_parts = parts if mode == NONE else [scaled(w, p, sizes, mode == ROOT) for p in parts]
    return [w.cast(p, n.dtype) for p in scaled_parts]


def _forward(w: Writer, n: TorchNode) -> ComplexValue:
    """Import a transform of real or of complex numbers along several dims."""
    real = n.op == "aten._fft_r2c.default"
    x = _operand(w, n)
    dims = tensor_dims(x[0])
    axes = n.axes(1, "dim", len(dims))
    for axis in reversed(axes):
        # The last axis comes first: of a real signal only half its spectrum is needed, and the other axes transform
        # that half.
        onesided = real and bool(n.args[3]) and axis == axes[-1]
        x = transform(w, x, axis, dims[axis], not real and not n.args[3], onesided)
    re, im = x
    assert im is not None
    return complex_of(w, *_normalised(w, n, (re, im), [dims[a] for a in axes], n.number(2, "normalization")))


def _to_real(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the inverse transform of half a spectrum along the last of several dims to a real signal."""
    x = _operand(w, n)
    axes, size = n.axes(1, "dim", len(tensor_dims(x[0]))), w.simplify(dim(n.args[3]))
    sizes = [*(tensor_dims(x[0])[a] for a in axes[:-1]), size]
    # The other axes first, while the numbers are complex; the last step gives real ones.
    for axis in axes[:-1]:
        x = transform(w, x, axis, tensor_dims(x[0])[axis], True)
    re, im = x
    if im is None:
        raise n.refuse("expected a complex spectrum; make it one by torch.complex")
    signal = real_inverse(w, (re, im), axes[-1], size)
    return w.of(_normalised(w, n, [signal], sizes, n.number(2, "normalization"))[0])


def _window_of(w: Writer, n: TorchNode, window_argument: object, size: int, width: int) -> Parts | None:
    """Return a window of `width`, or one of ones, in the middle of `size` zeros; None: all ones."""
    if window_argument is None and width == size:
        return None
    real, imag = parts_of(window_argument)
    parts = [w.full([const(width)], 1.0, n.dtype) if real is None else as_value(w, real, n.dtype)]
    parts += [] if imag is None else [as_value(w, imag, n.dtype)]
    # A window shorter than the transform is centred in it, as torch does.
    before = (size - width) // 2
    padded = [pad(w, p, [(before, size - width - before)]) for p in parts]
    return padded[0], padded[1] if len(padded) == 2 else None


def _short_time(w: Writer, n: TorchNode) -> Result:
    """Import the transforms of windows of a signal (aten.stft): (batch, frequencies, windows)."""
    size = n.number(1, "n_fft")
    step, width = (n.number(p, k) if n.argument(p, k) is not None else d for p, k, d in _lengths(size))
    if n.argument(8, "align_to_window"):
        raise n.refuse("expected no align_to_window; pad the signal instead")
    window = _window_of(w, n, n.argument(4, "window"), size, width)
    real, imag = parts_of(n.args[0])
    signal = [as_value(w, p, n.dtype) for p in (real, imag) if p is not None]
    whole = imag is not None or (window is not None and window[1] is not None)
    onesided = n.argument(6, "onesided")
    onesided = not whole if onesided is None else bool(onesided)
    last = len(tensor_dims(signal[0]))
    gives_complex = len(n.dims) == last + 1
    count = n.dims[-1] if gives_complex else n.dims[-2]
    parts = [frames(w, p, count, const(size), step) for p in signal]
    x: Parts = (parts[0], parts[1] if len(parts) == 2 else None)
    x = x if window is None else multiplied(w, x, window)
    re, im = transform(w, x, last, const(size), onesided=onesided)
    spectrum = _normalised(w, n, (re, im), [const(size)], ROOT if n.argument(5, "normalized", False) else NONE)
    order = [*range(last - 1), last, last - 1]
    y = complex_of(w, *(w.permute(v, order) for v in spectrum))
    return y if gives_complex else as_real(w, y)


def _lengths(size: int) -> tuple[tuple[int, str, int], ...]:
    """Return position, name and default of hop_length and win_length."""
    return (2, "hop_length", size // 4), (3, "win_length", size)


def _overlapped(w: Writer, value: Value, step: int, begin: Expr, size: Expr) -> Value:
    """Emit `size` sums from `begin` on of windows (batch, windows, places) with starts at multiples of `step`."""
    batch, count, width = tensor_dims(value)
    columns = w.reshape(w.permute(value, [0, 2, 1]), [batch, const(1), width, count])
    return w.reshape(w.emit(Fold((size,), (step,), (1,), (begin,)), columns), [batch, size])


def _inverse_short_time(w: Writer, n: TorchNode) -> Result:
    """Import the inverse of aten.stft (Griffin and Lim 1984): windows added up, over the sum of the squared window."""
    size = n.number(1, "n_fft")
    step, width = (n.number(p, k) if n.argument(p, k) is not None else d for p, k, d in _lengths(size))
    onesided, whole = n.argument(7, "onesided"), n.argument(9, "return_complex", False)
    re, im = _operand(w, n)
    if im is None:
        raise n.refuse("expected a complex spectrum; make it one by torch.view_as_complex")
    dims = tensor_dims(re)
    batch, bins, count = dims if len(dims) == 3 else (const(1), *dims)
    onesided = as_int(bins) != size if onesided is None else bool(onesided)
    re, im = (w.permute(w.reshape(v, [batch, bins, count]), [0, 2, 1]) for v in (re, im))
    parts = (
        [real_inverse(w, (re, im), 2, const(size))] if onesided else list(transform(w, (re, im), 2, const(size), True))
    )
    parts = [
        scaled(w, p, [const(size)], bool(n.argument(6, "normalized", False))) for p in (parts if whole else parts[:1])
    ]
    window = _window_of(w, n, n.argument(4, "window"), size, width) or (w.full([const(size)], 1.0, n.dtype), None)
    if window[1] is not None:
        raise n.refuse("expected a real window")
    # A centred transform has padded half a window at both ends, which is cut off again.
    begin = const(size // 2 if n.argument(5, "center", True) else 0)
    total = w.simplify(add(mul(sub(count, 1), step), size))
    length = n.argument(8, "length")
    end = sub(total, begin) if length is None else add(begin, dim(length))
    there = w.simplify(maximum(sub(minimum(end, total), begin), 0))
    square = w.reshape(w.mul(window[0], window[0]), [const(1), const(1), const(size)])
    weight = w.full([const(1), count, const(size)], 1.0, n.dtype)
    envelope = _overlapped(w, w.mul(weight, square), step, begin, there)
    results = []
    for p in parts:
        y = w.div(_overlapped(w, w.mul(p, window[0]), step, begin, there), envelope)
        y = pad(w, y, [(0, 0), (0, w.simplify(maximum(sub(end, total), 0)))])
        results.append(w.reshape(y, n.dims))
    return complex_of(w, *results) if len(results) == 2 else w.of(results[0])


Shape = Callable[[Array, Sequence[float]], Array]


def _cosines(*factors: float) -> Shape:
    """Make a sum of cosines of multiples of the place on the circle. Given numbers replace factors."""

    def shape(x: Array, parameters: Sequence[float]) -> Array:
        every = [*parameters, *factors[len(parameters) :]]
        return np.asarray(sum((-1) ** k * f * np.cos(2 * np.pi * k * x) for k, f in enumerate(every)))

    return shape


def _bartlett(x: Array, parameters: Sequence[float]) -> Array:
    return np.asarray(1 - np.abs(2 * x - 1))


def _kaiser(x: Array, parameters: Sequence[float]) -> Array:
    beta = parameters[0] if parameters else 12.0
    return np.asarray(np.i0(beta * np.sqrt(np.maximum(1 - (2 * x - 1) ** 2, 0))) / np.i0(beta))


def window(shape: Shape) -> Handler:
    """Make a handler of a window of a shape over 0 .. 1; a periodic one lacks the last element."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        size, periodic = n.number(0, "window_length"), bool(n.argument(1, "periodic", True))
        parameters = [float(g) for g in map(number_of, n.args[2:]) if g is not None]
        # A periodic window is the symmetric one of one more element, without its last.
        steps = size if periodic else size - 1
        if len(parameters) != len(n.args[2:]):
            raise n.refuse("expected numbers as parameters of a window")
        values = shape(np.arange(size) / steps, parameters) if size > 1 else np.ones(size)
        return w.constant(values.astype(n.dtype.numpy), n.name)

    return handler


SHAPES: Mapping[str, tuple[Shape, Sequence[str]]] = {
    "hann": (_cosines(0.5, 0.5), ()),
    "hamming": (_cosines(0.54, 0.46), ("periodic_alpha", "periodic_alpha_beta")),
    "blackman": (_cosines(0.42, 0.5, 0.08), ()), "bartlett": (_bartlett, ()), "kaiser": (_kaiser, ("beta",)),
}  # fmt: skip
"""Shape of each window, and the overloads of its operator besides the two that all windows have."""


HANDLERS: Mapping[str, Handler] = {
    **{f"aten.{name}_window.{overload}": window(shape)
    for name, (shape, more) in SHAPES.items()
    for overload in ("default", "periodic", *more)},
    "aten._fft_r2c.default": _forward, "aten._fft_c2c.default": _forward, "aten._fft_c2r.default": _to_real,
    "aten.stft.default": _short_time, "aten.istft.default": _inverse_short_time,
}  # fmt: skip
