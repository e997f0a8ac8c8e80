"""Element types, shared by both levels of the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from relax_tune.errors import ParseError


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar element type. name: NumPy's or ml_dtypes' (`float32`, `bfloat16`). short: the printed form (`f32`)."""

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
        """True for a 16-bit float: memory holds it, arithmetic is in f32."""
        return self.short in ("f16", "bf16")

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger float of this type."""
        return float(ml_dtypes.finfo(self.numpy).eps)

    @property
    def lowest(self) -> float:
        """The most negative finite float of this type."""
        return float(ml_dtypes.finfo(self.numpy).min)

    @property
    def is_int(self) -> bool:
        return self.short[0] in "iu"


bool_ = DType("bool", "bool")
i8 = DType("int8", "i8")
u8 = DType("uint8", "u8")
i32 = DType("int32", "i32")
i64 = DType("int64", "i64")
f16 = DType("float16", "f16")
bf16 = DType("bfloat16", "bf16")
f32 = DType("float32", "f32")
f64 = DType("float64", "f64")

ALL = (bool_, i8, u8, i32, i64, f16, bf16, f32, f64)
_BY_NAME = {d.name: d for d in ALL} | {d.short: d for d in ALL}


def dtype(name: str | np.dtype[Any]) -> DType:
    """Return the type with this NumPy or short name. Raises ParseError naming the known ones."""
    found = _BY_NAME.get(str(name))
    if found is None:
        raise ParseError(f"wanted a dtype, one of {', '.join(d.name for d in ALL)}; found {name!r}")
    return found


def is_floating(name: np.dtype[Any]) -> bool:
    """Return whether a NumPy type is floating, bfloat16 of ml_dtypes included."""
    return name.kind == "f" or name == bf16.numpy
