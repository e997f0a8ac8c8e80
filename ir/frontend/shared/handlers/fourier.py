"""Discrete Fourier transforms of both formats: products with a cosine and a sine matrix.

A complex tensor is a pair of its real and its imaginary part. Sizes may be expressions over the shape symbols.

Tests: `tests/ir/frontend/onnx/test_fourier.py`, `tests/ir/frontend/torch/test_complex.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.emitter import tensor_info

Parts = tuple[Value, "Value | None"]
"""Real and imaginary part; None: all zeros."""


Array = NDArray[np.float64]


LARGEST_TABLE = 1 << 20
"""Elements up to which a matrix of known size is a constant."""


LARGEST_PRODUCT = 1024
"""Known length up to which a transform is one product; longer ones are split where their factors allow it."""


LEAST_FACTOR = 8


def half(w: Writer, size: Expr) -> Expr:
    """Return the number of frequencies that the transform of a real signal of `size` is known by."""
    return w.simplify(add(floordiv(size, const(2)), 1))


def transform(
    w: Writer, x: Parts, axis: int, size: Expr, inverse: bool = False, onesided: bool = False
) -> tuple[Value, Value]:
    """Emit the discrete Fourier transform of `x` along an axis of `size`, without a factor.

    Args:
        onesided: Only the first `size // 2 + 1` frequencies.
    """
    order = _to_last(x[0], axis)
    re, im = (v if v is None else w.permute(v, order) for v in x)
    assert re is not None
    bins = half(w, size) if onesided else size
    split = _split(size)
    frequencies = (
        _product(w, (re, im), size, bins, inverse) if split is None else _cooley_tukey(w, (re, im), split, inverse)
    )
    if split is not None:
        frequencies = (w.slice(frequencies[0], len(order) - 1, const(0), bins), _front(w, frequencies[1], bins))
    back = [order.index(p) for p in range(len(order))]
    return w.permute(frequencies[0], back), w.permute(frequencies[1], back)


def real_inverse(w: Writer, x: tuple[Value, Value], axis: int, size: Expr) -> Value:
    """Emit the real signal of `size` whose first `size // 2 + 1` frequencies along an axis are `x`, without a factor.

    Frequencies but the first, and the last of an even size, count twice: once for their conjugate."""
    order = _to_last(x[0], axis)
    re, im = (w.permute(v, order) for v in x)
    back = [order.index(p) for p in range(len(order))]
    element, last = _element(re), len(order) - 1
    split = _split(size)
    if split is not None:
        end = w.simplify(add(sub(size, half(w, size)), 1))
        more = [w.reversed(w.slice(v, last, const(1), end), last) for v in (re, im)]
        whole = w.concat(last, re, more[0]), w.concat(last, im, w.mul(more[1], -1.0))
        return w.permute(_cooley_tukey(w, whole, split, True)[0], back)
    twice = _twice(w, size, element)
    cos, sin = waves(w, size, half(w, size), size, False, element)
    re, im = (w.mul(v, twice) for v in (re, im))
    return w.permute(w.add(_rows(w, re, cos), _rows(w, im, sin)), back)


def scaled(w: Writer, value: Value, sizes: Sequence[Expr], root: bool = False) -> Value:
    """Emit a value divided by the product of sizes, or by its square root."""
    element, total = _element(value), w.simplify(product(sizes))
    known = as_int(total)
    if known is not None:
        by = math.sqrt(max(known, 1)) if root else max(known, 1)
        return value if by == 1 else w.div(value, by)
    count = w.cast(w.size(total), element)
    return w.div(value, w.sqrt(count) if root else count)


def frames(w: Writer, value: Value, count: Expr, size: Expr, step: int) -> Value:
    """Emit `count` windows of `size` elements at multiples of `step` of the last axis: (..., count, size)."""
    first = w.expand_dims(w.mul(w.iota(count), step), (1,))
    return w.take(value, len(tensor_dims(value)) - 1, w.add(first, w.iota(size)))


def multiplied(w: Writer, a: Parts, b: Parts) -> Parts:
    """Emit the product of complex numbers, element by element."""
    (p, q), (r, s) = a, b
    re = w.mul(p, r)
    if q is None or s is None:
        one = w.mul(p, s) if s is not None else w.mul(q, r) if q is not None else None
        return re, one
    return w.sub(re, w.mul(q, s)), w.add(w.mul(p, s), w.mul(q, r))


def waves(w: Writer, rows: Expr, columns: Expr, size: Expr, inverse: bool, element: DType) -> tuple[Value, Value]:
    """Emit cosine and sine of `2 pi j k / size` of row j and column k; the sine is negative unless `inverse`.

    The angle is computed from `j k` modulo `size`, so that large products lose no digits."""
    r, c, n = (as_int(e) for e in (rows, columns, size))
    if r is not None and c is not None and n is not None and r * c <= LARGEST_TABLE:
        return _constants(w, f"{r}_{c}_{n}", n, np.outer(np.arange(r), np.arange(c)) % max(n, 1), inverse, element)
    first = w.expand_dims(w.iota(rows), (1,))
    place = w.modulo(w.mul(first, w.iota(columns)), w.size(size))
    cos, sin = _table(w, size, inverse, element)
    return w.emit(Take(), cos, place), w.emit(Take(), sin, place)


def _constants(
    w: Writer, name: str, n: int, places: NDArray[np.int64], inverse: bool, element: DType
) -> tuple[Value, Value]:
    """Return cosine and sine at places on a circle of `n` as constants."""

    def cos() -> Array:
        return _circle(n, inverse)[0][places]

    def sin() -> Array:
        return _circle(n, inverse)[1][places]

    sine_name = "sin_inverse" if inverse else "sin"
    return (
        w.tensor(w.table(f"dft_cos_{name}", element, cos)),
        w.tensor(w.table(f"dft_{sine_name}_{name}", element, sin)),
    )


def _circle(n: int, inverse: bool) -> tuple[Array, Array]:
    """Return cosine and sine of all multiples of `2 pi / n`, exact at multiples of a right angle; see `_table`."""
    r = np.arange(n)
    h = 2 * np.minimum(r, n - r)
    folded = 2 * np.minimum(h, n - h)
    angle = np.minimum(folded, n - folded) * (math.pi / 2) / max(n, 1)
    swapped = n < 2 * folded
    cos = np.where(swapped, np.sin(angle), np.cos(angle))
    sin = np.where(swapped, np.cos(angle), np.sin(angle))
    return np.where(n < 2 * h, -cos, cos), np.where((n < 2 * r) == inverse, -sin, sin) + 0.0


def _table(w: Writer, size: Expr, inverse: bool, element: DType) -> tuple[Value, Value]:
    """Emit cosine and sine of all multiples of `2 pi / size`, from angles of at most `pi / 4`, where few digits are lost."""
    known = as_int(size)
    if known is not None:
        return _constants(w, str(known), known, np.arange(known), inverse, element)
    n, r = w.size(size), w.iota(size)

    def double(v: Value) -> Value:
        return w.mul(v, 2)

    h = double(w.minimum(r, w.sub(n, r)))
    folded = double(w.minimum(h, w.sub(n, h)))
    place = w.minimum(folded, w.sub(n, folded))
    ratio = w.div(w.cast(place, element), w.cast(n, element))
    angle = w.mul(ratio, math.pi / 2)
    near, far = w.cos(angle), w.sin(angle)
    swapped = w.less(n, double(folded))
    cos, sin = w.where(swapped, far, near), w.where(swapped, near, far)
    cos = w.where(w.less(n, double(h)), w.mul(cos, -1.0), cos)
    signs = (w.mul(sin, -1.0), sin) if inverse else (sin, w.mul(sin, -1.0))
    return cos, w.where(w.less(n, double(r)), *signs)


def _twice(w: Writer, size: Expr, element: DType) -> Value:
    """Emit how often each of the first frequencies of a real signal counts."""
    known = as_int(size)
    if known is not None:
        k = np.arange(known // 2 + 1)
        return w.tensor(w.table(f"dft_twice_{known}", element, lambda: np.where((k == 0) | (2 * k == known), 1.0, 2.0)))
    places = w.iota(half(w, size))
    ends = (w.equal(places, 0), w.equal(w.mul(places, 2), w.size(size)))
    return w.where(w.logical_or(*ends), w.literal(1.0, element), w.literal(2.0, element))


def _product(w: Writer, x: Parts, size: Expr, bins: Expr, inverse: bool) -> tuple[Value, Value]:
    """Emit the first `bins` frequencies along the last axis as products with `waves`."""
    re, im = x
    cos, sin = waves(w, size, bins, size, inverse, _element(re))
    a, b = _columns(w, re, cos), _columns(w, re, sin)
    if im is None:
        return a, b
    return w.sub(a, _columns(w, im, sin)), w.add(b, _columns(w, im, cos))


def _cooley_tukey(w: Writer, x: Parts, factors: tuple[int, int], inverse: bool) -> tuple[Value, Value]:
    """Emit a transform of length `p q` by transforms of lengths p and q (Cooley and Tukey 1965).

    Element `q j + i` is in row j and column i, frequency `k + p l` in row l and column k."""
    p, q = factors
    dims = tensor_dims(x[0])
    n = len(dims)
    swap = [*range(n - 1), n, n - 1]
    re, im = (v if v is None else w.reshape(v, [*dims[:-1], const(p), const(q)]) for v in x)
    assert re is not None
    first = transform(w, (re, im), n - 1, const(p), inverse)  # (..., k, i)
    turn = waves(w, const(p), const(q), const(p * q), inverse, _element(re))
    re, im = multiplied(w, first, turn)
    a, b = transform(w, (re, im), n, const(q), inverse)  # (..., k, l)
    return w.reshape(w.permute(a, swap), dims), w.reshape(w.permute(b, swap), dims)


def _split(size: Expr) -> tuple[int, int] | None:
    """Return the factors of a known length that is too long for one product, as equal as they can be."""
    n = as_int(size)
    if n is None or n <= LARGEST_PRODUCT:
        return None
    small = next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
    return (small, n // small) if small >= LEAST_FACTOR else None


def _to_last(value: Value, axis: int) -> list[int]:
    return [*(p for p in range(len(tensor_dims(value))) if p != axis), axis]


def _front(w: Writer, value: Value, size: Expr) -> Value:
    return w.slice(value, len(tensor_dims(value)) - 1, const(0), size)


def _columns(w: Writer, x: Value, matrix: Value) -> Value:
    """Emit (..., k) times (k, n)."""
    return _of_rows(w, x, matrix, Matmul())


def _rows(w: Writer, x: Value, matrix: Value) -> Value:
    """Emit (..., k) times the transpose of (n, k)."""
    return _of_rows(w, x, matrix, Matmul(transpose_b=True))


def _of_rows(w: Writer, x: Value, matrix: Value, op: Matmul) -> Value:
    dims = tensor_dims(x)
    if len(dims) > 1:
        return w.emit(op, x, matrix)
    row = w.emit(op, w.expand_dims(x, (0,)), matrix)
    return w.reshape(row, [tensor_dims(row)[-1]])


def _element(value: Value) -> DType:
    return tensor_info(value).dtype or f32
