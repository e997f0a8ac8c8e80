"""Affine quantisation, dequantisation, and packing of 4-bit integers.

Tests: `tests/ir/op/test_semantics.py`.
"""

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
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, all_tensors
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import QUIET, Array, Deduction, OperatorBuilder, OperatorSpec, axis_index, float_result
from relax_tune.ir.op.math.small_floats import narrow, narrow_array


@dataclass(frozen=True, slots=True)
class Scaled(OperatorSpec):
    """Affine quantisation: integers `q` for floats `x = (q - zero) * scale`.

    Arguments: tensor, scales, and optional zero points of the integer type (default 0).

    Attributes:
        axis: None: one scale without dims; else one for each index along it, (n,).
        group: with `axis`, one scale for each run of `group` indices along it: dims of the tensor, ceil(n / group) at `axis`.
    """

    axis: int | None = None
    group: int | None = None

    def takes_small(self) -> bool:
        return True

    def _arguments(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        tensors = all_tensors(infos)
        if not 2 <= len(tensors) <= 3:
            raise DeduceError(f"{self.name}: expected a tensor, scales and perhaps zero points, got {list(infos)!r}")
        if tensors[1].dtype is not None and not tensors[1].dtype.is_float:
            raise DeduceError(f"{self.name}: expected floating-point scales, got {tensors[1]!r}; cast them first")
        if self.group is not None and (self.axis is None or self.group < 1):
            raise DeduceError(f"{self.name}: expected an axis and at least 1 index in a group, got {self!r}")
        return tensors

    def _check_dims(self, infos: Sequence[TensorInfo], ctx: Deduction) -> None:
        """Require scales and zero points of the dims that `axis` and `group` imply."""
        x = infos[0].shape
        if x is None:
            return
        expected: tuple[Expr, ...] = ()
        if self.axis is not None:
            axis = axis_index(self.name, self.axis, len(x))
            expected = (x[axis],)
            if self.group is not None:
                expected = (*x[:axis], ctx.simplify(ceildiv(x[axis], self.group)), *x[axis + 1 :])
        for what, t in zip(("scales", "zero points"), infos[1:]):
            if t.shape is None:
                continue
            if len(t.shape) != len(expected):
                raise DeduceError(f"{self.name}: expected {len(expected)} dims in {what}, got {t!r}")
            for p, (a, b) in enumerate(zip(expected, t.shape)):
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

    Attributes:
        saturate: saturation of small floats.
    """

    dtype: DType = i8
    bits: int = 8
    saturate: bool = field(default=True, metadata=QUIET)
    name: ClassVar[str] = "quantize"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        tensors = self._arguments(infos)
        x = tensors[0]
        if self.dtype not in (i8, u8, i16, u16, *SMALL) or self.dtype is f8e8m0 or self.bits not in (2, 4, 8):
            known = " ".join(str(d) for d in SMALL if d is not f8e8m0)
            raise DeduceError(
                f"quantize: expected {known}, i16, u16, or i8 or u8 of 2, 4 or 8 bits, got {self.dtype} of {self.bits}"
            )
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"quantize: expected a floating-point tensor, got {x!r}; cast it first")
        self.same_dtype(tensors[:2])
        if len(tensors) == 3 and tensors[2].dtype not in (None, self.dtype):
            raise DeduceError(f"quantize: expected zero points of {self.dtype}, got {tensors[2]!r}")
        self._check_dims(tensors, ctx)
        return TensorInfo(x.shape, self.dtype, x.ndim)

    def _range(self) -> tuple[int, int]:
        if self.dtype.bits != 8:
            return self.dtype.limits
        half = 1 << (self.bits - 1)
        return (0, 2 * half - 1) if self.dtype.is_unsigned else (-half, half - 1)

    def build(self, b: OperatorBuilder) -> None:
        shape, source = b.shape(0), b.dtype(0)
        wide = f64 if source is f64 else f32
        x, scale, *zero = (b.argument(p, name) for p, name in enumerate(("x", "scale", "zero")[: len(b.infos)]))
        y = b.output("y", shape, self.dtype)
        low, high = (const(n, wide) for n in self._range())

        def value(*i: Expr) -> Expr:
            scaled = div(_as(x[i], wide), _as(self._at(scale, i), wide))
            scaled = scaled if self.dtype.is_float else call("rint", scaled)
            # The zero point is added after rounding: a sum before it could change a tie.
            scaled = add(scaled, cast(self._at(zero[0], i), wide)) if zero else scaled
            if self.dtype.is_float:
                return narrow(scaled, self.dtype, self.saturate)
            # Limited as a float, since a cast of a float beyond the type is undefined in C.
            return cast(minimum(maximum(scaled, low), high), self.dtype)

        b.compute(y, value, "quantize")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, scale = (a if a.dtype == np.float64 else a.astype(np.float32) for a in arrays[:2])
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = x / self._spread(scale, x.shape)
        scaled = scaled if self.dtype.is_float else np.rint(scaled)
        if len(arrays) == 3:
            scaled = scaled + self._spread(arrays[2].astype(x.dtype), x.shape)
        if self.dtype.is_float:
            return narrow_array(scaled, self.dtype, self.saturate)
        return np.asarray(converted(np.clip(scaled, *self._range()), self.dtype))


@dataclass(frozen=True, slots=True)
class Dequantize(Scaled):
    """Dequantisation: `(q - zero) * scale`, of the type of the scales, computed in f32 (f64 for 32-bit integers)."""

    name: ClassVar[str] = "dequantize"
    unpacks: ClassVar[bool] = True

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        tensors = self._arguments(infos)
        q = tensors[0]
        if q.dtype not in (None, i8, u8, i16, u16, i32, *SMALL):
            known = " ".join(map(str, SMALL))
            raise DeduceError(
                f"dequantize: expected a tensor of i8, u8, i16, u16, i32 or {known}, got {q!r}; cast it first"
            )
        if len(tensors) == 3 and None not in (q.dtype, tensors[2].dtype) and tensors[2].dtype is not q.dtype:
            raise DeduceError(f"dequantize: expected zero points of {q.dtype}, got {tensors[2]!r}")
        self._check_dims(tensors, ctx)
        return TensorInfo(q.shape, tensors[1].dtype, q.ndim)

    def build(self, b: OperatorBuilder) -> None:
        shape, target = b.shape(0), b.dtype(1)
        # float32 holds no integer beyond 2^24 exactly; the sums of quantised products are int32.
        wide = f64 if target is f64 or b.dtype(0) is i32 else f32
        q, scale, *zero = (b.argument(p, name) for p, name in enumerate(("q", "scale", "zero")[: len(b.infos)]))
        y = b.output("y", shape, target)

        def value(*i: Expr) -> Expr:
            centred = cast(q[i], wide)
            centred = sub(centred, cast(self._at(zero[0], i), wide)) if zero else centred
            return _as(mul(centred, _as(self._at(scale, i), wide)), target)

        b.compute(y, value, "dequantize")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        q = arrays[0].astype(np.float64)
        if len(arrays) == 3:
            q = q - self._spread(arrays[2].astype(np.float64), q.shape)
        return float_result(q * self._spread(arrays[1], q.shape).astype(np.float64), arrays, arrays[1].dtype)


@dataclass(frozen=True, slots=True)
class Pack4(OperatorSpec):
    """Packing of two 4-bit integers in a byte: index `2 * i` along `axis` in the low half of byte `i`, the next in the high half.

    The argument is i8 or u8; its low four bits are packed. An odd end is padded with 0."""

    axis: int
    name: ClassVar[str] = "pack4"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if x.dtype not in (None, i8, u8):
            raise DeduceError(f"pack4: expected a tensor of i8 or u8, got {x!r}; cast it first")
        if x.shape is None:
            return TensorInfo(None, u8, x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        return TensorInfo((*x.shape[:axis], ctx.simplify(ceildiv(x.shape[axis], 2)), *x.shape[axis + 1 :]), u8)

    def build(self, b: OperatorBuilder) -> None:
        shape = b.shape(0)
        axis = axis_index(self.name, self.axis, len(shape))
        size = shape[axis]
        x = b.argument(0, "x")
        half = b.ctx.simplify(ceildiv(size, 2))
        y = b.output("y", (*shape[:axis], half, *shape[axis + 1 :]), u8)

        def value(*i: Expr) -> Expr:
            def bits(at: Expr) -> Expr:
                return floormod(cast(x[(*i[:axis], at, *i[axis + 1 :])], i32), const(16, i32))

            low, behind = mul(i[axis], 2), add(mul(i[axis], 2), 1)
            # Both sides of a selection are evaluated, so the index stays inside for an odd size too.
            high = select(lt(behind, size), bits(minimum(behind, sub(size, 1))), const(0, i32))
            return cast(add(bits(low), mul(high, const(16, i32))), u8)

        b.compute(y, value, "pack4")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x = np.moveaxis(arrays[0].view(np.uint8) & 15, self.axis, 0)
        if len(x) % 2:
            x = np.concatenate([x, np.zeros_like(x[:1])])
        # The first number of a pair has the low bits, as in ONNX (its `int4.md`).
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
            raise DeduceError(f"unpack4: expected bytes, u8, got {x!r}; cast them first")
        if x.shape is None:
            return TensorInfo(None, self._type(), x.ndim)
        axis = axis_index(self.name, self.axis, len(x.shape))
        ctx.require_equal(ceildiv(self.size, 2), x.shape[axis], f"unpack4: bytes for {self.size!r} numbers")
        return TensorInfo((*x.shape[:axis], self.size, *x.shape[axis + 1 :]), self._type())

    def build(self, b: OperatorBuilder) -> None:
        shape = b.shape(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.argument(0, "x")
        y = b.output("y", (*shape[:axis], self.size, *shape[axis + 1 :]), self._type())

        def value(*i: Expr) -> Expr:
            byte = cast(x[(*i[:axis], floordiv(i[axis], 2), *i[axis + 1 :])], i32)
            sixteen = const(16, i32)
            bits = select(eq(floormod(i[axis], 2), 0), floormod(byte, sixteen), floordiv(byte, sixteen))
            if self.signed:
                bits = sub(floormod(add(bits, const(8, i32)), sixteen), const(8, i32))
            return cast(bits, self._type())

        b.compute(y, value, "unpack4")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        size = as_int(self.size)
        if size is None:
            raise DeduceError(f"unpack4: expected a number to evaluate with, got {self.size!r}; bind its symbols first")
        x = np.moveaxis(arrays[0], self.axis, 0)
        both = np.stack([x & 15, x >> 4], axis=1).reshape(2 * len(x), *x.shape[1:])[:size]
        # Four bits in two's complement: 8 to 15 stand for -8 to -1.
        numbers = ((both + 8) & 15).astype(np.int8) - np.int8(8) if self.signed else both
        return np.moveaxis(numbers, 0, self.axis).astype(self._type().numpy)


def _as(e: Expr, dtype: DType) -> Expr:
    return e if e.dtype is dtype else cast(e, dtype)
