"""Arrays that stay in a device's memory between the subgraphs of a host program.

Tests: `tests/runtime/test_resident.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.device.base import Device, DeviceBuffer


class ArrayMemory(Protocol):
    """Memory of device arrays (`buffer_pool.BufferPool`)."""

    device: Device

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Return a fresh copy of an array in the host's memory. Raises ModelStateError once the memory is closed."""
        ...


class DeviceArray:
    """An array in the memory of a device, which a later call of a model on this device reads there. `numpy` copies it to the host.

    Its memory is reused when nothing refers to it. NumPy and others that know `__array__` or DLPack take it as an array of the host,
    a copy.

    Attributes:
        memory: What its buffer was taken from.
        buffer: Its memory, of the device's class.
        dtype: The type of its elements.
        shape: Its dims.
        host: The same array in the host's memory, if it is there too.
        outer: The dim that is stored outermost, before the others in their order.
    """

    __slots__ = ("__weakref__", "_owner", "buffer", "dtype", "host", "memory", "outer", "shape")

    def __init__(
        self,
        memory: ArrayMemory,
        buffer: Any,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        host: NDArray[Any] | None = None,
        owner: DeviceArray | None = None,
        outer: int = 0,
    ) -> None:
        self.memory, self.buffer, self.dtype, self.shape = memory, buffer, dtype, shape
        self.host, self._owner, self.outer = host, owner, outer

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
        """Return a read-only copy in the host's memory, copied once. Waits for the launches that write it.

        Raises:
            ModelStateError: The model that computed it is closed.
        """
        if self.host is None:
            self.host = self.memory.download(self)
            # All readers of the value share this copy.
            self.host.flags.writeable = False
        return self.host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return np.array(array, dtype) if copy or dtype not in (None, array.dtype) else array

    def __dlpack__(self, **options: Any) -> Any:
        # Consumers may write to what they get, and the copy of `numpy` is shared.
        return np.array(self.numpy()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the processor

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {self.shape} on {self.memory.device.info.name})"

    def moved(self, buffer: DeviceBuffer, shape: tuple[int, ...], owner: DeviceArray) -> DeviceArray:
        """Return an array like this one, as it is stored, in other memory and of other dims."""
        return DeviceArray(self.memory, buffer, self.dtype, shape, None, owner.owner, self.outer)

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the same memory under other dims, of an array in C order. Raises UserError for another number of elements."""
        if math.prod(shape) != math.prod(self.shape):
            raise UserError(f"reshape_to: expected {math.prod(self.shape)} elements, got dims {tuple(shape)}")
        host = None if self.host is None else self.host.reshape(shape)
        return DeviceArray(self.memory, self.buffer, self.dtype, tuple(shape), host, self.owner)


def on_host(value: Any) -> Any:
    """Return an array of a device in the host's memory; other values as they are."""
    return value.numpy() if isinstance(value, DeviceArray) else value
