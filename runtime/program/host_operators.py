"""Operators with data-dependent sizes or shape operands, computed in NumPy between subgraphs.

Tests: `tests/runtime/program/test_host_program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_tune.errors import UserError


@dataclass(frozen=True, slots=True)
class HostOperator:
    """An operator that NumPy computes. `run` takes `arity` values: arrays, and shapes as tuples of whole numbers.

    `run` raises UserError for values that do not fit."""

    arity: int
    run: Callable[..., Any]


def _array(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise UserError(f"{name}: expected an array, got a {type(value).__name__}")
    return value


def is_shape(value: Any) -> bool:
    """Return whether a value is a tuple of whole numbers."""
    return isinstance(value, tuple) and all(type(d) is int for d in value)


def _unique(x: Any) -> Any:
    array = _array("unique", x)
    # NumPy orders NaN only for its built-in types
    ordered = array.astype(np.float32) if array.dtype.kind in "fV" and array.itemsize < 4 else array
    # Every NaN is distinct, as NaN equals nothing.
    return np.unique(ordered, equal_nan=False).astype(array.dtype)


def _shape_of(x: Any) -> Any:
    return tuple(int(d) for d in _array("shape_of", x).shape)


def _reshape_to(x: Any, to: Any) -> Any:
    size = _array("reshape_to", x).size
    if not is_shape(to) or any(d < 0 for d in to):
        raise UserError(f"reshape_to: expected a shape of dims >= 0, got {to!r:.200}")
    count = 1
    for d in to:
        count *= d
    if count != size:
        raise UserError(f"reshape_to: expected {size} elements, got dims {to}")
    return x.reshape(to)


def _tensor_to_shape(x: Any) -> Any:
    array = _array("tensor_to_shape", x)
    if array.ndim != 1 or array.dtype != np.int64:
        raise UserError(f"tensor_to_shape: expected int64 in one dim, got {array.dtype} {array.shape}")
    dims = tuple(int(d) for d in array)
    if any(d < 0 for d in dims):
        raise UserError(
            f"tensor_to_shape: expected dims >= 0, got {dims}; a number below 0 is no size: use it as a tensor"
        )
    return dims


HOST_OPERATORS: Mapping[str, HostOperator] = {
    "reshape_to": HostOperator(2, _reshape_to),
    "shape_of": HostOperator(1, _shape_of),
    "tensor_to_shape": HostOperator(1, _tensor_to_shape),
    "unique": HostOperator(1, _unique),
}
