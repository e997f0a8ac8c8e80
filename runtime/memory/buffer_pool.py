"""Device memory for arrays that stay between the subgraphs of a host program.

Tests: `tests/runtime/test_resident.py`.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.memory.resident import DeviceArray

LEAST = 256
"""Bytes of the smallest buffer of a pool."""


class BufferPool:
    """Buffers for device arrays, of powers of two bytes. Launches run in order, so a buffer may be taken again at once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: dict[int, list[DeviceBuffer]] = defaultdict(list)

    def empty(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """Return an array with undefined elements, in the turn of the device. Raises MeasureError without memory."""
        # Powers of two let arrays of nearby shapes share buffers, and leave less than half of each unused.
        size = max(LEAST, 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else self._alloc(size)
        array = DeviceArray(self._download, buffer, dtype, shape)
        # Not at exit: the device may be closed by that time, and its memory ends with the process.
        weakref.finalize(array, free.append, buffer).atexit = False
        return array

    def _alloc(self, size: int) -> DeviceBuffer:
        """Allocate memory; if there is not enough, free the idle buffers of other sizes first."""
        try:
            return self.device.alloc(size)
        except MeasureError:
            # Launches that were enqueued may still use an idle buffer. Reuse is safe, because launches run in order;
            # freeing is not.
            self.device.synchronize()
            self.close()
            return self.device.alloc(size)

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        """Copy a host array, which is not written afterwards."""
        contiguous = np.ascontiguousarray(array)
        with self.device.turn:
            copied = self.empty(contiguous.dtype, array.shape)
            self.device.upload(copied.buffer, contiguous)
        # The caller promises not to write the array, so it serves as the host's copy without a download.
        copied.host = array
        return copied

    def _download(self, array: DeviceArray) -> NDArray[Any]:
        with self.device.turn:
            return self.device.download(array.buffer, array.dtype, array.shape)

    def close(self) -> None:
        """Free the memory of arrays that are gone."""
        with self.device.turn:
            for free in self._free.values():
                while free:
                    self.device.free(free.pop())


def pool_of(device: Device) -> BufferPool | None:
    """Return a pool for a device with separate memory; None where launches reach the host's arrays."""
    with device.turn:
        # Asked of the device and not of its kind: whether launches reach host memory depends on the driver.
        probe = device.alloc(LEAST)
        try:
            reaches = device.place(probe, None)
        finally:
            device.free(probe)
    return None if reaches else BufferPool(device)
