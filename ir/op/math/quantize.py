"""Affine quantisation, dequantisation, and packing of 4-bit integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import SMALL, DType, f8e8m0, f32, f64, i8, i16, i32, u8, u16
from relax_tune.ir.core.expr import (
    Expr,
    add,
    as_int,
    call,
    cast,
    ceildiv,
    const,
    div,
    eq,
    floordiv,
    floormod,
    lt,
    maximum,
    minimum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, all_tensors
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.op.base import (
    QUIET,
    Array,
    Deduction,
    OperatorSpec,
    axis_index,
    dtype_of,
    float_result,
    is_const,
    shape_of,
)
from relax_tune.ir.op.math.small_floats import narrow, narrow_array


@dataclass(frozen=True, slots=True)
class Scaled(OperatorSpec):
    """Affine quantisation: integers `q` for floats `x = (q - zero) * scale`.

    Arguments: tensor, scales, and optional zero points of the integer type (default 0).

    axis: None: one scale without dims; else one for each index along it, (n,)
    group: with `axis`, one scale for each run of `group` indices along it: dims of the tensor, ceil(n / group) at `axis`
    """

    axis: int | None = None
    group: int | None = None

    def takes_small(self) -> bool:
        return True

    def _arguments(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        found = all_tensors(infos)
        if not 2 <= len(found) <= 3:
            raise DeduceError(f"{self.name}: wanted a tensor, scales and perhaps zero points, found {list(infos)!r}")
        if found[1].dtype is not None and not found[1].dtype.is_float:
            raise DeduceError(f"{self.name}: wanted floating-point scales, found {found[1]!r}; cast them first")
        if self.group is not None and (self.axis is None or self.group < 1):
            raise DeduceError(f"{self.name}: wanted an axis and at least 1 index in a group, found {self!r}")
        return found

    def _check_dims(self, infos: Sequence[TensorInfo], ctx: Deduction) -> None:
        """Require scales and zero points of the dims that `axis` and `group` imply."""
        x = infos[0].shape
        if x is None:
            return
        wanted: tuple[Expr, ...] = ()
        if self.axis is not None:
            axis = axis_index(self.name, self.axis, len(x))
            wanted = (x[axis],)
            if self.group is not None:
                wanted = (*x[:axis], ctx.simplify(ceildiv(x[axis], self.group)), *x[axis + 1 :])
        for what, t in zip(("scales", "zero points"), infos[1:]):
            if t.shape is None:
                continue
            if len(t.shape) != len(wanted):
                raise DeduceError(f"{self.name}: wanted {len(wanted)} dims in {what}, found {t!r}")
            for p, (a, b) in enumerate(zip(wanted, t.shape)):
                ctx.require_equal(a, b, f"{self.name}: dim {p} of {what}")

    def _at(self, t: Tensor, place: Sequence[Expr]) -> Expr:
        """Read the scale or zero point of the element at `place`."""
        if self.axis is None:
            return t[()]
        axis = self.axis % len(place)
        if self.group is None:
            return t[place[axis]]
        return t[(*place[:axis], floordiv(place[axis], const(self.group)), *place[axis + 1 :])]

    def _spread(self, t: Array, shape: Sequence[int]) -> Array:
        """Broadcast scales or zero points to an array of `shape`."""
        if self.axis is None:
            return t
        axis = self.axis % len(shape)
        if self.group is None:
            return t.reshape([-1 if p == axis else 1 for p in range(len(shape))])
        return np.take(np.repeat(t, self.group, axis=axis), np.arange(shape[axis]), axis=axis)


@dataclass(frozen=True, slots=True)
class Quantize(Scaled):
    """Quantisation: `round(x / scale) + zero`, ties to even, saturated to `bits` bits.

    16-bit floats are divided and rounded in f32. To small floats it is `x / scale + zero`, rounded as by a cast.

    saturate: saturation of small floats"""

    dtype: DType = i8
    bits: int = 8
    saturate: bool = field(default=True, metadata=QUIET)
    name: ClassVar[str] = "quantize"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        found = self._arguments(infos)
        x = found[0]
        if self.dtype not in (i8, u8, i16, u16, *SMALL) or self.dtype is f8e8m0 or self.bits not in (2, 4, 8):
            known = " ".join(str(d) for d in SMALL if d is not f8e8m0)
            raise DeduceError(
                f"quantize: wanted {known}, i16, u16, or i8 or u8 of 2, 4 or 8 bits, found {self.dtype} of {self.bits}"
            )
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"quantize: wanted a floating-point tensor, found {x!r}; cast it first")
        self.same_dtype(found[:2])
        if len(found) == 3 and found[2].dtype not in (None, self.dtype):
            raise DeduceError(f"quantize: wanted zero points of {self.dtype}, found {found[2]!r}")
        self._check_dims(found, ctx)
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def _range(self) -> tuple[int, int]:
        if self.dtype.bits != 8:
            return self.dtype.limits
        half = 1 << (self.bits - 1)
        return (0, 2 * half - 1) if self.dtype.is_unsigned else (-half, half - 1)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape, source = shape_of(infos[0]), dtype_of(infos[0])
        wide = f64 if source is f64 else f32
        x, scale, *zero = (
            b.input(what, shape_of(i), dtype_of(i), is_const(consts, p))
            for p, (what, i) in enumerate(zip(("x", "scale", "zero"), infos))
        )
        y = b.output("y", shape, self.dtype)
        low, high = (const(n, wide) for n in self._range())

        def value(*i: Expr) -> Expr:
            found = div(_as(x[i], wide), _as(self._at(scale, i), wide))
            found = found if self.dtype.is_float else call("rint", found)
            found = add(found, cast(self._at(zero[0], i), wide)) if zero else found
            if self.dtype.is_float:
                return narrow(found, self.dtype, self.saturate)
            return cast(minimum(maximum(found, low), high), self.dtype)

        b.compute(y, value, "quantize")
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, scale = (a if a.dtype == np.float64 else a.astype(np.float32) for a in arrays[:2])
        with np.errstate(divide="ignore", invalid="ignore"):
            found = x / self._spread(scale, x.shape)
        found = found if self.dtype.is_float else np.rint(found)
        if len(arrays) == 3:
            found = found + self._spread(arrays[2].astype(x.dtype), x.shape)
        if self.dtype.is_float:
            return narrow_array(found, self.dtype, self.saturate)
        return np.asarray(converted(np.clip(found, *self._range()), self.dtype))


@dataclass(frozen=True, slots=True)
class Dequantize(Scaled):
    """Dequantisation: `(q - zero) * scale`, of the type of the scales, computed in f32 (f64 for 32-bit integers)."""

    name: ClassVar[str] = "dequantize"
    unpacks: ClassVar[bool] = True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        found = self._arguments(infos)
        q = found[0]
        if q.dtype not in (None, i8, u8, i16, u16, i32, *SMALL):
            known = " ".join(map(str, SMALL))
            raise DeduceError(
                f"dequantize: wanted a tensor of i8, u8, i16, u16, i32 or {known}, found {q!r}; cast it first"
            )
        if len(found) == 3 and None not in (q.dtype, found[2].dtype) and found[2].dtype is not q.dtype:
            raise DeduceError(f"dequantize: wanted zero points of {q.dtype}, found {found[2]!r}")
        self._check_dims(found, ctx)
        return TensorInfo(q.shape, found[1].dtype, q.ndim)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape, target = shape_of(infos[0]), dtype_of(infos[1])
        wide = f64 if target is f64 or dtype_of(infos[0]) is i32 else f32
        q, scale, *zero = (
            b.input(what, shape_of(i), dtype_of(i), is_const(consts, p))
            for p, (what, i) in enumerate(zip(("q", "scale", "zero"), infos))
        )
        y = b.output("y", shape, target)

        def value(*i: Expr) -> Expr:
            found = cast(q[i], wide)
            found = sub(found, cast(self._at(zero[0], i), wide)) if zero else found
            return _as(mul(found, _as(self._at(scale, i), wide)), target)

        b.compute(y, value, "dequantize")
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        q = arrays[0].astype(np.float64)
        if len(arrays) == 3:
            q = q - self._spread(arrays[2].astype(np.float64), q.shape)
        return float_result(q * self._spread(arrays[1], q.shape).astype(np.float64), arrays, arrays[1].dtype)


@dataclass(frozen=True, slots=True)
class Pack4(OperatorSpec):
    """Packing of two 4-bit integers in a byte: index `2 * i` along `axis` in the low half of byte `i`, the next in the high half.

    The argument is i8 or u8; its low four bits are kept. An odd end is padded with 0."""

    axis: int
    name: ClassVar[str] = "pack4"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype not in (None, i8, u8):
            raise DeduceError(f"pack4: wanted a tensor of i8 or u8, found {x!r}; cast it first")
        if x.shape is None:
            return TensorInfo(None, u8, x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        return TensorInfo((*x.shape[:axis], ctx.simplify(ceildiv(x.shape[axis], 2)), *x.shape[axis + 1 :]), u8)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape = shape_of(infos[0])
        axis = axis_index(self.name, self.axis, len(shape))
        size = shape[axis]
        x = b.input("x", shape, dtype_of(infos[0]), is_const(consts, 0))
        half = (ctx or Deduction()).simplify(ceildiv(size, 2))
        y = b.output("y", (*shape[:axis], half, *shape[axis + 1 :]), u8)

        def value(*i: Expr) -> Expr:
            def bits(at: Expr) -> Expr:
                return floormod(cast(x[(*i[:axis], at, *i[axis + 1 :])], i32), const(16, i32))

            low, behind = mul(i[axis], 2), add(mul(i[axis], 2), 1)
            high = select(lt(behind, size), bits(minimum(behind, sub(size, 1))), const(0, i32))
            return cast(add(bits(low), mul(high, const(16, i32))), u8)

        b.compute(y, value, "pack4")
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = np.moveaxis(arrays[0].view(np.uint8) & 15, self.axis, 0)
        if len(x) % 2:
            x = np.concatenate([x, np.zeros_like(x[:1])])
        return np.moveaxis(x[0::2] | (x[1::2] << 4), 0, self.axis).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Unpack4(OperatorSpec):
    """Inverse of `pack4`: `size` numbers along `axis`, i8 in -8 .. 7 if `signed`, else u8 in 0 .. 15."""

    axis: int
    size: Expr
    signed: bool = True
    name: ClassVar[str] = "unpack4"
    arity: ClassVar[int] = 1
    unpacks: ClassVar[bool] = True

    def _type(self) -> DType:
        return i8 if self.signed else u8

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype not in (None, u8):
            raise DeduceError(f"unpack4: wanted bytes, u8, found {x!r}; cast them first")
        if x.shape is None:
            return TensorInfo(None, self._type(), x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        ctx.require_equal(ceildiv(self.size, 2), x.shape[axis], f"unpack4: bytes for {self.size!r} numbers")
        return TensorInfo((*x.shape[:axis], self.size, *x.shape[axis + 1 :]), self._type())

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shape = shape_of(infos[0])
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.input("x", shape, u8, is_const(consts, 0))
        y = b.output("y", (*shape[:axis], self.size, *shape[axis + 1 :]), self._type())

        def value(*i: Expr) -> Expr:
            byte = cast(x[(*i[:axis], floordiv(i[axis], 2), *i[axis + 1 :])], i32)
            sixteen = const(16, i32)
            bits = select(eq(floormod(i[axis], 2), 0), floormod(byte, sixteen), floordiv(byte, sixteen))
            if self.signed:
                bits = sub(floormod(add(bits, const(8, i32)), sixteen), const(8, i32))
            return cast(bits, self._type())

        b.compute(y, value, "unpack4")
        return b.finish()

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        size = as_int(self.size)
        if size is None:
            raise DeduceError(f"unpack4: wanted a number to evaluate with, found {self.size!r}; bind its symbols first")
        x = np.moveaxis(arrays[0], self.axis, 0)
        both = np.stack([x & 15, x >> 4], axis=1).reshape(2 * len(x), *x.shape[1:])[:size]
        found = ((both + 8) & 15).astype(np.int8) - np.int8(8) if self.signed else both
        return np.moveaxis(found, 0, self.axis).astype(self._type().numpy)


def _as(e: Expr, dtype: DType) -> Expr:
    return e if e.dtype is dtype else cast(e, dtype)
