"""Constants on a device: each there once, and packed once, however many programs read it.

Constants of a mapped artifact stay in its file where launches reach the host's memory.

Tests: `tests/runtime/memory/test_weights.py`, `tests/runtime/test_artifact_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.device.memory import aligned_array
from relax_tune.runtime.mapped_file import drop_pages, is_lasting
from relax_tune.runtime.program.program import LaunchStep, Program


class DeviceWeights:
    """Device memory of constants and of their packed forms, for programs that run on one device.

    The caller owns the device, and holds its turn to ask for a buffer. `close` frees the memory, after every executor that
    uses it is done.
    """

    def __init__(self, device: Device, constants: Mapping[str, NDArray[Any]]) -> None:
        self.device, self._arrays = device, constants
        self._constants: dict[str, DeviceBuffer] = {}
        self._packed: dict[Hashable, DeviceBuffer] = {}
        self._in_place: dict[str, NDArray[Any]] = {}  # arrays that launches read where they are
        self._resident: frozenset[str] | None = None  # all, until it is known what launches read

    def constant(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceBuffer:
        """Return the device buffer of a constant, placed on first use. Raises ArtifactError unless one of this dtype and shape exists."""
        array = self._arrays.get(name)
        if array is None:
            raise ArtifactError(f"expected the constant {name}, got none of that name")
        if array.dtype != dtype or array.shape != shape:
            raise ArtifactError(f"constant {name}: expected {dtype} {shape}, got {array.dtype} {array.shape}")
        return self.present(name)

    def present(self, name: str) -> DeviceBuffer:
        """Return the device buffer of a constant that exists, placed again if it was freed."""
        array, buffer = self._arrays[name], self._constants.get(name)
        if buffer is None:
            buffer = self._wrapped(name, array)
            if buffer is None:
                buffer = self.device.alloc(array.nbytes, lasting=True)
                self.device.upload(buffer, np.ascontiguousarray(array))
                drop_pages(array)
            self._constants[name] = buffer
        return buffer

    def _wrapped(self, name: str, array: NDArray[Any]) -> DeviceBuffer | None:
        """Return a buffer over an array that nobody writes, on devices whose launches can be given another array later; else None."""
        buffer: DeviceBuffer | None = self.device.wrap(array) if is_lasting(array) else None
        if buffer is None:
            return None
        if not self.device.place(buffer, None):
            self.device.free(buffer)
            return None
        self._in_place[name] = array
        return buffer

    def let_go(self, name: str) -> None:
        """Drop a constant's pages of a mapped file, which launches read again from there if they need them."""
        if name in self._constants:
            drop_pages(self._arrays[name])

    def keep_only(self, names: Collection[str]) -> None:
        """Free all other constants, which were only packed and which no launch reads any more; `replace` needs them for a while."""
        self._resident = frozenset(names)
        self._free_packed()

    def _free_packed(self) -> None:
        for name in self._constants.keys() - (self._constants.keys() if self._resident is None else self._resident):
            self.device.free(self._constants.pop(name))
            self._in_place.pop(name, None)
            drop_pages(self._arrays[name])

    def packed(self, key: Hashable, nbytes: int) -> tuple[DeviceBuffer, bool]:
        """Return the device buffer of a packed weight, and whether it still has to be written. key: weight and packing"""
        fresh = key not in self._packed
        if fresh:
            self._packed[key] = self.device.alloc(nbytes, lasting=True)
        return self._packed[key], fresh

    def replace(self, constants: Mapping[str, NDArray[Any]], pack: Callable[[], None]) -> None:
        """Replace these constants by others of the same types and shapes. pack: packs them again (`Executor.pack_weights`)"""
        self._arrays = constants
        for name, buffer in self._constants.items():
            array = np.ascontiguousarray(constants[name])
            if name in self._in_place:
                if not is_lasting(array):
                    array = aligned_array(array.dtype, array.shape)
                    array[...] = constants[name]
                    array.flags.writeable = False
                self.device.place(buffer, array)
                self._in_place[name] = array
            else:
                self.device.upload(buffer, array)
        pack()
        self._free_packed()

    def close(self) -> None:
        """Free all memory. May be called twice."""
        with self.device.turn:
            for buffer in (*self._constants.values(), *self._packed.values()):
                self.device.free(buffer)
            self._constants.clear()
            self._packed.clear()
            self._in_place.clear()


def read_by_calls(program: Program) -> set[str]:
    """Return the names of the constants that calls may read: all but the ones that are only packed."""
    used = {i for call in program.calls for v in call.variants for step in v.steps for i in step.buffers}
    used |= {
        *program.outputs,
        *(c.buffer for c in program.checked),
        *(b.base for b in program.buffers if b.base is not None),
    }
    return {b.name for i, b in enumerate(program.buffers) if b.role == "const" and i in used}


def load_constants(
    program: Program,
    values: Sequence[int | None],
    weights: DeviceWeights,
    shared: Mapping[int, DeviceBuffer],
    launch: Callable[[LaunchStep], None],
    buffers: dict[int, DeviceBuffer],
) -> None:
    """Place constants, then run the `prepare` steps. Arrays packed by another program of the same weights are shared.

    Args:
        program: The program.
        values: Values of the slots that depend on no symbol.
        weights: Device memory of the constants.
        shared: Buffers of the caller.
        launch: Runs a step over `buffers`.
        buffers: Gets the buffer of each constant and packed weight.
    """
    sizes: dict[int, int] = {}
    for index, spec in enumerate(program.buffers):
        if spec.role not in ("const", "packed"):
            continue
        shape = _fixed(program, values, spec.shape, f"buffer {spec.name}")
        if any(dim < 0 for dim in shape):
            raise ArtifactError(f"{program.name}: buffer {spec.name}: expected dims of 0 or more, got {shape}")
        dtype = np.dtype(spec.dtype)
        sizes[index] = math.prod(shape) * dtype.itemsize
        if index in shared:
            check_size(program, index, shared[index], sizes[index])
        elif spec.role == "const":
            try:
                buffers[index] = weights.constant(spec.name, dtype, shape)
            except ArtifactError as error:
                raise ArtifactError(f"{program.name}: {error}") from None
    # A packed array is identified by what computes it: programs whose steps, sources and numbers are equal share one
    # copy.
    identity: dict[int, Hashable] = {i: (i, id(shared[i])) if i in shared else program.buffers[i].name for i in sizes}
    for position, step in enumerate(program.prepare):
        where = f"prepare step {position} ({step.target})"
        numbers = _fixed(program, values, (*step.scalars, *step.grid), where)
        unpacked = [i for i in step.buffers if program.buffers[i].role == "packed" and i not in buffers]
        sources = tuple(None if i in unpacked else identity[i] for i in step.buffers)
        # A step is left out if it only writes arrays that an earlier program has packed. One that writes nothing new
        # here, such as a caller's buffer, always runs.
        fresh = not unpacked
        for i in unpacked:
            identity[i] = ("packed", step.target, sources, numbers, step.local, step.buffers.index(i))
            buffers[i], new = weights.packed(identity[i], sizes[i])
            fresh = fresh or new
        if fresh:
            launch(step)
            for i in step.buffers:
                weights.let_go(program.buffers[i].name)
    for i in sizes:
        if i not in buffers and i not in shared:  # packed, and never written
            buffers[i], _ = weights.packed(("unwritten", program.name, i), sizes[i])


def check_size(program: Program, index: int, buffer: DeviceBuffer, nbytes: int) -> None:
    """Raise UserError for a buffer of the caller that is too small."""
    size = getattr(buffer, "nbytes", None)
    if size is not None and size < nbytes:
        name = program.buffers[index].name
        raise UserError(f"{program.name}: shared buffer {name}: expected {nbytes} bytes, got {size}")


def _fixed(program: Program, values: Sequence[int | None], slots: Sequence[int], where: str) -> tuple[int, ...]:
    """Return the values of slots that must not depend on symbols."""
    numbers = [values[slot] for slot in slots]
    if any(value is None for value in numbers):
        raise ArtifactError(f"{program.name}: {where}: expected sizes that depend on no symbol, got one that does")
    return tuple(value for value in numbers if value is not None)
