"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, add, const, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.base import (
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
from relax_tune.ir.op.math.elementwise import broadcast_dims, broadcast_position


@dataclass(frozen=True, slots=True)
class Matmul(OperatorSpec):
    """Matrix product `(..., i, k) @ (..., k, j) -> (..., i, j)`; leading dims broadcast.

    transpose_b: second operand is `(..., j, k)`"""

    transpose_b: bool = False
    name: ClassVar[str] = "matmul"
    halves: ClassVar[Halves] = "wanted"
    arity: ClassVar[int] = 2

    def _dims(self, b: Sequence[Expr]) -> tuple[Expr, Expr]:
        """Return (k, j) of the second argument."""
        return (b[-1], b[-2]) if self.transpose_b else (b[-2], b[-1])

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        a, b = self.tensors(infos)
        dtype = self.same_dtype((a, b))
        for position, t in enumerate((a, b)):
            if t.ndim is not None and t.ndim < 2:
                raise DeduceError(f"matmul: wanted at least 2 dims in argument {position}, found {t!r}")
        if a.shape is None or b.shape is None:
            return TensorInfo(None, dtype, None if a.ndim is None or b.ndim is None else max(a.ndim, b.ndim))
        k, j = self._dims(b.shape)
        ctx.require_equal(a.shape[-1], k, f"matmul of {a!r} and {b!r}: inner dims")
        lead, ndim = broadcast_dims(self.name, a.shape[:-2], b.shape[:-2], ctx)
        return TensorInfo(None if lead is None else (*lead, a.shape[-2], j), dtype, ndim + 2)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        builder = TensorBuilder(name)
        shape_a, shape_b, dtype = shape_of(infos[0]), shape_of(infos[1]), dtype_of(infos[0])
        lead, _ = broadcast_dims(self.name, shape_a[:-2], shape_b[:-2], ctx or Deduction())
        if lead is None:
            raise DeduceError(
                f"matmul: wanted leading dims that broadcast for certain, found {infos[0]!r}, {infos[1]!r}"
            )
        a = builder.input("a", shape_a, dtype, is_const(consts, 0))
        b = builder.input("b", shape_b, dtype, is_const(consts, 1))
        _, width = self._dims(shape_b)
        dims = (*lead, shape_a[-2], width)
        c = builder.output("c", dims, dtype)
        n = len(lead)

        def combine(old: Expr, *indices: Expr) -> Expr:
            batch, (i, j, k) = indices[:n], indices[n:]
            inner = (j, k) if self.transpose_b else (k, j)
            left = a[(*_lead(batch, shape_a[:-2], lead), i, k)]
            return add(old, mul(left, b[(*_lead(batch, shape_b[:-2], lead), *inner)]))

        builder.reduce(c, (shape_a[-1],), const(0, dtype), combine, "matmul")
        return builder.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        a, b = arrays
        right = np.swapaxes(b, -1, -2) if self.transpose_b else b
        return float_result(np.matmul(wide(a), wide(right)), arrays, np.result_type(a.dtype, b.dtype))


def _lead(batch: Sequence[Expr], dims: Sequence[Expr], out: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the batch indices of an operand with leading `dims` in a product with leading dims `out`."""
    aligned = list(zip(batch, out, strict=True))[len(batch) - len(dims) :]
    return tuple(broadcast_position(i, o, d) for (i, o), d in zip(aligned, dims, strict=True))
