"""Rounding to floats of at most 8 bits, saturated or not (ONNX, operator Cast), of expressions and in NumPy.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32, f64, is_floating
from relax_tune.ir.core.expr import Expr, cast, const, lt, maximum, minimum, mul, select
from relax_tune.ir.core.scalar_ops import converted

Rounding = Literal["nearest", "up", "down"]


def narrow(x: Expr, dtype: DType, saturate: bool, rounding: Rounding = "nearest") -> Expr:
    """Return `x` rounded to a small float.

    Args:
        saturate: numbers beyond the range of the type, also infinite ones, become its nearest number.
        rounding: `up` or `down` towards the next power of two, for `f8e8m0`.
    """
    wide = x if x.dtype in (f32, f64) else cast(x, f32)
    if saturate:
        wide = minimum(maximum(wide, const(dtype.lowest, wide.dtype)), const(dtype.highest, wide.dtype))
    if rounding != "nearest":
        near = cast(cast(wide, dtype), wide.dtype)
        beyond, factor = (lt(near, wide), 2.0) if rounding == "up" else (lt(wide, near), 0.5)
        wide = select(beyond, mul(near, const(factor, wide.dtype)), near)
    return cast(wide, dtype)


def narrow_array(x: NDArray[Any], dtype: DType, saturate: bool, rounding: Rounding = "nearest") -> NDArray[Any]:
    """Apply `narrow` to an array."""
    wide = (x if is_floating(x.dtype) else x.astype(np.float32)).astype(np.float64)
    if saturate:
        wide = np.clip(wide, dtype.lowest, dtype.highest)
    if rounding != "nearest":
        near = converted(wide, dtype).astype(np.float64)
        beyond, factor = (near < wide, 2.0) if rounding == "up" else (wide < near, 0.5)
        wide = np.where(beyond, near * factor, near)
    return np.asarray(converted(wide, dtype))
