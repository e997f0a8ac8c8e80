"""Operators on sliding windows over the last dims: convolution and pooling of padded inputs.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (  # fmt: skip
    Expr,
    add,
    and_,
    as_int,
    const,
    eq,
    floordiv,
    ge,
    le,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec, float_result, wide
from relax_tune.ir.op.indexing.indices import inside, nearest, readable, require_elements
from relax_tune.ir.op.reduction.reduce import lowest


def window_count(size: Expr, kernel: Expr, stride: int, dilation: int) -> Expr:
    """Return the number of windows that fit into a dim."""
    reach = add(mul(sub(kernel, 1), dilation), 1)
    return add(floordiv(sub(size, reach), const(stride)), 1)


def _counts(
    name: str,
    sizes: Sequence[Expr],
    kernels: Sequence[Expr],
    strides: Sequence[int],
    dilations: Sequence[int],
    ctx: Deduction,
) -> tuple[Expr, ...]:
    if not len(sizes) == len(kernels) == len(strides) == len(dilations):
        raise DeduceError(
            f"{name}: expected a kernel size, stride and dilation for each of {len(sizes)} dims, got {len(kernels)}, "
            f"{len(strides)} and {len(dilations)}"
        )
    if any(n < 1 for n in (*strides, *dilations)):
        raise DeduceError(f"{name}: expected strides and dilations of at least 1, got {strides} and {dilations}")
    counts = []
    for size, kernel, stride, dilation in zip(sizes, kernels, strides, dilations, strict=True):
        reach = ctx.simplify(add(mul(sub(kernel, 1), dilation), 1))
        fits = ctx.proves(ge(size, reach))
        if fits is Proof.NO:
            raise DeduceError(f"{name}: expected a dim of at least the window's {reach!r}, got {size!r}")
        if fits is Proof.UNKNOWN:
            message = f"{name}: expected a dim {size!r} of at least the window's {reach!r}, got {{0}} and {{1}}"
            ctx.require(ge(size, reach), message, size, reach)
        counts.append(ctx.simplify(window_count(size, kernel, stride, dilation)))
    return tuple(counts)


def _windows(x: Array, kernels: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """View x (n, c, d...) as (n, c, windows..., kernel...)."""
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernels, dilations))
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, x.ndim)))
    steps = tuple(slice(None, None, s) for s in strides) + tuple(slice(None, None, d) for d in dilations)
    return view[(slice(None), slice(None), *steps)]


@dataclass(frozen=True, slots=True)
class Conv(OperatorSpec):
    """Convolution `y[n, o, p...] = sum over c, q... of x[n, g(o) + c, p * stride + q * dilation ...] * w[o, c, q...]`.

    x: (n, channels, dims...); w: (out channels, channels / groups, kernel dims...); `g(o)`: first channel of the group of `o`"""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    name: ClassVar[str] = "conv"
    half_policy: ClassVar[HalfPolicy] = "prefer"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, w = self.tensors(infos)
        dtype = self.same_dtype((x, w))
        if x.shape is None or w.shape is None:
            return TensorInfo(None, dtype, x.ndim)
        if len(x.shape) < 3 or len(x.shape) != len(w.shape):
            raise DeduceError(f"conv: expected an equal number of at least 3 dims, got {x!r} and {w!r}")
        ctx.require_equal(x.shape[1], mul(w.shape[1], self.groups), "conv: channels")
        if self.groups > 1:
            what = f"conv: out channels in {self.groups} equal groups, what is left over of {w.shape[0]!r}"
            ctx.require_equal(w.shape[0] % self.groups, 0, what)
        counts = _counts(self.name, x.shape[2:], w.shape[2:], self.strides, self.dilations, ctx)
        return TensorInfo((x.shape[0], w.shape[0], *counts), dtype)

    def build(self, b: OperatorBuilder) -> None:
        dims, kernel, dtype = b.shape(0), b.shape(1), b.dtype(0)
        x, w = b.argument(0, "x"), b.argument(1, "w")
        counts = _counts(self.name, dims[2:], kernel[2:], self.strides, self.dilations, b.ctx)
        y = b.output("y", (dims[0], kernel[0], *counts), dtype)
        spatial = len(counts)

        def step(old: Expr, *i: Expr) -> Expr:
            (n, o), places, c, taps = i[:2], i[2 : 2 + spatial], i[2 + spatial], i[3 + spatial :]
            channel: Expr = c
            if self.groups > 1:
                each = floordiv(kernel[0], const(self.groups))
                # Group g of the output channels reads the g-th part of the input channels.
                channel = add(mul(floordiv(o, each), kernel[1]), c)
            where = (add(mul(p, s), mul(q, d)) for p, q, s, d in zip(places, taps, self.strides, self.dilations))
            return add(old, mul(x[(n, channel, *where)], w[(o, c, *taps)]))

        b.reduce(y, kernel[1:], const(0, dtype), step, "conv")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, w = map(wide, arrays)
        views = _windows(x, w.shape[2:], self.strides, self.dilations)
        n, spatial = x.shape[0], w.ndim - 2
        views = views.reshape(n, self.groups, x.shape[1] // self.groups, *views.shape[2:])
        kernels = w.reshape(self.groups, w.shape[0] // self.groups, *w.shape[1:])
        places, taps = "abc"[:spatial], "xyz"[:spatial]
        y = np.einsum(f"ngi{places}{taps},goi{taps}->ngo{places}", views, kernels)
        return float_result(y.reshape(n, w.shape[0], *y.shape[3:]), arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class Pool(OperatorSpec):
    """Pooling of each window of x (n, c, dims...): maximum if `largest`, else sum."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    largest: bool = True
    name: ClassVar[str] = "pool"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.shape is None:
            return x
        if len(x.shape) < 3:
            raise DeduceError(f"pool: expected at least 3 dims, got {x!r}")
        kernel = [const(k) for k in self.kernel]
        return TensorInfo(
            (*x.shape[:2], *_counts(self.name, x.shape[2:], kernel, self.strides, self.dilations, ctx)), x.dtype
        )

    def build(self, b: OperatorBuilder) -> None:
        dims, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        kernel = [const(k) for k in self.kernel]
        counts = _counts(self.name, dims[2:], kernel, self.strides, self.dilations, b.ctx)
        y = b.output("y", (*dims[:2], *counts), dtype)
        spatial = len(counts)

        def step(old: Expr, *i: Expr) -> Expr:
            places, taps = i[2 : 2 + spatial], i[2 + spatial :]
            where = (add(mul(p, s), mul(q, d)) for p, q, s, d in zip(places, taps, self.strides, self.dilations))
            value = x[(*i[:2], *where)]
            return maximum(old, value) if self.largest else add(old, value)

        b.reduce(y, kernel, lowest(dtype) if self.largest else const(0, dtype), step, "pool")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        views = _windows(wide(x), self.kernel, self.strides, self.dilations)
        axes = tuple(range(x.ndim, views.ndim))
        return float_result(views.max(axis=axes) if self.largest else views.sum(axis=axes), arrays, x.dtype)


@dataclass(frozen=True, slots=True)
class PoolPositions(OperatorSpec):
    """Positions of the largest elements of the windows of x (n, c, dims...), the first among equal ones.

    NaN is the largest, the last NaN wins, as in torch.
    The second argument is the pooled maximum. A position counts the elements of the dims row by row. Windows may reach beyond x.

    Attributes:
        before: number of elements of the first window in front of x.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Expr, ...]
    name: ClassVar[str] = "pool_positions"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, top = self.tensors(infos)
        self.same_dtype((x, top))
        spatial = len(self.kernel)
        if {len(self.strides), len(self.dilations), len(self.before)} != {spatial}:
            raise DeduceError(f"pool_positions: expected a stride, dilation and size before for each of {self.kernel}")
        if any(i.ndim not in (None, 2 + spatial) for i in (x, top)):
            raise DeduceError(f"pool_positions: expected {2 + spatial} dims, got {x!r} and {top!r}")
        if x.shape is not None and top.shape is not None:
            for p in range(2):
                ctx.require_equal(x.shape[p], top.shape[p], f"pool_positions: dim {p}")
            for d in x.shape[2:]:
                require_elements(self.name, ctx, d, top.shape)
        return TensorInfo(top.shape, i64, top.ndim)

    def build(self, b: OperatorBuilder) -> None:
        dims, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        top = b.argument(1, "top")
        y = b.output("y", b.shape(1), i64)
        spatial = len(self.kernel)

        def step(old: Expr, *i: Expr) -> Expr:
            place, taps = i[: 2 + spatial], i[2 + spatial :]
            flat: Expr = const(0)
            where, inner = [], []
            for a in range(spatial):
                n, at = (
                    dims[2 + a],
                    sub(add(mul(place[2 + a], self.strides[a]), mul(taps[a], self.dilations[a])), self.before[a]),
                )
                where.append(inside(at, n))
                inner += [le(0, at), lt(at, n)]
                flat = add(mul(flat, n), where[-1])
            value, best = x[(*place[:2], *where)], top[place]
            if dtype.is_float:  # with a NaN in the window, best is NaN, which equals nothing; the least key then belongs to the last NaN
                flat = select(ne(value, value), sub(-1, flat), select(eq(value, best), flat, const(2**62)))
            else:
                flat = select(eq(value, best), flat, const(2**62))
            return minimum(old, select(and_(*inner), flat, const(2**62)))

        key = b.alloc("key", b.shape(1), i64) if dtype.is_float else y
        b.reduce(key, [const(k) for k in self.kernel], const(2**62), step, "pool_positions")
        if dtype.is_float:
            b.compute(y, lambda *i: select(lt(key[i], 0), sub(-1, key[i]), key[i]), "decode")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, top = arrays
        before = [as_int(e) for e in self.before]
        if None in before:
            raise DeduceError(f"pool_positions: expected numbers to evaluate with, got {self.before}")
        y = np.full(top.shape, 2**62, np.int64)
        for taps in np.ndindex(*self.kernel):
            flat, good = np.zeros((1,) * len(taps), np.int64), np.ones((1,) * len(taps), bool)
            where = []
            for a, tap in enumerate(taps):
                n, count = x.shape[2 + a], top.shape[2 + a]
                at = np.arange(count) * self.strides[a] + tap * self.dilations[a] - (before[a] or 0)
                column = (-1,) + (1,) * (len(taps) - 1 - a)
                where.append(nearest(at, n))
                flat = flat * n + where[-1].reshape(column)
                good = good & ((at >= 0) & (at < n)).reshape(column)
            places: tuple[Any, ...] = (slice(None), slice(None), *np.ix_(*where))
            value = readable(x, range(2, x.ndim))[places]
            y = np.where(good & (value == top), np.minimum(y, flat), y)
            y = np.where(good & (value != value), np.minimum(y, -1 - flat), y)
        return np.where(y < 0, -1 - y, y)
