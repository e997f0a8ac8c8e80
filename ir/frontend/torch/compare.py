"""Comparisons, bits and truth values of ATen (aten.*).

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.frontend.shared.handlers.compare import logical_and
from relax_tune.ir.frontend.shared.handlers.math import operator, where
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.math import natural
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_value, common_type
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalNot, LogicalOr, NotEqual


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


def bitwise(op: OperatorSpec, of_bools: Handler) -> Handler:
    """Make a handler of the bits of integers, and of bools."""

    def handler(w: Writer, n: TorchNode) -> Result:
        if n.dtype is bool_:
            return of_bools(w, n)
        return w.of(w.emit(op, *(as_value(w, a, n.dtype) for a in n.args)))

    return handler


def _shift(w: Writer, n: TorchNode) -> ImportedValue:
    left = "left" in n.op or "lshift" in n.op
    x, y = n.operand(w, 0), n.operand(w, 1)
    return w.of(w.emit(ShiftLeft() if left else ShiftRight(), x, y))


LOGICAL: Mapping[str, Handler] = {
    "and": logical_and, "or": operator(LogicalOr(), 2), "xor": operator(NotEqual(), 2), "not": operator(LogicalNot()),
}  # fmt: skip
HANDLERS: Mapping[str, Handler] = {
    **{f"aten.{name}.{form}": handler for form in ("Tensor", "Scalar") for name, handler in (
        ("eq", compare(Equal())), ("ne", compare(NotEqual())), ("lt", compare(Less())), ("le", compare(LessEqual())),
        ("gt", compare(Less(), True)), ("ge", compare(LessEqual(), True)),
        ("bitwise_and", bitwise(BitwiseAnd(), LOGICAL["and"])), ("bitwise_or", bitwise(BitwiseOr(), LOGICAL["or"])),
        ("bitwise_xor", bitwise(BitwiseXor(), LOGICAL["xor"])), ("__lshift__", _shift), ("__rshift__", _shift),
    )},
    **{f"aten.bitwise_{side}_shift.{form}": _shift for side in ("left", "right") for form in ("Tensor", "Tensor_Scalar")},
    **{f"aten.logical_{name}.default": handler for name, handler in LOGICAL.items()},
    "aten.bitwise_not.default": bitwise(BitwiseNot(), LOGICAL["not"]), "aten.where.self": where,
}  # fmt: skip
