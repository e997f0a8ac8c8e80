"""What tests of libraries share: matrices as callers may lay them out, and what may follow a product, by NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relax_tune.runtime.device.base import Device

Array = np.ndarray[Any, Any]
F32 = np.dtype(np.float32)
_ERF = np.vectorize(math.erf, otypes=[np.float64])
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda y: np.maximum(y, 0),
    "gelu": lambda y: y * (1 + _ERF(y / math.sqrt(2))) / 2,
    "gelu_tanh": lambda y: y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2,
    "tanh": np.tanh,
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "swish": lambda y: y / (1 + np.exp(-y)),
}


def filled(device: Device, array: Array) -> Any:
    """A buffer of the device that holds the array."""
    buffer = device.alloc(array.nbytes)
    device.upload(buffer, np.ascontiguousarray(array))
    return buffer


def stored(rng: np.random.Generator, batch: int, rows: int, columns: int, turned: bool) -> tuple[Array, Array, int]:
    """Matrices, the memory that holds them (with a gap behind every row), and the length of its rows."""
    values = rng.standard_normal((batch, rows, columns)).astype(F32)
    lying = values.transpose(0, 2, 1) if turned else values
    memory = np.full((batch, lying.shape[1], lying.shape[2] + int(rng.integers(0, 3))), np.nan, F32)
    memory[:, :, : lying.shape[2]] = lying
    return values, memory, memory.shape[2]
