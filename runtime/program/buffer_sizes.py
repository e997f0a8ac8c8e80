"""Bytes of a program's buffers for one set of slot values, all at once: a decoder binds another shape at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program.program import Program

LARGEST = 2.0**62


class BufferSizes:
    """The dims of every buffer as slots, in one array."""

    def __init__(self, program: Program) -> None:
        self._program = program
        rank = max((len(b.shape) for b in program.buffers), default=0)
        # a slot behind all others has the value 1
        self._slots = np.array([[*b.shape, *[-1] * (rank - len(b.shape))] for b in program.buffers], np.intp)
        self._slots = self._slots.reshape(len(program.buffers), rank)
        self._itemsize = np.array([np.dtype(b.dtype).itemsize for b in program.buffers], np.int64)
        stored = [(n, program.storages[b.storage]) for n, b in enumerate(program.buffers) if b.storage is not None]
        views = [
            (n, b.base)
            for n, b in enumerate(program.buffers)
            if b.storage is None and b.base is not None and program.buffers[b.base].role != "input"
        ]
        self._stored = np.array(stored, np.intp).reshape(-1, 2)
        self._views = np.array(views, np.intp).reshape(-1, 2)

    def of(self, values: Sequence[int], known: NDArray[np.int64]) -> list[int]:
        """Return the bytes of every buffer. known: the values, and 1

        Raises ArtifactError for negative dims, and for buffers larger than the memory they lie in.
        """
        dims = known[self._slots]
        if (dims < 0).any():
            wrong = int(np.argmax((dims < 0).any(axis=1)))
            where = f"{self._program.name}: buffer {self._program.buffers[wrong].name}"
            raise ArtifactError(f"{where}: wanted dims of 0 or more, found {self.shape(wrong, values)}")
        if (dims.prod(axis=1, dtype=np.float64) * self._itemsize).max(initial=0.0) > LARGEST:
            sizes = [math.prod(self.shape(n, values)) * int(s) for n, s in enumerate(self._itemsize)]
            self._check(sizes, values)
            return sizes
        nbytes = dims.prod(axis=1) * self._itemsize
        over = (nbytes[self._stored[:, 0]] > known[self._stored[:, 1]]).any()
        if over or (nbytes[self._views[:, 0]] > nbytes[self._views[:, 1]]).any():
            self._check(nbytes.tolist(), values)
        return [int(n) for n in nbytes.tolist()]

    def shape(self, index: int, values: Sequence[int]) -> tuple[int, ...]:
        """Return the dims of one buffer."""
        return tuple(values[slot] for slot in self._program.buffers[index].shape)

    def _check(self, sizes: Sequence[int], values: Sequence[int]) -> None:
        program = self._program
        for index, slot in self._stored.tolist():
            if sizes[index] > values[slot]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: wanted {sizes[index]} bytes, its storage has {values[slot]}"
                )
        for index, base in self._views.tolist():
            if sizes[index] > sizes[base]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: wanted {sizes[index]} bytes, "
                    f"{program.buffers[base].name} that it views has {sizes[base]}"
                )
