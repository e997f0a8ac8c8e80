"""Products, prefix scans, and positions of extreme elements.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, i32, i64
from relax_tune.ir.core.expr import (
    Expr,
    add,
    and_,
    as_int,
    cast,
    const,
    eq,
    expr,
    le,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    or_,
    select,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec, axis_index, float_result, wide
from relax_tune.ir.op.reduction.reduce import Max, Min, Reduce, require_numbers

MOST = 2**31 - 1  # the largest int32


@dataclass(frozen=True, slots=True)
class Prod(Reduce):
    """Product; 1 over no elements."""

    name: ClassVar[str] = "prod"

    def start(self, dtype: DType) -> Expr:
        return const(1, dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return mul(old, x)

    def array(self, x: Array, axes: tuple[int, ...]) -> Array:
        return np.asarray(x.prod(axis=axes, keepdims=self.keepdims))


@dataclass(frozen=True, slots=True)
class Scan(OperatorSpec):
    """Prefix scan along `axis`: each result reduces the elements up to its position.

    Each result is a separate reduction; schedules compute them in order, each from the one before (`serial_scan`).

    Attributes:
        exclusive: leave out the element at the position.
        reverse: scan from the end.
    """

    axis: int = 0
    exclusive: bool = False
    reverse: bool = False
    arity: ClassVar[int] = 1
    start: ClassVar[int]
    accumulate: ClassVar[Callable[..., Array]]

    def neutral(self, dtype: DType) -> Expr:
        raise NotImplementedError

    def combine(self, old: Expr, x: Expr) -> Expr:
        raise NotImplementedError

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.ndim is not None:
            axis_index(self.name, self.axis, x.ndim)
        return x

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x, y = b.argument(0, "x"), b.output("y", shape, dtype)
        before = lt if self.exclusive else le

        def step(old: Expr, *indices: Expr) -> Expr:
            place, k = indices[:-1], indices[-1]
            included = before(place[axis], k) if self.reverse else before(k, place[axis])
            return self.combine(old, select(included, x[(*place[:axis], k, *place[axis + 1 :])], self.neutral(dtype)))

        b.reduce(y, (shape[axis],), self.neutral(dtype), step, self.name)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        axis = self.axis % x.ndim
        values = np.moveaxis(wide(x), axis, 0)
        values = values[::-1] if self.reverse else values
        sums = self.accumulate(values, axis=0)
        if self.exclusive:
            first = np.full_like(sums[:1], self.start)
            sums = np.concatenate([first, sums[:-1]])[: len(sums)]
        sums = sums[::-1] if self.reverse else sums
        return float_result(np.moveaxis(sums, 0, axis), arrays, x.dtype)


@dataclass(frozen=True, slots=True)
class CumSum(Scan):
    name: ClassVar[str] = "cum_sum"
    start: ClassVar[int] = 0
    accumulate: ClassVar[Callable[..., Array]] = staticmethod(np.cumsum)

    def neutral(self, dtype: DType) -> Expr:
        return const(0, dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return add(old, x)


@dataclass(frozen=True, slots=True)
class CumProd(Scan):
    name: ClassVar[str] = "cum_prod"
    start: ClassVar[int] = 1
    accumulate: ClassVar[Callable[..., Array]] = staticmethod(np.cumprod)

    def neutral(self, dtype: DType) -> Expr:
        return const(1, dtype)

    def combine(self, old: Expr, x: Expr) -> Expr:
        return mul(old, x)


@dataclass(frozen=True, slots=True)
class ArgMax(OperatorSpec):
    """Index of the largest element along `axis` (the smallest, if `least`), as int64; of equal ones the first, or the `last`.

    NaN wins over every number for both."""

    axis: int = 0
    least: bool = False
    last: bool = False
    name: ClassVar[str] = "arg_max"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        require_numbers(self.name, x)
        if x.shape is None:
            return TensorInfo(None, i64, None if x.ndim is None else x.ndim - 1)
        axis = axis_index(self.name, self.axis, len(x.shape))
        ctx.require_at_least(x.shape[axis], 1, f"arg_max: elements along axis {axis}")
        return TensorInfo((*x.shape[:axis], *x.shape[axis + 1 :]), i64)

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        axis = axis_index(self.name, self.axis, len(shape))
        rest = (*shape[:axis], *shape[axis + 1 :])
        x, y = b.argument(0, "x"), b.output("y", rest, i64)
        top = b.alloc("top", rest, dtype)
        extreme: Reduce = Min((axis,)) if self.least else Max((axis,))
        extreme.emit(b, x, top)
        # int32 positions share vectors with 32-bit elements
        short = (as_int(shape[axis]) or MOST) < MOST
        kind = i32 if short else i64
        place = b.alloc("place", rest, kind) if short else y

        def step(old: Expr, *indices: Expr) -> Expr:
            row, k = indices[:-1], cast(indices[-1], kind)
            value, best = x[(*row[:axis], indices[-1], *row[axis:])], top[row]
            # with a NaN along the axis, best is NaN, which equals nothing
            loses = and_(ne(value, best), eq(value, value)) if dtype.is_float else ne(value, best)
            if self.last:
                return maximum(old, select(loses, const(0, kind), k))
            return minimum(old, select(loses, cast(shape[axis], kind), k))

        # neutral element: beyond every position for the minimum, 0 for the maximum
        start = 0 if self.last else MOST if short else 2**62
        b.reduce(place, (shape[axis],), const(start, kind), step, "position")
        if short:
            b.compute(y, lambda *row: cast(place[row], i64), "widen")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = wide(arrays[0])  # NumPy does not order NaN of bfloat16
        pick = np.argmin if self.least else np.argmax
        if not self.last:
            return np.asarray(pick(x, axis=self.axis), np.int64)
        return np.asarray(x.shape[self.axis] - 1 - pick(np.flip(x, self.axis), axis=self.axis), np.int64)


def counts_ahead(element: Expr, other: Expr, i: Expr, k: Expr, largest: bool) -> Expr:
    """Return whether an element at `k` comes before `element` at `i`: the order of `top_k`.

    Equal elements keep their order, and NaN is the largest."""
    first, second = (element, other) if largest else (other, element)
    ahead, tied = lt(first, second), eq(element, other)
    if element.dtype.is_float:
        tied = or_(tied, and_(ne(element, element), ne(other, other)))
        ahead = or_(ahead, and_(eq(first, first), ne(second, second)))
    return or_(ahead, and_(tied, lt(k, i)))


@dataclass(frozen=True, slots=True)
class TopK(OperatorSpec):
    """Indices of the `k` largest elements along `axis` (the smallest, unless `largest`), best first, as int64.

    Equal elements keep their order, and NaN is the largest. Loops count the rank of each element; schedules select from
    chunks instead (`quadratic_select`), or sort (`radix_sort`, `bitonic_sort`)."""

    k: Expr
    axis: int = -1
    largest: bool = True
    name: ClassVar[str] = "top_k"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.shape is None:
            return TensorInfo(None, i64, x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        ctx.require_at_least(self.k, 0, "top_k: k")
        enough = ctx.proves(le(self.k, x.shape[axis]))
        if enough is Proof.NO:
            raise DeduceError(
                f"top_k: expected at most the {x.shape[axis]!r} elements of axis {axis}, got k = {self.k!r}"
            )
        if enough is Proof.UNKNOWN:
            message = f"top_k: expected k = {self.k!r} to be at most {x.shape[axis]!r}, got {{0}} and {{1}}"
            ctx.require(le(self.k, x.shape[axis]), message, self.k, x.shape[axis])
        return TensorInfo((*x.shape[:axis], self.k, *x.shape[axis + 1 :]), i64)

    def build(self, b: OperatorBuilder) -> None:
        shape = b.shape(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.argument(0, "x")
        y = b.output("y", (*shape[:axis], self.k, *shape[axis + 1 :]), i64)
        rank = b.alloc("rank", shape, i64)

        def at(place: Sequence[Expr], k: Expr) -> tuple[Expr, ...]:
            return (*place[:axis], k, *place[axis + 1 :])

        def count(old: Expr, *indices: Expr) -> Expr:
            place, k = indices[:-1], indices[-1]
            ahead = counts_ahead(x[tuple(place)], x[at(place, k)], place[axis], k, self.largest)
            return add(old, select(ahead, expr(1), expr(0)))

        def find(old: Expr, *indices: Expr) -> Expr:
            place, k = indices[:-1], indices[-1]
            return add(old, select(eq(rank[at(place, k)], place[axis]), k, expr(0)))

        b.reduce(rank, (shape[axis],), const(0), count, "rank")
        b.reduce(y, (shape[axis],), const(0), find, "find")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = wide(arrays[0])
        k = self.k.value
        if not isinstance(k, int):
            raise DeduceError(f"top_k: expected a number to evaluate with, got {self.k!r}; bind its symbols first")
        # from the end, so that equal elements keep their order when the best come first
        order = np.argsort(x, axis=self.axis, kind="stable")  # NaN last
        if self.largest:
            # Descending and stable: an ascending sort of the flipped row, flipped back, keeps the order of equal
            # elements.
            flipped = np.argsort(np.flip(x, self.axis), axis=self.axis, kind="stable")
            order = np.flip(x.shape[self.axis] - 1 - flipped, self.axis)
        return np.take(order, np.arange(k), axis=self.axis).astype(np.int64)
