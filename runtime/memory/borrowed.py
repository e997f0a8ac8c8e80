"""Arrays of other libraries in the memory of a device, read there (DLPack).

Tests: `tests/runtime/memory/test_dlpack.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.device.base import Device, SharesMemory
from relax_tune.runtime.memory.dlpack import imported
from relax_tune.runtime.memory.resident import DeviceArray


class BorrowedMemory:
    """Memory of other libraries on a device; see `ArrayMemory`. An array keeps its producer's memory until it ends."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Return a fresh copy of an array in the host's memory."""
        with self.device.turn:
            return self.device.download(array.buffer, array.dtype, array.shape)

    def lend(self, array: DeviceArray, wait: bool) -> int:
        """Raise BufferError: the producer's own object exports it."""
        raise BufferError("expected an array of this library, got a borrowed one; use its producer's")


def is_borrowed(array: object) -> bool:
    """Return whether an array is of another library's memory."""
    return isinstance(array, DeviceArray) and isinstance(array.memory, BorrowedMemory)


def address_of(array: DeviceArray) -> int:
    """Return the address of a borrowed array."""
    native = array.memory.device.native([array.buffer])
    assert native is not None
    return native[1][0]


def is_on(value: Any, device: Device) -> bool:
    """Return whether a value of another library is in the memory of this kind of device, so that `borrow` reads it there."""
    if isinstance(value, np.ndarray) or not isinstance(device, SharesMemory):
        return False
    if isinstance(value, DeviceArray) and value.memory.device is device:
        return False
    return hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) == device.dlpack[0]


def borrow(value: Any, device: Device, where: str, dtype: str, write: bool = False) -> DeviceArray:
    """Return a value for which `is_on` holds as an array over its memory, for work that the device enqueues later.

    Args:
        value: The producer.
        device: The device.
        where: What the message of an error begins with.
        dtype: Name of the expected type.
        write: Whether the work writes to it.

    Raises:
        UserError: It is on another device of this kind, of another type, not in C order, or read-only where the work writes to it; or
            its producer gives no memory.
    """
    assert isinstance(device, SharesMemory)
    number, own = int(value.__dlpack_device__()[1]), device.dlpack[1]
    kind = device.info.kind
    if number != own:
        raise UserError(
            f"{where}: expected an array on {kind}:{own}, got one on {kind}:{number}; copy it to the device"
        )
    tensor = isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))
    native = device.native([])
    assert native is not None
    try:
        array, read_only = imported(value.detach() if tensor else value, native[0])
    # The methods are of other libraries, whose errors may be of any class.
    except Exception as error:
        raise UserError(
            f"{where}: expected an array on {kind}:{own}, got a {type(value).__name__} that gives no memory: {error!s:.200}; copy it"
        ) from error
    if array.dtype.name != dtype:
        raise UserError(
            f"{where}: expected dtype {dtype}, got {array.dtype} in the memory of {kind}:{own}; convert it there"
            + (f" with to(torch.{dtype})" if tensor else "")
        )
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise UserError(
            f"{where}: expected an array in C order, got strides {array.strides} of dims {array.shape} in the memory of "
            f"{kind}:{own}; call its {'contiguous()' if tensor else 'copy()'}"
        )
    if write and read_only:
        raise UserError(f"{where}: expected memory that may be written, got read-only memory of {kind}:{own}; copy it")
    # NumPy gives an array without elements the address 0, or any other.
    buffer = device.adopt(int(array.ctypes.data), array.nbytes, array)
    return DeviceArray(BorrowedMemory(device), buffer, array.dtype, array.shape)
