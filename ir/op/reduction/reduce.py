"""Reductions: sums, means, maxima, and the row operators built on them.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, add, as_int, call, cast, const, div, maximum, minimum, mul, sub
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    OperatorBuilder,
    OperatorSpec,
    axis_index,
    float_result,
    product,
    wide,
)


@dataclass(frozen=True, slots=True)
class Reduce(OperatorSpec):
    """Reduction over `axes` (all when None); reduced dims are dropped, or become 1 if `keepdims`."""

    axes: tuple[int, ...] | None = None
    keepdims: bool = False
    arity: ClassVar[int] = 1

    @abstractmethod
    def start(self, dtype: DType) -> Expr:
        """Return the neutral element."""

    @abstractmethod
    def combine(self, old: Expr, x: Expr) -> Expr:
        """Combine a partial result with one element."""

    @abstractmethod
    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Reduce over `axes`, with `keepdims` applied."""

    def positions(self, ndim: int) -> tuple[int, ...]:
        axes = tuple(range(ndim)) if self.axes is None else self.axes
        positions = tuple(sorted(axis_index(self.name, a, ndim) for a in axes))
        if len(set(positions)) != len(positions):
            raise DeduceError(f"{self.name}: expected distinct axes, got {self.axes}")
        return positions

    def reduced_dims(self, shape: Sequence[Expr]) -> tuple[Expr, ...]:
        axes = self.positions(len(shape))
        if self.keepdims:
            return tuple(const(1) if p in axes else d for p, d in enumerate(shape))
        return tuple(d for p, d in enumerate(shape) if p not in axes)

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.shape is not None:
            return TensorInfo(self.reduced_dims(x.shape), x.dtype)
        if x.ndim is None:
            return TensorInfo(None, x.dtype, 0 if self.axes is None and not self.keepdims else None)
        axes = self.positions(x.ndim)
        return TensorInfo(None, x.dtype, x.ndim if self.keepdims else x.ndim - len(axes))

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", self.reduced_dims(shape), dtype)
        self.emit(b, x, y)

    def emit(self, b: TensorBuilder, x: Tensor, y: Tensor) -> None:
        """Emit the blocks that reduce `x` into `y`."""
        shape = x.buffer.shape
        axes = self.positions(len(shape))
        n = len(y.buffer.shape)

        def step(old: Expr, *indices: Expr) -> Expr:
            s, r = list(indices[:n]), list(indices[n:])
            if self.keepdims:
                s = [v for p, v in enumerate(s) if p not in axes]
            where = tuple(r.pop(0) if p in axes else s.pop(0) for p in range(len(shape)))
            return self.combine(old, x[where])

        b.reduce(y, tuple(shape[a] for a in axes), self.start(x.buffer.dtype), step, self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        return float_result(self.array(wide(x), self.positions(x.ndim)), arrays, x.dtype)


@dataclass(frozen=True, slots=True)
class Sum(Reduce):
    name: ClassVar[str] = "sum"

    def start(self, dtype: DType) -> Expr:
        return const(0, dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return add(old, x)

    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        return np.asarray(x.sum(axis=axes, keepdims=self.keepdims))


def require_numbers(name: str, x: TensorInfo) -> None:
    """Refuse bools, which have no order. Raises DeduceError."""
    if x.dtype is bool_:
        raise DeduceError(f"{name}: expected a tensor of numbers, got {x!r}; cast it first")


@dataclass(frozen=True, slots=True)
class Extreme(Reduce):
    """Maximum or minimum, NaN where an element is. An empty axis is an error unless `of_none`."""

    of_none: ClassVar[bool] = False

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        require_numbers(self.name, x)
        if x.shape is not None and not self.of_none:
            for a in self.positions(len(x.shape)):
                ctx.require_at_least(x.shape[a], 1, f"{self.name}: elements along axis {a}")
        return Reduce.infer(self, infos, ctx)


@dataclass(frozen=True, slots=True)
class Max(Extreme):
    """Maximum."""

    name: ClassVar[str] = "max"

    def start(self, dtype: DType) -> Expr:
        return lowest(dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return maximum(old, x)

    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        # NumPy refuses the maximum of no elements without an initial value.
        low: Any = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
        return np.asarray(x.max(axis=axes, keepdims=self.keepdims, initial=low))


@dataclass(frozen=True, slots=True)
class Min(Extreme):
    """Minimum."""

    name: ClassVar[str] = "min"

    def start(self, dtype: DType) -> Expr:
        return const(np.inf if dtype.is_float else int(np.iinfo(dtype.numpy).max), dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return minimum(old, x)

    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        high: Any = np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).max
        return np.asarray(x.min(axis=axes, keepdims=self.keepdims, initial=high))


@dataclass(frozen=True, slots=True)
class MaxOrLowest(Max):
    """Maximum; over no elements the lowest value of the dtype (ONNX, "ReduceMax", version 20)."""

    name: ClassVar[str] = "max_or_lowest"
    of_none: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MinOrHighest(Min):
    """Minimum; over no elements the highest value of the dtype (ONNX, "ReduceMin", version 20)."""

    name: ClassVar[str] = "min_or_highest"
    of_none: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Mean(Reduce):
    """Arithmetic mean of floats; NaN over no elements."""

    name: ClassVar[str] = "mean"

    def start(self, dtype: DType) -> Expr:
        return const(0, dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return add(old, x)

    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        count = math.prod(x.shape[a] for a in axes)
        with np.errstate(invalid="ignore"):
            return np.asarray(x.sum(axis=axes, keepdims=self.keepdims) / np.float64(count))

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"mean: expected a floating-point tensor, got {x!r}; cast it first")
        return Reduce.infer(self, infos, ctx)

    def emit(self, b: TensorBuilder, x: Tensor, y: Tensor) -> None:
        shape, dtype = x.buffer.shape, x.buffer.dtype
        total = b.alloc("total", y.buffer.shape, dtype)
        Reduce.emit(self, b, x, total)
        count = cast(product([shape[a] for a in self.positions(len(shape))]), dtype)
        b.compute(y, lambda *i: div(total[i], count), "mean_divide")


def lowest(dtype: DType) -> Expr:
    """Return the neutral element of maximum."""
    return const(-np.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min), dtype)


@dataclass(frozen=True, slots=True)
class RowOperator(OperatorSpec):
    """Operator on floats that computes each row of the last axis separately and keeps the shape."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        tensors = self.tensors(infos)
        x = tensors[0]
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"{self.name}: expected a floating-point tensor, got {x!r}; cast it first")
        if x.ndim == 0:
            raise DeduceError(f"{self.name}: expected at least 1 dim, got {x!r}")
        dtype = self.same_dtype(tensors)
        for position, t in enumerate(tensors[1:], 1):
            self.fit(x, position, t, ctx)
        return TensorInfo(x.shape, dtype, x.ndim)

    def fit(self, x: TensorInfo, position: int, t: TensorInfo, ctx: Deduction) -> None:
        """Require that argument `position` has one row of `x` as its shape. Raises DeduceError."""
        if t.ndim is not None and t.ndim != 1:
            raise DeduceError(f"{self.name}: expected 1 dim in argument {position}, got {t!r}")
        if t.shape is not None and x.shape is not None:
            ctx.require_equal(t.shape[0], x.shape[-1], f"{self.name}: argument {position} and the last dim of {x!r}")


def _row_sum(
    b: TensorBuilder, out: Tensor, width: Expr, value: Callable[[tuple[Expr, ...], Expr], Expr], name: str
) -> None:
    """Emit `out[row] = sum over k of value(row, k)`."""
    b.reduce(out, (width,), const(0, out.buffer.dtype), lambda old, *i: add(old, value(i[:-1], i[-1])), name)


@dataclass(frozen=True, slots=True)
class Softmax(RowOperator):
    """Softmax `exp(x - max) / sum(exp(x - max))` over the last axis."""

    name: ClassVar[str] = "softmax"
    arity: ClassVar[int] = 1

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", shape, dtype)
        top, total = b.alloc("top", shape[:-1], dtype), b.alloc("total", shape[:-1], dtype)
        power = b.alloc("power", shape, dtype)
        b.reduce(top, shape[-1:], lowest(dtype), lambda old, *i: maximum(old, x[i]), "softmax_max")
        b.compute(power, lambda *i: call("exp", sub(x[i], top[i[:-1]])), "softmax_exp")
        _row_sum(b, total, shape[-1], lambda row, k: power[(*row, k)], "softmax_sum")
        b.compute(y, lambda *i: div(power[i], total[i[:-1]]), "softmax")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = wide(arrays[0])
        if x.shape[-1] == 0:
            return float_result(x, arrays, arrays[0].dtype)
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return float_result(e / e.sum(axis=-1, keepdims=True), arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm(RowOperator):
    """Layer normalisation (Ba et al. 2016): `(x - mean) / sqrt(var + eps) * gamma + beta` over the last axes.

    x: (..., c); gamma, beta: (c,). The variance is the mean of squared differences (two passes); the difference of mean squares
    would cancel.

    Attributes:
        axes: number of axes that are normalised together. Beyond one, gamma and beta broadcast with x: with x viewed as (n, groups,
            channels, places) and weights (groups, channels, 1), this is group normalisation (Wu and He 2018).
    """

    eps: float = 1e-5
    axes: int = 1
    name: ClassVar[str] = "layer_norm"
    arity: ClassVar[int] = 3

    def fit(self, x: TensorInfo, position: int, t: TensorInfo, ctx: Deduction) -> None:
        if x.ndim is not None and not 1 <= self.axes <= x.ndim:
            raise DeduceError(f"layer_norm: expected from 1 to {x.ndim} axes, got {self.axes}")
        if self.axes == 1:
            RowOperator.fit(self, x, position, t, ctx)
        elif t.shape is not None and x.shape is not None:
            if len(t.shape) > len(x.shape):
                raise DeduceError(f"layer_norm: expected at most {len(x.shape)} dims in argument {position}, got {t!r}")
            for size, dim in zip(reversed(t.shape), reversed(x.shape), strict=False):
                if as_int(size) != 1:
                    ctx.require_equal(size, dim, f"layer_norm: a dim of argument {position} and {x!r}")

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        lead = len(shape) - self.axes
        x = b.argument(0, "x")
        gamma, beta = b.argument(1, "gamma"), b.argument(2, "beta")
        y = b.output("y", shape, dtype)
        mean, var = b.alloc("mean", shape[:lead], dtype), b.alloc("var", shape[:lead], dtype)
        count = cast(product(shape[lead:]), dtype)

        def centred(*i: Expr) -> Expr:
            return sub(x[i], div(mean[i[:lead]], count))

        def weight(t: Tensor, i: Sequence[Expr]) -> Expr:
            dims = t.buffer.shape
            along = i[len(i) - len(dims) :]
            return t[tuple(const(0) if as_int(d) == 1 else v for d, v in zip(dims, along, strict=True))]

        def scaled(*i: Expr) -> Expr:
            root = call("rsqrt", add(div(var[i[:lead]], count), const(self.eps, dtype)))
            return add(mul(mul(centred(*i), root), weight(gamma, i)), weight(beta, i))

        zero = const(0, dtype)
        b.reduce(mean, shape[lead:], zero, lambda old, *i: add(old, x[i]), "norm_mean")
        b.reduce(var, shape[lead:], zero, lambda old, *i: add(old, mul(centred(*i), centred(*i))), "norm_var")
        b.compute(y, scaled, "norm_scale")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, gamma, beta = map(wide, arrays)
        axes = tuple(range(x.ndim - self.axes, x.ndim))
        count = np.float64(math.prod(x.shape[-self.axes :]))
        with np.errstate(invalid="ignore"):
            d = x - x.sum(axis=axes, keepdims=True) / count
            var = (d * d).sum(axis=axes, keepdims=True) / count
        return float_result(d / np.sqrt(var + self.eps) * gamma + beta, arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class L2Normalize(RowOperator):
    """L2 normalisation `x / max(sqrt(sum(x * x)), eps)` over the last axis."""

    eps: float = 1e-12
    name: ClassVar[str] = "l2_normalize"
    arity: ClassVar[int] = 1

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", shape, dtype)
        square = b.alloc("square", shape[:-1], dtype)
        _row_sum(b, square, shape[-1], lambda row, k: mul(x[(*row, k)], x[(*row, k)]), "l2_sum")
        b.compute(y, lambda *i: div(x[i], maximum(call("sqrt", square[i[:-1]]), const(self.eps, dtype))), "l2_scale")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = wide(arrays[0])
        norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
        return float_result(x / np.maximum(norm, self.eps), arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class MeanPool(OperatorSpec):
    """Masked mean over positions: x (b, n, c), mask (b, n) of 0 and 1 -> (b, c), all floats.

    `sum(x * mask) / max(sum(mask), eps)`: a row without any position gives zeros."""

    eps: float = 1e-9
    name: ClassVar[str] = "mean_pool"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, mask = self.tensors(infos)
        dtype = self.same_dtype((x, mask))
        if dtype is not None and not dtype.is_float:
            raise DeduceError(f"mean_pool: expected floats, got {x!r} and {mask!r}; cast them first")
        for ndim, what, t in ((3, "x", x), (2, "mask", mask)):
            if t.ndim is not None and t.ndim != ndim:
                raise DeduceError(f"mean_pool: expected {ndim} dims in {what}, got {t!r}")
        if x.shape is None or mask.shape is None:
            return TensorInfo(None, dtype, 2)
        for position in (0, 1):
            ctx.require_equal(x.shape[position], mask.shape[position], f"mean_pool: dim {position} of x and mask")
        return TensorInfo((x.shape[0], x.shape[2]), dtype)

    def build(self, b: OperatorBuilder) -> None:
        rows, length, width = b.shape(0)
        dtype = b.dtype(0)
        x = b.argument(0, "x")
        mask = b.argument(1, "mask", (rows, length))
        y = b.output("y", (rows, width), dtype)
        count, total = b.alloc("count", (rows,), dtype), b.alloc("total", (rows, width), dtype)
        zero = const(0, dtype)
        b.reduce(count, (length,), zero, lambda old, i, k: add(old, mask[i, k]), "pool_count")
        b.reduce(total, (length,), zero, lambda old, i, j, k: add(old, mul(x[i, k, j], mask[i, k])), "pool_sum")
        b.compute(y, lambda i, j: div(total[i, j], maximum(count[i], const(self.eps, dtype))), "pool_divide")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, mask = map(wide, arrays)
        total = np.einsum("bnc,bn->bc", x, mask)
        return float_result(total / np.maximum(mask.sum(axis=1), self.eps)[:, None], arrays, arrays[0].dtype)
