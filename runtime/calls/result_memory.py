"""Memory of a session's results: of earlier results that nobody has any more, or fresh.

Tests: `tests/tuner/emit/test_sessions.py`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.device.memory import aligned_array
from relax_tune.runtime.program.sharing import stored_dims

MOST = 4
"""Number of arrays for which memory is remembered."""


class _Memory(NamedTuple):
    """An array as it is stored, its buffer, the object that all views of it refer to, and that object's references without theirs."""

    array: NDArray[Any]
    buffer: DeviceBuffer
    owner: Any
    references: int


class ResultMemory:
    """The memory of one result in the steps of a session, which launches write to.

    To allocate an array, and to copy a result that another processor's cache has, takes longer than the rest of a step on the host.
    """

    def __init__(self, device: Device, dtype: np.dtype[Any], outer: int) -> None:
        self._device, self._dtype, self._outer = device, dtype, outer
        self._known: list[_Memory] = []
        self._current: _Memory | None = None

    def take(self, shape: tuple[int, ...]) -> DeviceBuffer:
        """Return the buffer of an array of some dims that nobody has."""
        dims = stored_dims(self._outer, shape)
        for memory in self._known:
            if memory.array.shape == dims and sys.getrefcount(memory.owner) == memory.references:
                self._current = memory
                return memory.buffer
        array = aligned_array(self._dtype, dims)
        owner = array.base
        buffer = self._device.wrap(array)
        assert buffer is not None, "the device reads the memory of the host"
        self._known = [*self._known[1 - MOST :], _Memory(array, buffer, owner, 0)]
        memory = self._known[-1]
        del array, owner
        self._current = self._known[-1] = memory._replace(references=sys.getrefcount(memory.owner))
        return memory.buffer

    def result(self) -> NDArray[Any]:
        """Return an array over the memory that was taken last."""
        assert self._current is not None
        array = self._current.array.view()
        return np.moveaxis(array, 0, self._outer) if self._outer else array
