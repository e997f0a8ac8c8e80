"""Elementwise operators with one operand, or with two that broadcast."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.dtype import DType, bool_, f8e8m0, is_floating
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
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
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.op.base import (
    QUIET,
    Array,
    Deduction,
    Halves,
    OperatorSpec,
    dtype_of,
    float_result,
    is_const,
    shape_of,
    wide,
)
from relax_tune.ir.op.math.erf import erf
from relax_tune.ir.op.math.small_floats import Rounding, narrow, narrow_array


@dataclass(frozen=True, slots=True)
class Unary(OperatorSpec):
    """Elementwise function `y[i...] = f(x[i...])`, of the dtype of the argument."""

    arity: ClassVar[int] = 1
    floats_only: ClassVar[bool] = True

    @abstractmethod
    def scalar(self, x: Expr) -> Expr:
        """Return the result for one element."""

    @abstractmethod
    def array(self, x: Array) -> Array:
        """Compute all elements, in float64 for floats."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.floats_only and x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"{self.name}: wanted a floating-point tensor, found {x!r}; cast it first")
        return x

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape, dtype = shape_of(infos[0]), dtype_of(infos[0])
        x = b.input("x", shape, dtype, is_const(consts, 0))
        y = b.output("y", shape, dtype)
        b.compute(y, lambda *i: self.scalar(x[i]), self.name)
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        return float_result(self.array(wide(x)), arrays, x.dtype)


@dataclass(frozen=True, slots=True)
class Exp(Unary):
    name: ClassVar[str] = "exp"

    def scalar(self, x: Expr) -> Expr:
        return call("exp", x)

    def array(self, x: Array) -> Array:
        return np.asarray(np.exp(x))


@dataclass(frozen=True, slots=True)
class Erf(Unary):
    name: ClassVar[str] = "erf"
    halves: ClassVar[Halves] = "allowed"

    def scalar(self, x: Expr) -> Expr:
        return call("erf", x)

    def array(self, x: Array) -> Array:
        return erf(x)


@dataclass(frozen=True, slots=True)
class Tanh(Unary):
    name: ClassVar[str] = "tanh"
    halves: ClassVar[Halves] = "allowed"

    def scalar(self, x: Expr) -> Expr:
        return call("tanh", x)

    def array(self, x: Array) -> Array:
        return np.asarray(np.tanh(x))


@dataclass(frozen=True, slots=True)
class Sqrt(Unary):
    name: ClassVar[str] = "sqrt"

    def scalar(self, x: Expr) -> Expr:
        return call("sqrt", x)

    def array(self, x: Array) -> Array:
        return np.asarray(np.sqrt(x))


@dataclass(frozen=True, slots=True)
class Rsqrt(Unary):
    name: ClassVar[str] = "rsqrt"

    def scalar(self, x: Expr) -> Expr:
        return call("rsqrt", x)

    def array(self, x: Array) -> Array:
        return np.asarray(1.0 / np.sqrt(x))


@dataclass(frozen=True, slots=True)
class Sigmoid(Unary):
    name: ClassVar[str] = "sigmoid"
    halves: ClassVar[Halves] = "allowed"

    def scalar(self, x: Expr) -> Expr:
        return div(const(1, x.dtype), add(call("exp", sub(const(0, x.dtype), x)), const(1, x.dtype)))

    def array(self, x: Array) -> Array:
        with np.errstate(over="ignore"):  # half of 1 + tanh(x / 2) loses every digit of small results
            return np.asarray(1.0 / (1.0 + np.exp(-x)))


@dataclass(frozen=True, slots=True)
class Gelu(Unary):
    """GELU (Hendrycks & Gimpel 2016): `x * (1 + erf(x / sqrt(2))) / 2`."""

    name: ClassVar[str] = "gelu"
    halves: ClassVar[Halves] = "allowed"

    def scalar(self, x: Expr) -> Expr:
        return mul(
            mul(x, const(0.5, x.dtype)), add(call("erf", mul(x, const(math.sqrt(0.5), x.dtype))), const(1, x.dtype))
        )

    def array(self, x: Array) -> Array:
        return np.asarray(x * 0.5 * (1.0 + erf(x * math.sqrt(0.5))))


@dataclass(frozen=True, slots=True)
class Relu(Unary):
    name: ClassVar[str] = "relu"
    halves: ClassVar[Halves] = "allowed"
    floats_only: ClassVar[bool] = False

    def scalar(self, x: Expr) -> Expr:
        return maximum(x, 0)

    def array(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, 0))


@dataclass(frozen=True, slots=True)
class ScalarUnary(Unary):
    """Elementwise operation with a number, rounded to the dtype of the tensor; beside 16-bit floats to float32, as in torch.

    For tensors of integers and bools the number is one itself."""

    value: float = 0.0
    floats_only: ClassVar[bool] = False
    halves: ClassVar[Halves] = "allowed"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype is not None and not x.dtype.is_float and np.asarray(self.value).astype(x.dtype.numpy) != self.value:
            raise DeduceError(
                f"{self.name}: wanted a number of {x.dtype} for {x!r}, found {self.value!r}; cast it first"
            )
        return x

    def rounded(self, dtype: DType) -> Expr:
        return const(self.beside(dtype.numpy).value if dtype.is_float else int(self.value), dtype)

    def beside(self, dtype: np.dtype[Any]) -> Self:
        """Return the operator with the number that elements of a type meet: for floats of up to 32 bits a float32."""
        if not is_floating(dtype) or dtype == np.float64:
            return self
        with np.errstate(over="ignore"):  # too large is infinite
            return replace(self, value=float(np.float32(self.value)))

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return Unary.evaluate(self.beside(arrays[0].dtype), arrays)

    def number(self, x: Array) -> Any:
        """Return the number for NumPy: beside integers one of their type, since floats do not hold all of them."""
        return x.dtype.type(self.value) if x.dtype.kind in "iu" else self.value


@dataclass(frozen=True, slots=True)
class AddScalar(ScalarUnary):
    name: ClassVar[str] = "add_scalar"

    def scalar(self, x: Expr) -> Expr:
        return add(x, self.rounded(x.dtype))

    def array(self, x: Array) -> Array:
        return np.asarray(x + self.number(x))


@dataclass(frozen=True, slots=True)
class MulScalar(ScalarUnary):
    name: ClassVar[str] = "mul_scalar"

    def scalar(self, x: Expr) -> Expr:
        return mul(x, self.rounded(x.dtype))

    def array(self, x: Array) -> Array:
        return np.asarray(x * self.number(x))


@dataclass(frozen=True, slots=True)
class MaximumScalar(ScalarUnary):
    name: ClassVar[str] = "maximum_scalar"

    def scalar(self, x: Expr) -> Expr:
        return maximum(x, self.rounded(x.dtype))

    def array(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, self.number(x)))


@dataclass(frozen=True, slots=True)
class Cast(Unary):
    """Conversion to another dtype (towards zero from floats to integers; `scalar_ops.converted`).

    saturate, rounding: those of small floats (`small_floats.narrow`)"""

    dtype: DType
    saturate: bool = field(default=False, metadata=QUIET)
    rounding: Rounding = field(default="nearest", metadata=QUIET)
    name: ClassVar[str] = "cast"

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.saturate and not self._narrows():
            raise DeduceError(
                f"cast: wanted a float of at most 8 bits to saturate to, found {self.dtype}; clip instead"
            )
        if self.rounding != "nearest" and self.dtype is not f8e8m0:
            raise DeduceError(f"cast: wanted {f8e8m0} to round {self.rounding} to, found {self.dtype}")
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def _narrows(self) -> bool:
        return self.dtype.is_small and self.dtype.is_float

    def scalar(self, x: Expr) -> Expr:
        if self._narrows() and x.dtype is not self.dtype:
            return narrow(x, self.dtype, self.saturate, self.rounding)
        return cast(x, self.dtype)

    def array(self, x: Array) -> Array:
        return x

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape = shape_of(infos[0])
        x = b.input("x", shape, dtype_of(infos[0]), is_const(consts, 0))
        y = b.output("y", shape, self.dtype)
        b.compute(y, lambda *i: self.scalar(x[i]), self.name)
        return b.finish()

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
    Raises DeduceError naming the dim and both sizes when two dims can never fit.
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
                    f"{name}: dim {position}: wanted equal dims or a 1, found {p!r} and {q!r} "
                    f"in shapes ({', '.join(map(repr, a))}) and ({', '.join(map(repr, b))})"
                )
            else:
                what = f"{name}: dim {position}: wanted {p!r} and {q!r} to be equal or one of them 1, found {{0}} and {{1}}"
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

    Dims of 1 are read at 0, including dims found to be 1 only at run time."""
    shape = tensor.buffer.shape
    aligned = list(zip(indices, out, strict=True))[len(indices) - len(shape) :]
    return tensor[tuple(broadcast_position(i, o, d) for (i, o), d in zip(aligned, shape, strict=True))]


def broadcast_position(i: Expr, out: Expr, dim: Expr) -> Expr:
    """Return the index into a dim for index `i` of a broadcast dim `out`: 0 where `dim` is 1, also only at run time."""
    if dim is out or simplify(dim - out) is const(0):
        return i
    return const(0) if dim is const(1) else minimum(i, dim - 1)


@dataclass(frozen=True, slots=True)
class Binary(OperatorSpec):
    """Elementwise function `z = f(x, y)` with broadcasting; both operands of one dtype."""

    arity: ClassVar[int] = 2
    numbers_only: ClassVar[bool] = True
    halves: ClassVar[Halves] = "allowed"

    @abstractmethod
    def scalar(self, x: Expr, y: Expr) -> Expr:
        """Return the result for one pair of elements."""

    @abstractmethod
    def array(self, x: Array, y: Array) -> Array:
        """Compute all elements."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, y = self.tensors(infos)
        dtype = self.same_dtype((x, y))
        if self.numbers_only and dtype is bool_:
            raise DeduceError(f"{self.name}: wanted tensors of numbers, found {x!r} and {y!r}; cast them first")
        if x.shape is None or y.shape is None:
            ndim = None if x.ndim is None or y.ndim is None else max(x.ndim, y.ndim)
            return TensorInfo(None, dtype, ndim)
        dims, ndim = broadcast_dims(self.name, x.shape, y.shape, ctx)
        return TensorInfo(dims, dtype, ndim)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shapes, dtype = [shape_of(i) for i in infos], dtype_of(infos[0])
        dims, _ = broadcast_dims(self.name, shapes[0], shapes[1], ctx or Deduction())
        if dims is None:
            raise DeduceError(
                f"{self.name}: wanted dims that broadcast for certain, found {infos[0]!r} and {infos[1]!r}"
            )
        x, y = (b.input(n, s, dtype, is_const(consts, p)) for p, (n, s) in enumerate(zip("xy", shapes, strict=True)))
        z = b.output("z", dims, dtype)
        b.compute(z, lambda *i: self.scalar(broadcast_index(x, i, dims), broadcast_index(y, i, dims)), self.name)
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, y = arrays
        return float_result(self.array(wide(x), wide(y)), arrays, np.result_type(x.dtype, y.dtype))


@dataclass(frozen=True, slots=True)
class Add(Binary):
    name: ClassVar[str] = "add"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return add(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x + y)


@dataclass(frozen=True, slots=True)
class Sub(Binary):
    name: ClassVar[str] = "sub"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return sub(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x - y)


@dataclass(frozen=True, slots=True)
class Mul(Binary):
    name: ClassVar[str] = "mul"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return mul(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x * y)


@dataclass(frozen=True, slots=True)
class Div(Binary):
    """Floating-point division."""

    name: ClassVar[str] = "div"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        for info in self.tensors(infos):
            if info.dtype is not None and not info.dtype.is_float:
                raise DeduceError(f"div: wanted floating-point tensors, found {info!r}; cast it first")
        return Binary.infer(self, infos, ctx)

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return div(x, y)

    def array(self, x: Array, y: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(x / y)


@dataclass(frozen=True, slots=True)
class Maximum(Binary):
    name: ClassVar[str] = "maximum"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return maximum(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(np.maximum(x, y))


@dataclass(frozen=True, slots=True)
class Minimum(Binary):
    name: ClassVar[str] = "minimum"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return minimum(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(np.minimum(x, y))
