"""Steps of a session that differ from the one before in numbers only, with little work of the host.

Tests: `tests/tuner/emit/test_sessions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from relax_tune.runtime.arguments import Limits, index_limits, within
from relax_tune.runtime.bound_program import BoundProgram, Launches
from relax_tune.runtime.calls.result_memory import ResultMemory
from relax_tune.runtime.calls.steady_condition import Replaced, SteadyCondition
from relax_tune.runtime.device.base import DeviceBuffer, JoinsLaunches
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.program.sharing import stored_dims


class LastStep(NamedTuple):
    """A step of a session that was bound as a whole.

    Attributes:
        bound: Its binding.
        launches: Its launches, which read their numbers when they run.
        buffers: Buffers without memory of their own for the state, over which they are bound.
        given: The arguments that do not stay on the device, by position.
        state: The others after the step, by position.
        spare: Memory for the next value of each one that a result replaces and does not extend, by position.
        outputs: Memory of the results that launches write over `buffers`, by number.
    """

    bound: BoundProgram
    launches: Launches
    buffers: Mapping[int, DeviceBuffer]
    given: Mapping[int, NDArray[Any]]
    state: dict[int, DeviceArray]
    spare: dict[int, DeviceArray]
    outputs: Mapping[int, ResultMemory]


class _Given(NamedTuple):
    """An argument of every step: its type, its dims, the memory it is copied to, and the limits of its elements that are indices."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    memory: NDArray[Any]
    limits: Sequence[Limits]


class SteadySteps:
    """Steps with the shapes, variants and memory of the last one: of a decoder, all but those for which its caches move.

    The device evaluates the scalars of a step, and whether only numbers change; the host looks at the arguments of the step. The state
    of the session is updated at the end of the steps (`settle`).

    Args:
        executor: Executor of the function.
        device: Its device.
        condition: Says of a step whether it is steady.
        last: The last step. The steps own its state from now on, until they are settled.
        replaced: The arguments that results replace.
        results: Numbers of the buffers of the other results.
    """

    def __init__(
        self,
        executor: Executor,
        device: JoinsLaunches,
        condition: SteadyCondition,
        last: LastStep,
        replaced: Sequence[Replaced],
        results: Sequence[int],
    ) -> None:
        program, memory, bound = executor.program, executor.memory, last.bound
        self._executor, self._device, self._last = executor, device, last._replace(given={})
        self._launches, self._call, self._moves = last.launches, executor.call(), memory.moves
        self._names = [program.buffers[program.inputs[position]].name for position in last.given]
        self._given: list[_Given] = []
        for position, array in last.given.items():
            index = program.inputs[position]
            outer, limits = program.buffers[index].outer, index_limits(program, index, bound.values)
            view = device.view(memory.buffer(index), array.dtype, stored_dims(outer, array.shape))
            self._given.append(_Given(array.dtype, array.shape, np.moveaxis(view, 0, outer) if outer else view, limits))
        self._written = [(last.outputs[i], last.buffers[i], bound.shape(i)) for i in results if i in last.outputs]
        self._pointed: list[DeviceBuffer | None] = [None] * len(self._written)
        self._reads: list[Callable[[], NDArray[Any]]] = [
            last.outputs[i].result if i in last.outputs else partial(self._read, i) for i in results
        ]
        self._grown = [r for r in replaced if r.extends]
        self._swapped = [r for r in replaced if not r.extends]
        symbols = condition.symbols(bound, {r: last.state[r.position].buffer.nbytes for r in self._grown})
        self._symbols, self._numbers = symbols[: len(program.symbols)], last.launches.numbers
        self._advance = device.advances(condition.code, symbols, condition.moves, self._numbers[:-1])
        self._failed = False
        self._point()

    def _point(self) -> None:
        """Let the launches read the present state where a result replaces it, and write the next one to the spare memory."""
        for r in self._swapped:
            self._device.point(self._last.buffers[r.argument], self._last.state[r.position].buffer)
            self._device.point(self._last.buffers[r.result], self._last.spare[r.position].buffer)

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Any] | None:
        """Run a step; return its results, or None without an effect if more than numbers change or it has an error."""
        if type(inputs) is dict:
            inputs = [inputs.get(name) for name in self._names] if len(inputs) == len(self._names) else ()
        if type(inputs) not in (list, tuple) or len(inputs) != len(self._given):
            return None
        for array, given in zip(inputs, self._given):
            if type(array) is not ndarray or array.dtype is not given.dtype or array.shape != given.shape:
                return None
            for limits in given.limits:
                if not within(array, limits):
                    return None
        executor = self._executor
        # Also before the turn, which nobody releases in a forked process.
        if executor.refusal:
            return None
        with self._call:
            if executor.refusal or self._failed or self._moves != executor.memory.moves or not self._advance():
                return None
            self._failed = True
            if executor.record is not None:
                executor.record(tuple(self._symbols.tolist()))
            for array, given in zip(inputs, self._given):
                given.memory[...] = array
            for n, (output, alias, shape) in enumerate(self._written):
                buffer = output.take(shape)
                if buffer is not self._pointed[n]:
                    self._device.point(alias, buffer)
                    self._pointed[n] = buffer
            self._launches.enqueue()
            results = [read() for read in self._reads]
            self._failed = False
            if self._swapped:
                state, spare = self._last.state, self._last.spare
                for r in self._swapped:
                    state[r.position], spare[r.position] = spare[r.position], state[r.position]
                self._point()
        return results

    def _read(self, index: int) -> NDArray[Any]:
        """Return a copy of a result that lies in the memory of another array."""
        result: NDArray[Any] = self._executor.memory.read(self._last.bound, index, self._last.buffers, {})
        return result

    def settle(self) -> None:
        """Update the dims of the state: after the last step that succeeded."""
        for r in self._grown:
            # The numbers belong to the last step, also if it has failed.
            shape = self._executor.program.buffers[r.argument if self._failed else r.result].shape
            self._last.state[r.position].shape = tuple(self._numbers[list(shape)].tolist())
