"""Scatters (ONNX ScatterND, ScatterElements), lowered as gathers: each result element searches its updates.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, i32, i64
from relax_tune.ir.core.expr import Expr, add, and_, as_int, cast, const, eq, lt, maximum, minimum, mul, select
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    IndexUse,
    OperatorBuilder,
    OperatorSpec,
    axis_index,
    float_result,
    shape_of,
    wide,
)
from relax_tune.ir.op.indexing.indices import columns
from relax_tune.ir.op.reduction.reduce import Max, Min, Reduce, Sum
from relax_tune.ir.op.reduction.scan import Prod

Mode = Literal["replace", "add", "mul", "max", "min"]
_COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {"add": add, "mul": mul, "max": maximum, "min": minimum}
_NUMPY: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _neutral(mode: Mode, dtype: DType) -> Expr:
    """Return the neutral element: -0 for sums, since -0 + 0 is 0 (IEEE 754-2019, 6.3)."""
    if mode == "add" and dtype.is_float:
        # x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0 (IEEE 754, 6.3).
        return const(-0.0, dtype)
    kinds: Mapping[str, Reduce] = {"add": Sum(), "mul": Prod(), "max": Max(), "min": Min()}
    return kinds[mode].start(dtype)


@dataclass(frozen=True, slots=True)
class Scatter(OperatorSpec):
    """Scatter of updates into `x`.

    Loops search all updates for each element; schedules for processors take each update to its element (`serial_scatter`).

    An update at a computed index outside its dim is dropped.

    Attributes:
        mode: `replace` (the last of several updates counts), or the reduction that combines an element with all its updates.
    """

    mode: Mode = "replace"
    arity: ClassVar[int] = 3

    @abstractmethod
    def fit(self, x: TensorInfo, indices: TensorInfo, updates: TensorInfo, ctx: Deduction) -> None:
        """Require fitting dims.

        Raises:
            DeduceError: dims that never fit; undecided dims become run-time checks.
        """

    @abstractmethod
    def parts(
        self, x: Tensor, indices: Tensor, updates: Tensor
    ) -> tuple[Expr, Callable[[Sequence[Expr], Expr], tuple[Expr, Expr]]]:
        """Return the number of updates to search, and a function of them.

        The function maps (indices of a result element, number of an update) to (condition that it hits the element, its value)."""

    def takes_small(self) -> bool:
        return self.mode == "replace"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, indices, updates = self.tensors(infos)
        if indices.dtype not in (None, i32, i64):
            raise DeduceError(f"{self.name}: expected int32 or int64 indices, got {indices!r}; cast them first")
        dtype = self.same_dtype((x, updates))
        self.fit(x, indices, updates, ctx)
        return TensorInfo(x.shape, dtype, x.ndim)

    def build(self, b: OperatorBuilder) -> None:
        ctx = b.ctx
        dims, dtype = b.shape(0), b.dtype(0)
        x, indices, updates = (b.argument(p, name) for p, name in enumerate(("x", "indices", "updates")))
        y = b.output("y", dims, dtype)
        count, update_at = self.parts(x, indices, updates)
        if self.mode == "replace":
            # Of several updates for one element the last one counts, so its number is the largest.
            last = b.alloc("last", dims, i64)

            def newest(old: Expr, *i: Expr) -> Expr:
                return maximum(old, select(update_at(i[:-1], i[-1])[0], i[-1], const(-1)))

            b.reduce(last, (count,), const(-1), newest, "last")

            def chosen(*i: Expr) -> Expr:
                return select(lt(last[i], 0), x[i], update_at(i, maximum(last[i], 0))[1])

            if ctx.proves(lt(0, count)) is Proof.YES:
                b.compute(y, chosen, self.name)
            else:  # without updates none may be read
                b.compute(y, lambda *i: x[i], "scatter_keep")
                b.compute_window(y, (minimum(dims[0], mul(dims[0], count)), *dims[1:]), chosen, self.name)
            return
        total = b.alloc("total", dims, dtype)
        combine, neutral = _COMBINE[self.mode], _neutral(self.mode, dtype)

        def step(old: Expr, *i: Expr) -> Expr:
            here, value = update_at(i[:-1], i[-1])
            return combine(old, select(here, value, neutral))

        b.reduce(total, (count,), neutral, step, "total")
        b.compute(y, lambda *i: combine(x[i], total[i]), self.name)

    def written(self, x: Array, where: Any, updates: Array) -> Array:
        if self.mode == "replace":
            result = np.array(x)
            result[where] = updates
            return result
        result = np.array(wide(x))
        _NUMPY[self.mode].at(result, where, wide(updates))
        return float_result(result, (x, updates), x.dtype)


@dataclass(frozen=True, slots=True)
class ScatterND(Scatter):
    """Scatter `y[indices[m, 0], ..., indices[m, k-1], j...] = updates[m, j...]`.

    x: (d0 .. dk-1, rest); indices: (m, k), k a number; updates: (m, rest); each index in [0, its dim)"""

    name: ClassVar[str] = "scatter_nd"

    def fit(self, x: TensorInfo, indices: TensorInfo, updates: TensorInfo, ctx: Deduction) -> None:
        if x.shape is None or indices.shape is None or updates.shape is None:
            return
        depth = as_int(indices.shape[-1]) if len(indices.shape) == 2 else None
        if depth is None or not 1 <= depth <= len(x.shape):
            raise DeduceError(f"scatter_nd: expected indices (m, k) with k in 1..{len(x.shape)}, got {indices!r}")
        expected = (indices.shape[0], *x.shape[depth:])
        if len(updates.shape) != len(expected):
            raise DeduceError(f"scatter_nd: expected {len(expected)} dims in updates, got {updates!r}")
        for p, (a, b) in enumerate(zip(updates.shape, expected, strict=True)):
            ctx.require_equal(a, b, f"scatter_nd: dim {p} of updates")

    def parts(
        self, x: Tensor, indices: Tensor, updates: Tensor
    ) -> tuple[Expr, Callable[[Sequence[Expr], Expr], tuple[Expr, Expr]]]:
        depth = as_int(indices.buffer.shape[1]) or 0

        def update_at(indices_of_result: Sequence[Expr], m: Expr) -> tuple[Expr, Expr]:
            here: Expr = eq(cast(indices[m, 0], i64), indices_of_result[0])
            for p in range(1, depth):
                here = and_(here, eq(cast(indices[m, p], i64), indices_of_result[p]))
            return here, updates[(m, *indices_of_result[depth:])]

        return indices.buffer.shape[0], update_at

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return columns(1, infos)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, indices, updates = arrays
        inside = ((indices >= 0) & (indices < np.array(x.shape[: indices.shape[1]]))).all(axis=1)
        return self.written(x, tuple(indices[inside].T), updates[inside])


@dataclass(frozen=True, slots=True)
class ScatterElements(Scatter):
    """Scatter `y[i..., indices[i..., m, j...], j...] = updates[i..., m, j...]`, with the index at `axis`.

    All have one rank and equal dims, except along `axis`."""

    axis: int = 0
    name: ClassVar[str] = "scatter_elements"

    def fit(self, x: TensorInfo, indices: TensorInfo, updates: TensorInfo, ctx: Deduction) -> None:
        if x.shape is None or indices.shape is None or updates.shape is None:
            return
        if not len(x.shape) == len(indices.shape) == len(updates.shape):
            raise DeduceError(f"scatter_elements: expected equal numbers of dims, got {x!r}, {indices!r}, {updates!r}")
        axis = axis_index(self.name, self.axis, len(x.shape))
        for p, (d, i, u) in enumerate(zip(x.shape, indices.shape, updates.shape, strict=True)):
            ctx.require_equal(i, u, f"scatter_elements: dim {p} of indices and updates")
            if p != axis:
                ctx.require_equal(d, i, f"scatter_elements: dim {p} of the tensor and indices")

    def parts(
        self, x: Tensor, indices: Tensor, updates: Tensor
    ) -> tuple[Expr, Callable[[Sequence[Expr], Expr], tuple[Expr, Expr]]]:
        axis = axis_index(self.name, self.axis, len(x.buffer.shape))

        def update_at(indices_of_result: Sequence[Expr], m: Expr) -> tuple[Expr, Expr]:
            where = (*indices_of_result[:axis], m, *indices_of_result[axis + 1 :])
            return eq(cast(indices[where], i64), indices_of_result[axis]), updates[where]

        return indices.buffer.shape[axis], update_at

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return (IndexUse(1, shape_of(infos[0])[self.axis]),)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, indices, updates = arrays
        where: list[Array] = list(np.indices(indices.shape, sparse=True))
        where[self.axis % x.ndim] = indices
        inside = (indices >= 0) & (indices < x.shape[self.axis])
        return self.written(x, tuple(w[inside] for w in np.broadcast_arrays(*where)), updates[inside])
