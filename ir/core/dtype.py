"""Element types, shared by both levels of the program.

Tests: `tests/ir/core/test_expr.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from relax_tune.errors import ParseError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A scalar element type, interned: equal only to itself.

    Attributes:
        name: name in NumPy or ml_dtypes, such as `bfloat16`.
        short: printed form, such as `f32`.
    """

    name: str
    short: str

    def __str__(self) -> str:
        return self.short

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.name)

    @property
    def bytes(self) -> int:
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return "float" in self.name

    @property
    def is_half(self) -> bool:
        """True for a 16-bit float: stored as such, computed in f32."""
        return self.short in ("f16", "bf16")

    @property
    def is_small(self) -> bool:
        """True for a type of at most 8 bits that can be stored, copied and cast; no arithmetic uses it."""
        return self.short in _SMALL

    @property
    def is_packed(self) -> bool:
        """True for a type that is unpacked to a wider one for arithmetic: 16-bit floats and small types."""
        return self.short in _PACKED

    @property
    def bits(self) -> int:
        """Bits of a value. A value of less than 8 bits occupies a byte, whose high bits are 0."""
        return _SMALL.get(self.short) or 8 * self.bytes

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger float of this type."""
        return float(ml_dtypes.finfo(self.numpy).eps)

    @property
    def lowest(self) -> float:
        """The most negative finite float of this type."""
        return float(ml_dtypes.finfo(self.numpy).min)

    @property
    def highest(self) -> float:
        """The largest finite float of this type."""
        return float(ml_dtypes.finfo(self.numpy).max)

    @property
    def is_int(self) -> bool:
        return self.short[0] in "iu"

    @property
    def is_unsigned(self) -> bool:
        return self.short[0] == "u"

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest number of this integer type."""
        half = 1 << (self.bits - 1)
        return (0, 2 * half - 1) if self.is_unsigned else (-half, half - 1)

    def holds(self, other: DType) -> bool:
        """Return whether this integer type has every number of another one."""
        (low, high), (least, greatest) = self.limits, other.limits
        return low <= least and greatest <= high


bool_ = DType("bool", "bool")
i8 = DType("int8", "i8")
u8 = DType("uint8", "u8")
i16 = DType("int16", "i16")
u16 = DType("uint16", "u16")
i32 = DType("int32", "i32")
u32 = DType("uint32", "u32")
u64 = DType("uint64", "u64")
i64 = DType("int64", "i64")
f16 = DType("float16", "f16")
bf16 = DType("bfloat16", "bf16")
f32 = DType("float32", "f32")
f64 = DType("float64", "f64")
f8e4m3fn = DType("float8_e4m3fn", "f8e4m3fn")
f8e4m3fnuz = DType("float8_e4m3fnuz", "f8e4m3fnuz")
f8e5m2 = DType("float8_e5m2", "f8e5m2")
f8e5m2fnuz = DType("float8_e5m2fnuz", "f8e5m2fnuz")
f8e8m0 = DType("float8_e8m0fnu", "f8e8m0")
f4e2m1 = DType("float4_e2m1fn", "f4e2m1")
i4 = DType("int4", "int4")
u4 = DType("uint4", "uint4")
i2 = DType("int2", "int2")
u2 = DType("uint2", "uint2")

INTEGERS = (i8, u8, i16, u16, i32, u32, i64, u64)
COMPUTED = (bool_, *INTEGERS, f16, bf16, f32, f64)
SMALL = (f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f8e8m0, f4e2m1, i4, u4, i2, u2)
ALL = (*COMPUTED, *SMALL)
# The first digit of NumPy's name is the number of bits.
_SMALL = {d.short: int(next(c for c in d.name if c.isdigit())) for d in SMALL}
_PACKED = {*_SMALL, f16.short, bf16.short}
_FLOATS = frozenset(d.numpy for d in ALL if d.is_float)
_BY_NAME = {d.name: d for d in ALL} | {d.short: d for d in ALL}


def dtype(name: str | np.dtype[Any]) -> DType:
    """Return the type with this NumPy or short name.

    Raises:
        ParseError: names the known ones.
    """
    known = _BY_NAME.get(str(name))
    if known is None:
        raise ParseError(f"expected a dtype, one of {', '.join(d.name for d in ALL)}; got {name!r}")
    return known


def is_floating(name: np.dtype[Any]) -> bool:
    """Return whether a NumPy type is a float, also of ml_dtypes."""
    return name.kind == "f" or name in _FLOATS
