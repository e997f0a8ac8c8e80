"""Elementwise operators on the bits of numbers.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, bitcast, call, const
from relax_tune.ir.core.scalar_ops import reinterpreted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec, float_result
from relax_tune.ir.op.math.elementwise import Binary, OnnxName, Operands, Unary


@dataclass(frozen=True, slots=True)
class IntegerBinary(Binary):
    """Function of two integers."""

    operands: ClassVar[Operands] = "integers"


class BitwiseAnd(IntegerBinary):
    name, commutative, onnx = "bitwise_and", True, OnnxName("BitwiseAnd", (18,))


class BitwiseOr(IntegerBinary):
    name, commutative, onnx = "bitwise_or", True, OnnxName("BitwiseOr", (18,))


class BitwiseXor(IntegerBinary):
    name, commutative, onnx = "bitwise_xor", True, OnnxName("BitwiseXor", (18,))


class ShiftLeft(IntegerBinary):
    """Shift towards the high bits; 0 for a count below 0 or of at least the width."""

    name = "shift_left"


class ShiftRight(IntegerBinary):
    """Shift towards the low bits that keeps the sign; -1 or 0, by the sign, for a count below 0 or of at least the width."""

    name = "shift_right"


class IntegerPower(IntegerBinary):
    """Power of integers, wrapping; an exponent below 0 gives `1 / x ** -y` rounded towards zero, and 0 for x = 0."""

    name = "integer_power"


class BitwiseNot(Unary):
    name, onnx = "bitwise_not", OnnxName("BitwiseNot", (18,))
    operands: ClassVar[Operands] = "integers"

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
            raise DeduceError(f"bitcast: expected types of as many bits, not bool, got {self.source} and {self.dtype}")
        if x.dtype not in (None, self.source):
            raise DeduceError(f"bitcast: expected a tensor of {self.source}, got {x!r}")
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def build(self, b: OperatorBuilder) -> None:
        x, y = b.argument(0, "x"), b.output("y", b.shape(0), self.dtype)
        b.compute(y, lambda *i: bitcast(x[i], self.dtype), self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        with np.errstate(over="ignore"):
            value = np.asarray(reinterpreted(arrays[0], self.source, self.dtype))
        return float_result(value, arrays, self.dtype.numpy)
