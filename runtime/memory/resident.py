"""Arrays that stay in a device's memory between the subgraphs of a host program.

Tests: `tests/runtime/test_resident.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.program.program import BufferSpec
from relax_tune.runtime.program.sharing import stored_dims


class DeviceArray:
    """An array in a device's memory, as a value of a host program. Its memory is reused when nothing refers to it.

    buffer: its memory, of the device's class; download: copies it to the host
    host: the same array in the host's memory, where it came from there
    """

    __slots__ = ("__weakref__", "_owner", "buffer", "download", "dtype", "host", "shape")

    def __init__(
        self,
        download: Callable[[DeviceArray], NDArray[Any]],
        buffer: Any,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        host: NDArray[Any] | None = None,
        owner: DeviceArray | None = None,
    ) -> None:
        self.download, self.buffer, self.dtype, self.shape = download, buffer, dtype, shape
        self.host, self._owner = host, owner

    @property
    def owner(self) -> DeviceArray:
        """The array with whose end the memory is freed."""
        return self if self._owner is None else self._owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> NDArray[Any]:
        """Return a read-only copy in the host's memory, copied once. Waits for the launches that write it."""
        if self.host is None:
            self.host = self.download(self)
            # All readers of the value share this copy.
            self.host.flags.writeable = False
        return self.host

    def moved(self, buffer: DeviceBuffer, shape: tuple[int, ...], owner: DeviceArray) -> DeviceArray:
        """Return an array like this one, as it is stored, in other memory and of other dims."""
        return DeviceArray(self.download, buffer, self.dtype, shape, owner=owner.owner)

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the same memory under other dims. Raises UserError for another number of elements."""
        if math.prod(shape) != math.prod(self.shape):
            raise UserError(f"reshape_to: expected {math.prod(self.shape)} elements, got dims {tuple(shape)}")
        host = None if self.host is None else self.host.reshape(shape)
        return DeviceArray(self.download, self.buffer, self.dtype, tuple(shape), host, self.owner)


def on_host(value: Any) -> Any:
    """Return an array of a device in the host's memory; other values as they are."""
    return value.numpy() if isinstance(value, DeviceArray) else value


def stored_array(
    device: Device, spec: BufferSpec, buffer: DeviceBuffer, shape: tuple[int, ...], owner: DeviceArray
) -> DeviceArray:
    """Return an array of a program as it is stored, `spec.outer` first, under the dims that its caller sees."""

    def download(array: DeviceArray) -> NDArray[Any]:
        with device.turn:
            stored = device.download(array.buffer, array.dtype, stored_dims(spec, array.shape))
        return np.moveaxis(stored, 0, spec.outer) if spec.outer else stored

    return DeviceArray(download, buffer, np.dtype(spec.dtype), shape, owner=owner.owner)
