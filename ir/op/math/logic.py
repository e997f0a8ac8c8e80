"""Comparisons, boolean logic, and selection between two tensors.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, select
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec, float_result, wide
from relax_tune.ir.op.math.elementwise import Binary, OnnxName, Operands, Unary, broadcast_dims, broadcast_index


@dataclass(frozen=True, slots=True)
class Compare(Binary):
    """Comparison of operands of one dtype, with broadcasting; the result is bool."""

    operands: ClassVar[Operands] = "any"
    half_policy: ClassVar[HalfPolicy] = "never"


class Equal(Compare):
    name, function, commutative, onnx = "equal", "eq", True, OnnxName("Equal", (7, 11, 13, 19))


class NotEqual(Compare):
    name, function, commutative = "not_equal", "ne", True


class Less(Compare):
    name, function, onnx = "less", "lt", OnnxName("Less", (7, 9, 13))


class LessEqual(Compare):
    name, function, onnx = "less_equal", "le", OnnxName("LessOrEqual", (12, 16))


@dataclass(frozen=True, slots=True)
class Logical(Compare):
    """Logic on bools."""

    operands: ClassVar[Operands] = "bools"


class LogicalAnd(Logical):
    name, function, commutative = "logical_and", "and", True


class LogicalOr(Logical):
    name, function, commutative, onnx = "logical_or", "or", True, OnnxName("Or", (7,))


class LogicalNot(Unary):
    name, function, onnx = "logical_not", "not", OnnxName("Not", (1,))
    operands: ClassVar[Operands] = "bools"


@dataclass(frozen=True, slots=True)
class Where(OperatorSpec):
    """Select `x` where `cond`, else `y`, with broadcasting: cond (...) bool, x and y of one dtype."""

    name: ClassVar[str] = "where"
    half_policy: ClassVar[HalfPolicy] = "allow"
    arity: ClassVar[int] = 3

    def _dims(self, shapes: Sequence[Sequence[Expr]], ctx: Deduction) -> tuple[Expr, ...] | None:
        both, _ = broadcast_dims(self.name, shapes[1], shapes[2], ctx)
        return None if both is None else broadcast_dims(self.name, shapes[0], both, ctx)[0]

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        cond, x, y = self.tensors(infos)
        if cond.dtype not in (None, bool_):
            raise DeduceError(f"where: expected truth values as argument 0, got {cond!r}; compare or cast first")
        dtype = self.same_dtype((x, y))
        shapes = [t.shape for t in (cond, x, y) if t.shape is not None]
        if len(shapes) < 3:
            ndims = [t.ndim for t in (cond, x, y) if t.ndim is not None]
            return TensorInfo(None, dtype, max(ndims) if len(ndims) == 3 else None)
        return TensorInfo(self._dims(shapes, ctx), dtype, max(map(len, shapes)))

    def build(self, b: OperatorBuilder) -> None:
        dims = self._dims([b.shape(p) for p in range(3)], b.ctx)
        if dims is None:
            raise DeduceError(f"where: expected dims that broadcast for certain, got {list(b.infos)!r}")
        cond, x, y = (b.argument(p, name) for p, name in enumerate(("cond", "x", "y")))
        z = b.output("z", dims, b.dtype(1))
        b.compute(z, lambda *i: select(*(broadcast_index(t, i, dims) for t in (cond, x, y))), "where")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        cond, x, y = arrays
        return float_result(np.where(cond, wide(x), wide(y)), arrays, np.result_type(x.dtype, y.dtype))
