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
        rows = [(*b.shape, *[-1] * (rank - len(b.shape)), np.dtype(b.dtype).itemsize) for b in program.buffers]
        kinds = list(dict.fromkeys(rows))  # many buffers are alike
        number = {row: n for n, row in enumerate(kinds)}
        self._slots = np.array([row[:rank] for row in kinds], np.intp).reshape(len(kinds), rank)
        self._itemsize = np.array([row[rank] for row in kinds], np.int64)
        self._kinds = [number[row] for row in rows]
        stored = [(n, program.storages[b.storage]) for n, b in enumerate(program.buffers) if b.storage is not None]
        views = [
            (n, b.base)
            for n, b in enumerate(program.buffers)
            if b.storage is None and b.base is not None and program.buffers[b.base].role != "input"
        ]
        self._stored, self._views = stored, views
        # by kind, each once: a kind and its storage's slot, a kind and that of what it views
        self._kinds_stored = np.array(list({(self._kinds[n], s) for n, s in stored}), np.intp).reshape(-1, 2)
        bases = {(self._kinds[n], self._kinds[base]) for n, base in views}
        self._kinds_viewed = np.array(list(bases), np.intp).reshape(-1, 2)

    def of(self, values: Sequence[int], known: NDArray[np.int64]) -> list[int]:
        """Return the bytes of every buffer. known: the values, and 1

        Raises ArtifactError for negative dims, and for buffers larger than the memory they lie in.
        """
        dims = known[self._slots]
        if (dims < 0).any():
            wrong = self._kinds.index(int(np.argmax((dims < 0).any(axis=1))))
            where = f"{self._program.name}: buffer {self._program.buffers[wrong].name}"
            raise ArtifactError(f"{where}: wanted dims of 0 or more, found {self.shape(wrong, values)}")
        if (dims.prod(axis=1, dtype=np.float64) * self._itemsize).max(initial=0.0) > LARGEST:
            sizes = [math.prod(self.shape(n, values)) * int(self._itemsize[k]) for n, k in enumerate(self._kinds)]
            self._check(sizes, values)
            return sizes
        nbytes = dims.prod(axis=1) * self._itemsize
        known_sizes: list[int] = nbytes.tolist()
        sizes = [known_sizes[kind] for kind in self._kinds]
        over = (nbytes[self._kinds_stored[:, 0]] > known[self._kinds_stored[:, 1]]).any()
        if over or (nbytes[self._kinds_viewed[:, 0]] > nbytes[self._kinds_viewed[:, 1]]).any():
            self._check(sizes, values)
        return sizes

    def shape(self, index: int, values: Sequence[int]) -> tuple[int, ...]:
        """Return the dims of one buffer."""
        return tuple(values[slot] for slot in self._program.buffers[index].shape)

    def _check(self, sizes: Sequence[int], values: Sequence[int]) -> None:
        program = self._program
        for index, slot in self._stored:
            if sizes[index] > values[slot]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: wanted {sizes[index]} bytes, its storage has {values[slot]}"
                )
        for index, base in self._views:
            if sizes[index] > sizes[base]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: wanted {sizes[index]} bytes, "
                    f"{program.buffers[base].name} that it views has {sizes[base]}"
                )
