"""Operators on first-class shapes, and operators with data-dependent dims (Relax, section 3.2).

Tests: `tests/ir/deduce/test_relations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from relax_tune.errors import BuildError, DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.struct_info import ShapeInfo, StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec, wide
from relax_tune.ir.op.indexing.movement import Reshape


@dataclass(frozen=True, slots=True)
class ShapeOperator(OperatorSpec):
    """Operator that takes or returns a shape, or has data-dependent dims.

    It is never lowered to loops: the runtime computes it by its name (`runtime/program/host_operators`).
    """

    def build(self, b: OperatorBuilder) -> None:
        raise BuildError(f"{self.name}: this operator has no loops; the runtime computes it")


@dataclass(frozen=True, slots=True)
class ShapeOf(ShapeOperator):
    """Dims of a tensor, as a shape value."""

    name: ClassVar[str] = "shape_of"
    arity: ClassVar[int] = 1

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return ShapeInfo(x.shape, x.ndim)

    def evaluate(self, arrays: Sequence[Array]) -> Any:
        return tuple(int(d) for d in arrays[0].shape)


@dataclass(frozen=True, slots=True)
class ReshapeTo(ShapeOperator):
    """Reshape to the dims of a shape value, in row-major order."""

    name: ClassVar[str] = "reshape_to"
    arity: ClassVar[int] = 2

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        if len(infos) != 2 or not isinstance(infos[0], TensorInfo) or not isinstance(infos[1], ShapeInfo):
            raise DeduceError(f"reshape_to: expected a tensor and a shape, got {list(infos)!r}")
        x, to = infos[0], infos[1]
        if to.values is None:
            return TensorInfo(None, x.dtype, to.ndim)
        return Reshape(to.values).infer([x], ctx)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        dims = tuple(int(d) for d in arrays[1])
        if math.prod(dims) != arrays[0].size:
            raise DeduceError(f"reshape_to: expected {arrays[0].size} elements, got dims {dims}")
        return arrays[0].reshape(dims)


@dataclass(frozen=True, slots=True)
class TensorToShape(ShapeOperator):
    """Elements of an int64 tensor of one dim, as a shape value."""

    name: ClassVar[str] = "tensor_to_shape"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype not in (None, i64) or x.ndim not in (None, 1):
            raise DeduceError(f"tensor_to_shape: expected int64 in one dim, got {x!r}; cast or reshape it first")
        return ShapeInfo(None, None if x.shape is None else as_int(x.shape[0]))

    def evaluate(self, arrays: Sequence[Array]) -> Any:
        dims = tuple(int(d) for d in arrays[0])
        if any(d < 0 for d in dims):
            raise DeduceError(f"tensor_to_shape: expected dims >= 0, got {dims}")
        return dims


@dataclass(frozen=True, slots=True)
class Unique(ShapeOperator):
    """Distinct elements in ascending order, in one dim of data-dependent size."""

    name: ClassVar[str] = "unique"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        empty = x.shape is not None and any(ctx.equal(d, 0) is Proof.YES for d in x.shape)
        return TensorInfo((const(0),) if empty else None, x.dtype, 1)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        # NumPy sorts NaN last only for its built-in float types.
        return np.unique(wide(x), equal_nan=False).astype(x.dtype)
