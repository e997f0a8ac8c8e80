"""Comparisons, boolean logic, and selection between two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, and_, eq, le, lt, ne, not_, or_, select
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
from relax_tune.ir.op.math.elementwise import Binary, Unary, broadcast_dims, broadcast_index


@dataclass(frozen=True, slots=True)
class Compare(Binary):
    """Comparison of operands of one dtype, with broadcasting; the result is bool."""

    numbers_only: ClassVar[bool] = False
    halves: ClassVar[Halves] = "never"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        found = Binary.infer(self, infos, ctx)
        assert isinstance(found, TensorInfo)
        return TensorInfo(found.shape, bool_, found.ndim)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shapes, dtype = [shape_of(i) for i in infos], dtype_of(infos[0])
        dims, _ = broadcast_dims(self.name, shapes[0], shapes[1], ctx or Deduction())
        if dims is None:
            raise DeduceError(
                f"{self.name}: wanted dims that broadcast for certain, found {infos[0]!r} and {infos[1]!r}"
            )
        x, y = (b.input(n, s, dtype, is_const(consts, p)) for p, (n, s) in enumerate(zip("xy", shapes, strict=True)))
        z = b.output("z", dims, bool_)
        b.compute(z, lambda *i: self.scalar(broadcast_index(x, i, dims), broadcast_index(y, i, dims)), self.name)
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return np.asarray(self.array(*arrays), bool)


@dataclass(frozen=True, slots=True)
class Equal(Compare):
    name: ClassVar[str] = "equal"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return eq(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x == y)


@dataclass(frozen=True, slots=True)
class NotEqual(Compare):
    name: ClassVar[str] = "not_equal"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return ne(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x != y)


@dataclass(frozen=True, slots=True)
class Less(Compare):
    name: ClassVar[str] = "less"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return lt(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x < y)


@dataclass(frozen=True, slots=True)
class LessEqual(Compare):
    name: ClassVar[str] = "less_equal"

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return le(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x <= y)


@dataclass(frozen=True, slots=True)
class Logical(Compare):
    """Logic on bools."""

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        for info in self.tensors(infos):
            if info.dtype not in (None, bool_):
                raise DeduceError(f"{self.name}: wanted tensors of truth values, found {info!r}; compare or cast first")
        return Compare.infer(self, infos, ctx)


@dataclass(frozen=True, slots=True)
class LogicalAnd(Logical):
    name: ClassVar[str] = "logical_and"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return and_(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x & y)


@dataclass(frozen=True, slots=True)
class LogicalOr(Logical):
    name: ClassVar[str] = "logical_or"
    commutative: ClassVar[bool] = True

    def scalar(self, x: Expr, y: Expr) -> Expr:
        return or_(x, y)

    def array(self, x: Array, y: Array) -> Array:
        return np.asarray(x | y)


@dataclass(frozen=True, slots=True)
class LogicalNot(Unary):
    name: ClassVar[str] = "logical_not"
    floats_only: ClassVar[bool] = False

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype not in (None, bool_):
            raise DeduceError(f"logical_not: wanted a tensor of truth values, found {x!r}; compare or cast first")
        return x

    def scalar(self, x: Expr) -> Expr:
        return not_(x)

    def array(self, x: Array) -> Array:
        return np.logical_not(x)


@dataclass(frozen=True, slots=True)
class Where(OperatorSpec):
    """Select `x` where `cond`, else `y`, with broadcasting: cond (...) bool, x and y of one dtype."""

    name: ClassVar[str] = "where"
    halves: ClassVar[Halves] = "allowed"
    arity: ClassVar[int] = 3

    def _dims(self, shapes: Sequence[Sequence[Expr]], ctx: Deduction) -> tuple[Expr, ...] | None:
        both, _ = broadcast_dims(self.name, shapes[1], shapes[2], ctx)
        return None if both is None else broadcast_dims(self.name, shapes[0], both, ctx)[0]

    def takes_small(self) -> bool:
        return True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        cond, x, y = self.tensors(infos)
        if cond.dtype not in (None, bool_):
            raise DeduceError(f"where: wanted truth values as argument 0, found {cond!r}; compare or cast first")
        dtype = self.same_dtype((x, y))
        shapes = [t.shape for t in (cond, x, y) if t.shape is not None]
        if len(shapes) < 3:
            ndims = [t.ndim for t in (cond, x, y) if t.ndim is not None]
            return TensorInfo(None, dtype, max(ndims) if len(ndims) == 3 else None)
        return TensorInfo(self._dims(shapes, ctx), dtype, max(map(len, shapes)))

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shapes = [shape_of(i) for i in infos]
        dims = self._dims(shapes, ctx or Deduction())
        if dims is None:
            raise DeduceError(f"where: wanted dims that broadcast for certain, found {list(infos)!r}")
        names = ("cond", "x", "y")
        cond, x, y = (
            b.input(n, s, dtype_of(infos[p]), is_const(consts, p)) for p, (n, s) in enumerate(zip(names, shapes))
        )
        z = b.output("z", dims, dtype_of(infos[1]))
        b.compute(z, lambda *i: select(*(broadcast_index(t, i, dims) for t in (cond, x, y))), "where")
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        cond, x, y = arrays
        return float_result(np.where(cond, wide(x), wide(y)), arrays, np.result_type(x.dtype, y.dtype))
