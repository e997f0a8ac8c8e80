"""Elementwise operators of one operand, or of two that broadcast.

An operator states its scalar operation (`ir/core/scalar_ops`), the element types of its operands, its 16-bit policy and its
names in ONNX and torch. Deduction, loops, NumPy meaning, the registry and the importers' tables follow from these.
A subclass without attributes needs no `dataclass` decorator.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.dtype import DType, bool_, f8e8m0, is_floating
from relax_tune.ir.core.erf import erf
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    apply,
    as_int,
    call,
    cast,
    const,
    div,
    eq,
    maximum,
    minimum,
    mul,
    or_,
    select,
    sub,
)
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, ScalarOp, converted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import (
    QUIET,
    Array,
    Deduction,
    HalfPolicy,
    OperatorBuilder,
    OperatorSpec,
    float_result,
    wide,
)
from relax_tune.ir.op.math.small_floats import Rounding, narrow, narrow_array

Operands = Literal["floats", "integers", "numbers", "bools", "any"]
_OPERANDS: dict[Operands, tuple[str, str]] = {
    "floats": ("floating-point tensors", "cast it first"),
    "integers": ("tensors of integers", "cast it first"),
    "numbers": ("tensors of numbers", "cast it first"),
    "bools": ("tensors of bools", "compare or cast first"),
}


class OnnxName(NamedTuple):
    """ONNX operator of the same meaning, with the versions of it that can be imported."""

    name: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Elementwise(OperatorSpec):
    """Operator whose elements each depend on one element of every operand.

    Class attributes:
        function: name of the scalar operation in `SCALAR_OPS`; empty: the operator's name.
        operands: admissible element types; all operands have the same one.
        onnx: ONNX operator that is imported as this one.
        torch: ATen operator that is imported as this one: `aten.{torch}.default`.
    """

    function: ClassVar[str] = ""
    operands: ClassVar[Operands] = "floats"
    onnx: ClassVar[OnnxName | None] = None
    torch: ClassVar[str | None] = None

    @classmethod
    def scalar_op(cls) -> ScalarOp:
        """Return the scalar operation of the operator."""
        return SCALAR_OPS[cls.function or cls.name]

    def operand_infos(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        """Return the annotations of the operands.

        Raises:
            DeduceError: inadmissible element types.
        """
        tensors = self.tensors(infos)
        for info in tensors:
            if info.dtype is not None and not _admissible(info.dtype, self.operands):
                expected, advice = _OPERANDS[self.operands]
                raise DeduceError(f"{self.name}: expected {expected}, got {info!r}; {advice}")
        return tensors

    def computed(self, *args: Any) -> Array:
        """Evaluate the scalar operation on NumPy operands."""
        evaluate = self.scalar_op().evaluate
        assert evaluate is not None
        with np.errstate(all="ignore"):
            return np.asarray(evaluate(*args))


def _admissible(dtype: DType, operands: Operands) -> bool:
    match operands:
        case "floats":
            return dtype.is_float
        case "integers":
            return dtype.is_int
        case "numbers":
            return dtype is not bool_
        case "bools":
            return dtype is bool_
    return True


@dataclass(frozen=True, slots=True)
class Unary(Elementwise):
    """Elementwise function `y[i...] = f(x[i...])`, of the dtype of the operand."""

    arity: ClassVar[int] = 1

    def scalar(self, x: Expr) -> Expr:
        """Return the result for one element."""
        return apply(self.scalar_op().name, x)

    def array(self, x: Array) -> Array:
        """Compute all elements, in float64 for floats."""
        return self.computed(x)

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.operand_infos(infos)
        return x

    def build(self, b: OperatorBuilder) -> None:
        x, y = b.argument(0, "x"), b.output("y", b.shape(0), b.dtype(0))
        b.compute(y, lambda *i: self.scalar(x[i]), self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        return float_result(self.array(wide(x)), arrays, x.dtype)


class Exp(Unary):
    name, onnx, torch = "exp", OnnxName("Exp", (6, 13)), "exp"


class Erf(Unary):
    name, onnx, torch = "erf", OnnxName("Erf", (9, 13)), "erf"
    half_policy: ClassVar[HalfPolicy] = "allow"


class Tanh(Unary):
    name, onnx, torch = "tanh", OnnxName("Tanh", (6, 13)), "tanh"
    half_policy: ClassVar[HalfPolicy] = "allow"


class Sqrt(Unary):
    name, onnx, torch = "sqrt", OnnxName("Sqrt", (6, 13)), "sqrt"


class Rsqrt(Unary):
    name, torch = "rsqrt", "rsqrt"


class Sigmoid(Unary):
    name, onnx, torch = "sigmoid", OnnxName("Sigmoid", (6, 13)), "sigmoid"
    half_policy: ClassVar[HalfPolicy] = "allow"

    def scalar(self, x: Expr) -> Expr:
        return div(const(1, x.dtype), add(call("exp", sub(const(0, x.dtype), x)), const(1, x.dtype)))

    def array(self, x: Array) -> Array:
        with np.errstate(over="ignore"):  # (1 + tanh(x / 2)) / 2 would lose every digit of small results
            return np.asarray(1.0 / (1.0 + np.exp(-x)))


class Gelu(Unary):
    """GELU (Hendrycks & Gimpel 2016): `x * (1 + erf(x / sqrt(2))) / 2`."""

    name = "gelu"
    half_policy: ClassVar[HalfPolicy] = "allow"

    def scalar(self, x: Expr) -> Expr:
        return mul(
            mul(x, const(0.5, x.dtype)), add(call("erf", mul(x, const(math.sqrt(0.5), x.dtype))), const(1, x.dtype))
        )

    def array(self, x: Array) -> Array:
        return np.asarray(x * 0.5 * (1.0 + erf(x * math.sqrt(0.5))))


class Relu(Unary):
    name, onnx, torch = "relu", OnnxName("Relu", (6, 13, 14)), "relu"
    operands: ClassVar[Operands] = "any"
    half_policy: ClassVar[HalfPolicy] = "allow"

    def scalar(self, x: Expr) -> Expr:
        return maximum(x, 0)

    def array(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, 0))


@dataclass(frozen=True, slots=True)
class ScalarUnary(Unary):
    """Elementwise operation with a number as its second operand, rounded to the dtype of the tensor.

    For 16-bit float tensors the number has float32 precision, as in torch. For integer and bool tensors it must be representable."""

    value: float = 0.0
    operands: ClassVar[Operands] = "any"
    half_policy: ClassVar[HalfPolicy] = "allow"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.operand_infos(infos)
        if x.dtype is not None and not x.dtype.is_float and np.asarray(self.value).astype(x.dtype.numpy) != self.value:
            raise DeduceError(
                f"{self.name}: expected a number of {x.dtype} for {x!r}, got {self.value!r}; cast it first"
            )
        return x

    def for_dtype(self, dtype: np.dtype[Any]) -> Self:
        """Return the operator with its number rounded for tensors of `dtype`: to float32 for floats of up to 32 bits."""
        if not is_floating(dtype) or dtype == np.float64:
            return self
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
            return replace(self, value=float(np.float32(self.value)))

    def scalar(self, x: Expr) -> Expr:
        number = self.for_dtype(x.dtype.numpy).value if x.dtype.is_float else int(self.value)
        return apply(self.scalar_op().name, x, const(number, x.dtype))

    def array(self, x: Array) -> Array:
        # in the dtype of integer tensors, since float64 cannot represent every int64
        return self.computed(x, x.dtype.type(self.value) if x.dtype.kind in "iu" else self.value)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return Unary.evaluate(self.for_dtype(arrays[0].dtype), arrays)


class AddScalar(ScalarUnary):
    name, function = "add_scalar", "add"


class MulScalar(ScalarUnary):
    name, function = "mul_scalar", "mul"


class MaximumScalar(ScalarUnary):
    name, function = "maximum_scalar", "max"


class DivScalar(ScalarUnary):
    """Floating-point division by a number, rounded once: a product with the reciprocal would round twice."""

    name, function = "div_scalar", "div"
    operands: ClassVar[Operands] = "floats"


LARGEST_EXACT_EXPONENT = 126
"""Powers of two up to this exponent have normal reciprocals in float32 and float64."""


def division_by(value: float) -> ScalarUnary:
    """Return the division of floats by a number; a product if the reciprocal is exact, as for a power of two."""
    mantissa, exponent = math.frexp(value) if math.isfinite(value) else (0.0, 0)
    exact = abs(mantissa) == 0.5 and abs(exponent - 1) <= LARGEST_EXACT_EXPONENT
    return MulScalar(1.0 / value) if exact else DivScalar(float(value))


@dataclass(frozen=True, slots=True)
class Cast(Unary):
    """Conversion to another dtype (`scalar_ops.converted`); floats become integers by rounding towards zero.

    Attributes:
        dtype: element type of the result.
        saturate: numbers beyond a small float type become its largest finite number (`small_floats.narrow`).
        rounding: rounding to `f8e8m0`.
    """

    dtype: DType
    saturate: bool = field(default=False, metadata=QUIET)
    rounding: Rounding = field(default="nearest", metadata=QUIET)
    name: ClassVar[str] = "cast"
    operands: ClassVar[Operands] = "any"

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.saturate and not self._narrows():
            raise DeduceError(
                f"cast: expected a float of at most 8 bits to saturate to, got {self.dtype}; clip instead"
            )
        if self.rounding != "nearest" and self.dtype is not f8e8m0:
            raise DeduceError(f"cast: expected {f8e8m0} to round {self.rounding} to, got {self.dtype}")
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def _narrows(self) -> bool:
        return self.dtype.is_small and self.dtype.is_float

    def scalar(self, x: Expr) -> Expr:
        if self._narrows() and x.dtype is not self.dtype:
            return narrow(x, self.dtype, self.saturate, self.rounding)
        return cast(x, self.dtype)

    def build(self, b: OperatorBuilder) -> None:
        x, y = b.argument(0, "x"), b.output("y", b.shape(0), self.dtype)
        b.compute(y, lambda *i: self.scalar(x[i]), self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        if self._narrows():
            return x if x.dtype == self.dtype.numpy else narrow_array(x, self.dtype, self.saturate, self.rounding)
        return float_result(x if self.dtype.is_float else converted(x, self.dtype), arrays, self.dtype.numpy)


def broadcast_dims(
    name: str, a: Sequence[Expr], b: Sequence[Expr], ctx: Deduction
) -> tuple[tuple[Expr, ...] | None, int]:
    """Broadcast symbolic dims by the rule of NumPy; return the joint dims and their number.

    The dims are None when run time decides which side is 1 (a `select` if `ctx.choices`); a check is then added.

    Raises:
        DeduceError: names the dim and both sizes when two dims can never fit.
    """
    ndim = max(len(a), len(b))
    one = const(1)
    x = (one,) * (ndim - len(a)) + tuple(a)
    y = (one,) * (ndim - len(b)) + tuple(b)
    dims: list[Expr] | None = []
    for position, (p, q) in enumerate(zip(x, y, strict=True)):
        chosen: Expr | None
        if p is one or q is one:
            chosen = q if p is one else p
        else:
            proof = ctx.equal(p, q)
            if proof is Proof.YES:
                chosen = p
            elif proof is Proof.NO and ctx.equal(p, 1) is Proof.NO and ctx.equal(q, 1) is Proof.NO:
                raise DeduceError(
                    f"{name}: dim {position}: expected equal dims or a 1, got {p!r} and {q!r} "
                    f"in shapes ({', '.join(map(repr, a))}) and ({', '.join(map(repr, b))})"
                )
            else:
                # Either dim may turn out to be 1. If one is known to be larger, the result has that dim, otherwise the choice is left to
                # run time.
                what = f"{name}: dim {position}: expected {p!r} and {q!r} to be equal or one of them 1, got {{0}} and {{1}}"
                fixed = p if (as_int(p) or 0) > 1 else q if (as_int(q) or 0) > 1 else None
                ctx.require(or_(eq(p, q), or_(eq(p, 1), eq(q, 1))), what, p, q)
                chosen = select(eq(p, 1), q, p) if fixed is None and ctx.choices else fixed
        if chosen is None:
            dims = None
        elif dims is not None:
            dims.append(chosen)
    return (None if dims is None else tuple(dims)), ndim


def broadcast_index(tensor: Tensor, indices: Sequence[Var], out: Sequence[Expr]) -> Expr:
    """Read `tensor` at the aligned `indices` of a broadcast result of dims `out`.

    Dims of 1 are read at 0, including dims that only a run shows to be 1."""
    shape = tensor.buffer.shape
    aligned = list(zip(indices, out, strict=True))[len(indices) - len(shape) :]
    return tensor[tuple(broadcast_position(i, o, d) for (i, o), d in zip(aligned, shape, strict=True))]


def broadcast_position(i: Expr, out: Expr, dim: Expr) -> Expr:
    """Return the index into a dim for index `i` of a broadcast dim `out`: 0 where `dim` is 1, also only at run time."""
    if dim is out or simplify(dim - out) is const(0):
        return i
    return const(0) if dim is const(1) else minimum(i, dim - 1)


@dataclass(frozen=True, slots=True)
class Binary(Elementwise):
    """Elementwise function `z = f(x, y)` with broadcasting; comparisons and logic return bools."""

    arity: ClassVar[int] = 2
    operands: ClassVar[Operands] = "numbers"
    half_policy: ClassVar[HalfPolicy] = "allow"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        """Return the result for one pair of elements."""
        return apply(self.scalar_op().name, x, y)

    def array(self, x: Array, y: Array) -> Array:
        """Compute all elements, in float64 for floats."""
        return self.computed(x, y)

    def result_dtype(self, dtype: DType | None) -> DType | None:
        """Return the element type of the result for operands of `dtype`."""
        operation = SCALAR_OPS.get(self.function or self.name)
        return bool_ if operation is not None and operation.gives_bool else dtype

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, y = self.operand_infos(infos)
        dtype = self.result_dtype(self.same_dtype((x, y)))
        if x.shape is None or y.shape is None:
            ndim = None if x.ndim is None or y.ndim is None else max(x.ndim, y.ndim)
            return TensorInfo(None, dtype, ndim)
        dims, ndim = broadcast_dims(self.name, x.shape, y.shape, ctx)
        return TensorInfo(dims, dtype, ndim)

    def build(self, b: OperatorBuilder) -> None:
        dims, _ = broadcast_dims(self.name, b.shape(0), b.shape(1), b.ctx)
        if dims is None:
            raise DeduceError(
                f"{self.name}: expected dims that broadcast for certain, got {b.infos[0]!r} and {b.infos[1]!r}"
            )
        x, y = b.argument(0, "x"), b.argument(1, "y")
        z = b.output("z", dims, self.result_dtype(b.dtype(0)) or b.dtype(0))
        b.compute(z, lambda *i: self.scalar(broadcast_index(x, i, dims), broadcast_index(y, i, dims)), self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, y = arrays
        value = self.array(wide(x), wide(y))
        return float_result(value, arrays, value.dtype if value.dtype == bool else np.result_type(x.dtype, y.dtype))


class Add(Binary):
    name, commutative = "add", True


class Sub(Binary):
    name = "sub"


class Mul(Binary):
    name, commutative = "mul", True


class Div(Binary):
    """Floating-point division."""

    name = "div"
    operands: ClassVar[Operands] = "floats"


class Maximum(Binary):
    name, function, torch, commutative = "maximum", "max", "maximum", True


class Minimum(Binary):
    name, function, torch, commutative = "minimum", "min", "minimum", True
