"""Random numbers of both formats, by a counter: Philox 4x32-10 (Salmon et al., SC 2011).

The number of an element depends only on its position and the key of its node. Every call gives the same numbers, and so does every
iteration of a loop.

Tests: `tests/ir/frontend/onnx/test_random.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64, i64, u64
from relax_tune.ir.core.expr import Expr, const, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.math.bits import BitwiseOr, BitwiseXor
from relax_tune.ir.rewrite.emitter import tensor_info

Key = tuple[int, int]


ROUNDS = 10


FACTORS = (0xD2511F53, 0xCD9E8D57)


STEPS = (0x9E3779B9, 0xBB67AE85)


WORD = 0xFFFFFFFF


PRECISION: Mapping[DType, int] = {f16: 11, bf16: 8, f32: 24, f64: 53}
"""Number of bits of a significand."""


def key_of(w: Writer, seed: float | None) -> Key:
    """Return the key of a node: of its seed, or else of its place among the random nodes without one."""
    if seed is None:
        return w.serial("random numbers") & WORD, 1
    return int(struct.unpack("<I", struct.pack("<f", seed))[0]), 0


def philox(w: Writer, counter: Sequence[Value], key: Key) -> list[Value]:
    """Emit Philox 4x32-10 of four words of 32 bits, in uint64."""
    mask, half = w.literal(WORD, u64), w.literal(32, u64)
    factors = [w.literal(m, u64) for m in FACTORS]
    c = list(counter)
    for r in range(ROUNDS):
        keys = [w.literal((k + r * step) & WORD, u64) for k, step in zip(key, STEPS)]
        products = [w.mul(c[p], m) for p, m in zip((0, 2), factors)]
        high = [w.shift_right(p, half) for p in products]
        low = [w.bitwise_and(p, mask) for p in products]
        mixed = [w.emit(BitwiseXor(), w.emit(BitwiseXor(), high[1 - p], c[1 + 2 * p]), keys[p]) for p in (0, 1)]
        c = [mixed[0], low[1], mixed[1], low[0]]
    return c


def words(w: Writer, shape: Sequence[Expr], key: Key) -> list[Value]:
    """Emit four words of 32 bits for each element of a shape, in uint64."""
    at = w.cast(w.iota(w.simplify(product(shape))), u64)
    zero = w.literal(0, u64)
    counter = [w.bitwise_and(at, w.literal(WORD, u64)), w.shift_right(at, w.literal(32, u64)), zero, zero]
    return [w.reshape(v, shape) for v in philox(w, counter, key)]


def _joined(w: Writer, high: Value, low: Value) -> Value:
    """Return two words of 32 bits as one of 64."""
    return w.emit(BitwiseOr(), w.shift_left(high, w.literal(32, u64)), low)


def _part(w: Writer, drawn: Sequence[Value], element: DType) -> Value:
    """Return numbers in [0, 1): the first bits of the words, as many as the element type holds exactly."""
    bits = PRECISION[element]
    if element is f64:
        whole = w.shift_right(_joined(w, drawn[0], drawn[1]), w.literal(64 - bits, u64))
    else:
        whole = w.shift_right(drawn[0], w.literal(32 - bits, u64))
    work = f64 if element is f64 else f32
    # processors convert signed integers to floats by one instruction, unsigned ones by several
    return w.mul(w.cast(w.cast(whole, i64), work), 2.0**-bits)


def uniform(w: Writer, shape: Sequence[Expr], key: Key, element: DType, low: float = 0.0, high: float = 1.0) -> Value:
    """Emit numbers of equal density in [low, high), rounded to the element type."""
    numbers = _part(w, words(w, shape, key), element)
    if high - low != 1.0:
        numbers = w.mul(numbers, high - low)
    if low:
        numbers = w.add(numbers, low)
    return w.cast(numbers, element)


def normal(w: Writer, shape: Sequence[Expr], key: Key, element: DType, mean: float = 0.0, scale: float = 1.0) -> Value:
    """Emit normally distributed numbers (Box and Muller 1958): `sqrt(-2 log(u)) cos(2 pi v)`, u in (0, 1], v in [0, 1)."""
    work = f64 if element is f64 else f32
    drawn = words(w, shape, key)
    u = w.add(_part(w, drawn, work), 2.0 ** -PRECISION[work])
    v = _part(w, drawn[2:], work)
    size = w.sqrt(w.mul(w.log(u), -2.0))
    numbers = w.mul(size, w.cos(w.mul(v, 2 * math.pi)))
    if scale != 1.0:
        numbers = w.mul(numbers, scale)
    if mean:
        numbers = w.add(numbers, mean)
    return w.cast(numbers, element)


def integers(w: Writer, shape: Sequence[Expr], key: Key, low: int, high: int) -> Value:
    """Emit integers in [low, high), as int64: the rest of 64 bits, whose bias is below `(high - low) / 2^64`."""
    drawn = words(w, shape, key)
    rest = w.modulo(_joined(w, drawn[0], drawn[1]), high - low)
    return w.add(w.cast(rest, i64), low) if low else w.cast(rest, i64)


def drawn_true(w: Writer, chance: ImportedValue, key: Key) -> Value:
    """Emit truth values, each true with its own probability, a float from 0 to 1."""
    work = f64 if chance.dtype is f64 else f32
    part = uniform(w, chance.shape, key, work)
    return w.less(part, w.cast(w.tensor(chance), work))


def dropped(w: Writer, x: ImportedValue, ratio: float, key: Key) -> tuple[Value, Value]:
    """Emit (mask, result) of dropout (Srivastava et al. 2014): elements remain with the probability `1 - ratio`, and are divided by it."""
    work = f64 if x.dtype is f64 else f32
    mask = w.less_equal(w.literal(ratio, work), uniform(w, x.shape, key, work))
    value = w.cast(w.tensor(x), work)
    scaled = w.mul(value, 1 / (1 - ratio) if ratio < 1 else 0.0)
    return mask, w.cast(w.where(mask, scaled, 0), x.dtype)


def classes(w: Writer, weights: Value, count: Expr, key: Key) -> Value:
    """Emit `count` classes of each row, drawn with replacement by weights (rows, classes): (rows, count), int64.

    A class is drawn where a number below the total passes the sums of the weights up to it (inversion of the distribution)."""
    rows, n = tensor_dims(weights)
    element = tensor_info(weights).dtype or f32
    sums = w.cum_sum(weights, 1)
    total = w.slice(sums, 1, w.simplify(sub(n, 1)), n)
    at = w.mul(uniform(w, [rows, count], key, element), total)
    passed = w.less_equal(w.reshape(sums, [rows, const(1), n]), w.reshape(at, [rows, count, const(1)]))
    # rounding up to the total passes all sums; a class without weight is never the last
    possible = w.less(0, weights)
    last = w.arg_max(w.cast(possible, i64), 1, last=True)
    drawn = w.sum(w.cast(passed, i64), (2,), False)
    return w.minimum(drawn, w.reshape(last, [rows, const(1)]))


def distinct_classes(w: Writer, weights: Value, count: Expr, key: Key) -> Value:
    """Emit `count` different classes of each row by weights (rows, classes): the largest `log(u) / weight` (Efraimidis and
    Spirakis 2006)."""
    element = tensor_info(weights).dtype or f32
    shape = tensor_dims(weights)
    work = f64 if element is f64 else f32
    u = w.add(_part(w, words(w, shape, key), work), 2.0 ** -PRECISION[work])
    rank = w.div(w.log(u), weights)
    none = w.less_equal(weights, 0)
    rank = w.where(none, -math.inf, rank)
    return w.top_k(rank, count, 1)
