"""Sessions: calls of one function whose state stays on the device (donated arguments, as in XLA and Relax).

Tests: `tests/tuner/emit/test_sessions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.arguments import check_values, in_order
from relax_tune.runtime.arrays import any_tensor, as_array, as_tensors
from relax_tune.runtime.bound_program import BoundProgram, Launches
from relax_tune.runtime.calls.result_memory import ResultMemory
from relax_tune.runtime.calls.steady_condition import Replaced, SteadyCondition
from relax_tune.runtime.calls.steady_steps import LastStep, SteadySteps
from relax_tune.runtime.device.base import DeviceBuffer, JoinsLaunches
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.borrowed import borrow, is_borrowed, is_on
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.results import Results, named


class Session:
    """A series of calls of a function, in which results replace arguments without leaving the device.

    A decoder's caches are such arguments. Where a result only extends an argument, the new elements are appended to the old ones: a
    call then copies nothing. A pool of blocks is changed where it is. Any other result and its argument change places. Memory doubles
    when it is full.

    Calls of one session must not overlap; several sessions, and other calls of the model, may. `close` frees the memory.

    Args:
        executor: Executor of the function.
        start: The arguments that stay on the device, by name.
        replaced: Number of the result that replaces each argument that changes; the others serve every call.

    Raises:
        UserError: A name is no parameter, a number is no result, or an array does not fit.
    """

    def __init__(self, executor: Executor, start: Mapping[str, Any], replaced: Mapping[str, int]) -> None:
        program = executor.program
        self._executor, self._pool = executor, BufferPool(executor.device)
        names = [program.buffers[i].name for i in program.inputs]
        if not set(replaced) <= set(start) <= set(names):
            raise UserError(
                f"{program.name}: expected an array to start with for each parameter that a result replaces, "
                f"{', '.join(replaced) or 'none'}, got {', '.join(start) or 'none'}; the parameters are {', '.join(names)}"
            )
        for name, number in replaced.items():
            _check_replaces(program, name, number)
        self._replaced = {name: _replaced(program, names.index(name), number) for name, number in replaced.items()}
        self._groups: dict[tuple[object, ...], list[Replaced]] = {}  # equal shapes and sizes, computed once per call
        memory = executor.memory
        for r in self._replaced.values():
            key = memory.kinds_at(r.argument), memory.kinds_at(r.result), r.extends
            self._groups.setdefault(key, []).append(r)
        self._others = {position: name for position, name in enumerate(names) if name not in start}
        self._resident = {position: program.inputs[position] for position, name in enumerate(names) if name in start}
        self._results = [i for number, i in enumerate(program.outputs) if number not in replaced.values()]
        self._names = tuple(program.buffers[i].name for i in self._results)
        device = executor.device
        self._joins = device if isinstance(device, JoinsLaunches) else None
        self._condition: SteadyCondition | None = None
        self._steady: SteadySteps | None = None
        self._may_be_steady = (
            self._joins is not None and not program.checked and not _has_indices(program, self._resident.values())
        )
        # Live: from step to step mostly the numbers change, and renewing launches would take longer than a small
        # kernel runs.
        self._launches = Launches(device, live=True)
        self._outputs = {
            i: ResultMemory(device, np.dtype(program.buffers[i].dtype), program.buffers[i].outer)
            for i in self._results
            if i in memory.placeable and self._joins is not None
        }
        # They are bound over these buffers, which stay while the memory of the state and of results moves.
        swapped = [r.result for r in self._replaced.values() if not r.extends]
        indices = () if self._joins is None else (*self._resident.values(), *swapped, *self._outputs)
        self._aliases: dict[int, DeviceBuffer] = {index: device.alloc(0) for index in indices}
        self._spare: dict[int, DeviceArray] = {}  # memory of former states, for the next ones
        self._last: list[tuple[np.dtype[Any], tuple[int, ...]]] | None = None  # types of the last step's arguments
        self._start = {position: start[names[position]] for position in self._resident}
        self._state: dict[int, DeviceArray] | None = None
        self._begin(self._resident)

    def _begin(self, positions: Iterable[int]) -> None:
        """Copy arguments as they were at the start to the device."""
        with self._executor.device.turn:
            self._state = {**(self._state or {}), **{p: self._upload(p, self._start[p]) for p in positions}}

    def _upload(self, position: int, array: Any) -> DeviceArray:
        """Copy an argument to the device, as it is stored there."""
        program = self._executor.program
        spec = program.buffers[program.inputs[position]]
        where, expected = f"{program.name}: parameter {spec.name}", f"{len(spec.shape)} dims of {spec.dtype}"
        device = self._executor.device
        stays = isinstance(array, DeviceArray) and (array.memory.device, array.outer) == (device, spec.outer)
        source: NDArray[Any] | DeviceArray
        if is_on(array, device):
            source = borrow(array, device, where, spec.dtype)
        else:
            source = array if stays else as_array(array, where, expected, spec.dtype)
        if source.dtype != np.dtype(spec.dtype) or source.ndim != len(spec.shape):
            raise UserError(f"{where}: expected {expected}, got {source.ndim} of {source.dtype}")
        copied = self._pool.empty(source.dtype, source.shape, spec.outer)
        if isinstance(source, DeviceArray):
            device.copy(copied.buffer, source.buffer, source.nbytes)
            if is_borrowed(source):
                device.synchronize()  # its owner may free the memory as soon as this returns
        else:
            device.upload(copied.buffer, np.moveaxis(source, spec.outer, 0) if spec.outer else source)
        return copied

    @property
    def _open(self) -> dict[int, DeviceArray]:
        if self._steady is not None:
            self._steady.settle()
            self._steady = None
        if self._state is None:
            raise ModelStateError(
                f"{self._executor.program.name}: expected an open session, got one that was closed; open another"
            )
        return self._state

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Results:
        """Call the function with its other parameters, by name or in order; return its other results, in order.

        Raises:
            RelaxTuneError: As `Model.run`; the state is then as before the call.
        """
        executor, program = self._executor, self._executor.program
        if self._steady is not None:
            results = self._steady.run(inputs)
            if results is not None:
                return named(results, self._names)
        given = in_order(program.name, list(self._others.values()), inputs)
        state = self._open
        arguments = {**state, **dict(zip(self._others, given, strict=True))}
        arrays, key, values = executor.match([arguments[p] for p in range(len(program.inputs))], checked=self._resident)
        check_values(program, arrays, values)
        with executor.call():
            # A decoder's caches grow in every call, so a shape hardly ever returns; cached, it would evict bindings
            # of other calls.
            bound = executor.bind(key, values, cached=False)
            buffers, updated = self._next(bound, state)
            others = [(program.inputs[position], arrays[position]) for position in self._others]
            placed = executor.launch(bound, buffers, others, in_place=True, launches=self._launches)
            executor.device.synchronize()  # arrays of the pool may be freed as soon as this returns
            results = [
                self._outputs[index].result()
                if index in self._outputs
                else executor.memory.read(bound, index, buffers, placed)
                for index in self._results
            ]
            # Last, so that a call that fails leaves the state as it was.
            self._state = {**state, **updated}
            self._spare = {r.position: state[r.position] for r in self._replaced.values() if not r.extends}
            # A steady step takes plain arrays: none that were converted, none on a device.
            plain = all(type(a) is np.ndarray and a is arrays[p] for p, a in zip(self._others, given))
            self._continue(bound, given if plain else None)
        return named(as_tensors(results) if any_tensor(inputs) else results, self._names)

    def _next(
        self, bound: BoundProgram, state: Mapping[int, DeviceArray]
    ) -> tuple[dict[int, DeviceBuffer], dict[int, DeviceArray]]:
        """Return the device buffers for the launches of a step, and the arrays that it computes, by position."""
        buffers = {index: state[position].buffer for position, index in self._resident.items()}
        updated: dict[int, DeviceArray] = {}
        for group in self._groups.values():
            shape, room = bound.shape(group[0].result), self._executor.memory.room(bound, group[0].argument)
            for r in group:
                updated[r.position] = self._replace(r, state[r.position], shape, room, buffers)
        if self._joins is None:
            return buffers, updated
        buffers |= {index: output.take(bound.shape(index)) for index, output in self._outputs.items()}
        for index, buffer in buffers.items():
            self._joins.point(self._aliases[index], buffer)
        return self._aliases, updated

    def _continue(self, bound: BoundProgram, given: Sequence[NDArray[Any]] | None) -> None:
        """Let the next steps be steady, if this one had arguments of the same types as the one before."""
        types = None if given is None else [(a.dtype, a.shape) for a in given]
        # Preparing them takes longer than binding a step as a whole.
        same = given is not None and types == self._last
        if same and self._joins is not None and self._may_be_steady and self._state is not None:
            arguments = dict(zip(self._others, given or ()))
            last = LastStep(bound, self._launches, self._aliases, arguments, self._state, self._spare, self._outputs)
            replaced = [*self._replaced.values()]
            if self._condition is None:
                self._condition = SteadyCondition(self._executor, [r for r in replaced if r.extends])
            self._steady = SteadySteps(self._executor, self._joins, self._condition, last, replaced, self._results)
        self._last = types

    def _replace(
        self,
        replaced: Replaced,
        array: DeviceArray,
        shape: tuple[int, ...],
        room: int,
        buffers: dict[int, DeviceBuffer],
    ) -> DeviceArray:
        """Return the array of a result: it extends the argument, or is in memory of the pool.

        Args:
            replaced: The argument and the result.
            array: The argument.
            shape: Shape of the result.
            room: Bytes of memory that the argument needs.
            buffers: Gets the device buffers that launches must use.
        """
        if replaced.extends and array.buffer.nbytes >= room:
            return array.moved(array.buffer, shape, array)
        # The pool rounds up to powers of two, so that appending n elements one by one copies O(n) of them in all.
        spare = self._spare.pop(replaced.position, None)
        fits = spare is not None and spare.shape == shape
        owner = spare if spare is not None and fits else self._pool.empty(array.dtype, shape, array.outer)
        if replaced.extends:
            self._executor.device.copy(owner.buffer, array.buffer, array.nbytes)
            buffers[replaced.argument] = owner.buffer
        else:
            buffers[replaced.result] = owner.buffer
        return owner

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arguments that results have replaced, by name."""
        state = self._open
        return {name: self._pool.download(state[r.position]) for name, r in self._replaced.items()}

    def reset(self) -> None:
        """Give the arguments that results have replaced the values that they had at the start; the arrays must be unchanged.

        Raises:
            ModelStateError: The session or the model is closed.
        """
        self._open  # noqa: B018
        with self._executor.call():
            self._executor.check_open()
            self._begin(r.position for r in self._replaced.values())

    def close(self) -> None:
        """Free the memory. May be called twice."""
        # The launches refer to the buffers of the arrays.
        self._state, self._launches = None, Launches(self._executor.device, live=True)
        self._steady, self._aliases, self._spare, self._outputs = None, {}, {}, {}
        self._pool.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_indices(program: Program, buffers: Iterable[int]) -> bool:
    """Return whether elements of some inputs are used as indices, which the host checks."""
    ranged = {r.buffer for r in program.ranges}
    return any(index in ranged or program.buffers[index].fill.kind == "integers" for index in buffers)


def _replaced(program: Program, position: int, number: int) -> Replaced:
    argument, result = program.inputs[position], program.outputs[number]
    return Replaced(position, argument, result, _in_place(program, argument, result))


def _in_place(program: Program, argument: int, result: int) -> bool:
    """Return whether a result lies in the memory of an argument: as a view of it, or as the argument itself, which the call changes."""
    return argument in (result, program.buffers[result].base)


def _check_replaces(program: Program, name: str, number: int) -> None:
    """Raise UserError unless a result may replace a parameter: it has its type and rank, and memory that nothing else uses."""
    if not 0 <= number < len(program.outputs):
        raise UserError(f"{program.name}: expected one of {len(program.outputs)} results, got number {number}")
    index = next(i for i in program.inputs if program.buffers[i].name == name)
    old, new = program.buffers[index], program.buffers[program.outputs[number]]
    if (old.dtype, len(old.shape), old.outer) != (new.dtype, len(new.shape), new.outer):
        raise UserError(
            f"{program.name}: expected a result of {old.dtype} and {len(old.shape)} dims to replace {name}, got {new.name} of "
            f"{new.dtype} and {len(new.shape)} dims"
        )
    if new.role != "output" and not _in_place(program, index, program.outputs[number]):
        raise UserError(f"{program.name}: expected a result that is computed to replace {name}, got {new.name}, a view")
