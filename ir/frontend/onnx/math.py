"""Elementwise ONNX operators.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np

from relax_tune.ir.core.dtype import bool_, f8e8m0, f32, f64
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array, shortest
from relax_tune.ir.frontend.shared.handlers import math as shared
from relax_tune.ir.frontend.shared.handlers.compare import logical_and
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.bits import BitCast, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.elementwise import Add, Cast, Maximum, Minimum, broadcast_dims
from relax_tune.ir.op.math.logic import Less, LessEqual, NotEqual
from relax_tune.ir.op.math.small_floats import Rounding
from relax_tune.ir.op.registry import ELEMENTWISE


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
    # Attributes are float64, which does not hold every larger integer.
    return value is not None and (isinstance(value, float) or abs(value) < 2**53)


def with_literal(node: OnnxNode, left: bool) -> tuple[ImportedValue, float | int] | None:
    """Return (tensor, number) if an operand is a constant that does not broadcast the other; else None.

    Args:
        left: Whether the first operand may be the number.
    """
    a, b = node.item(0), node.item(1)
    for tensor, number in ((a, b), (b, a)) if left else ((a, b),):
        value = literal_of(number)
        if tensor.array is None and number.ndim <= tensor.ndim and value is not None and _small(value):
            return tensor, value
    return None


def _natural(node: OnnxNode) -> bool:
    return all(i is not None and i.natural for i in node.inputs)


def _add(w: Writer, node: OnnxNode) -> ImportedValue:
    pair = with_literal(node, True)
    total = w.add(w.tensor(pair[0]), pair[1]) if pair else w.add(node.operand(w, 0), node.operand(w, 1))
    return w.of(total, _natural(node))


def _sub(w: Writer, node: OnnxNode) -> ImportedValue:
    pair = with_literal(node, False)
    return w.of(w.add(w.tensor(pair[0]), -pair[1]) if pair else w.sub(node.operand(w, 0), node.operand(w, 1)))


def _mul(w: Writer, node: OnnxNode) -> ImportedValue:
    pair = with_literal(node, True)
    scaled = w.mul(w.tensor(pair[0]), pair[1]) if pair else w.mul(node.operand(w, 0), node.operand(w, 1))
    return w.of(scaled, _natural(node))


def _div(w: Writer, node: OnnxNode) -> ImportedValue:
    if not node.item(0).dtype.is_float:
        return w.of(w.quotient(node.operand(w, 0), node.operand(w, 1)), _natural(node))
    pair = with_literal(node, False)
    return w.of(w.div(w.tensor(pair[0]), pair[1]) if pair else w.div(node.operand(w, 0), node.operand(w, 1)))


def _pow(w: Writer, node: OnnxNode) -> ImportedValue:
    base, exponent = node.item(0), node.item(1)
    power = shared.known_power(w, base, literal_of(exponent)) if exponent.ndim <= base.ndim else None
    if power is not None:
        return power
    x, y = w.tensor(base), w.tensor(exponent)
    if base.dtype.is_float:
        return w.of(w.power(x, w.cast(y, base.dtype)))
    if exponent.dtype.is_int:
        return w.of(shared.integer_power(w, x, y))
    return w.of(w.cast(w.power(w.cast(x, f64), w.cast(y, f64)), base.dtype))


def _cast(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    target = node.item(1).dtype if node.op == "CastLike" else node.element("to")
    if x.dtype is target:
        return x
    if target.is_small and target.is_float:
        mode = node.choice("round_mode", "up", "down", "nearest") if target is f8e8m0 else "nearest"
        return w.of(w.emit(Cast(target, node.flag("saturate", True), cast(Rounding, mode)), w.tensor(x)))
    return w.of(w.cast(w.tensor(x), target), x.natural and target.is_int)


def folded(w: Writer, node: OnnxNode, op: OperatorSpec) -> Value:
    """Emit a binary operator over all inputs, from the left."""
    return reduce(lambda a, b: w.emit(op, a, b), (node.operand(w, p) for p in range(len(node.inputs))))


def variadic(op: OperatorSpec) -> Handler:
    return lambda w, node: w.of(folded(w, node, op), _natural(node))


def _mean(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(w.div(folded(w, node, Add()), len(node.inputs)))


def _clip(w: Writer, node: OnnxNode) -> ImportedValue:
    value = node.operand(w, 0)
    if node.has(1):
        low = literal_of(node.item(1))
        value = w.maximum(value, low if low is not None and _small(low) else node.operand(w, 1))
    if node.has(2):
        value = w.minimum(value, node.operand(w, 2))
    return w.of(value, node.item(0).natural)


def _greater(w: Writer, node: OnnxNode) -> ImportedValue | Sequence[ImportedValue | None]:
    """Import `a > b` as `b < a`, which is the same for NaN; decide comparisons of non-negative values with 0."""
    strict = node.op == "Greater"
    a, b = node.item(0), node.item(1)
    dims = broadcast_dims(node.op, a.shape, b.shape, w.g.deduction)[0]
    if not strict and a.natural and a.dtype.is_int and b.uniform is not None and b.uniform <= 0 and dims is not None:
        return w.uniform(dims, True, bool_)
    return shared.operator(Less() if strict else LessEqual(), 2, swap=True)(w, node)


def _is_inf(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.operand(w, 0)
    ends = {"detect_positive": math.inf, "detect_negative": -math.inf}
    tests = [w.equal(x, end) for name, end in ends.items() if node.flag(name, True)]
    if not tests:
        return w.of(w.less(x, x))
    return w.of(tests[0] if len(tests) == 1 else w.logical_or(*tests))


def _sign(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Sign: NaN for NaN, as NumPy and ONNX Runtime have it; torch has 0."""
    x = node.operand(w, 0)
    signs = shared.sign(w, x)
    return w.of(w.where(shared.is_nan(w, x), x, signs) if node.item(0).dtype.is_float else signs)


def _prelu(w: Writer, node: OnnxNode) -> ImportedValue:
    x, slopes = node.operand(w, 0), node.operand(w, 1)
    scaled = w.mul(x, slopes)
    return w.of(w.where(w.less(x, 0), scaled, x))


def _elu(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Elu, Celu, whose exponential is of `x / alpha`, and Selu, which scales both sides by gamma."""
    x, selu = node.operand(w, 0), node.op == "Selu"
    alpha = node.real("alpha", 1.6732632423543772848170429916717 if selu else 1.0)
    scale = node.real("gamma", 1.0507009873554804934193349852946) if selu else 1.0
    return w.of(shared.elu(w, x, w.div(x, alpha) if node.op == "Celu" else x, alpha, scale))


def _hard_sigmoid(w: Writer, node: OnnxNode) -> ImportedValue:
    x, swish = node.operand(w, 0), node.op == "HardSwish"
    alpha, beta = node.real("alpha", 1 / 6 if swish else 0.2), node.real("beta", 0.5)
    gate = shared.clip(w, w.add(w.mul(x, alpha), beta), 0.0, 1.0)
    return w.of(w.mul(x, gate) if swish else gate)


def softplus(w: Writer, x: Value) -> Value:
    """Emit `log(1 + exp(x))` as `max(x, 0) + log1p(exp(-|x|))`, without overflow and accurate where small."""
    tail = w.exp(w.mul(w.abs(x), -1))
    return w.add(w.relu(x), shared.log1p(w, tail))


def in_work_type(function: Callable[[Writer, Value], Value]) -> Handler:
    """Make a handler of a function that is computed in 32 bits for 16-bit floats."""

    def handler(w: Writer, node: OnnxNode) -> ImportedValue:
        element = node.item(0).dtype
        return w.of(w.cast(function(w, w.cast(node.operand(w, 0), shared.work_type(element))), element))

    return handler


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
        raise node.refuse(f"expected a dense tensor or numbers, got attributes {sorted(node.attributes)}")
    return w.constant(array, node.outputs[0])


def _mod(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Mod: with `fmod` the result has the sign of the dividend, otherwise the sign of the divisor."""
    divisor, towards_zero = node.item(1), node.flag("fmod")
    rest = shared.remainder(w, node.operand(w, 0), node.operand(w, 1), towards_zero)
    return w.of(rest, divisor.natural and divisor.dtype.is_int and not towards_zero)


def _shift(w: Writer, node: OnnxNode) -> ImportedValue:
    left = node.choice("direction", "", "LEFT", "RIGHT") == "LEFT"
    return w.of(w.emit(ShiftLeft() if left else ShiftRight(), w.tensor(node.item(0)), w.tensor(node.item(1))))


def _bit_cast(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), node.element("to")
    if x.dtype is target:
        return x
    if x.dtype is bool_ and target.bytes == 1:
        return w.of(w.cast(w.tensor(x), target))
    return w.of(w.emit(BitCast(target, x.dtype), w.tensor(x)))


HANDLERS: Mapping[str, Handler] = {
    **{op.onnx.name: shared.operator(op(), op.arity) for op in ELEMENTWISE.values() if op.onnx},
    "Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div, "Neg": shared.written(shared.neg),
    "Reciprocal": shared.written(shared.reciprocal), "Pow": _pow,
    "Gelu": shared.gelu, "Ceil": shared.written(shared.ceil), "Sign": _sign, "Cast": _cast, "CastLike": _cast,
    "Sum": variadic(Add()),
    "Max": variadic(Maximum()), "Min": variadic(Minimum()), "Mean": _mean, "Clip": _clip, "Where": shared.where,
    "Greater": _greater, "GreaterOrEqual": _greater, "And": logical_and, "Xor": shared.operator(NotEqual(), 2),
    "IsNaN": shared.written(shared.is_nan),
    "IsInf": _is_inf, "LeakyRelu": shared.leaky_relu, "PRelu": _prelu, "Elu": _elu, "Celu": _elu, "Selu": _elu,
    "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_sigmoid, "Softplus": in_work_type(softplus),
    "Mish": in_work_type(lambda w, x: w.mul(x, w.tanh(softplus(w, x)))),
    "Identity": shared.identity, "Constant": _constant, "BitShift": _shift, "BitCast": _bit_cast, "Mod": _mod,
}  # fmt: skip
