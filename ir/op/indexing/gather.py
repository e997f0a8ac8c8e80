"""Gathers: elements at computed indices (ONNX GatherND, GatherElements).

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import Expr, as_int, le
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    HalfPolicy,
    IndexUse,
    OperatorBuilder,
    OperatorSpec,
    axis_index,
    shape_of,
)
from relax_tune.ir.op.indexing.indices import columns, inside, nearest, readable, require_elements


def _check_indices(name: str, indices: TensorInfo) -> None:
    if indices.dtype not in (None, i32, i64):
        raise DeduceError(f"{name}: expected int32 or int64 indices, got {indices!r}; cast them first")


@dataclass(frozen=True, slots=True)
class GatherND(OperatorSpec):
    """Gather `y[i..., j...] = x[indices[i..., 0], ..., indices[i..., k-1], j...]`.

    x: (d0 .. dk-1, rest); indices: (..., k), k a number; each index in [0, its dim) (outside: see `ir/op/indexing/indices`)"""

    name: ClassVar[str] = "gather_nd"
    half_policy: ClassVar[HalfPolicy] = "table"
    arity: ClassVar[int] = 2

    def _depth(self, x: Sequence[Expr], indices: Sequence[Expr]) -> int:
        depth = as_int(indices[-1]) if indices else None
        if depth is None or not 1 <= depth <= len(x):
            raise DeduceError(
                f"gather_nd: expected a last dim of indices in 1..{len(x)}, got dims {tuple(indices)!r} for {tuple(x)!r}"
            )
        return depth

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, indices = self.tensors(infos)
        _check_indices(self.name, indices)
        if x.shape is None or indices.shape is None:
            return TensorInfo(None, x.dtype)
        depth = self._depth(x.shape, indices.shape)
        result = (*indices.shape[:-1], *x.shape[depth:])
        for size in x.shape[:depth]:
            require_elements(self.name, ctx, size, result)
        return TensorInfo(result, x.dtype)

    def build(self, b: OperatorBuilder) -> None:
        dims, where = b.shape(0), b.shape(1)
        depth, n = self._depth(dims, where), len(where) - 1
        x = b.argument(0, "x")
        indices = b.argument(1, "indices")
        y = b.output("y", (*where[:-1], *dims[depth:]), b.dtype(0))
        b.compute(
            y, lambda *i: x[(*(inside(indices[(*i[:n], k)], dims[k]) for k in range(depth)), *i[n:])], "gather_nd"
        )

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return columns(1, infos)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, indices = arrays
        depth = range(indices.shape[-1])
        return np.asarray(readable(x, depth)[tuple(nearest(indices[..., k], x.shape[k]) for k in depth)])


@dataclass(frozen=True, slots=True)
class GatherElements(OperatorSpec):
    """Gather `y[i..., p, j...] = x[i..., indices[i..., p, j...], j...]`, with `p` at `axis`.

    Both have one rank. The result has the dims of indices, which are at most the dims of x along the other axes. Each index is in
    [0, dim of x at `axis`) (outside: see `ir/op/indexing/indices`)."""

    axis: int = 0
    name: ClassVar[str] = "gather_elements"
    half_policy: ClassVar[HalfPolicy] = "table"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, indices = self.tensors(infos)
        _check_indices(self.name, indices)
        if x.ndim is not None and indices.ndim is not None and x.ndim != indices.ndim:
            raise DeduceError(f"gather_elements: expected equal numbers of dims, got {x!r} and {indices!r}")
        if x.ndim is not None:
            axis = axis_index(self.name, self.axis, x.ndim)
            if x.shape is not None and indices.shape is not None:
                self._require_fit(ctx, x.shape, indices.shape, axis)
        return TensorInfo(indices.shape, x.dtype, indices.ndim)

    def _require_fit(self, ctx: Deduction, x: Sequence[Expr], indices: Sequence[Expr], axis: int) -> None:
        require_elements(self.name, ctx, x[axis], indices)
        for position, (size, dim) in enumerate(zip(x, indices, strict=True)):
            fits = le(dim, size)
            proof = Proof.YES if position == axis else ctx.proves(fits)
            what = f"gather_elements: dim {position} of indices: expected at most the dim of the data"
            if proof is Proof.NO:
                raise DeduceError(f"{what}, {size!r}, got {dim!r}")
            if proof is Proof.UNKNOWN:
                ctx.require(fits, f"{what}, {{0}}, got {{1}}", size, dim)

    def build(self, b: OperatorBuilder) -> None:
        dims, where = b.shape(0), b.shape(1)
        axis = axis_index(self.name, self.axis, len(dims))
        x = b.argument(0, "x")
        indices = b.argument(1, "indices")
        y = b.output("y", where, b.dtype(0))
        b.compute(y, lambda *i: x[(*i[:axis], inside(indices[i], dims[axis]), *i[axis + 1 :])], "gather_elements")

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return (IndexUse(1, shape_of(infos[0])[self.axis]),)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, indices = arrays
        axis = self.axis % x.ndim
        # Sparse index arrays broadcast, so only the axis itself needs an index for every element.
        where: list[Array] = list(np.indices(indices.shape, sparse=True))
        where[axis] = nearest(indices, x.shape[axis])
        return np.asarray(x[tuple(where)])
