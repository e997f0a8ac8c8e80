"""Operators that create tensors from shape expressions.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, as_int, const, eq, select
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec


@dataclass(frozen=True, slots=True)
class Iota(OperatorSpec):
    """Integers `0, 1 ... size - 1`, as int64."""

    size: Expr
    name: ClassVar[str] = "iota"
    arity: ClassVar[int] = 0

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        self.tensors(infos)
        ctx.require_at_least(self.size, 0, "iota: size")
        return TensorInfo((ctx.simplify(self.size),), i64)

    def build(self, b: OperatorBuilder) -> None:
        y = b.output("y", (self.size,), i64)
        b.compute(y, lambda i: i, "iota")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.arange(_number(self.size, "iota"), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Scalars(OperatorSpec):
    """Expressions over shape symbols as an int64 tensor of one dim."""

    values: tuple[Expr, ...]
    name: ClassVar[str] = "scalars"
    arity: ClassVar[int] = 0

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        self.tensors(infos)
        ctx.require_divisors(self.values)
        return TensorInfo((const(len(self.values)),), i64)

    def build(self, b: OperatorBuilder) -> None:
        y = b.output("y", (len(self.values),), i64)

        def value(i: Expr) -> Expr:
            chosen = self.values[-1] if self.values else const(0)
            for position in range(len(self.values) - 2, -1, -1):
                chosen = select(eq(i, position), self.values[position], chosen)
            return chosen

        b.compute(y, value, "scalars")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.array([_number(v, "scalars") for v in self.values], np.int64)


def _number(e: Expr, what: str) -> int:
    number = as_int(e)
    if number is None:
        raise DeduceError(f"{what}: expected a number to evaluate with, got {e!r}; bind its symbols first")
    return number
