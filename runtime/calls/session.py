"""Sessions: calls of one function whose state stays on the device (donated arguments, as in XLA and Relax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.arguments import check_values, in_order
from relax_tune.runtime.bound_program import LastLaunches
from relax_tune.runtime.device.base import DeviceBuffer
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray, kept_array
from relax_tune.runtime.program.program import Program


class _Replaced(NamedTuple):
    """An argument that a result replaces.

    position: among the inputs; argument, result: their buffers' numbers; extends: the result is the argument with more elements
    """

    position: int
    argument: int
    result: int
    extends: bool


class Session:
    """A series of calls of a function, in which results replace arguments without leaving the device.

    A decoder's caches are such arguments. Where a result only extends an argument, the new elements are written behind the old
    ones: a call then copies nothing. Any other result and its argument change places. Memory doubles when it is full.

    start: the arguments that stay on the device, by name
    kept: the number of the result that replaces each argument that changes; the others serve every call

    Calls of one session must not overlap; several sessions, and other calls of the model, may. `close` frees the memory.

    Raises: UserError for names that are no parameters, numbers that are no results, or arrays that do not fit.
    """

    def __init__(self, executor: Executor, start: Mapping[str, NDArray[Any]], kept: Mapping[str, int]) -> None:
        program = executor.program
        self._executor, self._pool = executor, BufferPool(executor.device)
        names = [program.buffers[i].name for i in program.inputs]
        if not set(kept) <= set(start) <= set(names):
            raise UserError(
                f"{program.name}: wanted an array to start with for each parameter that a result replaces, {', '.join(kept) or 'none'}, "
                f"found {', '.join(start) or 'none'}; the parameters are {', '.join(names)}"
            )
        for name, number in kept.items():
            _check_replaces(program, name, number)
        self._kept = {name: _replaced(program, names.index(name), number) for name, number in kept.items()}
        self._alike: dict[tuple[object, ...], list[_Replaced]] = {}
        for r in self._kept.values():
            self._alike.setdefault((executor.kinds_at(r.argument), executor.kinds_at(r.result), r.extends), []).append(
                r
            )
        self._others = {position: name for position, name in enumerate(names) if name not in start}
        self._held = {position: program.inputs[position] for position, name in enumerate(names) if name in start}
        self._results = [i for number, i in enumerate(program.outputs) if number not in kept.values()]
        self._last = LastLaunches()
        with executor.device.turn:
            self._state: dict[int, DeviceArray] | None = {p: self._upload(p, start[names[p]]) for p in self._held}

    def _upload(self, position: int, array: NDArray[Any]) -> DeviceArray:
        """Copy an argument to the device, as it is stored there."""
        program = self._executor.program
        spec = program.buffers[program.inputs[position]]
        given = np.asarray(array)
        if given.dtype != np.dtype(spec.dtype) or given.ndim != len(spec.shape):
            raise UserError(
                f"{program.name}: parameter {spec.name}: wanted {len(spec.shape)} dims of {spec.dtype}, found {given.ndim} of {given.dtype}"
            )
        made = self._pool.empty(given.dtype, given.shape)
        stored = np.moveaxis(given, spec.outer, 0) if spec.outer else given
        self._executor.device.upload(made.buffer, stored)
        return kept_array(self._executor.device, spec, made.buffer, given.shape, made)

    @property
    def _open(self) -> dict[int, DeviceArray]:
        if self._state is None:
            raise ModelStateError(
                f"{self._executor.program.name}: wanted an open session, found one that was closed; make another"
            )
        return self._state

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[NDArray[Any]]:
        """Call the function with its other parameters, by name or in order; return its other results, in order.

        Raises: as `Model.run`; the state is then as before.
        """
        state, executor = self._open, self._executor
        program = executor.program
        given = dict(zip(self._others, in_order(program.name, list(self._others.values()), inputs), strict=True))
        arrays, key, values = executor.matched(
            [given[p] if p in given else state[p] for p in range(len(program.inputs))], known=self._held
        )
        check_values(program, arrays, values)
        with executor.call():
            bound = executor.new_binding(key, values)
            buffers = {index: state[position].buffer for position, index in self._held.items()}
            made: dict[int, DeviceArray] = {}
            for alike in self._alike.values():
                shape, room = bound.shape(alike[0].result), executor.room(bound, alike[0].argument)
                for r in alike:
                    made[r.position] = self._replace(r, state[r.position], shape, room, buffers)
            others = [(program.inputs[position], arrays[position]) for position in self._others]
            results = executor.run_over(bound, buffers, others, self._results, self._last)
        self._state = {**state, **made}
        return results

    def _replace(
        self,
        replaced: _Replaced,
        array: DeviceArray,
        shape: tuple[int, ...],
        room: int,
        buffers: dict[int, DeviceBuffer],
    ) -> DeviceArray:
        """Return the array of a result, behind the argument's elements or in memory of the pool.

        shape: of the result; room: bytes of the memory of the argument; buffers: get what launches must use
        """
        if replaced.extends and array.buffer.nbytes >= room:
            return array.moved(array.buffer, shape, array)
        owner = self._pool.empty(array.dtype, shape)
        if replaced.extends:
            self._executor.device.copy(owner.buffer, array.buffer, array.nbytes)
            buffers[replaced.argument] = owner.buffer
        else:
            buffers[replaced.result] = owner.buffer
        return array.moved(owner.buffer, shape, owner)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arguments that results have replaced, by name."""
        return {name: np.array(self._open[r.position].numpy()) for name, r in self._kept.items()}

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._state, self._last = None, LastLaunches()  # which hold the arrays
        self._pool.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _replaced(program: Program, position: int, number: int) -> _Replaced:
    argument, result = program.inputs[position], program.outputs[number]
    return _Replaced(position, argument, result, program.buffers[result].base == argument)


def _check_replaces(program: Program, name: str, number: int) -> None:
    """Raise UserError unless the result of this number may replace the parameter: of its type and rank, in memory of its own."""
    if not 0 <= number < len(program.outputs):
        raise UserError(f"{program.name}: wanted one of {len(program.outputs)} results, found number {number}")
    index = next(i for i in program.inputs if program.buffers[i].name == name)
    old, new = program.buffers[index], program.buffers[program.outputs[number]]
    if (old.dtype, len(old.shape), old.outer) != (new.dtype, len(new.shape), new.outer):
        raise UserError(
            f"{program.name}: wanted a result of {old.dtype} and {len(old.shape)} dims to replace {name}, found {new.name} of "
            f"{new.dtype} and {len(new.shape)} dims"
        )
    if new.role != "output" and new.base != index:
        raise UserError(f"{program.name}: wanted a result that is computed to replace {name}, found {new.name}, a view")
