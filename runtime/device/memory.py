"""Aligned host memory, used by every device that shares memory with the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError

ALIGNMENT = 64


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """A byte array of `nbytes` rounded up to whole cache lines (at least one), its first byte 64-byte aligned.

    Raises: MeasureError when the memory cannot be had.
    """
    if nbytes < 0:
        raise MeasureError(f"memory: wanted a size of 0 or more bytes, found {nbytes}")
    rounded = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    try:
        raw = np.empty(rounded + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):
        raise MeasureError(f"memory: wanted {nbytes} bytes, the host has not that much to give") from None
    start = -int(raw.__array_interface__["data"][0]) % ALIGNMENT
    return raw[start : start + rounded]


def aligned_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array whose first element is 64-byte aligned, contents undefined. Raises: as `aligned_bytes`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_bytes(nbytes)[:nbytes].view(dtype).reshape(shape)


def check_transfer(what: str, wanted: int, size: int) -> None:
    """Raises MeasureError when `wanted` bytes do not fit in a buffer of `size` bytes."""
    if wanted > size:
        raise MeasureError(f"{what}: wanted {wanted} bytes, found a buffer of {size}")
