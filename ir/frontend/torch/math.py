"""Elementwise arithmetic of ATen (aten.*)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relax_tune.ir.core.dtype import DType, bool_, f8e8m0, f32
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, clip, remainder, sign, tanh_gelu
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import (
    Handler,
    Number,
    TorchNode,
    as_item,
    as_value,
    number_of,
)
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import IntegerPower
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    Erf,
    Exp,
    Gelu,
    Maximum,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Relu,
    Rsqrt,
    Sigmoid,
    Sqrt,
    Sub,
    Tanh,
)
from relax_tune.ir.op.math.logic import Equal, Less, LogicalAnd, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import (
    Abs,
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atan2,
    Atanh,
    Cos,
    Cosh,
    Floor,
    Fmod,
    Log,
    Log2,
    Log10,
    Power,
    Quotient,
    Rint,
    Sin,
    Sinh,
    Tan,
)

# Largest magnitude of integers that an attribute represents exactly.
EXACT = 2**53


def number(value: Any) -> Number | None:
    """Return the value of a number or constant without dims, or None if an attribute cannot represent it."""
    if isinstance(value, ImportedValue):
        if value.array is None or value.ndim or value.dtype is bool_:
            return None
        value = value.array.item()
    found = number_of(value)
    if found is None or isinstance(found, bool) or not math.isfinite(found):
        return None
    return None if isinstance(found, int) and abs(found) >= EXACT else found


def unary(op: OperatorSpec) -> Handler:
    """Make a handler of a unary operator; an integer argument is cast to the element type of the result."""
    return lambda w, n: w.of(w.emit(op, as_value(w, n.item(0), n.dtype)))


def natural(value: Any) -> bool:
    """Return True if an operand is known to be a non-negative integer."""
    if isinstance(value, ImportedValue):
        return value.natural
    found = number_of(value)
    return isinstance(found, int) and found >= 0


def _natural(w: Writer, value: Any) -> bool:
    return w.natural(value) if isinstance(value, Expr) else natural(value)


def _with_alpha(w: Writer, n: TorchNode, sign: int) -> tuple[Any, Any, float | int]:
    """Return (a, b, alpha) of `a + alpha * b`."""
    alpha = number_of(n.given(2, "alpha", 1))
    if alpha is None:
        raise n.refuse("wanted alpha as a number")
    return n.args[0], n.args[1], sign * alpha


def _add(w: Writer, n: TorchNode, sign: int = 1) -> ImportedValue:
    a, b, alpha = _with_alpha(w, n, sign)
    if sign == 1 and not isinstance(a, ImportedValue):
        a, b = b, a
    c = number(b)
    if c is not None and isinstance(a, ImportedValue):
        shift = c * alpha
        x = as_item(w, a, n.dtype)
        if shift == 0 and (n.dtype.is_int or math.copysign(1, float(c) * alpha) < 0):  # -0.0 + 0.0 is 0.0
            return x
        return w.of(w.emit(AddScalar(shift), w.tensor(x)), x.natural and n.dtype.is_int and shift >= 0)
    x, y = as_item(w, a, n.dtype), as_item(w, b, n.dtype)
    if n.dtype is bool_:
        y = y if alpha else w.uniform(y.shape, False, bool_)
        return w.of(w.emit(LogicalOr(), w.tensor(x), w.tensor(y)))
    if alpha not in (1, -1):
        y = w.of(w.emit(MulScalar(abs(alpha)), w.tensor(y)))
    found = w.emit(Add() if alpha > 0 else Sub(), w.tensor(x), w.tensor(y))
    return w.of(found, alpha > 0 and n.dtype.is_int and _natural(w, a) and _natural(w, b))


def _rsub(w: Writer, n: TorchNode) -> ImportedValue:
    x, y = as_value(w, n.args[1], n.dtype), as_value(w, n.args[0], n.dtype)
    return w.of(w.emit(Sub(), x, y))


def _mul(w: Writer, n: TorchNode) -> ImportedValue:
    a, b = n.args[0], n.args[1]
    if n.dtype is bool_:
        return w.of(w.emit(LogicalAnd(), as_value(w, a, bool_), as_value(w, b, bool_)))
    for x, y in ((a, b), (b, a)):
        c = number(y)
        if c is not None and isinstance(x, ImportedValue):
            item = as_item(w, x, n.dtype)
            if c == 1:
                return item
            return w.of(w.emit(MulScalar(c), w.tensor(item)), item.natural and n.dtype.is_int and c >= 0)
    found = w.emit(Mul(), as_value(w, a, n.dtype), as_value(w, b, n.dtype))
    return w.of(found, n.dtype.is_int and natural(a) and natural(b))


def _rounded_down(w: Writer, x: Value, y: Value, quotient: Value, n: TorchNode) -> Value:
    """Turn a quotient rounded towards zero into the floor: subtract 1 where it is negative and inexact."""
    zero = w.literal(0, n.dtype)
    rest = w.emit(Sub(), x, w.emit(Mul(), quotient, y))
    signs = w.emit(NotEqual(), w.emit(Less(), rest, zero), w.emit(Less(), y, zero))
    below = w.emit(LogicalAnd(), w.emit(NotEqual(), rest, zero), signs)
    return w.emit(Sub(), quotient, w.emit(Cast(n.dtype), below))


def _floored(w: Writer, x: Value, y: Value, quotient: Value, element: DType) -> Value:
    """Return the floor of a quotient of floats by its exact remainder (torch, "div_floor_floating").

    A zero divisor and an infinite quotient keep the quotient."""
    zero, one = w.literal(0, element), w.literal(1, element)
    rest = w.emit(Fmod(), x, y)
    below = w.emit(NotEqual(), w.emit(Less(), rest, zero), w.emit(Less(), y, zero))
    below = w.emit(LogicalAnd(), w.emit(NotEqual(), rest, zero), below)
    exact = w.emit(Div(), w.emit(Sub(), x, rest), y)
    exact = w.emit(Where(), below, w.emit(Sub(), exact, one), exact)
    down = w.emit(Floor(), exact)
    up = w.emit(Less(), w.literal(0.5, element), w.emit(Sub(), exact, down))
    found = w.emit(Where(), up, w.emit(Add(), down, one), down)
    signed = w.emit(Mul(), zero, quotient)  # 0 with the sign of the quotient
    found = w.emit(Where(), w.emit(Equal(), exact, zero), signed, found)
    return w.emit(Where(), w.emit(Equal(), y, zero), quotient, found)


def truncated(w: Writer, x: Value, element: DType) -> Value:
    """Round towards zero."""
    up = w.emit(MulScalar(-1), w.emit(Floor(), w.emit(MulScalar(-1), x)))
    return w.emit(Where(), w.emit(Less(), x, w.literal(0, element)), up, w.emit(Floor(), x))


def _div(w: Writer, n: TorchNode) -> ImportedValue:
    a, b, mode = n.args[0], n.args[1], n.given(2, "rounding_mode")
    if n.dtype.is_int:
        x, y = as_value(w, a, n.dtype), as_value(w, b, n.dtype)
        found = w.emit(Quotient(), x, y)
        if mode == "floor" and not (_natural(w, a) and _natural(w, b)):
            found = _rounded_down(w, x, y, found, n)
        return w.of(found, _natural(w, a) and _natural(w, b))
    c = number(b)
    if c is not None and mode is None and 1e-30 < abs(c) < 1e30 and n.dtype.bytes >= 4:
        return w.of(w.emit(MulScalar(1.0 / c), as_value(w, a, n.dtype)))
    element = f32 if n.dtype.is_half and (mode is not None or c is not None) else n.dtype
    x, y = as_value(w, a, element), as_value(w, b, element)
    found = w.emit(Div(), x, y)
    if mode == "floor":
        found = _floored(w, x, y, found, element)
    elif mode == "trunc":
        found = truncated(w, found, element)
    return w.of(cast_to(w, found, element, n.dtype))


def _pow(w: Writer, n: TorchNode) -> ImportedValue:
    a, b = n.args[0], n.args[1]
    if not isinstance(a, ImportedValue):
        return w.of(
            w.emit(Power() if n.dtype.is_float else IntegerPower(), as_value(w, a, n.dtype), as_value(w, b, n.dtype))
        )
    item = as_item(w, a, n.dtype)
    x, c = w.tensor(item), number(b)
    if c == 1:
        return item
    if c == 2:
        return w.of(w.emit(Mul(), x, x), item.natural)
    if c == 3:
        return w.of(w.emit(Mul(), w.emit(Mul(), x, x), x), item.natural)
    if not n.dtype.is_float:
        if c is not None and c < 0:
            raise n.refuse(f"wanted an exponent of at least 0 for integers, found {c}")
        return w.of(w.emit(IntegerPower(), x, as_value(w, b, n.dtype)))
    if c == 0.5:
        return w.of(w.emit(Sqrt(), x))
    if c == -0.5:
        return w.of(w.emit(Rsqrt(), x))
    return w.of(w.emit(Power(), x, as_value(w, b, n.dtype)))


def _remainder(w: Writer, n: TorchNode) -> ImportedValue:
    x, y = as_value(w, n.args[0], n.dtype), as_value(w, n.args[1], n.dtype)
    return w.of(remainder(w, x, y, n.dtype, "fmod" in n.op))


def _sign(w: Writer, n: TorchNode) -> ImportedValue:
    return n.item(0) if n.dtype is bool_ else w.of(sign(w, as_value(w, n.item(0), n.dtype), n.dtype))


def _is_not_finite(w: Writer, n: TorchNode) -> ImportedValue:
    """Import isnan and isinf; no integer is either."""
    item = n.item(0)
    x = w.tensor(item)
    if "isnan" in n.op or not item.dtype.is_float:
        return w.of(w.emit(NotEqual(), x, x))
    ends = (w.emit(Equal(), x, w.literal(end, item.dtype)) for end in (math.inf, -math.inf))
    return w.of(w.emit(LogicalOr(), *ends))


def _trunc(w: Writer, n: TorchNode) -> ImportedValue:
    """Import trunc as the floor of the magnitude with the sign of `x`."""
    item = n.item(0)
    if not item.dtype.is_float:
        return item
    x = w.tensor(item)
    up = w.emit(MulScalar(-1), w.emit(Floor(), w.emit(MulScalar(-1), x)))
    return w.of(w.emit(Where(), w.emit(Less(), x, w.literal(0, item.dtype)), up, w.emit(Floor(), x)))


def _neg(w: Writer, n: TorchNode) -> ImportedValue:
    x = w.tensor(n.item(0))
    return w.of(w.emit(Sub(), w.literal(0, n.dtype), x) if n.dtype.is_unsigned else w.emit(MulScalar(-1), x))


def _reciprocal(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(Div(), w.literal(1.0, n.dtype), as_value(w, n.item(0), n.dtype)))


def _silu(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_value(w, n.item(0), n.dtype)
    return w.of(w.emit(Mul(), x, w.emit(Sigmoid(), x)))


def _gelu(w: Writer, n: TorchNode) -> ImportedValue:
    x, how = w.tensor(n.item(0)), n.given(1, "approximate", "none")
    if how not in ("none", "tanh"):
        raise n.refuse(f"wanted approximate 'none' or 'tanh', found {how!r}")
    return w.of(w.emit(Gelu(), x) if how == "none" else tanh_gelu(w, x))


def whole(handler: Handler) -> Handler:
    """Make a handler of a rounding, which leaves integers as they are."""
    return lambda w, n: n.item(0) if n.item(0).dtype.is_int else handler(w, n)


def _ceil(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(w.emit(MulScalar(-1), w.emit(Floor(), w.emit(MulScalar(-1), w.tensor(n.item(0))))))


def _clamp(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_item(w, n.item(0), n.dtype)
    low, high = n.given(1, "min"), n.given(2, "max")
    value, kept = w.tensor(x), x.natural and (high is None or natural(high))
    for bound, one, two in ((low, MaximumScalar, Maximum), (high, None, Minimum)):
        if bound is None:
            continue
        c = number(bound)
        if c is not None and one is not None:
            value = w.emit(one(c), value)
        else:
            value = w.emit(two(), value, as_value(w, bound, n.dtype))
    return w.of(value, kept or (n.dtype.is_int and low is not None and natural(low) and high is None))


def _hardtanh(w: Writer, n: TorchNode) -> ImportedValue:
    low, high = number(n.given(1, "min_val", -1.0)), number(n.given(2, "max_val", 1.0))
    return w.of(clip(w, w.tensor(n.item(0)), n.dtype, low, high))


def pair(op: OperatorSpec) -> Handler:
    """Make a handler of an extreme of two operands; of truth values it is their union or intersection."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        if n.dtype is bool_:
            both: OperatorSpec = LogicalOr() if isinstance(op, Maximum) else LogicalAnd()
            return w.of(w.emit(both, as_value(w, n.args[0], bool_), as_value(w, n.args[1], bool_)))
        found = w.emit(op, as_value(w, n.args[0], n.dtype), as_value(w, n.args[1], n.dtype))
        return w.of(found, natural(n.args[0]) and natural(n.args[1]))

    return handler


def _to_copy(w: Writer, n: TorchNode) -> ImportedValue:
    x, target = n.item(0), n.dtype
    if x.dtype is target or not (target.is_small and target.is_float):
        return as_item(w, x, target)
    value = w.tensor(x)
    if target is f8e8m0:  # torch drops the sign, and has the least power for 0
        value = w.emit(MaximumScalar(target.lowest), w.emit(Abs(), cast_to(w, value, x.dtype, f32)))
        return w.of(w.emit(Cast(target), value))
    return w.of(w.emit(Cast(target, n.given(1, "saturate", False) is True), value))


def same(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a copy or an alias as its argument."""
    return n.item(0)


def _leaky(w: Writer, n: TorchNode) -> ImportedValue:
    x, slope = w.tensor(n.item(0)), number(n.given(1, "negative_slope", 0.01))
    if slope is None:
        raise n.refuse("wanted negative_slope as a number")
    low: Value = w.emit(MulScalar(float(slope)), x)
    return w.of(w.emit(Where(), w.emit(Less(), x, w.literal(0, n.dtype)), low, x))


def _log1p(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `log(1 + x)` as `log(u) * x / (u - 1)`, `u = 1 + x` rounded: accurate near 0 (W. Kahan)."""
    x = as_value(w, n.item(0), n.dtype)
    one = w.literal(1.0, n.dtype)
    u = w.emit(AddScalar(1.0), x)
    exact = w.emit(LogicalOr(), w.emit(Equal(), u, one), w.emit(Equal(), u, w.literal(math.inf, n.dtype)))
    ratio = w.emit(Div(), x, w.emit(Where(), exact, one, w.emit(Sub(), u, one)))
    return w.of(w.emit(Where(), exact, x, w.emit(Mul(), w.emit(Log(), u), ratio)))


def _expm1(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `exp(x) - 1` as `tanh(x / 2) * (exp(x) + 1)`: accurate near 0."""
    x = as_value(w, n.item(0), n.dtype)
    half = w.emit(Tanh(), w.emit(MulScalar(0.5), x))
    return w.of(w.emit(Mul(), half, w.emit(AddScalar(1.0), w.emit(Exp(), x))))


def _elu(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `scale * x` where positive, else `scale * alpha * (exp(input_scale * x) - 1)`."""
    x = w.tensor(n.item(0))
    alpha, scale, inner = (number(n.given(p, k, 1.0)) for p, k in ((1, "alpha"), (2, "scale"), (3, "input_scale")))
    if alpha is None or scale is None or inner is None:
        raise n.refuse("wanted alpha, scale and input_scale as numbers")
    low = w.emit(MulScalar(float(alpha)), w.emit(AddScalar(-1.0), w.emit(Exp(), w.emit(MulScalar(float(inner)), x))))
    found = w.emit(Where(), w.emit(Less(), w.literal(0, n.dtype), x), x, low)
    return w.of(found if scale == 1 else w.emit(MulScalar(float(scale)), found))


HANDLERS: Mapping[str, Handler] = {
    "aten.add.Tensor": _add, "aten.add.Scalar": _add, "aten.sub.Tensor": lambda w, n: _add(w, n, -1),
    "aten.sub.Scalar": lambda w, n: _add(w, n, -1), "aten.rsub.Scalar": _rsub, "aten.rsub.Tensor": _rsub,
    "aten.mul.Tensor": _mul, "aten.mul.Scalar": _mul, "aten.div.Tensor": _div, "aten.div.Scalar": _div,
    "aten.div.Tensor_mode": _div, "aten.div.Scalar_mode": _div,
    "aten.pow.Tensor_Scalar": _pow, "aten.pow.Tensor_Tensor": _pow, "aten.pow.Scalar": _pow,
    **{f"aten.{name}.{form}": _remainder for name in ("fmod", "remainder") for form in ("Tensor", "Scalar")},
    "aten.remainder.Scalar_Tensor": _remainder,
    "aten.sign.default": _sign, "aten.isnan.default": _is_not_finite, "aten.isinf.default": _is_not_finite,
    "aten.trunc.default": _trunc, "aten.log2.default": unary(Log2()), "aten.log10.default": unary(Log10()),
    "aten.atan2.default": pair(Atan2()),
    "aten.exp.default": unary(Exp()), "aten.log.default": unary(Log()),
    "aten.sqrt.default": unary(Sqrt()), "aten.rsqrt.default": unary(Rsqrt()), "aten.tanh.default": unary(Tanh()),
    "aten.sigmoid.default": unary(Sigmoid()), "aten.relu.default": unary(Relu()), "aten.erf.default": unary(Erf()),
    "aten.abs.default": unary(Abs()), "aten.floor.default": whole(unary(Floor())), "aten.round.default": whole(unary(Rint())),
    "aten.ceil.default": whole(_ceil), "aten.sin.default": unary(Sin()), "aten.cos.default": unary(Cos()),
    "aten.tan.default": unary(Tan()), "aten.asin.default": unary(Asin()), "aten.acos.default": unary(Acos()),
    "aten.atan.default": unary(Atan()), "aten.sinh.default": unary(Sinh()), "aten.cosh.default": unary(Cosh()),
    "aten.asinh.default": unary(Asinh()), "aten.acosh.default": unary(Acosh()), "aten.atanh.default": unary(Atanh()),
    "aten.neg.default": _neg, "aten.reciprocal.default": _reciprocal, "aten.silu.default": _silu, "aten.gelu.default": _gelu,
    "aten.clamp.default": _clamp, "aten.clamp.Tensor": _clamp, "aten.clamp_min.default": _clamp,
    "aten.hardtanh.default": _hardtanh, "aten.leaky_relu.default": _leaky,
    "aten.elu.default": _elu, "aten.log1p.default": _log1p, "aten.expm1.default": _expm1, "aten.maximum.default": pair(Maximum()),
    "aten.minimum.default": pair(Minimum()), "aten._to_copy.default": _to_copy, "aten.clone.default": same,
    "aten.alias.default": same, "aten.detach.default": same, "aten.contiguous.default": same, "aten.lift_fresh_copy.default": same,
}  # fmt: skip
