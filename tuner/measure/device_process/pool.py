"""Device memory that all candidates of a batch share: constants, inputs and outputs.

Forty copies of the weights would evict each other from every cache, so buffers of equal name and contents exist once. Inputs and
outputs are slabs of the largest shape of the batch, with guard bytes after the part that a shape uses.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.bound_program import BoundProgram
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import FLOATING, BufferSpec, Fill, Program
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes, constant_shapes, random_array

GUARD_BYTES = 4096
POISON = 0xFF  # as floats of any width these bytes are NaN
# Integers of 0xFF bytes are -1, which many kernels may well return.
INTEGER_POISON = 0x7F

_ARRAY_BYTES = 256 << 20
Contents = tuple[str, str, tuple[int, ...], Fill, int]


def buffer_bytes(spec: BufferSpec, shape: Sequence[int]) -> int:
    """Return the size of a buffer of this shape in bytes."""
    return math.prod(shape) * np.dtype(spec.dtype).itemsize


class RecentArrays:
    """The random arrays that were drawn last: all batches of a task have the same inputs.

    Args:
        most_bytes: size of all arrays.
    """

    def __init__(self, most_bytes: int = _ARRAY_BYTES) -> None:
        self._most_bytes = most_bytes
        self._arrays: OrderedDict[Contents, NDArray[Any]] = OrderedDict()
        self.nbytes = 0

    def of(self, contents: Contents) -> NDArray[Any]:
        """Return `random_array` of these contents, not to be written."""
        array = self._arrays.get(contents)
        if array is None:
            array = self._arrays[contents] = random_array(*contents)
            array.flags.writeable = False
            self.nbytes += array.nbytes
        self._arrays.move_to_end(contents)
        while self.nbytes > self._most_bytes:
            self.nbytes -= self._arrays.popitem(last=False)[1].nbytes
        return array


class SharedBuffers:
    """The shared buffers of one device. They live across batches, so that constants stay loaded."""

    def __init__(self, device: Device) -> None:
        self._device, self._arrays = device, RecentArrays()
        self._constants: dict[Contents, Any] = {}
        self._slabs: dict[str, Any] = {}
        self._loaded: dict[str, Contents] = {}

    def reserve(self, programs: Iterable[tuple[Program, Sequence[Mapping[str, int]], int]]) -> None:
        """Reserve memory for a batch. No executor may be alive.

        Slabs grow to the largest need. Constants that no program of the batch uses are freed.

        Args:
            programs: each program with all its symbol bindings, and the seed of its constants.
        """
        needs: dict[str, int] = {}
        used: set[Contents] = set()
        for program, bindings, seed in programs:
            used.update(contents for _, contents in _constant_contents(program, seed))
            for symbols in bindings:
                shapes = buffer_shapes(program, symbols)
                for index in (*program.inputs, *program.outputs):
                    spec = program.buffers[index]
                    if spec.role in ("input", "output"):
                        needs[spec.name] = max(needs.get(spec.name, 0), buffer_bytes(spec, shapes[index]))
        for contents in [contents for contents in self._constants if contents not in used]:
            self._device.free(self._constants.pop(contents))
        outgrown = [n for n, s in self._slabs.items() if n not in needs or s.nbytes < needs[n] + GUARD_BYTES]
        for name in outgrown:
            self._loaded.pop(name, None)
            self._device.free(self._slabs.pop(name))
        for name in [name for name in needs if name not in self._slabs]:
            self._slabs[name] = self._device.alloc(needs[name] + GUARD_BYTES)

    def of(self, program: Program, constant_seed: int) -> dict[str, Any]:
        """Return the `shared` argument of this program's executor; constants are created and uploaded on first use."""
        shared: dict[str, Any] = {}
        for name, contents in _constant_contents(program, constant_seed):
            if contents not in self._constants:
                array = random_array(*contents)
                self._constants[contents] = self._device.alloc(array.nbytes, lasting=True)
                self._device.upload(self._constants[contents], array)
            shared[name] = self._constants[contents]
        for spec in program.buffers:
            if spec.role in ("input", "output") and spec.name in self._slabs:
                shared[spec.name] = self._slabs[spec.name]
        return shared

    def refresh(self) -> None:
        """Restore the memory that a wrong candidate may have overwritten."""
        for contents, buffer in self._constants.items():
            self._device.upload(buffer, random_array(*contents))
        self._loaded.clear()

    def load_inputs(self, program: Program, bound: BoundProgram, seed: int) -> None:
        """Load the random inputs of `seed`, unless an earlier candidate has left them in place."""
        for index in program.inputs:
            spec = program.buffers[index]
            contents = (spec.name, spec.dtype, bound.shapes[spec.name], spec.fill, seed)
            if self._loaded.get(spec.name) != contents:
                slab = self._slabs[spec.name]
                self._fill(slab, POISON, slab.nbytes)  # reading past the end must not find an old shape's numbers
                self._device.upload(slab, self._arrays.of(contents))
                self._loaded[spec.name] = contents

    def poison(self, program: Program, executor: Executor) -> None:
        """Overwrite outputs and temporaries, so that only the candidate's own results remain after it runs."""
        for spec in program.buffers:
            if spec.role == "output":
                floating = spec.dtype in FLOATING
                slab = self._slabs[spec.name]
                self._fill(slab, POISON if floating else INTEGER_POISON, slab.nbytes)
            elif spec.role == "temp":
                buffer = executor.buffer(spec.name)
                self._fill(buffer, POISON, buffer.nbytes)

    def overrun(self, program: Program, bound: BoundProgram) -> str | None:
        """Return a sentence if a candidate wrote past the end of an output since `poison`, else None."""
        for index in program.outputs:
            spec = program.buffers[index]
            if spec.role != "output":
                continue
            size = buffer_bytes(spec, bound.shapes[spec.name])
            guard = self._device.download(self._slabs[spec.name], np.dtype(np.uint8), (size + GUARD_BYTES,))[size:]
            poison = POISON if spec.dtype in FLOATING else INTEGER_POISON
            if (guard != poison).any():
                first = int(np.argmax(guard != poison))
                return f"output {spec.name}: expected no writes after its {size} bytes, got byte {first} changed"
        return None

    def _fill(self, buffer: Any, value: int, nbytes: int) -> None:
        if nbytes:
            poison: NDArray[np.uint8] = np.full(nbytes, value, np.uint8)
            self._device.upload(buffer, poison)


def _constant_contents(program: Program, seed: int) -> list[tuple[str, Contents]]:
    shapes = constant_shapes(program)
    return [
        (spec.name, (spec.name, spec.dtype, shapes[spec.name], spec.fill, seed))
        for spec in program.buffers
        if spec.role == "const"
    ]
