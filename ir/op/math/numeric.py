"""Elementwise mathematics: magnitude, logarithms, trigonometry, rounding, powers, integer division.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.ir.core.expr import Expr, add, and_, const, eq, floordiv, floormod, lt, mul, ne, or_, select, sub
from relax_tune.ir.op.base import Array, HalfPolicy
from relax_tune.ir.op.math.elementwise import Binary, OnnxName, Operands, Unary


class Abs(Unary):
    """Magnitude of numbers; the smallest integer is its own magnitude, since its negation overflows."""

    name, onnx, torch = "abs", OnnxName("Abs", (6, 13)), "abs"
    operands: ClassVar[Operands] = "numbers"
    half_policy: ClassVar[HalfPolicy] = "allow"


class Log(Unary):
    """The natural logarithm."""

    name, onnx, torch = "log", OnnxName("Log", (6, 13)), "log"


class Log2(Unary):
    name, torch = "log2", "log2"


class Log10(Unary):
    name, torch = "log10", "log10"


class Floor(Unary):
    name, onnx = "floor", OnnxName("Floor", (6, 13))


class Rint(Unary):
    """Rounding to the nearest integer, ties to even."""

    name, onnx = "rint", OnnxName("Round", (11, 22))


class Sin(Unary):
    name, onnx, torch = "sin", OnnxName("Sin", (7, 22)), "sin"


class Cos(Unary):
    name, onnx, torch = "cos", OnnxName("Cos", (7, 22)), "cos"


class Tan(Unary):
    name, onnx, torch = "tan", OnnxName("Tan", (7, 22)), "tan"


class Asin(Unary):
    name, onnx, torch = "asin", OnnxName("Asin", (7, 22)), "asin"


class Acos(Unary):
    name, onnx, torch = "acos", OnnxName("Acos", (7, 22)), "acos"


class Atan(Unary):
    name, onnx, torch = "atan", OnnxName("Atan", (7, 22)), "atan"


class Sinh(Unary):
    name, onnx, torch = "sinh", OnnxName("Sinh", (9, 22)), "sinh"


class Cosh(Unary):
    name, onnx, torch = "cosh", OnnxName("Cosh", (9, 22)), "cosh"


class Asinh(Unary):
    name, onnx, torch = "asinh", OnnxName("Asinh", (9, 22)), "asinh"


class Acosh(Unary):
    name, onnx, torch = "acosh", OnnxName("Acosh", (9, 22)), "acosh"


class Atanh(Unary):
    name, onnx, torch = "atanh", OnnxName("Atanh", (9, 22)), "atanh"


@dataclass(frozen=True, slots=True)
class FloatBinary(Binary):
    """Function of two floats that needs more digits than 16-bit floats have."""

    operands: ClassVar[Operands] = "floats"
    half_policy: ClassVar[HalfPolicy] = "never"


class Power(FloatBinary):
    """Power `x ** y` of floats."""

    name, function = "power", "pow"


class Atan2(FloatBinary):
    """Angle of the point (y, x), from -pi to pi."""

    name, torch = "atan2", "atan2"


class Fmod(FloatBinary):
    """Float remainder of a division towards zero, with the sign of `x`."""

    name = "fmod"


@dataclass(frozen=True, slots=True)
class IntegerDivision(Binary):
    """Integer division; the result is 0 for a divisor of 0, since loops must not trap."""

    operands: ClassVar[Operands] = "integers"

    def guarded(self, x: Expr, y: Expr, divide: Callable[[Expr, Expr], Expr], by_minus_one: Expr) -> Expr:
        """Return `divide(x, y)`, evaluated only for divisors that cannot trap.

        0 divides by nothing, and -1 overflows for the smallest integer: both are replaced by 1 in the operands of `divide`."""
        zero, one = const(0, x.dtype), const(1, x.dtype)
        if x.dtype.is_unsigned:
            return select(eq(y, zero), zero, divide(x, select(eq(y, zero), one, y)))
        minus = const(-1, x.dtype)
        quotient = divide(x, select(or_(eq(y, zero), eq(y, minus)), one, y))
        return select(eq(y, zero), zero, select(eq(y, minus), by_minus_one, quotient))


class Quotient(IntegerDivision):
    """Integer quotient `x / y`, towards zero."""

    name = "quotient"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        def towards_zero(a: Expr, b: Expr) -> Expr:
            down = floordiv(a, b)
            if a.dtype.is_unsigned:
                return down
            zero, one = const(0, a.dtype), const(1, a.dtype)
            return select(and_(lt(down, zero), ne(mul(down, b), a)), add(down, one), down)

        return self.guarded(x, y, towards_zero, sub(const(0, x.dtype), x))

    def array(self, x: Array, y: Array) -> Array:
        safe = np.where(y == 0, 1, y)
        with np.errstate(over="ignore"):
            down = x // safe
            return np.asarray(np.where(y == 0, 0, down + ((down < 0) & (down * safe != x)))).astype(x.dtype)


class Modulo(IntegerDivision):
    """Integer remainder `x - floor(x / y) * y`, with the sign of `y`."""

    name = "modulo"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return self.guarded(x, y, floormod, const(0, x.dtype))

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(np.where(y == 0, 0, x % np.where(y == 0, 1, y))).astype(x.dtype)
