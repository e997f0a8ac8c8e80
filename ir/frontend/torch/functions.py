"""Elementwise ATen functions made of other operators: powers, signs, extremes beside NaN."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.math import pair
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Div, Maximum, Minimum, Mul, MulScalar
from relax_tune.ir.op.math.logic import Less, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Power


def _exp2(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(Power(), w.literal(2.0, n.dtype), as_value(w, n.item(0), n.dtype)))


def _negative(w: Writer, x: Value, n: TorchNode) -> Value:
    """Return whether numbers are below 0 or the float -0."""
    below = w.emit(Less(), x, w.literal(0, n.dtype))
    if not n.dtype.is_float:
        return below
    over = w.emit(Div(), w.literal(1.0, n.dtype), x)
    return w.emit(LogicalOr(), below, w.emit(Less(), over, w.literal(0.0, n.dtype)))


def _copysign(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the magnitude of one operand with the sign of the other; a NaN counts as positive."""
    size, sign = w.emit(Abs(), as_value(w, n.args[0], n.dtype)), as_value(w, n.args[1], n.dtype)
    return w.of(w.emit(Where(), _negative(w, sign, n), w.emit(MulScalar(-1), size), size))


def extreme_number(op: OperatorSpec) -> Handler:
    """Make a handler of an extreme of two operands that prefers numbers to NaN."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        if not n.dtype.is_float:
            return pair(op)(w, n)  # type: ignore[return-value]
        x, y = (as_value(w, n.args[p], n.dtype) for p in (0, 1))
        best = w.emit(Where(), w.emit(NotEqual(), y, y), x, w.emit(op, x, y))
        return w.of(w.emit(Where(), w.emit(NotEqual(), x, x), y, best))

    return handler


def _square(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_value(w, n.item(0), n.dtype)
    return w.of(w.emit(Mul(), x, x))


HANDLERS: Mapping[str, Handler] = {
      "aten.exp2.default": _exp2,
      
    "aten.copysign.Tensor": _copysign, "aten.square.default": _square,
    "aten.fmax.default": extreme_number(Maximum()), "aten.fmin.default": extreme_number(Minimum()),
}  # fmt: skip
