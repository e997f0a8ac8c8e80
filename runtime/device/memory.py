"""Aligned host memory, used by every device that shares memory with the host.

Tests: `tests/runtime/device/test_device_memory.py`.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError, MemoryLack
from relax_tune.runtime.mapped_file import ALIGNMENT

SLAB_BYTES = 32 << 20
# the size of a transparent huge page on x86-64, and on aarch64 with pages of 4 KiB
LARGE_PAGE = 2 << 20


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return a byte array of `nbytes` rounded up to whole cache lines (at least one), its first byte 64-byte aligned.

    Raises: MeasureError when the memory cannot be had.
    """
    if nbytes < 0:
        raise MeasureError(f"memory: expected a size of 0 or more bytes, got {nbytes}")
    rounded = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    try:
        # NumPy promises no cache line as the start: the spare bytes leave room for one.
        raw = np.empty(rounded + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):
        raise MemoryLack(f"memory: expected {nbytes} bytes, the host has not that much to give") from None
    start = -int(raw.__array_interface__["data"][0]) % ALIGNMENT
    return raw[start : start + rounded]


class Slabs:
    """Long-lived memory, in large pages if the system provides them.

    Arrays smaller than such a page are placed contiguously in one, so that reading many of them crosses few pages. A
    slab is freed with the last of its arrays.
    """

    def __init__(self) -> None:
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a byte array as `aligned_bytes` does; small ones share slabs."""
        rounded = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        if nbytes < 0 or rounded > SLAB_BYTES:
            return aligned_bytes(nbytes)  # NumPy requests large pages itself
        if rounded > self._free.size:
            self._free = _slab(nbytes)
        slab, rest = self._free[:rounded], self._free[rounded:]
        self._free = rest if rest.size else np.empty(0, np.uint8)  # an empty view would keep the slab
        return slab


def _slab(nbytes: int) -> NDArray[np.uint8]:
    try:  # private: shared memory, which is the default, has large pages by another setting of the system
        pages = mmap.mmap(-1, SLAB_BYTES + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryLack(f"memory: expected {nbytes} bytes, the host has not that much to give") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)  # keeps them mapped
    start = -int(whole.__array_interface__["data"][0]) % LARGE_PAGE
    return whole[start : start + SLAB_BYTES]


def aligned_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array whose first element is 64-byte aligned, contents undefined. Raises: as `aligned_bytes`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_bytes(nbytes)[:nbytes].view(dtype).reshape(shape)


def even_runs(array: NDArray[Any]) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """Return an array's memory as two loops over runs of adjacent bytes: the extent and the stride of each loop, the bytes of a run.

    None for an array that takes more loops.
    """
    # Axes are read from the innermost one: adjacent ones join the run, and axes that step over whole inner loops join the loop.
    run = array.itemsize
    loops: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(array.shape), reversed(array.strides)):
        if extent == 1:
            continue
        if not loops and stride == run:
            run *= extent
        elif loops and stride == loops[-1][0] * loops[-1][1]:
            loops[-1] = (loops[-1][0] * extent, loops[-1][1])
        else:
            loops.append((extent, stride))
    if len(loops) > 2:
        return None
    inner, outer = (*loops, (1, 0), (1, 0))[:2]
    return outer, inner, run


def check_transfer(what: str, nbytes: int, size: int) -> None:
    """Raise MeasureError when `nbytes` bytes do not fit in a buffer of `size` bytes."""
    if nbytes > size:
        raise MeasureError(f"{what}: expected {nbytes} bytes, got a buffer of {size}")
