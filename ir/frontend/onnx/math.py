"""Elementwise ONNX operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from relax_tune.ir.core.dtype import bool_, f8e8m0, f32, f64
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array, element_type, shortest
from relax_tune.ir.frontend.shared.compositions import cast_to, clip, integer_power, sign, tanh_gelu
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo
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
    broadcast_dims,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalNot, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Floor, Log, Power, Quotient
from relax_tune.ir.op.math.small_floats import Rounding


def literal_of(item: ImportedValue) -> float | int | None:
    """Return the value of a finite constant of one element, or None."""
    if item.array is None or item.array.size != 1 or item.dtype is bool_:
        return None
    value = item.array.reshape(-1)[0].item()
    if isinstance(value, int):
        return value
    return (shortest(value) if item.dtype is f32 else value) if math.isfinite(value) else None


def _small(value: float | int | None) -> bool:
    """Return True if an attribute represents the number exactly."""
    return value is not None and (isinstance(value, float) or abs(value) < 2**53)


def unary(op: OperatorSpec) -> Handler:
    return lambda w, node: w.of(w.emit(op, w.tensor(node.item(0))))


def binary(op: OperatorSpec, swap: bool = False) -> Handler:
    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        a, b = w.tensor(node.item(0)), w.tensor(node.item(1))
        return w.of(w.emit(op, b, a) if swap else w.emit(op, a, b))

    return handler


def with_literal(node: OnnxNode, left: bool) -> tuple[ImportedValue, float | int] | None:
    """Return (tensor, number) if an operand is a constant that does not broadcast the other; else None.

    left: the first operand may be the number"""
    a, b = node.item(0), node.item(1)
    for tensor, number in ((a, b), (b, a)) if left else ((a, b),):
        value = literal_of(number)
        if tensor.array is None and number.ndim <= tensor.ndim and value is not None and _small(value):
            return tensor, value
    return None


def _natural(node: OnnxNode) -> bool:
    return all(i is not None and i.natural for i in node.inputs)


def _add(w: Writer, node: OnnxNode) -> ImportedValue:
    found = with_literal(node, True)
    if found is not None:
        return w.of(w.emit(AddScalar(found[1]), w.tensor(found[0])), _natural(node))
    return w.of(w.emit(Add(), w.tensor(node.item(0)), w.tensor(node.item(1))), _natural(node))


def _sub(w: Writer, node: OnnxNode) -> ImportedValue:
    found = with_literal(node, False)
    if found is not None:
        return w.of(w.emit(AddScalar(-found[1]), w.tensor(found[0])))
    return binary(Sub())(w, node)  # type: ignore[return-value]


def _mul(w: Writer, node: OnnxNode) -> ImportedValue:
    found = with_literal(node, True)
    if found is not None:
        return w.of(w.emit(MulScalar(found[1]), w.tensor(found[0])), _natural(node))
    return w.of(w.emit(Mul(), w.tensor(node.item(0)), w.tensor(node.item(1))), _natural(node))


def _div(w: Writer, node: OnnxNode) -> ImportedValue:
    a, b = node.item(0), node.item(1)
    if not a.dtype.is_float:
        return w.of(w.emit(Quotient(), w.tensor(a), w.tensor(b)), a.natural and b.natural)
    found = with_literal(node, False)
    if found is not None and 1e-30 < abs(found[1]) < 1e30 and not a.dtype.is_half:
        return w.of(w.emit(MulScalar(1.0 / found[1]), w.tensor(a)))
    return w.of(w.emit(Div(), w.tensor(a), w.tensor(b)))


def _neg(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.emit(MulScalar(-1), w.tensor(node.item(0))))


def _reciprocal(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return w.of(w.emit(Div(), w.literal(1.0, x.dtype), w.tensor(x)))


def _pow(w: Writer, node: OnnxNode) -> ImportedValue:
    base, exponent = node.item(0), node.item(1)
    x, value = w.tensor(base), literal_of(exponent)
    fits = exponent.ndim <= base.ndim
    if fits and value == 2:
        return w.of(w.emit(Mul(), x, x))
    if fits and value == 3:
        return w.of(w.emit(Mul(), w.emit(Mul(), x, x), x))
    if fits and value == 1:
        return base
    if not base.dtype.is_float:
        y = w.tensor(exponent)
        if exponent.dtype.is_int:
            return w.of(integer_power(w, x, base.dtype, y, exponent.dtype))
        found = w.emit(Power(), cast_to(w, x, base.dtype, f64), cast_to(w, y, exponent.dtype, f64))
        return w.of(cast_to(w, found, f64, base.dtype))
    if fits and value == 0.5:
        return w.of(w.emit(Sqrt(), x))
    if fits and value == -0.5:
        return w.of(w.emit(Rsqrt(), x))
    y = w.tensor(exponent)
    if exponent.dtype is not base.dtype:
        y = w.emit(Cast(base.dtype), y)
    return w.of(w.emit(Power(), x, y))


def _cast(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    if node.op == "CastLike":
        target = node.item(1).dtype
    else:
        target = element_type(int(node.attributes.get("to", 0)), f"node {node.name!r}")
    if x.dtype is target:
        return x
    if target.is_small and target.is_float:
        mode = node.choice("round_mode", "up", "down", "nearest") if target is f8e8m0 else "nearest"
        saturate = bool(node.attributes.get("saturate", 1))
        return w.of(w.emit(Cast(target, saturate, cast(Rounding, mode)), w.tensor(x)))
    return w.of(cast_to(w, w.tensor(x), x.dtype, target), x.natural and target.is_int)


def _gelu(w: Writer, node: OnnxNode) -> ImportedValue:
    x = w.tensor(node.item(0))
    if node.choice("approximate", "none", "tanh") == "none":
        return w.of(w.emit(Gelu(), x))
    return w.of(tanh_gelu(w, x))


def variadic(op: OperatorSpec) -> Handler:
    """Make a handler that folds a binary operator over all inputs, from the left."""

    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        total = w.tensor(node.item(0))
        for position in range(1, len(node.inputs)):
            total = w.emit(op, total, w.tensor(node.item(position)))
        return w.of(total, _natural(node))

    return handler


def _mean(w: Writer, node: OnnxNode) -> ImportedValue:
    total = variadic(Add())(w, node)
    assert isinstance(total, ImportedValue)
    return w.of(w.emit(MulScalar(1.0 / len(node.inputs)), w.tensor(total)))


def _clip(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    value = w.tensor(x)
    if node.has(1):
        low = literal_of(node.item(1))
        if _small(low) and low is not None:
            value = w.emit(MaximumScalar(low), value)
        else:
            value = w.emit(Maximum(), value, w.tensor(node.item(1)))
    if node.has(2):
        value = w.emit(Minimum(), value, w.tensor(node.item(2)))
    return w.of(value, x.natural)


def _where(w: Writer, node: OnnxNode) -> ImportedValue:
    natural = node.item(1).natural and node.item(2).natural
    return w.of(w.emit(Where(), *(w.tensor(node.item(p)) for p in range(3))), natural)


def _joint(w: Writer, node: OnnxNode) -> tuple[Expr, ...] | None:
    """Return the dims that two inputs broadcast to, or None when undecided."""
    a, b = node.item(0).shape, node.item(1).shape
    return broadcast_dims(node.op, a, b, w.g.deduction)[0]


def _greater(w: Writer, node: OnnxNode) -> ImportedValue | Sequence[ImportedValue | None]:
    """Import `a > b` as `b < a`, which is the same for NaN; decide comparisons of non-negative values with 0."""
    strict = node.op == "Greater"
    a, b = node.item(0), node.item(1)
    dims = _joint(w, node)
    if not strict and a.natural and a.dtype.is_int and b.uniform is not None and b.uniform <= 0 and dims is not None:
        return w.uniform(dims, True, bool_)
    return binary(Less() if strict else LessEqual(), swap=True)(w, node)


def _and(w: Writer, node: OnnxNode) -> ImportedValue | Sequence[ImportedValue | None]:
    """Import And. `x and true` becomes `x`."""
    a, b = node.item(0), node.item(1)
    dims = _joint(w, node)
    for x, other in ((a, b), (b, a)):
        if x.uniform is True and dims is not None and x.dtype is other.dtype is bool_:
            if other.uniform is True:
                return w.uniform(dims, True, bool_)
            same = len(dims) == other.ndim and all(map(w.g.deduction.same, dims, other.shape))
            return other if same else w.of(w.emit(BroadcastTo(dims), w.tensor(other)))
    return binary(LogicalAnd())(w, node)


def _is_inf(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    signs = [
        s for s, key in ((math.inf, "detect_positive"), (-math.inf, "detect_negative")) if node.attributes.get(key, 1)
    ]
    tests = [w.emit(Equal(), w.tensor(x), w.literal(s, x.dtype)) for s in signs]
    if not tests:
        return w.of(w.emit(Less(), w.tensor(x), w.tensor(x)))
    return w.of(tests[0] if len(tests) == 1 else w.emit(LogicalOr(), *tests))


def _is_nan(w: Writer, node: OnnxNode) -> ImportedValue:
    x = w.tensor(node.item(0))
    return w.of(w.emit(NotEqual(), x, x))


def _sign(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return w.of(sign(w, w.tensor(x), x.dtype))


def _ceil(w: Writer, node: OnnxNode) -> ImportedValue:
    down = w.emit(Floor(), w.emit(MulScalar(-1), w.tensor(node.item(0))))
    return w.of(w.emit(MulScalar(-1), down))


def _leaky(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LeakyRelu and PRelu: `slope * x` where negative, with a number or a tensor as slope."""
    x = node.item(0)
    value = w.tensor(x)
    if node.op == "PRelu":
        scaled = w.emit(Mul(), value, w.tensor(node.item(1)))
    else:
        scaled = w.emit(MulScalar(float(node.attributes.get("alpha", 0.01))), value)
    return w.of(w.emit(Where(), w.emit(Less(), value, w.literal(0, x.dtype)), scaled, value))


def _elu(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Elu, `x` where positive, else `alpha * (exp(x) - 1)`, and Selu, which multiplies both by gamma."""
    x = node.item(0)
    value = w.tensor(x)
    alpha = float(node.attributes.get("alpha", 1.0 if node.op == "Elu" else 1.6732632423543772848170429916717))
    low = w.emit(MulScalar(alpha), w.emit(AddScalar(-1.0), w.emit(Exp(), value)))
    found = w.emit(Where(), w.emit(Less(), w.literal(0, x.dtype), value), value, low)
    if node.op == "Selu":
        found = w.emit(MulScalar(float(node.attributes.get("gamma", 1.0507009873554804934193349852946))), found)
    return w.of(found)


def _hard_sigmoid(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    swish = node.op == "HardSwish"
    alpha = 1 / 6 if swish else float(node.attributes.get("alpha", 0.2))
    beta = 0.5 if swish else float(node.attributes.get("beta", 0.5))
    line = w.emit(AddScalar(beta), w.emit(MulScalar(alpha), w.tensor(x)))
    gate = clip(w, line, x.dtype, 0.0, 1.0)
    return w.of(w.emit(Mul(), w.tensor(x), gate) if swish else gate)


def _softplus(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Softplus `log(1 + exp(x))` as `max(x, 0) + log(1 + exp(-|x|))`, which does not overflow."""
    x = w.tensor(node.item(0))
    tail = w.emit(Exp(), w.emit(MulScalar(-1), w.emit(Abs(), x)))
    return w.of(w.emit(Add(), w.emit(Relu(), x), w.emit(Log(), w.emit(AddScalar(1.0), tail))))


def constant_of(node: OnnxNode) -> Array | None:
    """Return the array of a Constant node; None for an attribute without numbers."""
    numbers: Mapping[str, Any] = {
        "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64,
    }  # fmt: skip
    for key, kind in numbers.items():
        if key in node.attributes:
            return np.asarray(node.attributes[key], kind)
    value = node.attributes.get("value")
    return value if isinstance(value, np.ndarray) else None


def _constant(w: Writer, node: OnnxNode) -> ImportedValue:
    array = constant_of(node)
    if array is None:
        raise node.refuse(f"wanted a dense tensor or numbers, found attributes {sorted(node.attributes)}")
    return w.constant(array, node.outputs[0])


HANDLERS: Mapping[str, Handler] = {
    "Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div, "Neg": _neg, "Reciprocal": _reciprocal, "Pow": _pow,
    "Exp": unary(Exp()), "Erf": unary(Erf()), "Tanh": unary(Tanh()), "Sqrt": unary(Sqrt()), "Sigmoid": unary(Sigmoid()),
    "Relu": unary(Relu()), "Gelu": _gelu, "Abs": unary(Abs()), "Log": unary(Log()), "Floor": unary(Floor()),
    "Ceil": _ceil, "Sign": _sign, "Cast": _cast, "CastLike": _cast, "Sum": variadic(Add()), "Max": variadic(Maximum()),
    "Min": variadic(Minimum()), "Mean": _mean, "Clip": _clip, "Where": _where, "Equal": binary(Equal()),
    "Less": binary(Less()), "LessOrEqual": binary(LessEqual()), "Greater": _greater,
    "GreaterOrEqual": _greater, "And": _and, "Or": binary(LogicalOr()), "Xor": binary(NotEqual()),
    "Not": unary(LogicalNot()), "IsNaN": _is_nan, "IsInf": _is_inf, "LeakyRelu": _leaky, "PRelu": _leaky, "Elu": _elu,
    "Selu": _elu, "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_sigmoid, "Softplus": _softplus,
    "Identity": lambda w, node: node.item(0), "Constant": _constant,
}  # fmt: skip
