"""Arrays that stay in a device's memory between the subgraphs of a host program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError


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
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> NDArray[Any]:
        """Return a read-only copy in the host's memory, made once. Waits for the launches that write it."""
        if self.host is None:
            self.host = self.download(self)
            self.host.flags.writeable = False
        return self.host

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the same memory under other dims. Raises UserError for another number of elements."""
        if math.prod(shape) != math.prod(self.shape):
            raise UserError(f"reshape_to: wanted {math.prod(self.shape)} elements, found dims {tuple(shape)}")
        host = None if self.host is None else self.host.reshape(shape)
        return DeviceArray(self.download, self.buffer, self.dtype, tuple(shape), host, self)


def on_host(value: Any) -> Any:
    """Return an array of a device in the host's memory; other values as they are."""
    return value.numpy() if isinstance(value, DeviceArray) else value
