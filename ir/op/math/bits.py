"""Elementwise operators on the bits of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, bitcast, call, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, reinterpreted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.base import Array, Deduction, OperatorSpec, float_result, is_const, shape_of
from relax_tune.ir.op.math.elementwise import Binary, Unary


def require_integers(op: OperatorSpec, infos: Sequence[StructInfo]) -> None:
    """Raise DeduceError for a tensor of another element type."""
    for info in OperatorSpec.tensors(op, infos):
        if info.dtype is not None and not info.dtype.is_int:
            raise DeduceError(f"{op.name}: wanted tensors of integers, found {info!r}; cast it first")


@dataclass(frozen=True, slots=True)
class OnIntegers(Binary):
    """Function of two integers, called by the name of the operator."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        require_integers(self, infos)
        return Binary.infer(self, infos, ctx)

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return call(self.name, x, y)

    def array(self, x: Array, y: Array) -> Array:
        evaluate = SCALAR_OPS[self.name].evaluate
        assert evaluate is not None
        return np.asarray(evaluate(x, y))


@dataclass(frozen=True, slots=True)
class BitwiseAnd(OnIntegers):
    name: ClassVar[str] = "bitwise_and"
    commutative: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BitwiseOr(OnIntegers):
    name: ClassVar[str] = "bitwise_or"
    commutative: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BitwiseXor(OnIntegers):
    name: ClassVar[str] = "bitwise_xor"
    commutative: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ShiftLeft(OnIntegers):
    """Shift towards the high bits; 0 for a count below 0 or of at least the width."""

    name: ClassVar[str] = "shift_left"


@dataclass(frozen=True, slots=True)
class ShiftRight(OnIntegers):
    """Shift towards the low bits that keeps the sign; -1 or 0, by the sign, for a count below 0 or of at least the width."""

    name: ClassVar[str] = "shift_right"


@dataclass(frozen=True, slots=True)
class IntegerPower(OnIntegers):
    """Power of integers, wrapping; an exponent below 0 gives `1 / x ** -y` rounded towards zero, and 0 for x = 0."""

    name: ClassVar[str] = "integer_power"


@dataclass(frozen=True, slots=True)
class BitwiseNot(Unary):
    name: ClassVar[str] = "bitwise_not"
    floats_only: ClassVar[bool] = False

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        require_integers(self, infos)
        return Unary.infer(self, infos, ctx)

    def scalar(self, x: Expr) -> Expr:
        return call("bitwise_xor", x, const(-1, x.dtype))

    def array(self, x: Array) -> Array:
        return np.asarray(~x)


@dataclass(frozen=True, slots=True)
class BitCast(OperatorSpec):
    """The bits of numbers of type `source`, read as another type of as many bits."""

    dtype: DType
    source: DType
    name: ClassVar[str] = "bitcast"
    arity: ClassVar[int] = 1

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.source.bits != self.dtype.bits or bool_ in (self.source, self.dtype):
            raise DeduceError(f"bitcast: wanted types of as many bits, not bool, found {self.source} and {self.dtype}")
        if x.dtype not in (None, self.source):
            raise DeduceError(f"bitcast: wanted a tensor of {self.source}, found {x!r}")
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape = shape_of(infos[0])
        x = b.input("x", shape, self.source, is_const(consts, 0))
        y = b.output("y", shape, self.dtype)
        b.compute(y, lambda *i: bitcast(x[i], self.dtype), self.name)
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        with np.errstate(over="ignore"):
            found = np.asarray(reinterpreted(arrays[0], self.source, self.dtype))
        return float_result(found, arrays, self.dtype.numpy)
