"""Elementwise mathematics: magnitude, logarithm, trigonometry, rounding, powers, integer division."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, add, and_, call, const, eq, floordiv, floormod, lt, mul, ne, or_, select, sub
from relax_tune.ir.core.struct_info import StructInfo
from relax_tune.ir.op.base import Array, Deduction, Halves, OperatorSpec
from relax_tune.ir.op.math.elementwise import Binary, Unary


@dataclass(frozen=True, slots=True)
class Abs(Unary):
    """Magnitude of numbers; that of the smallest integer is itself."""

    name: ClassVar[str] = "abs"
    floats_only: ClassVar[bool] = False
    halves: ClassVar[Halves] = "allowed"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype is bool_:
            raise DeduceError(f"abs: wanted a tensor of numbers, found {x!r}; cast it first")
        return x

    def scalar(self, x: Expr) -> Expr:
        return call("abs", x)

    def array(self, x: Array) -> Array:
        return np.asarray(np.abs(x))


@dataclass(frozen=True, slots=True)
class Log(Unary):
    """The natural logarithm."""

    name: ClassVar[str] = "log"

    def scalar(self, x: Expr) -> Expr:
        return call("log", x)

    def array(self, x: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(x))


@dataclass(frozen=True, slots=True)
class Floor(Unary):
    name: ClassVar[str] = "floor"

    def scalar(self, x: Expr) -> Expr:
        return call("floor", x)

    def array(self, x: Array) -> Array:
        return np.asarray(np.floor(x))


@dataclass(frozen=True, slots=True)
class OfFloats(Binary):
    """Function of two floats."""

    halves: ClassVar[Halves] = "never"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        for info in OperatorSpec.tensors(self, infos):
            if info.dtype is not None and not info.dtype.is_float:
                raise DeduceError(f"{self.name}: wanted floating-point tensors, found {info!r}; cast it first")
        return Binary.infer(self, infos, ctx)


@dataclass(frozen=True, slots=True)
class Power(OfFloats):
    """Power `x ** y` of floats."""

    name: ClassVar[str] = "power"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return call("pow", x, y)

    def array(self, x: Array, y: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.power(x, y))


@dataclass(frozen=True, slots=True)
class MathFunction(Unary):
    """A function of the C mathematical library, called by the name of the operator."""

    function: ClassVar[Callable[..., Any]]

    def scalar(self, x: Expr) -> Expr:
        return call(self.name, x)

    def array(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(type(self).function(x))


@dataclass(frozen=True, slots=True)
class Sin(MathFunction):
    name: ClassVar[str] = "sin"
    function = staticmethod(np.sin)


@dataclass(frozen=True, slots=True)
class Cos(MathFunction):
    name: ClassVar[str] = "cos"
    function = staticmethod(np.cos)


@dataclass(frozen=True, slots=True)
class Tan(MathFunction):
    name: ClassVar[str] = "tan"
    function = staticmethod(np.tan)


@dataclass(frozen=True, slots=True)
class Asin(MathFunction):
    name: ClassVar[str] = "asin"
    function = staticmethod(np.arcsin)


@dataclass(frozen=True, slots=True)
class Acos(MathFunction):
    name: ClassVar[str] = "acos"
    function = staticmethod(np.arccos)


@dataclass(frozen=True, slots=True)
class Atan(MathFunction):
    name: ClassVar[str] = "atan"
    function = staticmethod(np.arctan)


@dataclass(frozen=True, slots=True)
class Log2(MathFunction):
    name: ClassVar[str] = "log2"
    function = staticmethod(np.log2)


@dataclass(frozen=True, slots=True)
class Log10(MathFunction):
    name: ClassVar[str] = "log10"
    function = staticmethod(np.log10)


@dataclass(frozen=True, slots=True)
class Sinh(MathFunction):
    name: ClassVar[str] = "sinh"
    function = staticmethod(np.sinh)


@dataclass(frozen=True, slots=True)
class Cosh(MathFunction):
    name: ClassVar[str] = "cosh"
    function = staticmethod(np.cosh)


@dataclass(frozen=True, slots=True)
class Asinh(MathFunction):
    name: ClassVar[str] = "asinh"
    function = staticmethod(np.arcsinh)


@dataclass(frozen=True, slots=True)
class Acosh(MathFunction):
    name: ClassVar[str] = "acosh"
    function = staticmethod(np.arccosh)


@dataclass(frozen=True, slots=True)
class Atanh(MathFunction):
    name: ClassVar[str] = "atanh"
    function = staticmethod(np.arctanh)


@dataclass(frozen=True, slots=True)
class Rint(MathFunction):
    """Rounding to the nearest integer, ties to even."""

    name: ClassVar[str] = "rint"
    function = staticmethod(np.rint)


@dataclass(frozen=True, slots=True)
class WholeDivision(Binary):
    """Integer division; the result is 0 for a divisor of 0, since loops must not trap."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        for info in OperatorSpec.tensors(self, infos):
            if info.dtype is not None and not info.dtype.is_int:
                raise DeduceError(f"{self.name}: wanted tensors of integers, found {info!r}; cast it first")
        return Binary.infer(self, infos, ctx)

    def divided(self, x: Expr, y: Expr, value: Callable[[Expr, Expr], Expr], by_minus_one: Expr) -> Expr:
        """Return `value(x, y)` without the divisors that may trap: 0, and -1 (overflow of the least integer)."""
        zero, one = const(0, x.dtype), const(1, x.dtype)
        if x.dtype.short[0] == "u":
            return select(eq(y, zero), zero, value(x, select(eq(y, zero), one, y)))
        minus = const(-1, x.dtype)
        found = value(x, select(or_(eq(y, zero), eq(y, minus)), one, y))
        return select(eq(y, zero), zero, select(eq(y, minus), by_minus_one, found))


@dataclass(frozen=True, slots=True)
class Quotient(WholeDivision):
    """Integer quotient `x / y`, towards zero."""

    name: ClassVar[str] = "quotient"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        def towards_zero(a: Expr, b: Expr) -> Expr:
            down = floordiv(a, b)
            if a.dtype.short[0] == "u":
                return down
            zero, one = const(0, a.dtype), const(1, a.dtype)
            return select(and_(lt(down, zero), ne(mul(down, b), a)), add(down, one), down)

        return self.divided(x, y, towards_zero, sub(const(0, x.dtype), x))

    def array(self, x: Array, y: Array) -> Array:
        safe = np.where(y == 0, 1, y)
        with np.errstate(over="ignore"):
            down = x // safe
            return np.asarray(np.where(y == 0, 0, down + ((down < 0) & (down * safe != x)))).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Modulo(WholeDivision):
    """Integer remainder `x - floor(x / y) * y`, with the sign of `y`."""

    name: ClassVar[str] = "modulo"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return self.divided(x, y, floormod, const(0, x.dtype))

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(np.where(y == 0, 0, x % np.where(y == 0, 1, y))).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Atan2(OfFloats):
    """Angle of the point (y, x), from -pi to pi."""

    name: ClassVar[str] = "atan2"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return call("atan2", x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(np.arctan2(x, y))


@dataclass(frozen=True, slots=True)
class Fmod(OfFloats):
    """Float remainder of a division towards zero, with the sign of `x`."""

    name: ClassVar[str] = "fmod"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return call("fmod", x, y)

    def array(self, x: Array, y: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.fmod(x, y))
