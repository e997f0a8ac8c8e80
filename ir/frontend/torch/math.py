"""Elementwise arithmetic of ATen (aten.*).

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relax_tune.ir.core.dtype import bool_, f8e8m0, f32
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.frontend.shared.handlers import math as shared
from relax_tune.ir.frontend.shared.node import Number, number_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, with_attributes, wrapped
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import IntegerPower
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, Maximum, MaximumScalar, Minimum, Mul, Sub
from relax_tune.ir.op.math.logic import LogicalAnd, LogicalOr
from relax_tune.ir.op.math.numeric import Power
from relax_tune.ir.op.registry import ELEMENTWISE

COPIES = ("clone", "alias", "detach", "contiguous", "lift_fresh_copy")
# Largest magnitude of integers that an attribute represents exactly.
EXACT = 2**53


def number(value: Any) -> Number | None:
    """Return the value of a number or constant without dims, or None if an attribute cannot represent it."""
    if isinstance(value, ImportedValue):
        if value.array is None or value.ndim or value.dtype is bool_:
            return None
        value = value.array.item()
    n = number_of(value)
    if n is None or isinstance(n, bool) or not math.isfinite(n):
        return None
    # Attributes are doubles.
    return None if isinstance(n, int) and abs(n) >= EXACT else n


def natural(value: Any) -> bool:
    """Return True if an operand is known to be a non-negative integer."""
    if isinstance(value, ImportedValue):
        return value.natural
    n = number_of(value)
    return isinstance(n, int) and n >= 0


def _natural(w: Writer, value: Any) -> bool:
    return w.natural(value) if isinstance(value, Expr) else natural(value)


def _add(w: Writer, n: TorchNode, sign: int = 1) -> ImportedValue:
    """Import `a + alpha * b`. sign: -1 for `a - alpha * b`."""
    a, b, alpha = n.args[0], n.args[1], number_of(n.argument(2, "alpha", 1))
    if alpha is None:
        raise n.refuse("expected alpha as a number")
    alpha *= sign
    # A sum is the same in both orders, so that the number comes second.
    if sign == 1 and not isinstance(a, ImportedValue):
        a, b = b, a
    c = number(b)
    if c is not None and isinstance(a, ImportedValue):
        shift = c * alpha
        x = as_item(w, a, n.dtype)
        if shift == 0 and (n.dtype.is_int or math.copysign(1, float(c) * alpha) < 0):  # -0.0 + 0.0 is 0.0
            return x
        return w.of(w.add(w.tensor(x), shift), x.natural and n.dtype.is_int and shift >= 0)
    x, y = as_item(w, a, n.dtype), as_item(w, b, n.dtype)
    if n.dtype is bool_:
        y = y if alpha else w.uniform(y.shape, False, bool_)
        return w.of(w.logical_or(w.tensor(x), w.tensor(y)))
    if alpha not in (1, -1):
        y = w.of(w.mul(w.tensor(y), abs(alpha)))
    total = w.emit(Add() if alpha > 0 else Sub(), w.tensor(x), w.tensor(y))
    return w.of(total, alpha > 0 and n.dtype.is_int and _natural(w, a) and _natural(w, b))


def _mul(w: Writer, n: TorchNode) -> ImportedValue:
    a, b = n.args[0], n.args[1]
    if n.dtype is bool_:
        return w.of(w.logical_and(as_value(w, a, bool_), as_value(w, b, bool_)))
    for x, y in ((a, b), (b, a)):
        c = number(y)
        if c is not None and isinstance(x, ImportedValue):
            item = as_item(w, x, n.dtype)
            if c == 1:
                return item
            return w.of(w.mul(w.tensor(item), c), item.natural and n.dtype.is_int and c >= 0)
    product = w.mul(as_value(w, a, n.dtype), as_value(w, b, n.dtype))
    return w.of(product, n.dtype.is_int and natural(a) and natural(b))


def _div(w: Writer, n: TorchNode) -> ImportedValue:
    a, b, mode = n.args[0], n.args[1], n.argument(2, "rounding_mode")
    if n.dtype.is_int:
        x, y = as_value(w, a, n.dtype), as_value(w, b, n.dtype)
        quotient = w.quotient(x, y)
        if mode == "floor" and not (_natural(w, a) and _natural(w, b)):
            # `quotient` rounds towards 0. Where the remainder has another sign than the divisor, the floor is one
            # less.
            below = shared.signs_differ(w, w.sub(x, w.mul(quotient, y)), y)
            quotient = w.sub(quotient, w.cast(below, n.dtype))
        return w.of(quotient, _natural(w, a) and _natural(w, b))
    c = number(b)
    if c is not None and mode is None:
        return w.of(w.div(as_value(w, a, n.dtype), c))
    # A quotient of 16-bit floats may round up to the next whole number before it is rounded down.
    element = n.dtype if mode is None else shared.work_type(n.dtype)
    x, y = as_value(w, a, element), as_value(w, b, element)
    quotient = w.div(x, y)
    if mode == "floor":
        quotient = shared.floored_quotient(w, x, y, quotient)
    elif mode == "trunc":
        quotient = shared.truncated(w, quotient)
    return w.of(w.cast(quotient, n.dtype))


def _pow(w: Writer, n: TorchNode) -> ImportedValue:
    a, b = n.args[0], n.args[1]
    if not isinstance(a, ImportedValue):
        return w.of(
            w.emit(Power() if n.dtype.is_float else IntegerPower(), as_value(w, a, n.dtype), as_value(w, b, n.dtype))
        )
    item = as_item(w, a, n.dtype)
    x, c = w.tensor(item), number(b)
    power = shared.known_power(w, item, c)
    if power is not None:
        return power
    if not n.dtype.is_float:
        if c is not None and c < 0:
            raise n.refuse(f"expected an exponent of at least 0 for integers, got {c}")
        return w.of(w.emit(IntegerPower(), x, as_value(w, b, n.dtype)))
    return w.of(w.power(x, as_value(w, b, n.dtype)))


def _remainder(w: Writer, n: TorchNode) -> ImportedValue:
    x, y = n.operand(w, 0), n.operand(w, 1)
    return w.of(shared.remainder(w, x, y, "fmod" in n.op))


def _sign(w: Writer, n: TorchNode) -> ImportedValue:
    return n.item(0) if n.dtype is bool_ else w.of(shared.sign(w, n.operand(w, 0)))


def _is_not_finite(w: Writer, n: TorchNode) -> ImportedValue:
    """Import isnan and isinf; no integer is either."""
    item = n.item(0)
    x = w.tensor(item)
    if "isnan" in n.op or not item.dtype.is_float:
        return w.of(shared.is_nan(w, x))
    ends = (w.equal(x, end) for end in (math.inf, -math.inf))
    return w.of(w.logical_or(*ends))


def _clamp(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.typed(w, 0)
    low, high = n.argument(1, "min"), n.argument(2, "max")
    value, natural_bounds = w.tensor(x), x.natural and (high is None or natural(high))
    for bound, one, two in ((low, MaximumScalar, Maximum), (high, None, Minimum)):
        if bound is None:
            continue
        c = number(bound)
        if c is not None and one is not None:
            value = w.emit(one(wrapped(c, n.dtype)), value)
        else:
            value = w.emit(two(), value, as_value(w, bound, n.dtype))
    return w.of(value, natural_bounds or (n.dtype.is_int and low is not None and natural(low) and high is None))


def _hardtanh(w: Writer, n: TorchNode) -> ImportedValue:
    low, high = number(n.argument(1, "min_val", -1.0)), number(n.argument(2, "max_val", 1.0))
    return w.of(shared.clip(w, w.tensor(n.item(0)), low, high))


def pair(op: OperatorSpec) -> Handler:
    """Make a handler of an extreme of two operands; of truth values it is their union or intersection."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        if n.dtype is bool_:
            both: OperatorSpec = LogicalOr() if isinstance(op, Maximum) else LogicalAnd()
            return w.of(w.emit(both, as_value(w, n.args[0], bool_), as_value(w, n.args[1], bool_)))
        y = w.emit(op, n.operand(w, 0), n.operand(w, 1))
        return w.of(y, natural(n.args[0]) and natural(n.args[1]))

    return handler


def _to_copy(w: Writer, n: TorchNode) -> ImportedValue:
    x, target = n.item(0), n.dtype
    if x.dtype is target or not (target.is_small and target.is_float):
        return as_item(w, x, target)
    value = w.tensor(x)
    if target is f8e8m0:  # torch drops the sign, and has the least power for 0
        value = w.maximum(w.abs(w.cast(value, f32)), target.lowest)
        return w.of(w.cast(value, target))
    return w.of(w.emit(Cast(target, n.argument(1, "saturate", False) is True), value))


def _elu(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `scale * x` where positive, else `scale * alpha * (exp(input_scale * x) - 1)`."""
    x = w.tensor(n.item(0))
    alpha, scale, inner = (number(n.argument(p, k, 1.0)) for p, k in ((1, "alpha"), (2, "scale"), (3, "input_scale")))
    if alpha is None or scale is None or inner is None:
        raise n.refuse("expected alpha, scale and input_scale as numbers")
    return w.of(shared.elu(w, x, w.mul(x, float(inner)), float(alpha), float(scale)))


def extreme_number(op: OperatorSpec) -> Handler:
    """Make a handler of an extreme of two operands that prefers numbers to NaN."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        if not n.dtype.is_float:
            return pair(op)(w, n)  # type: ignore[return-value]
        x, y = n.operand(w, 0), n.operand(w, 1)
        best = w.where(shared.is_nan(w, y), x, w.emit(op, x, y))
        return w.of(w.where(shared.is_nan(w, x), y, best))

    return handler


def _rounded(w: Writer, n: TorchNode) -> ImportedValue:
    """Import rounding to a number of decimals, as `round(x * 10^d) / 10^d`."""
    item, decimals = n.item(0), n.number(1, "decimals", 0)
    if not item.dtype.is_float:
        return item
    element = shared.work_type(item.dtype)
    value, ten = as_value(w, item, element), w.literal(10.0 ** abs(decimals), element)
    # Powers of 10 with negative exponents are not exact, so that for them the inverse operations are taken.
    first, second = (Mul(), Div()) if decimals > 0 else (Div(), Mul())
    value = value if not decimals else w.emit(first, value, ten)
    value = w.rint(value)
    return w.of(w.cast(value if not decimals else w.emit(second, value, ten), n.dtype))


def _sign_bit(w: Writer, n: TorchNode) -> ImportedValue:
    """Import whether the sign is negative, also of -0; a NaN counts as positive."""
    item = n.item(0)
    if item.dtype is bool_:
        return w.uniform(n.dims, False, bool_)
    return w.of(shared.is_negative(w, w.tensor(item)))


HANDLERS: Mapping[str, Handler] = {
    **{
        f"aten.{op.torch}.default": shared.operator(op()) if op.arity == 1 else pair(op())
        for op in ELEMENTWISE.values()
        if op.torch
    },
    "aten.add.Tensor": _add, "aten.add.Scalar": _add, "aten.sub.Tensor": lambda w, n: _add(w, n, -1),
    "aten.sub.Scalar": lambda w, n: _add(w, n, -1), "aten.rsub.Scalar": shared.operator(Sub(), 2, swap=True),
    "aten.rsub.Tensor": shared.operator(Sub(), 2, swap=True),
    "aten.mul.Tensor": _mul, "aten.mul.Scalar": _mul, "aten.div.Tensor": _div, "aten.div.Scalar": _div,
    "aten.true_divide.Tensor": _div,  # an alias that torch writes for quotients of numbers, after its decompositions
    "aten.div.Tensor_mode": _div, "aten.div.Scalar_mode": _div, "aten.pow.Tensor_Scalar": _pow,
    "aten.pow.Tensor_Tensor": _pow, "aten.pow.Scalar": _pow,
    **{f"aten.{name}.{form}": _remainder for name in ("fmod", "remainder") for form in ("Tensor", "Scalar")},
    "aten.remainder.Scalar_Tensor": _remainder, "aten.sign.default": _sign, "aten.isnan.default": _is_not_finite,
    "aten.isinf.default": _is_not_finite, "aten.trunc.default": shared.rounding(shared.truncated),
    "aten.floor.default": shared.rounding(Writer.floor), "aten.round.default": shared.rounding(Writer.rint),
    "aten.ceil.default": shared.rounding(shared.ceil),
    "aten.neg.default": shared.written(shared.neg), "aten.reciprocal.default": shared.written(shared.reciprocal),
    "aten.silu.default": shared.written(shared.silu),
    "aten.gelu.default": with_attributes(shared.gelu, approximate=(1, "approximate")),
    "aten.clamp.default": _clamp, "aten.clamp.Tensor": _clamp, "aten.clamp_min.default": _clamp,
    "aten.hardtanh.default": _hardtanh,
    "aten.leaky_relu.default": with_attributes(shared.leaky_relu, alpha=(1, "negative_slope")),
    "aten.elu.default": _elu, "aten.log1p.default": shared.written(shared.log1p),
    "aten.expm1.default": shared.written(shared.expm1),
    "aten._to_copy.default": _to_copy, **{f"aten.{name}.default": shared.identity for name in COPIES},
    "aten.exp2.default": shared.written(lambda w, x: w.power(2.0, x)),
    "aten.nextafter.default": shared.written(shared.next_after, 2),
    "aten.round.decimals": _rounded, "aten.ldexp.Tensor": shared.written(lambda w, x, y: w.mul(x, w.power(2.0, y)), 2),
    "aten.signbit.default": _sign_bit, "aten.angle.default": shared.written(shared.angle),
    "aten.hypot.default": shared.written(shared.hypot, 2),
    **dict.fromkeys(("aten.copysign.Tensor", "aten.copysign.Scalar"), shared.written(shared.copysign, 2)),
    "aten.square.default": shared.written(shared.square),
    "aten.fmax.default": extreme_number(Maximum()), "aten.fmin.default": extreme_number(Minimum()),
}  # fmt: skip
