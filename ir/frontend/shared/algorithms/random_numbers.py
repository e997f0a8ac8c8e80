"""Random numbers by a counter, for importers of every format: Philox 4x32-10 (Salmon et al., SC 2011).

The number of an element depends on its position and the key of its node alone. Every call gives the same numbers, and so does every
iteration of a loop."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64, i64, u64
from relax_tune.ir.core.expr import Expr, const, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.math.bits import BitwiseAnd, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.elementwise import AddScalar, Cast, Div, Minimum, Mul, MulScalar, Sqrt
from relax_tune.ir.op.math.logic import Less, LessEqual, Where
from relax_tune.ir.op.math.numeric import Cos, Log, Modulo
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.op.reduction.scan import ArgMax, CumSum, TopK
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
    """Emit Philox 4x32-10 of four words of 32 bits, held in uint64."""
    mask, half = w.literal(WORD, u64), w.literal(32, u64)
    factors = [w.literal(m, u64) for m in FACTORS]
    c = list(counter)
    for r in range(ROUNDS):
        keys = [w.literal((k + r * step) & WORD, u64) for k, step in zip(key, STEPS)]
        products = [w.emit(Mul(), c[p], m) for p, m in zip((0, 2), factors)]
        high = [w.emit(ShiftRight(), p, half) for p in products]
        low = [w.emit(BitwiseAnd(), p, mask) for p in products]
        mixed = [w.emit(BitwiseXor(), w.emit(BitwiseXor(), high[1 - p], c[1 + 2 * p]), keys[p]) for p in (0, 1)]
        c = [mixed[0], low[1], mixed[1], low[0]]
    return c


def words(w: Writer, shape: Sequence[Expr], key: Key) -> list[Value]:
    """Emit four words of 32 bits for each element of a shape, in uint64."""
    at = w.emit(Cast(u64), w.emit(Iota(w.simplify(product(shape)))))
    zero = w.literal(0, u64)
    counter = [w.emit(BitwiseAnd(), at, w.literal(WORD, u64)), w.emit(ShiftRight(), at, w.literal(32, u64)), zero, zero]
    return [w.reshape(v, shape) for v in philox(w, counter, key)]


def _joined(w: Writer, high: Value, low: Value) -> Value:
    """Return two words of 32 bits as one of 64."""
    return w.emit(BitwiseOr(), w.emit(ShiftLeft(), high, w.literal(32, u64)), low)


def _part(w: Writer, drawn: Sequence[Value], element: DType) -> Value:
    """Return numbers in [0, 1): the first bits of the words, as many as the element type holds exactly."""
    bits = PRECISION[element]
    if element is f64:
        whole = w.emit(ShiftRight(), _joined(w, drawn[0], drawn[1]), w.literal(64 - bits, u64))
    else:
        whole = w.emit(ShiftRight(), drawn[0], w.literal(32 - bits, u64))
    work = f64 if element is f64 else f32
    # a signed integer becomes a float by one instruction
    return w.emit(MulScalar(2.0**-bits), w.emit(Cast(work), w.emit(Cast(i64), whole)))


def uniform(w: Writer, shape: Sequence[Expr], key: Key, element: DType, low: float = 0.0, high: float = 1.0) -> Value:
    """Emit numbers of equal density in [low, high), rounded to the element type."""
    work = f64 if element is f64 else f32
    found = _part(w, words(w, shape, key), element)
    if high - low != 1.0:
        found = w.emit(MulScalar(high - low), found)
    if low:
        found = w.emit(AddScalar(low), found)
    return cast_to(w, found, work, element)


def normal(w: Writer, shape: Sequence[Expr], key: Key, element: DType, mean: float = 0.0, scale: float = 1.0) -> Value:
    """Emit normally distributed numbers (Box and Muller 1958): `sqrt(-2 log(u)) cos(2 pi v)`, u in (0, 1], v in [0, 1)."""
    work = f64 if element is f64 else f32
    drawn = words(w, shape, key)
    u = w.emit(AddScalar(2.0 ** -PRECISION[work]), _part(w, drawn, work))
    v = _part(w, drawn[2:], work)
    size = w.emit(Sqrt(), w.emit(MulScalar(-2.0), w.emit(Log(), u)))
    found = w.emit(Mul(), size, w.emit(Cos(), w.emit(MulScalar(2 * math.pi), v)))
    if scale != 1.0:
        found = w.emit(MulScalar(scale), found)
    if mean:
        found = w.emit(AddScalar(mean), found)
    return cast_to(w, found, work, element)


def integers(w: Writer, shape: Sequence[Expr], key: Key, low: int, high: int) -> Value:
    """Emit integers in [low, high), as int64: the rest of 64 bits, whose bias is below `(high - low) / 2^64`."""
    drawn = words(w, shape, key)
    rest = w.emit(Modulo(), _joined(w, drawn[0], drawn[1]), w.literal(high - low, u64))
    return w.emit(AddScalar(low), w.emit(Cast(i64), rest)) if low else w.emit(Cast(i64), rest)


def drawn_true(w: Writer, chance: ImportedValue, key: Key) -> Value:
    """Emit truth values, each true with a chance of its own, a float from 0 to 1."""
    work = f64 if chance.dtype is f64 else f32
    part = uniform(w, chance.shape, key, work)
    return w.emit(Less(), part, cast_to(w, w.tensor(chance), chance.dtype, work))


def dropped(w: Writer, x: ImportedValue, ratio: float, key: Key) -> tuple[Value, Value]:
    """Emit (mask, result) of dropout (Srivastava et al. 2014): elements are kept with the chance `1 - ratio`, and divided by it."""
    work = f64 if x.dtype is f64 else f32
    kept = w.emit(LessEqual(), w.literal(ratio, work), uniform(w, x.shape, key, work))
    value = cast_to(w, w.tensor(x), x.dtype, work)
    scaled = w.emit(MulScalar(1 / (1 - ratio) if ratio < 1 else 0.0), value)
    return kept, cast_to(w, w.emit(Where(), kept, scaled, w.literal(0, work)), work, x.dtype)


def classes(w: Writer, weights: Value, count: Expr, key: Key) -> Value:
    """Emit `count` classes of each row, drawn with replacement by weights (rows, classes): (rows, count), int64.

    A class is drawn where a number below the total passes the sums of the weights up to it (inversion of the distribution)."""
    rows, n = tensor_dims(weights)
    element = tensor_info(weights).dtype or f32
    sums = w.emit(CumSum(1), weights)
    total = slice_axis(w, sums, 1, w.simplify(sub(n, 1)), n)
    at = w.emit(Mul(), uniform(w, [rows, count], key, element), total)
    passed = w.emit(LessEqual(), w.reshape(sums, [rows, const(1), n]), w.reshape(at, [rows, count, const(1)]))
    # rounding up to the total passes all sums; a class without weight is never the last
    possible = w.emit(Less(), w.literal(0, element), weights)
    last = w.emit(ArgMax(1, last=True), w.emit(Cast(i64), possible))
    found = w.emit(Sum((2,), False), w.emit(Cast(i64), passed))
    return w.emit(Minimum(), found, w.reshape(last, [rows, const(1)]))


def distinct_classes(w: Writer, weights: Value, count: Expr, key: Key) -> Value:
    """Emit `count` different classes of each row by weights (rows, classes): the largest `log(u) / weight` (Efraimidis and
    Spirakis 2006)."""
    element = tensor_info(weights).dtype or f32
    shape = tensor_dims(weights)
    work = f64 if element is f64 else f32
    u = w.emit(AddScalar(2.0 ** -PRECISION[work]), _part(w, words(w, shape, key), work))
    rank = w.emit(Div(), w.emit(Log(), u), weights)
    none = w.emit(LessEqual(), weights, w.literal(0, element))
    rank = w.emit(Where(), none, w.literal(-math.inf, element), rank)
    return w.emit(TopK(count, 1), rank)
