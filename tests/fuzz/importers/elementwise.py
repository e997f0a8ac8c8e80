"""Random uses of elementwise ONNX operators, of casts, comparisons and extremes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from tests.fuzz.importers.builder import (
    BOOL,
    EVERY,
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    NUMBERS,
    Builder,
    number_of,
    numbers,
    types_of,
    within,
)
from tests.fuzz.importers.program import Array, Draw, Invalid

Use = Callable[[Builder, str], None]


def unary(b: Builder, op: str) -> None:
    b.node(op, [b.x(op)])


def in_domain(low: float, high: float) -> Use:
    """A function with values between `low` and `high`, at times of other numbers."""

    def use(b: Builder, op: str) -> None:
        dtype = b.dtype(op)
        b.node(op, [b.x(op) if b.chance(0.2) else b.given(b.shape(), dtype, within(low, high, dtype))])

    return use


def binary(b: Builder, op: str) -> None:
    x = b.x(op)
    pair = [x, b.mate(x)]
    b.rng.shuffle(pair)
    b.node(op, pair)


def nonzero(dtype: np.dtype[object]) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        values = rng.integers(1, 100, shape) if dtype.itemsize > 1 else rng.integers(1, 12, shape)
        signs = rng.choice([-1, 1], shape) if dtype.kind == "i" else 1
        return np.asarray(values * signs).astype(dtype)

    return draw


def quotient(b: Builder, op: str) -> None:
    """Div and Mod: divisors of integers are not 0, nor -1 below the smallest number."""
    x = b.x(op)
    dtype = b.get(x).dtype
    more = {"fmod": 1} if op == "Mod" and (dtype.kind == "f" or b.chance(0.4)) else {}
    if dtype.kind == "f":
        divisor = b.given(b.choose(((), (1,))), dtype, nonzero(dtype), True) if b.chance(0.4) else b.mate(x)
        b.node(op, [x, divisor], **more)
        return
    if dtype.kind == "i" and b.get(x).size and int(b.get(x).min()) == np.iinfo(dtype).min:
        raise Invalid("smallest number")
    y = b.mate(x, nonzero(dtype))
    b.node(op, [x, y], **more)


def power(b: Builder, op: str) -> None:
    base = b.x(op)
    kinds = [t for t in types_of(op, b.opset, 1 if b.opset >= 12 else 0) if t in NUMBERS]
    if b.opset < 12 or b.chance(0.5):
        kinds = [b.get(base).dtype]
    kind = b.choose(kinds)
    low, high = (0, 5) if kind.kind in "iu" else (-2, 3)
    draw = within(low, high, kind)
    if kind.kind == "f" and b.chance(0.5):
        number = b.choose((0.0, 1.0, 2.0, 0.5, -0.5, -1.0, 3.0, 1.7, -2.0))
        b.node(op, [base, b.literal(np.asarray(number, kind))])
        return
    shape = b.get(base).shape if b.chance(0.5) else ()
    b.node(op, [base, b.given(shape, kind, draw)])


def variadic(b: Builder, op: str) -> None:
    x = b.x(op)
    b.node(op, [x, *(b.mate(x) for _ in range(b.choose((0, 1, 1, 2, 3))))])


def shift(b: Builder, op: str) -> None:
    x = b.x(op)
    dtype = b.get(x).dtype
    y = b.given(b.get(x).shape if b.chance(0.5) else (), dtype, within(0, 8 * dtype.itemsize, dtype))
    b.node(op, [x, y], direction=b.choose(("LEFT", "RIGHT")))


def prelu(b: Builder, op: str) -> None:
    x = b.x(op)
    shape = b.get(x).shape
    dims = [d if b.chance(0.7) else 1 for d in shape][b.rng.randrange(len(shape) + 1) :]
    b.node(op, [x, b.given(dims, b.get(x).dtype)])


def cast(b: Builder, op: str) -> None:
    x = b.x(op)
    to = b.choose(EVERY)
    if op == "CastLike":
        b.node(op, [x, b.given((1,), to)])
        return
    b.node(op, [x], to=number_of(to))


def where(b: Builder, op: str) -> None:
    x = b.x(op, position=1)
    y = b.mate(x)
    shape = np.broadcast_shapes(b.get(x).shape, b.get(y).shape)
    condition = b.existing([BOOL]) if b.chance(0.4) else None
    if condition is not None:
        try:
            if int(np.prod(np.broadcast_shapes(shape, b.get(condition).shape))) > 4000:
                condition = None
        except ValueError:
            condition = None
    dims = [d if b.chance(0.7) else 1 for d in shape]
    b.node(op, [condition or b.given(dims, BOOL), x, y])


def clip(b: Builder, op: str) -> None:
    x = b.x(op)
    dtype = b.get(x).dtype
    low, high = sorted(float(v) for v in b.np_rng.integers(-5 if dtype.kind != "u" else 0, 9, 2))
    if b.chance(0.1):
        low, high = high, low
    has_low, has_high = b.choose(((True, True), (True, False), (False, True), (False, False)))
    if b.opset < 11:
        b.node(op, [x], min=low if has_low else None, max=high if has_high else None)
        return
    inputs = [x, b.literal(np.asarray(low, dtype), b.chance(0.7)) if has_low else ""]
    inputs += [b.literal(np.asarray(high, dtype), b.chance(0.7))] if has_high else []
    b.node(op, inputs)


def with_real(name: str, *choices: float) -> Use:
    def use(b: Builder, op: str) -> None:
        b.node(op, [b.x(op)], **({} if b.chance(0.3) else {name: float(b.choose(choices))}))

    return use


def hard_sigmoid(b: Builder, op: str) -> None:
    b.node(op, [b.x(op)], alpha=b.choose((None, 0.5, 1 / 6, 0.0)), beta=b.choose((None, 0.25, 0.0, 1.0)))


def selu(b: Builder, op: str) -> None:
    b.node(op, [b.x(op)], alpha=b.choose((None, 0.5, 1.5)), gamma=b.choose((None, 0.5, 2.0)))


def gelu(b: Builder, op: str) -> None:
    b.node(op, [b.x(op)], approximate=b.choose((None, "none", "tanh")))


def is_inf(b: Builder, op: str) -> None:
    dtype = b.dtype(op)
    x = b.given(b.shape(), dtype, numbers("edges", dtype)) if b.chance(0.5) else b.x(op)
    b.node(op, [x], detect_positive=b.choose((None, 0, 1)), detect_negative=b.choose((None, 0, 1)))


def quantize(b: Builder, op: str) -> None:
    """QuantizeLinear: of a tensor, by columns, or in blocks."""
    x = b.x(op, among=FLOATS, least=1)
    a = b.get(x)
    kinds = [t for t in types_of(op, b.opset, 2) if t in INTS] or [np.dtype("u1")]
    kind = b.choose(kinds)
    scale_type = a.dtype if b.opset >= 19 else F32
    if b.opset < 19 and a.dtype != F32:
        raise Invalid("scale")
    axis, shape, attributes = scales_shape(b, a.shape)
    scale = b.given(shape, scale_type, positive(scale_type))
    inputs = [x, scale, b.given(shape, kind, within(*zero_range(kind), kind))] if b.chance(0.7) else [x, scale]
    if len(inputs) == 2 and b.opset >= 21 and b.chance(0.6):
        attributes["output_dtype"] = number_of(b.choose(kinds))
    b.node(op, inputs, **({"axis": axis} if axis is not None else {}), **attributes)


def zero_range(dtype: np.dtype[object]) -> tuple[int, int]:
    return (0, 1) if dtype == I32 else (-20, 21) if dtype.kind == "i" else (0, 41)


def positive(dtype: np.dtype[object]) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.asarray(rng.choice([0.25, 0.5, 1.0, 0.1, 0.037, 0.013], shape)).astype(dtype)

    return draw


def scales_shape(b: Builder, shape: tuple[int, ...]) -> tuple[int | None, tuple[int, ...], dict[str, int]]:
    form = b.choose(("one", "column", "blocks"))
    if form == "one" or (form == "column" and b.opset < 13):
        return None, (), {}
    axis = b.axis(len(shape))
    if form == "column" or b.opset < 21 or shape[axis] < 2:
        return axis, (shape[axis],), {}
    block = b.choose((1, 2, shape[axis]))
    dims = [*shape]
    dims[axis] = -(-shape[axis] // block)
    return axis, tuple(dims), {"block_size": block}


def dequantize(b: Builder, op: str) -> None:
    kinds = [t for t in types_of(op, b.opset, 0) if t in INTS]
    x = b.existing(kinds, least=1) if b.chance(0.4) else None
    x = x or b.given(b.shape(b.choose((1, 2, 3))), b.choose(kinds))
    a = b.get(x)
    axis, shape, attributes = scales_shape(b, a.shape)
    scale_type = b.choose([t for t in types_of(op, b.opset, 1) if t in FLOATS] or [F32])
    inputs = [x, b.given(shape, scale_type, positive(scale_type))]
    if b.chance(0.7):
        inputs.append(b.given(shape, a.dtype, within(*zero_range(a.dtype), a.dtype)))
    b.node(op, inputs, **({"axis": axis} if axis is not None else {}), **attributes)


def bit_cast(b: Builder, op: str) -> None:
    x = b.x(op, among=EVERY)
    size = b.get(x).dtype.itemsize
    b.node(op, [x], to=number_of(b.choose([t for t in EVERY if t.itemsize == size])))


def dropout(b: Builder, op: str) -> None:
    """Dropout outside of training, whose result is its input."""
    x = b.x(op)
    if b.opset < 12:
        b.node(op, [x], ratio=b.choose((None, 0.3)))
        return
    ratio = b.literal(np.asarray(0.4, b.choose([t for t in types_of(op, b.opset, 1) if t in FLOATS])))
    b.node(op, b.choose(([x], [x, ratio], [x, ratio, b.literal(np.asarray(False))])), b.choose((1, 2)))


USES: Mapping[str, Use] = {
    **dict.fromkeys(("Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Relu", "Exp", "Erf", "Tanh", "Sigmoid", "Softplus", "Softsign",
                     "Mish", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Reciprocal", "HardSwish", "Not", "BitwiseNot",
                     "Identity", "IsNaN"), unary),
    **dict.fromkeys(("Sqrt", "Log"), in_domain(0, 9)), **dict.fromkeys(("Asin", "Acos", "Atanh"), in_domain(-1, 1)),
    "Acosh": in_domain(1, 9),
    **dict.fromkeys(("Add", "Sub", "Mul", "And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Less", "LessOrEqual",
                     "Greater", "GreaterOrEqual"), binary),
    "Div": quotient, "Mod": quotient, "Pow": power, **dict.fromkeys(("Max", "Min", "Sum", "Mean"), variadic), "BitShift": shift,
    "PRelu": prelu, "Cast": cast, "CastLike": cast, "Where": where, "Clip": clip, "BitCast": bit_cast, "Dropout": dropout,
    "Elu": with_real("alpha", 0.5, 2.0), "Celu": with_real("alpha", 0.5, 2.0, 3.0), "LeakyRelu": with_real("alpha", 0.1, -0.5, 3.0),
    "ThresholdedRelu": with_real("alpha", 0.0, 0.5, -1.0), "HardSigmoid": hard_sigmoid, "Selu": selu, "Gelu": gelu, "IsInf": is_inf,
    "QuantizeLinear": quantize, "DequantizeLinear": dequantize,
}  # fmt: skip


def edge_consumer(b: Builder, x: str) -> None:
    """Add a consumer of floats whose result jumps: an error of one unit shows in it."""
    a = b.get(x)
    kind = b.choose(("Floor", "Round", "Sign", "int", "Equal", "Gather", "Greater", "Ceil"))
    if kind in ("Floor", "Round", "Sign", "Ceil"):
        if kind in ("Sign", "Round") and b.opset < 11:
            kind = "Floor"
        b.node(kind, [x])
    elif kind == "int":
        b.node("Cast", [x], to=number_of(b.choose((I32, I64))))
    elif kind in ("Equal", "Greater"):
        with np.errstate(all="ignore"):
            rounded = np.where(np.isfinite(a), np.round(a.astype(np.float64)), 0).astype(a.dtype)
        b.node(kind, [x, b.literal(rounded if x in b.inexact or b.chance(0.3) else a)])
    else:
        n = 9
        limits = [b.literal(np.asarray(v, a.dtype)) for v in (-n, n - 1)]
        (floor,) = b.node("Floor", [x])
        bounded = b.node("Min", [*b.node("Max", [floor, limits[0]]), limits[1]])
        (indices,) = b.node("Cast", bounded, to=number_of(I64))
        b.node("Gather", [b.literal(np.arange(n, dtype=F32) * 10), indices])
