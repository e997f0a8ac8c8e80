"""Sessions: calls of one function whose state stays on the device (donated arguments, as in XLA and Relax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.arguments import in_order
from relax_tune.runtime.bound_program import LastLaunches
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray, kept_array
from relax_tune.runtime.program.program import Program


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
        self._names = [program.buffers[i].name for i in program.inputs]
        if not set(kept) <= set(start) <= set(self._names):
            raise UserError(
                f"{program.name}: wanted an array to start with for each parameter that a result replaces, {', '.join(kept) or 'none'}, "
                f"found {', '.join(start) or 'none'}; the parameters are {', '.join(self._names)}"
            )
        for name, number in kept.items():
            _check_replaces(program, name, number)
        self._kept, self._last = dict(kept), LastLaunches()
        with executor.device.turn:
            self._state: dict[str, DeviceArray] | None = {n: self._upload(n, a) for n, a in start.items()}

    def _upload(self, name: str, array: NDArray[Any]) -> DeviceArray:
        """Copy an argument to the device, as it is stored there."""
        program = self._executor.program
        spec = program.buffers[program.inputs[self._names.index(name)]]
        given = np.asarray(array)
        if given.dtype != np.dtype(spec.dtype) or given.ndim != len(spec.shape):
            raise UserError(
                f"{program.name}: parameter {name}: wanted {len(spec.shape)} dims of {spec.dtype}, found {given.ndim} of {given.dtype}"
            )
        made = self._pool.empty(given.dtype, given.shape)
        stored = np.moveaxis(given, spec.outer, 0) if spec.outer else given
        self._executor.device.upload(made.buffer, stored)
        return kept_array(self._executor.device, spec, made.buffer, given.shape, made)

    @property
    def _open(self) -> dict[str, DeviceArray]:
        if self._state is None:
            raise ModelStateError(
                f"{self._executor.program.name}: wanted an open session, found one that was closed; make another"
            )
        return self._state

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[NDArray[Any]]:
        """Call the function with its other parameters, by name or in order; return its other results, in order.

        Raises: as `Model.run`; the state is then as before.
        """
        state = self._open
        others = [n for n in self._names if n not in state]
        given = dict(zip(others, in_order(self._executor.program.name, others, inputs), strict=True))
        results = self._executor.run_kept({**given, **state}, self._kept, self._pool, self._last)
        self._state = {**state, **{name: results[number] for name, number in self._kept.items()}}
        return [r for number, r in enumerate(results) if number not in self._kept.values()]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arguments that results have replaced, by name."""
        return {name: np.array(self._open[name].numpy()) for name in self._kept}

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._state, self._last = None, LastLaunches()  # which hold the arrays
        self._pool.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
