"""Sums of overlapping windows (ONNX Col2Im, torch fold), which transposed convolutions end with.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as tuples
from typing import Any, ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import (  # fmt: skip
    Expr,
    add,
    and_,
    as_int,
    ceildiv,
    const,
    eq,
    floordiv,
    floormod,
    le,
    lt,
    minimum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec, float_result, wide
from relax_tune.ir.op.indexing.indices import inside, require_elements


@dataclass(frozen=True, slots=True)
class Fold(OperatorSpec):
    """Sum of windows `y[n, c, i * stride + q * dilation - before ...] += x[n, c, q..., i...]`; what falls outside is dropped.

    x: (n, c, kernel dims..., windows...); the result is (n, c, sizes...)

    Attributes:
        before: number of elements of the windows in front of the result.
    """

    sizes: tuple[Expr, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Expr, ...]
    name: ClassVar[str] = "fold"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        n = len(self.sizes)
        if {len(self.strides), len(self.dilations), len(self.before)} != {n} or x.ndim not in (None, 2 + 2 * n):
            raise DeduceError(
                f"fold: expected (n, c, {n} kernel dims, {n} windows), and {n} strides, dilations and sizes before, got {x!r}, "
                f"{self.strides}, {self.dilations} and {self.before}"
            )
        if min((*self.strides, *self.dilations), default=1) < 1:
            raise DeduceError(
                f"fold: expected strides and dilations of at least 1, got {self.strides} and {self.dilations}"
            )
        for size in self.sizes:
            ctx.require_at_least(size, 0, "fold: size")
        if x.shape is None:
            return TensorInfo(None, x.dtype, 2 + n)
        dims = (*x.shape[:2], *(ctx.simplify(s) for s in self.sizes))
        for d in x.shape[2:]:
            require_elements(self.name, ctx, d, dims)
        return TensorInfo(dims, x.dtype)

    def _source(self, axis: int, place: Expr, t: Expr, kernel: Expr, n: Expr) -> tuple[Expr, Expr, list[Expr]]:
        """Return (place in the window, window, conditions) of term `t` at a place counted from the first window."""
        # A term is visited for each kernel place in general. With dilation 1 only every stride-th kernel place can hit this place, so
        # the loop has ceil(kernel / stride) terms, which begin at the remainder of the place.
        stride, dilation = self.strides[axis], self.dilations[axis]
        if stride == 1:
            window = sub(place, mul(t, dilation))
            return t, window, [le(0, window), lt(window, n)]
        if dilation == 1:
            at, window = add(floormod(place, const(stride)), mul(t, stride)), sub(floordiv(place, const(stride)), t)
            return at, window, [lt(at, kernel), le(0, window), lt(window, n)]
        away = sub(place, mul(t, dilation))
        window = floordiv(away, const(stride))
        return t, window, [eq(floormod(away, const(stride)), 0), le(0, window), lt(window, n)]

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        n = len(self.sizes)
        kernel, windows = shape[2 : 2 + n], shape[2 + n :]
        x, y = b.argument(0, "x"), b.output("y", (*shape[:2], *self.sizes), dtype)
        terms = [
            ceildiv(k, s) if s > 1 and d == 1 else k
            for k, s, d in zip(kernel, self.strides, self.dilations, strict=True)
        ]

        def step(old: Expr, *i: Expr) -> Expr:
            where: list[list[Expr]] = [[], []]
            inner: list[Expr] = []
            for a in range(n):
                place = add(i[2 + a], self.before[a])
                at, window, conditions = self._source(a, place, i[2 + n + a], kernel[a], windows[a])
                where[0].append(minimum(at, sub(kernel[a], 1)))
                where[1].append(inside(window, windows[a]))
                inner += conditions
            value = x[(*i[:2], *where[0], *where[1])]
            return add(old, select(and_(*inner), value, const(0, dtype)))

        b.reduce(y, terms, const(0, dtype), step, "fold")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        n, source = len(self.sizes), wide(arrays[0])
        sizes, before = ([as_int(e) for e in exprs] for exprs in (self.sizes, self.before))
        if None in sizes or None in before:
            raise DeduceError(f"fold: expected numbers to evaluate with, got {self.sizes} and {self.before}")
        y = np.zeros((*x.shape[:2], *(s or 0 for s in sizes)), source.dtype)
        for at in tuples(*(range(k) for k in x.shape[2 : 2 + n])):
            to: list[Array] = []
            inner: list[Array] = []
            for a in range(n):
                places = np.arange(x.shape[2 + n + a]) * self.strides[a] + at[a] * self.dilations[a] - (before[a] or 0)
                good = np.flatnonzero((places >= 0) & (places < (sizes[a] or 0)))
                to.append(places[good])
                inner.append(good)
            every: tuple[Any, ...] = (slice(None), slice(None))
            part = source[(*every, *at)][(*every, *np.ix_(*inner))]
            with np.errstate(all="ignore"):
                y[(*every, *np.ix_(*to))] += part
        return float_result(y, arrays, x.dtype)
