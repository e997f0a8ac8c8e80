"""The device memory of a program: one slab per storage, input and output, which only grows and is shared by all bindings.

Tests: `tests/runtime/test_executor.py`, `tests/runtime/test_resident.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.bound_program import NO_BUFFERS, BoundProgram, Buffers
from relax_tune.runtime.device.base import Device, DeviceBuffer, JoinsLaunches, SharesMemory
from relax_tune.runtime.memory.borrowed import is_borrowed
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.host_pool import HostPool
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.memory.weights import check_size
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.sharing import stored_dims, unshared, viewed_inputs


class ProgramMemory:
    """The buffers of a program on a device. The caller has the device's turn.

    Args:
        program: The program.
        device: Its device.
        sizes: The bytes of its buffers.
        shared: Buffers of the caller for named inputs, constants or outputs; they are never freed or grown.

    Attributes:
        generation: How often a slab was replaced by a larger one that launches do not see. Launches of an earlier generation refer to
            freed memory.
        moves: How often a slab was replaced by a larger one.
        shared: The buffers of the caller, by number.
        constants: Buffers of constants and packed weights, by number.
        placeable: Inputs and outputs that share memory with no other.
        results: Host memory of results that launches write in place.

    Raises:
        UserError: A name in `shared` is no input, constant or output.
    """

    def __init__(
        self, program: Program, device: Device, sizes: BufferSizes, shared: Mapping[str, DeviceBuffer] | None
    ) -> None:
        self._program, self._device, self._sizes = program, device, sizes
        self._joins = device if isinstance(device, JoinsLaunches) else None
        self.generation = self.moves = 0
        self.shared = _numbered(program, shared or {})
        self.constants: dict[int, DeviceBuffer] = {}
        self._own: dict[int, DeviceBuffer] = {}
        self._storages: list[DeviceBuffer | None] = [None] * len(program.storages)
        self.results = HostPool()
        self._borrows = False  # whether enqueued copies read memory of other libraries
        # Only arrays that cross the call have slabs of their size. Intermediate ones share the storages that the
        # build has planned.
        self._crossing = [n for n, b in enumerate(program.buffers) if b.role in ("input", "output")]
        self.placeable = unshared(program) - self.shared.keys()
        self._extended = {i: view for i, view in viewed_inputs(program).items() if i not in self.shared}
        self._views: dict[int, list[int]] = {}
        for number, spec in enumerate(program.buffers):
            if spec.base is not None:
                self._views.setdefault(spec.base, []).append(number)

    def buffer(self, index: int, replaced: Buffers = NO_BUFFERS) -> DeviceBuffer | None:
        """Return the present device buffer of a program's buffer; None before it has memory.

        Args:
            index: Number of the buffer.
            replaced: Buffers of a caller that replace own ones in its call.
        """
        if index in replaced:
            return replaced[index]
        if index in self.shared:
            return self.shared[index]
        if index in self.constants:
            return self.constants[index]
        spec = self._program.buffers[index]
        if spec.base is not None:
            return self.buffer(spec.base, replaced)
        return self._own.get(index) if spec.storage is None else self._storages[spec.storage]

    def grow(self, bound: BoundProgram, replaced: Buffers = NO_BUFFERS) -> None:
        """Make every slab as large as a binding needs. Raises MeasureError without memory."""
        for number, slot in enumerate(self._program.storages):
            self._storages[number] = self._slab(self._storages[number], bound.values[slot])
        for index, buffer in self.shared.items():
            check_size(self._program, index, buffer, self.room(bound, index))
        for index in self._crossing:
            if index not in self.shared and index not in replaced:
                self._own[index] = self._slab(self._own.get(index), self.room(bound, index))

    def _slab(self, slab: DeviceBuffer | None, nbytes: int) -> DeviceBuffer:
        if slab is not None and slab.nbytes >= nbytes:
            return slab
        if slab is not None:
            nbytes = max(nbytes, slab.nbytes + slab.nbytes // 2)  # so that a growing sequence seldom reallocates
            self._device.synchronize()  # launches under way may use it
        # Before the old slab is freed: without memory for it, calls of the old sizes still work.
        larger = self._device.alloc(nbytes)
        if slab is None:
            return larger
        self.moves += 1
        if self._joins is not None:
            self._joins.point(slab, larger)  # launches read its address when they run
            return slab
        self._device.free(slab)
        self.generation += 1
        return larger

    def storage_bytes(self) -> list[int]:
        """Return the bytes of each storage's memory."""
        return [0 if slab is None else slab.nbytes for slab in self._storages]

    def room(self, bound: BoundProgram, index: int) -> int:
        """Return the bytes of the memory of an array, which a result may extend in place."""
        return max([bound.nbytes(index), *(bound.nbytes(view) for view in self._views.get(index, ()))])

    def kinds_at(self, index: int) -> tuple[int, ...]:
        """Return the kinds (`BufferSizes`) of an array and its views: equal kinds always have equal dims and `room`."""
        return tuple(self._sizes.kinds[n] for n in (index, *self._views.get(index, ())))

    def give(
        self,
        bound: BoundProgram,
        index: int,
        array: NDArray[Any] | DeviceArray,
        in_place: bool,
        placed: dict[int, NDArray[Any]],
    ) -> None:
        """Copy an argument to the device, or let launches read it where it is.

        Args:
            bound: The binding of the call.
            index: Number of the input.
            array: The argument.
            in_place: Let launches use the host's memory where the device can.
            placed: Gets the host arrays that launches use, by number.
        """
        spec = self._program.buffers[index]
        if isinstance(array, DeviceArray):
            if array.memory.device is self._device and array.outer == spec.outer:
                # The array stays on the device: a round trip through the host would wait for all launches before.
                if array.lent:
                    self._finish()
                self._device.copy(self.buffer(index), array.buffer, array.nbytes)
                self._borrows = self._borrows or is_borrowed(array)
                return
            array = array.numpy()
        stored = np.moveaxis(array, spec.outer, 0) if spec.outer else array
        view = self._extended.get(index)
        if in_place and view is not None and self.room(bound, index):
            # The result extends the argument in place: copy the argument to where the result will be.
            result = self._program.buffers[view]
            memory = self.results.empty(np.dtype(result.dtype), stored_dims(result.outer, bound.shape(view)))
            if memory.size >= stored.size and self._device.place(self._own[index], memory):
                placed[index] = placed[view] = memory
                self._device.upload(self._own[index], stored)
                return
        contiguous = np.ascontiguousarray(stored)
        if not (in_place and self._place(index, contiguous, placed)):
            self._device.upload(self.buffer(index), contiguous)

    def _finish(self) -> None:
        """Wait for the work of other libraries, which may write to an array that they have taken."""
        assert isinstance(self._device, SharesMemory)
        self._device.finish()

    def return_borrowed(self) -> None:
        """Wait until arguments in the memory of other libraries were read: their owners may then write to it or free it."""
        if self._borrows:
            self._borrows = False
            self._device.synchronize()

    def place_results(self, bound: BoundProgram, outputs: Iterable[int], placed: dict[int, NDArray[Any]]) -> None:
        """Let launches write outputs to fresh host arrays where the device can; `placed` gets the arrays."""
        for index in outputs:
            if index not in self.placeable:
                continue
            spec = self._program.buffers[index]
            array = self.results.empty(np.dtype(spec.dtype), stored_dims(spec.outer, bound.shape(index)))
            self._place(index, array, placed)

    def _place(self, index: int, array: NDArray[Any], placed: dict[int, NDArray[Any]]) -> bool:
        """Let launches use an array as an input or output that shares memory with no other. Returns whether they do."""
        # `placeable` leaves out buffers that share memory with others of the program, which the array could not
        # replace.
        suitable = index in self.placeable and array.nbytes > 0 and array.flags.aligned
        if not suitable or not self._device.place(self._own[index], array):
            return False
        placed[index] = array
        return True

    def unplace(self, placed: Iterable[int]) -> None:
        """Let launches use the buffers' own memory again."""
        for index in placed:
            if index in self._own:
                self._device.place(self._own[index], None)

    def read(
        self,
        bound: BoundProgram,
        index: int,
        replaced: Buffers,
        placed: Mapping[int, NDArray[Any]],
        pool: BufferPool | None = None,
    ) -> Any:
        """Return an output of the last launch; waits for it.

        Args:
            bound: Its binding.
            index: Number of the output.
            replaced: Buffers of the caller that it used.
            placed: Host arrays that it wrote in place, as `Executor.launch` returns them.
            pool: Return an array of this pool, in the device's memory, instead of one of the host.
        """
        spec = self._program.buffers[index]
        dtype, shape = np.dtype(spec.dtype), bound.shape(index)
        if pool is not None and index not in placed:
            array = pool.empty(dtype, shape, spec.outer)
            self._device.copy(array.buffer, self.buffer(index, replaced), array.nbytes)
            return array
        stored = placed.get(index)
        if stored is None:
            stored = self._device.download(self.buffer(index, replaced), dtype, stored_dims(spec.outer, shape))
        return np.moveaxis(stored, 0, spec.outer) if spec.outer else stored

    def close(self) -> None:
        """Free the memory, without buffers of the caller and constants."""
        for buffer in [*self._own.values(), *(s for s in self._storages if s is not None)]:
            self._device.free(buffer)
        self._own.clear()
        self.results.close()
        self.constants.clear()
        self._storages = [None] * len(self._program.storages)
        self.generation += 1
        self.moves += 1


def _numbered(program: Program, shared: Mapping[str, DeviceBuffer]) -> dict[int, DeviceBuffer]:
    """Return the buffers of a caller by number. Raises UserError for names that are no inputs, constants or outputs."""
    numbers = {spec.name: index for index, spec in enumerate(program.buffers)}
    unknown = sorted(set(shared) - set(numbers))
    if unknown:
        raise UserError(f"{program.name}: shared buffers: expected names of the program, got {unknown}")
    buffers = {numbers[name]: buffer for name, buffer in shared.items()}
    if any(program.buffers[index].role in ("temp", "packed", "view") for index in buffers):
        raise UserError(f"{program.name}: shared buffers: expected inputs, constants or outputs only")
    return buffers
