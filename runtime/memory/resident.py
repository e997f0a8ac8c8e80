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
from relax_tune.runtime.device.base import Device, DeviceBuffer, SharesMemory
from relax_tune.runtime.memory.dlpack import CPU, exported
from relax_tune.runtime.program.sharing import stored_dims


class ArrayMemory(Protocol):
    """Memory of device arrays (`buffer_pool.BufferPool`)."""

    device: Device

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Return a fresh copy of an array in the host's memory. Raises ModelStateError once the memory is closed."""
        ...

    def lend(self, array: DeviceArray, wait: bool) -> int:
        """Return the address of an array for another library, after the launches that write it. Raises as `download`."""
        ...


class DeviceArray:
    """An array in the memory of a device, which a later call of a model on this device reads there. `numpy` copies it to the host.

    Its memory is reused when nothing refers to it, also from other libraries. These take it by DLPack: over the same memory on a CUDA
    device, whose consumers may then write to it; on others, as by `__array__`, a copy in the host's memory.

    Attributes:
        memory: What its buffer was taken from.
        buffer: Its memory, of the device's class.
        dtype: The type of its elements.
        shape: Its dims.
        host: The same array in the host's memory, if it is there too.
        outer: The dim that is stored outermost, before the others in their order.
        lent: Whether another library has taken its memory.
    """

    __slots__ = ("__weakref__", "_owner", "buffer", "dtype", "host", "lent", "memory", "outer", "shape")

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
        self.host, self._owner, self.outer, self.lent = host, owner, outer, False

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
        """Return a read-only copy in the host's memory. Waits for the launches that write it.

        It is copied once, unless another library has its memory.

        Raises:
            ModelStateError: The model that computed it is closed.
        """
        if self.host is not None:
            return self.host
        copied = self.memory.download(self)
        # All readers of the value share this copy.
        copied.flags.writeable = False
        if not self.lent:
            self.host = copied
        return copied

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return np.array(array, dtype) if copy or dtype not in (None, array.dtype) else array

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule of DLPack; arguments as in the array API standard.

        With any stream but -1, the launches that write the array have ended.

        Raises:
            BufferError: The consumer asks for another device, or for no copy where there must be one, or DLPack lacks the type.
            ModelStateError: The model that computed it is closed.
        """
        own = self.__dlpack_device__()
        asked = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if asked[0] == CPU:
            if copy is False:
                raise BufferError(
                    f"expected an array on {self.memory.device.info.name}, which takes a copy to the processor"
                )
            # Consumers may write to what they get, and the copy of `numpy` is shared.
            array = np.array(self.numpy())
            return array.__dlpack__() if max_version is None else array.__dlpack__(max_version=max_version)
        if asked != own or copy:
            raise BufferError(
                f"expected to share memory on device {own}, got device {asked}, copy={copy}; copy it there"
            )
        address = self.memory.lend(self, stream != -1)
        return exported(address, self.dtype, stored_dims(self.outer, self.shape), self.outer, own, self, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self.memory.device
        return device.dlpack if isinstance(device, SharesMemory) else (CPU, 0)

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
