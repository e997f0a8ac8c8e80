"""Formulas over tensors of float64, written with Python's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, Erf, Exp, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Cos, Floor, Log, Power, Rint, Sin

Operand = Union["Formula", float]


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A tensor of float64 in a formula."""

    w: Writer
    value: Value

    def of(self, value: Value) -> Formula:
        return Formula(self.w, value)

    def constant(self, number: float) -> Formula:
        return self.of(self.w.literal(number, f64))

    def _with(self, op: OperatorSpec, other: Operand, swap: bool = False) -> Formula:
        b = other if isinstance(other, Formula) else self.constant(other)
        return self.of(self.w.emit(op, b.value, self.value) if swap else self.w.emit(op, self.value, b.value))

    def __add__(self, other: Operand) -> Formula:
        if isinstance(other, Formula) or not math.isfinite(other):
            return self._with(Add(), other)
        return self.of(self.w.emit(AddScalar(float(other)), self.value))

    def __mul__(self, other: Operand) -> Formula:
        if isinstance(other, Formula) or not math.isfinite(other):
            return self._with(Mul(), other)
        return self.of(self.w.emit(MulScalar(float(other)), self.value))

    def __sub__(self, other: Operand) -> Formula:
        return self._with(Sub(), other) if isinstance(other, Formula) else self + -other

    def __rsub__(self, other: float) -> Formula:
        return self._with(Sub(), other, swap=True)

    def __truediv__(self, other: Formula) -> Formula:
        return self._with(Div(), other)

    def __rtruediv__(self, other: float) -> Formula:
        return self._with(Div(), other, swap=True)

    def __neg__(self) -> Formula:
        return self * -1.0

    def _unary(self, op: OperatorSpec) -> Formula:
        return self.of(self.w.emit(op, self.value))

    def exp(self) -> Formula:
        return self._unary(Exp())

    def log(self) -> Formula:
        return self._unary(Log())

    def sqrt(self) -> Formula:
        return self._unary(Sqrt())

    def erf(self) -> Formula:
        return self._unary(Erf())

    def abs(self) -> Formula:
        return self._unary(Abs())

    def floor(self) -> Formula:
        return self._unary(Floor())

    def rint(self) -> Formula:
        return self._unary(Rint())

    def sin(self) -> Formula:
        return self._unary(Sin())

    def cos(self) -> Formula:
        return self._unary(Cos())

    def power(self, exponent: float) -> Formula:
        return self._with(Power(), exponent)

    def below(self, other: Operand) -> Value:
        return self._with(Less(), other).value

    def at_most(self, other: Operand) -> Value:
        return self._with(LessEqual(), other).value

    def equals(self, other: Operand) -> Value:
        return self._with(Equal(), other).value

    def where(self, cond: Value, other: Operand) -> Formula:
        """Return this where `cond` is true, else the other."""
        b = other if isinstance(other, Formula) else self.constant(other)
        return self.of(self.w.emit(Where(), cond, self.value, b.value))

    def polynomial(self, coefficients: Sequence[float]) -> Formula:
        """Return a polynomial by Horner's rule, the coefficient of the highest power first."""
        found = self * coefficients[0] + coefficients[1]
        for c in coefficients[2:]:
            found = found * self + c
        return found


def function(compute: Callable[[Formula], Formula], position: int = 0) -> Handler:
    """Make a handler of a function of one tensor, computed in float64 and rounded once."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        found = compute(Formula(w, as_value(w, n.item(position), f64)))
        return w.of(cast_to(w, found.value, f64, n.dtype))

    return handler
