"""Comparisons, bits and truth values of ATen (aten.*)."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.math import natural
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_item, as_value, common_type, number_of
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.bits import BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalNot, LogicalOr, NotEqual, Where


def compare(op: OperatorSpec, swap: bool = False) -> Handler:
    """Make a handler of a comparison, in the common element type of both operands."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        a, b = n.args[0], n.args[1]
        element = common_type(a, b)
        c = number_of(b)
        least = -1 if isinstance(op, Less) else 0
        if swap and natural(a) and c is not None and c <= least:
            return w.uniform(n.dims, True, bool_)
        x, y = as_value(w, a, element), as_value(w, b, element)
        return w.of(w.emit(op, y, x) if swap else w.emit(op, x, y))

    return handler


def _truth(w: Writer, n: TorchNode, position: int) -> ImportedValue:
    """Return an operand as bools."""
    return as_item(w, n.args[position], bool_)


def bitwise(op: OperatorSpec, of_bools: Handler) -> Handler:
    """Make a handler of the bits of integers, and of bools."""

    def handler(w: Writer, n: TorchNode) -> Result:
        if n.dtype is bool_:
            return of_bools(w, n)
        return w.of(w.emit(op, *(as_value(w, a, n.dtype) for a in n.args)))

    return handler


def _shift(w: Writer, n: TorchNode) -> ImportedValue:
    left = "left" in n.op or "lshift" in n.op
    x, y = as_value(w, n.args[0], n.dtype), as_value(w, n.args[1], n.dtype)
    return w.of(w.emit(ShiftLeft() if left else ShiftRight(), x, y))


def _and(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a logical and; simplify `x and true` to `x`."""
    a, b = _truth(w, n, 0), _truth(w, n, 1)
    for x, other in ((a, b), (b, a)):
        if x.uniform is True:
            if other.uniform is True:
                return w.uniform(n.dims, True, bool_)
            same = len(n.dims) == other.ndim and all(map(w.g.deduction.same, n.dims, other.shape))
            return other if same else w.of(w.emit(BroadcastTo(n.dims), w.tensor(other)))
    return w.of(w.emit(LogicalAnd(), w.tensor(a), w.tensor(b)))


def logical(op: OperatorSpec) -> Handler:
    return lambda w, n: w.of(w.emit(op, w.tensor(_truth(w, n, 0)), w.tensor(_truth(w, n, 1))))


def _not(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(LogicalNot(), w.tensor(_truth(w, n, 0))))


def _where(w: Writer, n: TorchNode) -> ImportedValue:
    cond = as_value(w, n.item(0), bool_)
    a, b = as_item(w, n.args[1], n.dtype), as_item(w, n.args[2], n.dtype)
    return w.of(w.emit(Where(), cond, w.tensor(a), w.tensor(b)), a.natural and b.natural)


HANDLERS: Mapping[str, Handler] = {
    **{f"aten.{name}.{form}": handler for form in ("Tensor", "Scalar") for name, handler in (
        ("eq", compare(Equal())), ("ne", compare(NotEqual())), ("lt", compare(Less())), ("le", compare(LessEqual())),
        ("gt", compare(Less(), True)), ("ge", compare(LessEqual(), True)),
        ("bitwise_and", bitwise(BitwiseAnd(), _and)), ("bitwise_or", bitwise(BitwiseOr(), logical(LogicalOr()))),
        ("bitwise_xor", bitwise(BitwiseXor(), logical(NotEqual()))), ("__lshift__", _shift), ("__rshift__", _shift),
    )},
    **{f"aten.bitwise_{side}_shift.{form}": _shift for side in ("left", "right") for form in ("Tensor", "Tensor_Scalar")},
    "aten.bitwise_not.default": bitwise(BitwiseNot(), _not), "aten.logical_not.default": _not,
    "aten.logical_and.default": _and, "aten.logical_or.default": logical(LogicalOr()),
    "aten.logical_xor.default": logical(NotEqual()), "aten.where.self": _where,
}  # fmt: skip
