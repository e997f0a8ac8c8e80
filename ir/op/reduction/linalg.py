"""Matrix products.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, add, const, mul
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec, float_result, wide
from relax_tune.ir.op.math.elementwise import broadcast_dims, broadcast_position


@dataclass(frozen=True, slots=True)
class Matmul(OperatorSpec):
    """Matrix product `(..., i, k) @ (..., k, j) -> (..., i, j)`; leading dims broadcast.

    Attributes:
        transpose_b: second operand is `(..., j, k)`.
    """

    transpose_b: bool = False
    name: ClassVar[str] = "matmul"
    half_policy: ClassVar[HalfPolicy] = "prefer"
    arity: ClassVar[int] = 2

    def _dims(self, b: Sequence[Expr]) -> tuple[Expr, Expr]:
        """Return (k, j) of the second argument."""
        return (b[-1], b[-2]) if self.transpose_b else (b[-2], b[-1])

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        a, b = self.tensors(infos)
        dtype = self.same_dtype((a, b))
        for position, t in enumerate((a, b)):
            if t.ndim is not None and t.ndim < 2:
                raise DeduceError(f"matmul: expected at least 2 dims in argument {position}, got {t!r}")
        if a.shape is None or b.shape is None:
            return TensorInfo(None, dtype, None if a.ndim is None or b.ndim is None else max(a.ndim, b.ndim))
        k, j = self._dims(b.shape)
        ctx.require_equal(a.shape[-1], k, f"matmul of {a!r} and {b!r}: inner dims")
        lead, ndim = broadcast_dims(self.name, a.shape[:-2], b.shape[:-2], ctx)
        return TensorInfo(None if lead is None else (*lead, a.shape[-2], j), dtype, ndim + 2)

    def build(self, builder: OperatorBuilder) -> None:
        shape_a, shape_b, dtype = builder.shape(0), builder.shape(1), builder.dtype(0)
        lead, _ = broadcast_dims(self.name, shape_a[:-2], shape_b[:-2], builder.ctx)
        if lead is None:
            raise DeduceError(
                f"matmul: expected leading dims that broadcast for certain, got {builder.infos[0]!r}, {builder.infos[1]!r}"
            )
        a = builder.argument(0, "a")
        b = builder.argument(1, "b")
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

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        a, b = arrays
        right = np.swapaxes(b, -1, -2) if self.transpose_b else b
        return float_result(np.matmul(wide(a), wide(right)), arrays, np.result_type(a.dtype, b.dtype))


def _lead(batch: Sequence[Expr], dims: Sequence[Expr], out: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the batch indices of an operand with leading `dims` in a product with leading dims `out`."""
    # Leading dims are aligned at the last one, as in NumPy.
    aligned = list(zip(batch, out, strict=True))[len(batch) - len(dims) :]
    return tuple(broadcast_position(i, o, d) for (i, o), d in zip(aligned, dims, strict=True))
