"""Values of graph functions in the interpreter: their annotations, and their description in messages.

Tests: `tests/ir/interp/test_interp_graph.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.dtype import DType, dtype
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.struct_info import ObjectInfo, PrimInfo, ShapeInfo, StructInfo, TensorInfo, TupleInfo

Array = NDArray[Any]
Result = Any
"""An array, a shape as a tuple of ints, a scalar, a graph function as a `FunctionRef`, or a tuple of results."""


def is_shape(value: Result) -> bool:
    return isinstance(value, tuple) and all(isinstance(d, (int, np.integer)) and _is_number(d) for d in value)


def _is_number(value: Result) -> bool:
    """Return whether a value is a number of at most 64 bits; bools do not count."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return isinstance(value, (float, np.number))


def as_given(info: StructInfo, value: Result) -> Result:
    """Convert an argument to the interpreter's form: sequences of whole numbers as shapes, arrays without dims as scalars."""
    if isinstance(info, ShapeInfo) and (isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 1)):
        return tuple(value)
    return value[()] if isinstance(info, PrimInfo) and isinstance(value, np.ndarray) and value.ndim == 0 else value


def scalar_dtype(value: Result) -> DType | None:
    """Return the element type of a scalar, None for other values."""
    if isinstance(value, (bool, np.bool_)) or _is_number(value):
        return dtype(np.asarray(value).dtype)
    return None


def actual_info(value: Result) -> StructInfo:
    """Return the full annotation of a value."""
    match value:
        case np.ndarray():
            return TensorInfo(tuple(const(d) for d in value.shape), dtype(value.dtype))
        case tuple() if is_shape(value):
            return ShapeInfo(tuple(const(int(d)) for d in value))
        case tuple():
            return TupleInfo(tuple(map(actual_info, value)))
    kind = scalar_dtype(value)
    return ObjectInfo() if kind is None else PrimInfo(kind)


def describe_info(info: StructInfo, value: Result) -> StructInfo:
    """Return the annotation of a value in numbers, limited to the dims that `info` has."""
    match info, value:
        case TensorInfo(), np.ndarray():
            return TensorInfo(tuple(const(d) for d in value.shape), None)
        case ShapeInfo(), tuple() if is_shape(value):
            return ShapeInfo(tuple(const(int(d)) for d in value))
        case PrimInfo(kind), int() | np.integer():
            return PrimInfo(kind, const(int(value)))
        case TupleInfo(parts), tuple():
            return TupleInfo(tuple(describe_info(i, v) for i, v in zip(parts, value)))
    return ObjectInfo()


def describe(value: object) -> str:
    """Describe a value in an error message."""
    match value:
        case np.ndarray():
            return f"an array of {value.dtype} with shape {value.shape}"
        case g.FunctionRef(name):
            return f"the function {name}"
        case tuple():
            return f"a tuple of {len(value)}"
    return f"the number {value}" if isinstance(value, (int, float, np.generic)) else f"a {type(value).__name__}"


def outside_place(array: Array, low: int, high: int, every: int, column: int) -> str:
    """Return value and place of the first index outside [low, high); an empty text when there is none."""
    used = array.reshape(-1)[column::every]
    wrong = (used < low) | (used >= high)
    if not wrong.any():
        return ""
    place = np.unravel_index(int(np.argmax(wrong)) * every + column, array.shape)
    return f"{array[place]} at [{', '.join(str(int(i)) for i in place)}]"
