"""Bytes of a program's buffers for one set of slot values.

Buffers of equal dims are computed once, since a decoder binds new values at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program.program import Program


class BufferSizes:
    """The dims of every buffer as slots. Buffers of the same slots and element size are of one kind.

    Attributes:
        kinds: The kind of each buffer.
        rows: Slots of the dims and bytes of an element, by kind.
        kinds_stored: Each kind and the slot of a storage that must have its bytes.
        kinds_viewed: Each kind and the kind of a buffer that it lies in.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        rows = [(b.shape, np.dtype(b.dtype).itemsize) for b in program.buffers]
        self.rows = list(dict.fromkeys(rows))  # many buffers are alike
        number = {row: n for n, row in enumerate(self.rows)}
        self.kinds = [number[row] for row in rows]
        self._stored = [
            (n, program.storages[b.storage]) for n, b in enumerate(program.buffers) if b.storage is not None
        ]
        self._views = [
            (n, b.base)
            for n, b in enumerate(program.buffers)
            if b.storage is None and b.base is not None and program.buffers[b.base].role != "input"
        ]
        # by kind, each once: kinds and the slots of their storages, kinds and the kinds of the buffers they view
        self._dims = sorted({slot for shape, _ in self.rows for slot in shape})
        self.kinds_stored = sorted({(self.kinds[n], slot) for n, slot in self._stored})
        self.kinds_viewed = sorted({(self.kinds[n], self.kinds[base]) for n, base in self._views})

    def of(self, values: Sequence[int]) -> list[int]:
        """Return the bytes of a buffer of each kind.

        Raises ArtifactError for negative dims, and for buffers larger than the memory they lie in.
        """
        if self._dims and min([values[slot] for slot in self._dims]) < 0:
            self._refuse_negative(values)
        sizes = []
        for shape, size in self.rows:
            for slot in shape:
                size *= values[slot]
            sizes.append(size)
        for kind, slot in self.kinds_stored:
            if sizes[kind] > values[slot]:
                self._refuse_larger(sizes, values)
        for kind, base in self.kinds_viewed:
            if sizes[kind] > sizes[base]:
                self._refuse_larger(sizes, values)
        return sizes

    def shape(self, index: int, values: Sequence[int]) -> tuple[int, ...]:
        """Return the dims of one buffer."""
        return tuple([values[slot] for slot in self._program.buffers[index].shape])

    def _refuse_negative(self, values: Sequence[int]) -> None:
        for index, buffer in enumerate(self._program.buffers):
            if min(self.shape(index, values), default=0) < 0:
                raise ArtifactError(
                    f"{self._program.name}: buffer {buffer.name}: expected dims of 0 or more, got {self.shape(index, values)}"
                )

    def _refuse_larger(self, sizes: Sequence[int], values: Sequence[int]) -> None:
        program, nbytes = self._program, [sizes[kind] for kind in self.kinds]
        for index, slot in self._stored:
            if nbytes[index] > values[slot]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: expected {nbytes[index]} bytes, its storage has {values[slot]}"
                )
        for index, base in self._views:
            if nbytes[index] > nbytes[base]:
                raise ArtifactError(
                    f"{program.name}: buffer {program.buffers[index].name}: expected {nbytes[index]} bytes, "
                    f"{program.buffers[base].name} that it views has {nbytes[base]}"
                )
