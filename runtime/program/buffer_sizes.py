"""Bytes of a program's buffers for one set of slot values, all at once: a decoder binds another shape at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program.program import Program

EXACT = 2.0**53
"""Up to here f64 holds every whole number."""


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
        # by kind, each once: kinds and their storages' slots, kinds and those of what they view
        bases = {(self._kinds[n], self._kinds[base]) for n, base in views}
        self._kinds_stored = _columns({(self._kinds[n], s) for n, s in stored})
        self._kinds_viewed = _columns(bases)

    def of(self, values: Sequence[int], known: NDArray[np.int64]) -> list[int]:
        """Return the bytes of every buffer. known: the values, and 1

        Raises ArtifactError for negative dims, and for buffers larger than the memory they lie in.
        """
        dims = known[self._slots]
        if dims.min(initial=0) < 0:
            wrong = self._kinds.index(int(np.argmax((dims < 0).any(axis=1))))
            where = f"{self._program.name}: buffer {self._program.buffers[wrong].name}"
            raise ArtifactError(f"{where}: wanted dims of 0 or more, found {self.shape(wrong, values)}")
        nbytes = dims.prod(axis=1, dtype=np.float64) * self._itemsize
        if nbytes.max(initial=0.0) > EXACT:
            sizes = [math.prod(self.shape(n, values)) * int(self._itemsize[k]) for n, k in enumerate(self._kinds)]
            self._check(sizes, values)
            return sizes
        (stored, slots), (viewed, bases) = self._kinds_stored, self._kinds_viewed
        by_kind = nbytes.astype(np.int64).tolist()
        sizes = [by_kind[kind] for kind in self._kinds]
        if (nbytes[stored] > known[slots]).any() or (nbytes[viewed] > nbytes[bases]).any():
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


def _columns(pairs: set[tuple[int, int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    found = np.array(sorted(pairs), np.intp).reshape(-1, 2)
    return found[:, 0].copy(), found[:, 1].copy()
