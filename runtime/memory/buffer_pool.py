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

from relax_tune.errors import MeasureError, ModelStateError
from relax_tune.runtime.device.base import Device, DeviceBuffer, SharesMemory
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.program.sharing import stored_dims

LEAST = 256
"""Bytes of the smallest buffer of a pool."""


class BufferPool:
    """Buffers for device arrays, of powers of two bytes. Launches run in order, so a buffer may be taken again at once."""

    def __init__(self, device: Device) -> None:
        self.device, self._closed = device, False
        self._free: dict[int, list[DeviceBuffer]] = defaultdict(list)
        self._lent = set[int]()  # identities of buffers that other libraries have had

    def empty(self, dtype: np.dtype[Any], shape: tuple[int, ...], outer: int = 0) -> DeviceArray:
        """Return an array with undefined elements, in the turn of the device; `outer` is the dim stored outermost.

        Raises:
            MeasureError: Memory runs out.
        """
        # Powers of two let arrays of nearby shapes share buffers, and leave less than half of each unused.
        size = max(LEAST, 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length())
        free = self._free[size]
        buffer = self._reused(free.pop()) if free else self._alloc(size)
        array = DeviceArray(self, buffer, dtype, shape, outer=outer)
        # Not at exit: the device may be closed by that time, and its memory ends with the process.
        weakref.finalize(array, free.append, buffer).atexit = False
        return array

    def _reused(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """Return an idle buffer that no queue of another library reads any more."""
        if id(buffer) in self._lent:
            # A consumer may drop an array while its own queue still has work that reads it.
            self._lent.discard(id(buffer))
            self._shared().finish()
        return buffer

    def _shared(self) -> SharesMemory:
        assert isinstance(self.device, SharesMemory)
        return self.device

    def lend(self, array: DeviceArray, wait: bool) -> int:
        """Return the address of an array for another library. Raises ModelStateError after `close`.

        wait: Wait for the launches that write it.
        """
        with self.device.turn:
            self._check_open(array)
            if wait:
                self.device.synchronize()
            native = self.device.native([array.buffer])
            assert native is not None
            self._lent.add(id(array.buffer))
            array.lent, array.host = True, None  # a consumer may write to it
            return native[1][0]

    def _check_open(self, array: DeviceArray) -> None:
        if self._closed:
            raise ModelStateError(
                f"device array {array.dtype} {array.shape}: expected an open model, got one that was closed; read it before"
            )

    def _alloc(self, size: int) -> DeviceBuffer:
        """Allocate memory; if there is not enough, free the idle buffers of other sizes first."""
        try:
            return self.device.alloc(size)
        except MeasureError:
            # Launches that were enqueued may still use an idle buffer. Reuse is safe, because launches run in order;
            # freeing is not.
            self.device.synchronize()
            self._free_idle()
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

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Return a fresh copy of an array in the host's memory. Raises ModelStateError after `close`."""
        with self.device.turn:
            self._check_open(array)
            if array.lent:
                self._shared().finish()
            dims = stored_dims(array.outer, array.shape)
            stored = self.device.download(array.buffer, array.dtype, dims)
        return np.moveaxis(stored, 0, array.outer) if array.outer else stored

    def _free_idle(self) -> None:
        for free in self._free.values():
            while free:
                self.device.free(self._reused(free.pop()))

    def close(self) -> None:
        """Free the memory of arrays that are gone, and refuse to read the others. May be called twice."""
        with self.device.turn:
            self._closed = True
            self._free_idle()


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
