"""Constants on a device: each uploaded once, and packed once, however many programs read it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError
from relax_tune.runtime.device.base import Device, DeviceBuffer


class DeviceWeights:
    """Device memory of constants and of their packed forms, for programs that run on one device.

    The caller owns the device, and holds its turn to ask for a buffer. `close` frees the memory, after every executor that
    uses it is done.
    """

    def __init__(self, device: Device, constants: Mapping[str, NDArray[Any]]) -> None:
        self.device, self._arrays = device, constants
        self._constants: dict[str, DeviceBuffer] = {}
        self._packed: dict[Hashable, DeviceBuffer] = {}

    def constant(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceBuffer:
        """Return the device buffer of a constant, uploaded on first use. Raises ArtifactError unless one of this dtype
        and shape exists.
        """
        array = self._arrays.get(name)
        if array is None:
            raise ArtifactError(f"wanted the constant {name}, found none of that name")
        if array.dtype != dtype or array.shape != shape:
            raise ArtifactError(f"constant {name}: wanted {dtype} {shape}, found {array.dtype} {array.shape}")
        if name not in self._constants:
            self._constants[name] = self.device.alloc(array.nbytes, lasting=True)
            self.device.upload(self._constants[name], np.ascontiguousarray(array))
        return self._constants[name]

    def packed(self, key: Hashable, nbytes: int) -> tuple[DeviceBuffer, bool]:
        """Return the device buffer of a packed weight, and whether it still has to be written. key: weight and packing"""
        fresh = key not in self._packed
        if fresh:
            self._packed[key] = self.device.alloc(nbytes, lasting=True)
        return self._packed[key], fresh

    def close(self) -> None:
        """Free all memory. May be called twice."""
        with self.device.turn:
            for buffer in (*self._constants.values(), *self._packed.values()):
                self.device.free(buffer)
            self._constants.clear()
            self._packed.clear()
