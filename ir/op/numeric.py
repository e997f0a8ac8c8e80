"""Elementwise functions beyond the activations: magnitudes, logarithms, rounding, powers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.ir.expr import Expr, call
from relax_tune.ir.op.base import Array
from relax_tune.ir.op.elementwise import Binary, Unary


@dataclass(frozen=True, slots=True)
class Abs(Unary):
    name: ClassVar[str] = "abs"

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
class Power(Binary):
    """`x` to the power `y`, for floats."""

    name: ClassVar[str] = "power"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return call("pow", x, y)

    def array(self, x: Array, y: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.power(x, y))
