"""Elementwise arithmetic of both formats, written out of smaller operators where no operator has it.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import DType, bool_, f32, i32, i64, u64
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.node import Node, SharedHandler
from relax_tune.ir.frontend.shared.operators import element_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import BitCast, IntegerPower
from relax_tune.ir.op.math.elementwise import Gelu
from relax_tune.ir.op.math.numeric import Fmod


def written(function: Callable[..., Value], arity: int = 1) -> SharedHandler:
    """Make a handler of a function of a writer and operands, all of the element type in which the operator computes."""
    return lambda w, n: w.of(function(w, *(n.operand(w, p) for p in range(arity))))


def operator(op: OperatorSpec, arity: int = 1, swap: bool = False) -> SharedHandler:
    """Make a handler of one operator. swap: The operands change places."""
    return written(lambda w, *args: w.emit(op, *(args[::-1] if swap else args)), arity)


def rounding(function: Callable[[Writer, Value], Value]) -> SharedHandler:
    """Make a handler of a rounding, which leaves integers as they are."""
    return lambda w, n: w.of(function(w, w.tensor(n.item(0)))) if n.item(0).dtype.is_float else n.item(0)


def identity(w: Writer, n: Node) -> ImportedValue:
    """Import a copy or an alias as its argument."""
    return n.item(0)


def work_type(element: DType) -> DType:
    """Return the element type in which sums and squares of elements are computed: float32 for 16-bit floats."""
    return f32 if element.is_half else element


def clip(w: Writer, x: Value, low: float | None, high: float | None) -> Value:
    x = x if low is None else w.maximum(x, low)
    return x if high is None else w.minimum(x, high)


def where(w: Writer, n: Node) -> ImportedValue:
    condition, a, b = w.cast(w.tensor(n.item(0)), bool_), n.typed(w, 1), n.typed(w, 2)
    return w.of(w.where(condition, w.tensor(a), w.tensor(b)), a.natural and b.natural)


def gelu(w: Writer, n: Node) -> ImportedValue:
    x = w.tensor(n.item(0))
    return w.of(w.emit(Gelu(), x) if n.choice("approximate", "none", "tanh") == "none" else tanh_gelu(w, x))


def leaky_relu(w: Writer, n: Node) -> ImportedValue:
    x = w.tensor(n.item(0))
    low = w.mul(x, n.real("alpha", 0.01))
    return w.of(w.where(w.less(x, 0), low, x))


def neg(w: Writer, x: Value) -> Value:
    return w.sub(0, x) if element_of(x).is_unsigned else w.mul(x, -1)


def reciprocal(w: Writer, x: Value) -> Value:
    return w.div(w.literal(1.0, element_of(x)), x)


def square(w: Writer, x: Value) -> Value:
    return w.mul(x, x)


def silu(w: Writer, x: Value) -> Value:
    return w.mul(x, w.sigmoid(x))


def ceil(w: Writer, x: Value) -> Value:
    return w.mul(w.floor(w.mul(x, -1)), -1)


def truncated(w: Writer, x: Value) -> Value:
    """Round towards zero."""
    up = ceil(w, x)
    return w.where(w.less(x, 0), up, w.floor(x))


def is_nan(w: Writer, x: Value) -> Value:
    return w.not_equal(x, x)


def sign(w: Writer, x: Value) -> Value:
    """Emit -1, 0 or 1 by the sign of `x`; 0 for NaN."""
    element = element_of(x)
    zero = w.literal(0, element)
    above = w.cast(w.less(zero, x), element)
    return above if element.is_unsigned else w.sub(above, w.cast(w.less(x, zero), element))


def is_negative(w: Writer, x: Value) -> Value:
    """Emit whether numbers are below 0 or the float -0; a NaN counts as positive."""
    below = w.less(x, 0)
    return w.logical_or(below, w.less(reciprocal(w, x), 0.0)) if element_of(x).is_float else below


def copysign(w: Writer, x: Value, y: Value) -> Value:
    """Emit the magnitude of `x` with the sign of `y`."""
    size = w.abs(x)
    return w.where(is_negative(w, y), w.mul(size, -1), size)


def log1p(w: Writer, x: Value) -> Value:
    """Emit `log(1 + x)` as `log(u) * x / (u - 1)`, `u = 1 + x` rounded: accurate near 0 (W. Kahan)."""
    one = w.literal(1.0, element_of(x))
    u = w.add(x, 1.0)
    exact = w.logical_or(w.equal(u, one), w.equal(u, math.inf))
    ratio = w.div(x, w.where(exact, one, w.sub(u, one)))
    return w.where(exact, x, w.mul(w.log(u), ratio))


def expm1(w: Writer, x: Value) -> Value:
    """Emit `exp(x) - 1` as `tanh(x / 2) * (exp(x) + 1)`: accurate near 0."""
    half = w.tanh(w.mul(x, 0.5))
    return w.mul(half, w.add(w.exp(x), 1.0))


def remainder(w: Writer, x: Value, y: Value, towards_zero: bool) -> Value:
    """Emit the remainder of a division: towards zero with the sign of `x`, otherwise with the sign of `y`.

    Integers divided by 0 give 0.
    """
    element = element_of(x)
    if element.is_int:
        if not towards_zero:
            return w.modulo(x, y)
        rest = w.sub(x, w.mul(w.quotient(x, y), y))
        return w.where(w.equal(y, 0), y, rest)
    rest = w.emit(Fmod(), x, y)
    if towards_zero:
        return rest
    return w.where(signs_differ(w, rest, y), w.add(rest, y), rest)


def signs_differ(w: Writer, rest: Value, y: Value) -> Value:
    """Emit whether a remainder is not 0 and its sign is not the divisor's."""
    zero = w.literal(0, element_of(rest))
    differ = w.not_equal(w.less(rest, zero), w.less(y, zero))
    return w.logical_and(w.not_equal(rest, zero), differ)


def floored_quotient(w: Writer, x: Value, y: Value, quotient: Value) -> Value:
    """Round a quotient of floats down by its exact remainder (torch, "div_floor_floating").

    A zero divisor and an infinite quotient keep the quotient.
    """
    element = element_of(x)
    zero, one = w.literal(0, element), w.literal(1, element)
    rest = w.emit(Fmod(), x, y)
    below = w.not_equal(w.less(rest, zero), w.less(y, zero))
    below = w.logical_and(w.not_equal(rest, zero), below)
    exact = w.div(w.sub(x, rest), y)
    exact = w.where(below, w.sub(exact, one), exact)
    down = w.floor(exact)
    up = w.less(w.literal(0.5, element), w.sub(exact, down))
    rounded = w.where(up, w.add(down, one), down)
    rounded = w.where(w.equal(exact, zero), w.mul(zero, quotient), rounded)  # 0 with the sign of the quotient
    return w.where(w.equal(y, zero), quotient, rounded)


def integer_power(w: Writer, x: Value, y: Value) -> Value:
    """Emit a power of integers. Exponents of a type that the base's type does not hold use a wider power.

    Raises:
        ParseError: The base is uint64 and exponents may be negative.
    """
    base, exponent = element_of(x), element_of(y)
    if base.holds(exponent):
        return w.emit(IntegerPower(), x, w.cast(y, base))
    wide = u64 if exponent is u64 else i64
    if base is u64:
        raise ParseError(f"expected exponents of an unsigned type for uint64, got {exponent}; cast them first")
    return w.cast(w.emit(IntegerPower(), w.cast(x, wide), w.cast(y, wide)), base)


def known_power(w: Writer, x: ImportedValue, exponent: float | None) -> ImportedValue | None:
    """Write a power by a known exponent as products or roots; None for other exponents, and for roots of integers."""
    value = w.tensor(x)
    if exponent == 1:
        return x
    if exponent == 2:
        return w.of(w.mul(value, value), x.natural)
    if exponent == 3:
        return w.of(w.mul(w.mul(value, value), value), x.natural)
    if exponent in (0.5, -0.5) and x.dtype.is_float:
        return w.of(w.sqrt(value) if exponent == 0.5 else w.rsqrt(value))
    return None


def tanh_gelu(w: Writer, x: Value) -> Value:
    """Return `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2`."""
    cube = w.mul(w.mul(x, x), x)
    inner = w.mul(w.add(x, w.mul(cube, 0.044715)), math.sqrt(2 / math.pi))
    return w.mul(w.mul(x, 0.5), w.add(w.tanh(inner), 1.0))


def elu(w: Writer, x: Value, inner: Value, alpha: float, scale: float) -> Value:
    """Emit `scale * x` where positive, else `scale * alpha * (exp(inner) - 1)`."""
    low = w.mul(expm1(w, inner), alpha)
    y = w.where(w.less(0, x), x, low)
    return y if scale == 1 else w.mul(y, scale)


def angle(w: Writer, x: Value) -> Value:
    """Emit the angle of real numbers: pi below 0, NaN of NaN."""
    zero = w.literal(0.0, element_of(x))
    angles = w.where(w.less(x, zero), math.pi, zero)
    return w.where(is_nan(w, x), x, angles)


def hypot(w: Writer, x: Value, y: Value) -> Value:
    """Emit `sqrt(x^2 + y^2)` without overflow between; infinite for an infinity, also with NaN (C, 7.12.7.3)."""
    source = element_of(x)
    element = work_type(source)
    x, y = (w.abs(w.cast(v, element)) for v in (x, y))
    zero, far = w.literal(0.0, element), w.literal(math.inf, element)
    big, small = w.maximum(x, y), w.minimum(x, y)
    ratio = w.div(small, big)
    root = w.sqrt(w.add(w.mul(ratio, ratio), 1.0))
    length = w.where(w.equal(big, zero), zero, w.mul(big, root))
    infinite = w.logical_or(w.equal(x, far), w.equal(y, far))
    return w.cast(w.where(infinite, far, length), source)


def next_after(w: Writer, x: Value, y: Value) -> Value:
    """Emit the next number towards another: the bits, which have the order of numbers of one sign, plus or minus 1."""
    element = element_of(x)
    bits = {4: i32, 8: i64}.get(element.bytes)
    if bits is None:
        raise ParseError(f"expected float32 or float64, got {element}")
    zero = w.literal(0, element)
    below = w.less(y, x)
    away = w.not_equal(below, w.less(zero, x))
    step = w.sub(w.mul(w.cast(away, bits), 2), 1)
    neighbour = w.emit(BitCast(element, bits), w.add(w.emit(BitCast(bits, element), x), step))
    least = w.emit(BitCast(element, bits), w.literal(1, bits))
    neighbour = w.where(w.equal(x, zero), w.where(below, w.mul(least, -1), least), neighbour)
    following = w.where(w.equal(x, y), y, neighbour)
    return w.where(w.equal(x, x), w.where(w.equal(y, y), following, y), x)
