"""Elementwise ATen functions made of other operators: powers, signs, extremes beside NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.ir.core.dtype import DType, bool_, f32, i32, i64
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.math import pair
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import BitCast
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Maximum, Minimum, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Power, Rint


def _exp2(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(Power(), w.literal(2.0, n.dtype), as_value(w, n.item(0), n.dtype)))


def _negative(w: Writer, x: Value, element: DType) -> Value:
    """Return whether numbers are below 0 or the float -0."""
    below = w.emit(Less(), x, w.literal(0, element))
    if not element.is_float:
        return below
    over = w.emit(Div(), w.literal(1.0, element), x)
    return w.emit(LogicalOr(), below, w.emit(Less(), over, w.literal(0.0, element)))


def _copysign(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the magnitude of one operand with the sign of the other; a NaN counts as positive."""
    size, sign = w.emit(Abs(), as_value(w, n.args[0], n.dtype)), as_value(w, n.args[1], n.dtype)
    return w.of(w.emit(Where(), _negative(w, sign, n.dtype), w.emit(MulScalar(-1), size), size))


def extreme_number(op: OperatorSpec) -> Handler:
    """Make a handler of an extreme of two operands that prefers numbers to NaN."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        if not n.dtype.is_float:
            return pair(op)(w, n)  # type: ignore[return-value]
        x, y = (as_value(w, n.args[p], n.dtype) for p in (0, 1))
        best = w.emit(Where(), w.emit(NotEqual(), y, y), x, w.emit(op, x, y))
        return w.of(w.emit(Where(), w.emit(NotEqual(), x, x), y, best))

    return handler


def _next_after(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the next number towards another: the bits, which have the order of numbers of one sign, plus or less 1."""
    bits = {4: i32, 8: i64}.get(n.dtype.bytes)
    if bits is None:
        raise n.refuse(f"wanted float32 or float64, found {n.dtype}")
    x, y = (as_value(w, n.args[p], n.dtype) for p in (0, 1))
    zero = w.literal(0, n.dtype)
    below = w.emit(Less(), y, x)
    away = w.emit(NotEqual(), below, w.emit(Less(), zero, x))
    step = w.emit(Sub(), w.emit(MulScalar(2), w.emit(Cast(bits), away)), w.literal(1, bits))
    moved = w.emit(BitCast(n.dtype, bits), w.emit(Add(), w.emit(BitCast(bits, n.dtype), x), step))
    least = w.emit(BitCast(n.dtype, bits), w.literal(1, bits))
    moved = w.emit(
        Where(), w.emit(Equal(), x, zero), w.emit(Where(), below, w.emit(MulScalar(-1), least), least), moved
    )
    found = w.emit(Where(), w.emit(Equal(), x, y), y, moved)
    return w.of(w.emit(Where(), w.emit(Equal(), x, x), w.emit(Where(), w.emit(Equal(), y, y), found, y), x))


def _rounded(w: Writer, n: TorchNode) -> ImportedValue:
    """Import rounding to a number of decimals, as `round(x * 10^d) / 10^d`."""
    item, decimals = n.item(0), n.number(1, "decimals", 0)
    if not item.dtype.is_float:
        return item
    element = f32 if item.dtype.is_half else item.dtype
    value, ten = as_value(w, item, element), w.literal(10.0 ** abs(decimals), element)
    first, second = (Mul(), Div()) if decimals > 0 else (Div(), Mul())
    value = value if not decimals else w.emit(first, value, ten)
    value = w.emit(Rint(), value)
    return w.of(cast_to(w, value if not decimals else w.emit(second, value, ten), element, n.dtype))


def _scaled_by_power(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x * 2^y`."""
    power = w.emit(Power(), w.literal(2.0, n.dtype), as_value(w, n.args[1], n.dtype))
    return w.of(w.emit(Mul(), as_value(w, n.args[0], n.dtype), power))


def _sign_bit(w: Writer, n: TorchNode) -> ImportedValue:
    """Import whether the sign is negative, also of -0; a NaN counts as positive."""
    item = n.item(0)
    if item.dtype is bool_:
        return w.uniform(n.dims, False, bool_)
    return w.of(_negative(w, w.tensor(item), item.dtype))


def _angle(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the angle of real numbers: pi below 0, NaN of NaN."""
    x, zero = as_value(w, n.item(0), n.dtype), w.literal(0.0, n.dtype)
    found = w.emit(Where(), w.emit(Less(), x, zero), w.literal(math.pi, n.dtype), zero)
    return w.of(w.emit(Where(), w.emit(NotEqual(), x, x), x, found))


def _hypot(w: Writer, n: TorchNode) -> ImportedValue:
    x, y = (as_value(w, n.args[p], n.dtype) for p in (0, 1))
    return w.of(hypot(w, x, y, n.dtype))


def hypot(w: Writer, x: Value, y: Value, of: DType) -> Value:
    """Emit `sqrt(x^2 + y^2)` without overflow between; infinite beside an infinity, also with NaN (C, 7.12.7.3).

    of: element type of x and y"""
    element = f32 if of.is_half else of
    x, y = (w.emit(Abs(), cast_to(w, v, of, element)) for v in (x, y))
    zero, far = w.literal(0.0, element), w.literal(math.inf, element)
    big, small = w.emit(Maximum(), x, y), w.emit(Minimum(), x, y)
    ratio = w.emit(Div(), small, big)
    root = w.emit(Sqrt(), w.emit(AddScalar(1.0), w.emit(Mul(), ratio, ratio)))
    found = w.emit(Where(), w.emit(Equal(), big, zero), zero, w.emit(Mul(), big, root))
    infinite = w.emit(LogicalOr(), w.emit(Equal(), x, far), w.emit(Equal(), y, far))
    return cast_to(w, w.emit(Where(), infinite, far, found), element, of)


def _square(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_value(w, n.item(0), n.dtype)
    return w.of(w.emit(Mul(), x, x))


HANDLERS: Mapping[str, Handler] = {
    "aten.exp2.default": _exp2, "aten.nextafter.default": _next_after, "aten.round.decimals": _rounded,
    "aten.ldexp.Tensor": _scaled_by_power, "aten.signbit.default": _sign_bit, "aten.angle.default": _angle,
    "aten.hypot.default": _hypot,
    "aten.copysign.Tensor": _copysign, "aten.square.default": _square,
    "aten.fmax.default": extreme_number(Maximum()), "aten.fmin.default": extreme_number(Minimum()),
}  # fmt: skip
