"""Data movement without computation: take, views, permutation, concatenation, slices.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import Expr, add, as_int, ceildiv, const, eq, ge, le, maximum, minimum, mul, or_, sub
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo, all_tensors
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    HalfPolicy,
    IndexUse,
    OperatorBuilder,
    OperatorSpec,
    axis_index,
    product,
    shape_of,
)
from relax_tune.ir.op.indexing.indices import inside, nearest, require_elements
from relax_tune.ir.op.math.elementwise import broadcast_index


def _integers(dims: Sequence[Expr], what: str) -> tuple[int, ...]:
    """Return dims without symbols as numbers."""
    numbers: list[int] = []
    for d in dims:
        n = as_int(d)
        if n is None:
            raise DeduceError(f"{what}: expected numbers to evaluate with, got {d!r}; bind its symbols first")
        numbers.append(n)
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class Take(OperatorSpec):
    """Rows of a table: table (v, ...), indices (...) of int32 or int64, each in [0, v).

    The result has the dims of indices, then the other dims of the table. Indices outside: see `ir/op/indexing/indices`."""

    name: ClassVar[str] = "take"
    half_policy: ClassVar[HalfPolicy] = "table"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        table, indices = self.tensors(infos)
        if indices.dtype not in (None, i32, i64):
            raise DeduceError(f"take: expected int32 or int64 indices, got {indices!r}; cast them first")
        if table.ndim == 0:
            raise DeduceError(f"take: expected a table of at least 1 dim, got {table!r}")
        if table.shape is None or indices.shape is None:
            known = table.ndim is not None and indices.ndim is not None
            return TensorInfo(None, table.dtype, (table.ndim or 0) - 1 + (indices.ndim or 0) if known else None)
        require_elements(self.name, ctx, table.shape[0], (*indices.shape, *table.shape[1:]))
        return TensorInfo((*indices.shape, *table.shape[1:]), table.dtype)

    def build(self, b: OperatorBuilder) -> None:
        rows, where = b.shape(0), b.shape(1)
        table = b.argument(0, "table")
        indices = b.argument(1, "indices")
        y = b.output("y", (*where, *rows[1:]), b.dtype(0))
        n = len(where)
        b.compute(y, lambda *i: table[(inside(indices[i[:n]], rows[0]), *i[n:])], "take")

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return (IndexUse(1, shape_of(infos[0])[0]),)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.asarray(np.take(arrays[0], nearest(arrays[1], arrays[0].shape[0]), axis=0, mode="clip"))


@dataclass(frozen=True, slots=True)
class Reshape(OperatorSpec):
    """Reshape in row-major order; a view, never a kernel."""

    shape: tuple[Expr, ...]
    name: ClassVar[str] = "reshape"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.shape is None:
            return TensorInfo(self.shape, x.dtype)
        old, new = ctx.simplify(product(x.shape)), ctx.simplify(product(self.shape))
        what = f"reshape of ({', '.join(map(repr, x.shape))}) to ({', '.join(map(repr, self.shape))})"
        proof = ctx.equal(old, new)
        if proof is Proof.NO:
            raise DeduceError(f"{what}: expected equal products of dims, got {old!r} and {new!r}")
        if proof is Proof.UNKNOWN:
            ctx.require(eq(old, new), f"{what}: expected equal products of dims, got {{0}} and {{1}}", old, new)
        return TensorInfo(self.shape, x.dtype)

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", self.shape, dtype)

        def value(*i: Expr) -> Expr:
            flat: Expr = const(0)
            for v, d in zip(i, self.shape, strict=True):
                flat = add(mul(flat, d), v)
            where: list[Expr] = []
            for p in range(len(shape) - 1, -1, -1):
                where.insert(0, flat if p == 0 else flat % shape[p])
                flat = flat // shape[p]
            return x[tuple(where)]

        b.compute(y, value, "reshape")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        dims = _integers(self.shape, "reshape")
        if math.prod(dims) != arrays[0].size:
            raise DeduceError(f"reshape: expected {arrays[0].size} elements, got dims {dims}")
        return arrays[0].reshape(dims)


@dataclass(frozen=True, slots=True)
class Flatten(OperatorSpec):
    """All elements in row-major order in one dim; a view, never a kernel."""

    name: ClassVar[str] = "flatten"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return (
            TensorInfo(None, x.dtype, 1) if x.shape is None else TensorInfo((ctx.simplify(product(x.shape)),), x.dtype)
        )

    def build(self, b: OperatorBuilder) -> None:
        Reshape((product(b.shape(0)),)).build(b)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return arrays[0].reshape(-1)


@dataclass(frozen=True, slots=True)
class ExpandDims(OperatorSpec):
    """New dims of 1 at `axes` of the result; a view, never a kernel."""

    axes: tuple[int, ...]
    name: ClassVar[str] = "expand_dims"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def _shape(self, shape: Sequence[Expr]) -> tuple[Expr, ...]:
        n = len(shape) + len(self.axes)
        at = {axis_index(self.name, a, n) for a in self.axes}
        if len(at) != len(self.axes):
            raise DeduceError(f"expand_dims: expected distinct axes, got {self.axes}")
        rest = iter(shape)
        return tuple(const(1) if p in at else next(rest) for p in range(n))

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.shape is None:
            return TensorInfo(None, x.dtype, None if x.ndim is None else x.ndim + len(self.axes))
        return TensorInfo(self._shape(x.shape), x.dtype)

    def build(self, b: OperatorBuilder) -> None:
        Reshape(self._shape(b.shape(0))).build(b)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.expand_dims(arrays[0], self.axes)


@dataclass(frozen=True, slots=True)
class Permute(OperatorSpec):
    """Permutation of axes: axis `p` of the result is axis `axes[p]` of the argument."""

    axes: tuple[int, ...]
    name: ClassVar[str] = "permute"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.ndim is not None and sorted(self.axes) != list(range(x.ndim)):
            raise DeduceError(f"permute: expected a permutation of 0..{x.ndim - 1}, got {self.axes}")
        shape = None if x.shape is None else tuple(x.shape[a] for a in self.axes)
        return TensorInfo(shape, x.dtype, len(self.axes))

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", tuple(shape[a] for a in self.axes), dtype)
        inverse = [self.axes.index(p) for p in range(len(shape))]
        b.compute(y, lambda *i: x[tuple(i[p] for p in inverse)], "permute")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.transpose(arrays[0], self.axes)


@dataclass(frozen=True, slots=True)
class BroadcastTo(OperatorSpec):
    """Broadcast along new leading dims and dims of 1."""

    shape: tuple[Expr, ...]
    name: ClassVar[str] = "broadcast_to"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.ndim is not None and x.ndim > len(self.shape):
            raise DeduceError(f"broadcast_to: expected at most {len(self.shape)} dims, got {x!r}")
        if x.shape is not None:
            offset = len(self.shape) - len(x.shape)
            for p, d in enumerate(x.shape):
                self._require(d, self.shape[offset + p], f"broadcast_to: dim {offset + p}", ctx)
        return TensorInfo(self.shape, x.dtype)

    def _require(self, dim: Expr, target: Expr, what: str, ctx: Deduction) -> None:
        """Require `dim` to be `target` or 1; an undecided condition becomes a run-time check."""
        proof = Proof.YES if as_int(dim) == 1 else ctx.equal(dim, target)
        if proof is Proof.NO and ctx.equal(dim, 1) is Proof.NO:
            raise DeduceError(f"{what}: expected equal dims or a 1, got {dim!r} and {target!r}")
        if proof is not Proof.YES:
            message = f"{what}: expected {dim!r} to be {target!r} or 1, got {{0}} and {{1}}"
            ctx.require(or_(eq(dim, target), eq(dim, 1)), message, dim, target)

    def build(self, b: OperatorBuilder) -> None:
        dtype = b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", self.shape, dtype)
        b.compute(y, lambda *i: broadcast_index(x, i, self.shape), "broadcast_to")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.broadcast_to(arrays[0], _integers(self.shape, "broadcast_to"))


@dataclass(frozen=True, slots=True)
class Concat(OperatorSpec):
    """Concatenation along `axis`; other dims equal."""

    axis: int = 0
    name: ClassVar[str] = "concat"
    half_policy: ClassVar[HalfPolicy] = "pass_through"

    def _tensors(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        tensors = all_tensors(infos)
        if not tensors:
            raise DeduceError(f"concat: expected at least one tensor and only tensors, got {list(infos)!r}")
        return tensors

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        parts = self._tensors(infos)
        dtype = self.same_dtype(parts)
        ndims = {p.ndim for p in parts if p.ndim is not None}
        if len(ndims) > 1:
            raise DeduceError(f"concat: expected equal numbers of dims, got {sorted(ndims)}")
        shapes = [p.shape for p in parts if p.shape is not None]
        if len(shapes) != len(parts):
            return TensorInfo(None, dtype, next(iter(ndims), None))
        axis = axis_index(self.name, self.axis, len(shapes[0]))
        total: Expr = const(0)
        for number, s in enumerate(shapes):
            for p, d in enumerate(s):
                if p != axis:
                    ctx.require_equal(shapes[0][p], d, f"concat: dim {p} of arguments 0 and {number}")
            total = add(total, s[axis])
        dims = (*shapes[0][:axis], ctx.simplify(total), *shapes[0][axis + 1 :])
        return TensorInfo(dims, dtype)

    def build(self, b: OperatorBuilder) -> None:
        dtype = b.dtype(0)
        shapes = [shape_of(i) for i in b.infos]
        axis = axis_index(self.name, self.axis, len(shapes[0]))
        xs = [b.argument(p, f"x{p}") for p in range(len(shapes))]
        ends: list[Expr] = []
        for s in shapes:
            ends.append(s[axis] if not ends else add(ends[-1], s[axis]))
        y = b.output("y", (*shapes[0][:axis], b.ctx.simplify(ends[-1]), *shapes[0][axis + 1 :]), dtype)

        # one block per argument, so that no element of an empty or neighbouring argument is read
        for p, x in enumerate(xs):
            start = const(0) if p == 0 else ends[p - 1]
            b.place(y, {axis: start}, x, f"concat_{p}")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(list(arrays), axis=self.axis)


def _cut(b: TensorBuilder, x: Tensor, y: Tensor, axis: int, start: Expr, name: str, step: int = 1) -> None:
    b.compute(y, lambda *i: x[(*i[:axis], add(mul(i[axis], step), start), *i[axis + 1 :])], name)


@dataclass(frozen=True, slots=True)
class Split(OperatorSpec):
    """Split into `parts` pieces along `axis`, each of ceil(n / parts); the last ones may be shorter or empty."""

    parts: int
    axis: int = 0
    name: ClassVar[str] = "split"
    arity: ClassVar[int] = 1

    def pieces(self, n: Expr, ctx: Deduction) -> tuple[tuple[Expr, Expr], ...]:
        """Return (start, size) of every piece of a dim of size `n`."""
        size = ctx.simplify(ceildiv(n, self.parts))
        if ctx.equal(mul(size, self.parts), n) is Proof.YES:
            return tuple((ctx.simplify(mul(size, i)), size) for i in range(self.parts))
        exact = ctx.simplify(n // self.parts)
        if ctx.equal(mul(exact, self.parts), n) is Proof.YES:
            return tuple((ctx.simplify(mul(exact, i)), exact) for i in range(self.parts))
        return tuple(
            (
                ctx.simplify(minimum(mul(size, i), n)),
                ctx.simplify(maximum(minimum(size, sub(n, mul(size, i))), 0)),
            )
            for i in range(self.parts)
        )

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.parts < 1:
            raise DeduceError(f"split: expected at least 1 part, got {self.parts}")
        if x.shape is None:
            return TupleInfo((TensorInfo(None, x.dtype, x.ndim),) * self.parts)
        axis = axis_index(self.name, self.axis, len(x.shape))
        return TupleInfo(
            tuple(
                TensorInfo((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
                for _, size in self.pieces(x.shape[axis], ctx)
            )
        )

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.argument(0, "x")
        pieces = self.pieces(shape[axis], b.ctx)
        outs = [b.output(f"y{p}", (*shape[:axis], s, *shape[axis + 1 :]), dtype) for p, (_, s) in enumerate(pieces)]
        for p, (y, (start, _)) in enumerate(zip(outs, pieces, strict=True)):
            _cut(b, x, y, axis, start, f"split_{p}")

    def evaluate(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        (x,) = arrays
        n = x.shape[self.axis]
        size = -(-n // self.parts)
        edges = [min(size * i, n) for i in range(self.parts + 1)]
        axis = self.axis % x.ndim
        cut = (slice(None),) * axis
        return tuple(x[(*cut, slice(a, e))] for a, e in zip(edges, edges[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Slice(OperatorSpec):
    """Slice `x[..., begin:end:step, ...]` along `axis`; both ends are clamped to the size, as in Python.

    Ends are at least 0, or at least -1 with a step below 0: an `end` of -1 then includes element 0."""

    axis: int
    begin: Expr
    end: Expr
    step: int = 1
    name: ClassVar[str] = "slice"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def _window(self, n: Expr, ctx: Deduction) -> tuple[Expr, Expr]:
        """Return (start, size) within a dim of size `n`."""
        if self.step < 0:
            start = _least(self.begin, sub(n, 1), ctx)
            span = ctx.simplify(sub(start, self.end))
        else:
            stop = _least(self.end, n, ctx)
            start = _least(self.begin, n, ctx)
            span = ctx.simplify(sub(stop, start))
        if ctx.proves(ge(span, 0)) is not Proof.YES:
            # min(begin, n) may be replaced by begin under max(.., 0): when begin > n both give an empty slice
            span = maximum(span if self.step < 0 else ctx.simplify(sub(stop, self.begin)), 0)
        return start, span if self.step == 1 else ctx.simplify(ceildiv(span, abs(self.step)))

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.step == 0:
            raise DeduceError("slice: expected a step other than 0, got 0")
        least = 0 if self.step > 0 else -1
        for what, e in (("begin", self.begin), ("end", self.end)):
            ctx.require_at_least(e, least, f"slice: {what}")
        if x.shape is None:
            return TensorInfo(None, x.dtype, x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        _, size = self._window(x.shape[axis], ctx)
        return TensorInfo((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.argument(0, "x")
        start, size = self._window(shape[axis], b.ctx)
        y = b.output("y", (*shape[:axis], size, *shape[axis + 1 :]), dtype)
        _cut(b, x, y, axis, start, "slice", self.step)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        begin, end = _integers((self.begin, self.end), "slice")
        axis = self.axis % arrays[0].ndim
        if self.step < 0:
            where = np.arange(min(begin, arrays[0].shape[axis] - 1), end, self.step)
            return np.take(arrays[0], where, axis=axis)
        return np.asarray(arrays[0][(*(slice(None),) * axis, slice(begin, end, self.step))])


def _least(a: Expr, b: Expr, ctx: Deduction) -> Expr:
    """Return min(a, b), simplified when an order is proved."""
    if ctx.proves(le(a, b)) is Proof.YES:
        return a
    return b if ctx.proves(le(b, a)) is Proof.YES else ctx.simplify(minimum(a, b))


VIEWS: tuple[type[OperatorSpec], ...] = (Reshape, Flatten, ExpandDims)
"""Views: operators whose result is the memory of the argument under other dims."""
