"""Host memory for results that launches write in place."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.device.memory import aligned_array, aligned_bytes

LEAST = 64 << 10
"""Bytes of the smallest array whose memory is reused; smaller ones come from mapped pages."""


class HostPool:
    """Memory of arrays that are gone, for new ones: the system may take longer to map fresh pages than a kernel to fill them.

    It keeps at most as many bytes as the largest call took. The caller holds the device's turn in all but `close`; arrays may end
    in any thread.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._taken = self._most = 0

    def begin(self) -> None:
        """Begin a call."""
        self._most, self._taken = max(self._most, self._taken), 0

    def empty(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return an array that starts at a cache line, with undefined elements. Raises MeasureError without memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST:
            return aligned_array(dtype, shape)
        # Rounded sizes, so that results of nearby shapes reuse each other's memory.
        step = 1 << (nbytes.bit_length() - 3)  # a quarter of the power of two below
        memory = self._reusable(nbytes)
        if memory is None:
            memory = aligned_bytes(-(-nbytes // step) * step)
            self._idle.setdefault(memory.nbytes, [])  # here, since `_keep` must add no key while others read them
        self._taken += memory.nbytes
        block = _Block(memory)
        weakref.finalize(block, self._keep, memory).atexit = False
        return np.asarray(block)[:nbytes].view(dtype).reshape(shape)

    def _reusable(self, nbytes: int) -> NDArray[np.uint8] | None:
        # Smallest first, which leaves large blocks to large results.
        for size in sorted(self._idle):
            # A small result in a much larger block would take it from the arrays that need its size.
            if nbytes <= size <= 4 * nbytes and (blocks := self._idle[size]):
                return blocks.pop()
        return None

    def _keep(self, memory: NDArray[np.uint8]) -> None:
        # Copied, because another thread may add a size while this one iterates.
        idle = sum(size * len(blocks) for size, blocks in list(self._idle.items()))
        if idle + memory.nbytes <= max(self._most, self._taken):
            self._idle[memory.nbytes].append(memory)

    def close(self) -> None:
        """Free the idle memory; memory of arrays in use is freed when they end."""
        self._most = self._taken = 0
        self._idle.clear()


class _Block:
    """Owner of some memory, which its arrays keep alive."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        # NumPy keeps the object as the base of every view of its memory, so it ends with the last of them.
        self.__array_interface__ = memory.__array_interface__
