"""A call of a function over the same arrays each time (input/output binding, as of ONNX Runtime)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arguments import check_values, in_order
from relax_tune.runtime.device.base import DeviceBuffer, Launch
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.resident import on_host
from relax_tune.runtime.program.host_program import (
    CallSubgraph,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    LoadWeight,
    Move,
    Number,
    Pack,
    Require,
)
from relax_tune.runtime.program.sharing import stored_dims
from relax_tune.runtime.vm import CallFrame, VirtualMachine

Array = NDArray[Any]


class BoundCall:
    """A call whose arguments and results are the same arrays each time: `run` reads what they hold then, and writes the results.

    Shapes, variants and launches are settled once. Where launches reach the host's memory, nothing is copied.

    inputs: arrays by name or in order. results: arrays to write, in order; without them the call makes its own. fixed: names of
    arguments whose elements never change. Elements that are used as indices are checked in every run, those of fixed ones once.
    symbols: the value of each, where the inputs do not determine all.

    Other calls of the model may run in between; runs of one `BoundCall` must not overlap.

    Raises: as `Executor.run`, and UserError for results that do not fit, are no plain memory or overlap another array.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Mapping[str, Array] | Sequence[Array],
        results: Sequence[Array] | None = None,
        fixed: Collection[str] = (),
        symbols: Sequence[int] | None = None,
    ) -> None:
        program, self._executor = executor.program, executor
        given, self._key, self._values = executor.matched(inputs, symbols)
        check_values(program, given, self._values)
        self._inputs: list[Array] = [on_host(a) for a in given]
        names = {program.buffers[i].name: i for i in program.inputs}
        _check_fixed(program.name, names, fixed)
        self._fixed = {names[name] for name in fixed}
        with executor.device.turn:
            self._bound = executor.open_binding(self._key, self._values)
            self.results = self._checked(results)
            self._buffers = self._wrapped()
            self._generation, self._launches, self._runs = -1, list[Launch](), 0

    def _checked(self, results: Sequence[Array] | None) -> list[Array]:
        """Return the arrays of the results, made here unless they are given."""
        program, made = self._executor.program, results is None
        specs = [program.buffers[i] for i in program.outputs]
        wanted = [(np.dtype(s.dtype), self._bound.shapes[s.name]) for s in specs]
        found = [np.empty(shape, dtype) for dtype, shape in wanted] if results is None else list(results)
        if len(found) != len(wanted):
            raise UserError(f"{program.name}: wanted arrays for {len(wanted)} results, found {len(found)}")
        for number, (array, (dtype, shape)) in enumerate(zip(found, wanted)):
            where = f"{program.name}: array of result {number}"
            if not isinstance(array, np.ndarray) or (array.dtype, array.shape) != (dtype, shape):
                what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
                raise UserError(f"{where}: wanted an array of {dtype} {shape}, found {what}")
            if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
                raise UserError(f"{where}: wanted writable memory in C order, found other; use numpy.empty")
            others = [*self._inputs, *found[:number]]
            if not made and any(np.may_share_memory(array, other) for other in others):
                raise UserError(f"{where}: wanted memory of its own, found some of another array of the call")
        return found

    def _wrapped(self) -> dict[int, DeviceBuffer]:
        """Return buffers over the memory of the arrays that launches can use where they are."""
        executor = self._executor
        buffers: dict[int, DeviceBuffer] = {}
        program = executor.program
        for index, array in (*zip(program.inputs, self._inputs), *zip(program.outputs, self.results)):
            plain = array.flags.c_contiguous and array.flags.aligned and not program.buffers[index].outer
            if index in executor.placeable and plain and array.nbytes:
                buffer = executor.device.wrap(array)
                if buffer is not None:
                    buffers[index] = buffer
        return buffers

    def run(self) -> list[Array]:
        """Call the function; return the arrays of its results, which the next run overwrites.

        Raises: UserError for elements that are no indices where they must be; ModelStateError once the model is closed.
        """
        executor = self._executor
        check_values(executor.program, self._inputs, self._values, self._fixed)
        with executor.call():
            executor.check_open()
            if self._generation != executor.generation:
                self._launches = executor.launches_over(self._bound, self._buffers)
                self._generation, self._runs = executor.generation, 0
            if executor.record is not None:
                executor.record(self._key)
            self._transfer_and_launch()
        return self.results

    def _transfer_and_launch(self) -> None:
        executor, program = self._executor, self._executor.program
        for index, array in zip(program.inputs, self._inputs):
            if index not in self._buffers:
                spec = program.buffers[index]
                stored = np.moveaxis(array, spec.outer, 0) if spec.outer else array
                executor.device.upload(executor.device_buffer(index), np.ascontiguousarray(stored))
        for launch in self._launches:
            launch()
        self._runs += 1
        if self._runs == 2 and (recorded := executor.device.record(self._launches)) is not None:
            self._launches = [recorded]
        executor.device.synchronize()
        executor.check_computed(self._bound)
        for index, array in zip(program.outputs, self.results):
            if index not in self._buffers:
                spec = program.buffers[index]
                dims = stored_dims(spec, array.shape)
                stored = executor.device.download(executor.device_buffer(index), array.dtype, dims)
                array[...] = np.moveaxis(stored, 0, spec.outer) if spec.outer else stored


ALLOWED = (CheckValue, Compute, Require, GetItem, Pack, Move, Number, LoadWeight, CallSubgraph)
"""Instructions whose effects shapes and numbers alone decide."""


class BoundSteps:
    """A call of a host program over the same arrays each time, as `BoundCall`: the calls of its subgraphs, in order.

    Shapes and numbers among the arguments stay the same too.

    Raises: as `BoundCall`, and UserError for a program whose steps depend on more than shapes and numbers.
    """

    def __init__(
        self,
        machine: VirtualMachine,
        program: HostProgram,
        inputs: Mapping[str, Any] | Sequence[Any],
        results: Sequence[Array] | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        other = next((type(i).__name__ for i in program.instructions() if not isinstance(i, ALLOWED)), None)
        if other is not None:
            raise UserError(
                f"{program.name}: wanted a function whose steps follow from shapes alone, found a step {other}; use run"
            )
        names = [p.name for p in program.params]
        given = in_order(program.name, names, inputs)
        _check_fixed(program.name, names, fixed)
        self._fixed = [a for name, a in zip(names, given) if name in fixed and isinstance(a, np.ndarray)]
        self._calls: list[BoundCall] = []
        traced = copy(machine)
        traced.execute = {**machine.execute, CallSubgraph: self._bind}
        self._made = traced.results_of(program.name, given)
        wanted = [(a.dtype, a.shape) if isinstance(a, np.ndarray) else None for a in self._made]
        if None in wanted:
            raise UserError(f"{program.name}: wanted a function whose results are arrays, found another; use run")
        own = [a for call in self._calls for a in call.results]
        fresh = [a if any(a is o for o in own) else a.copy() for a in self._made]
        self.results = fresh if results is None else list(results)
        found = [(a.dtype, a.shape) if isinstance(a, np.ndarray) else None for a in self.results]
        if found != wanted:
            raise UserError(f"{program.name}: results: wanted arrays of {wanted}, found {found}")
        arrays = [a for a in given if isinstance(a, np.ndarray)]
        for number, array in enumerate(() if results is None else self.results):
            if any(np.may_share_memory(array, other) for other in (*arrays, *self.results[:number])):
                raise UserError(
                    f"{program.name}: array of result {number}: wanted memory of its own, found some of another array of the call"
                )

    def _bind(self, machine: VirtualMachine, i: CallSubgraph, frame: CallFrame) -> None:
        executor, args = machine.executors[i.part], [on_host(a) for a in frame.values(i.args)]
        names = [executor.program.buffers[n].name for n in executor.program.inputs]
        fixed = [name for name, a in zip(names, args) if any(np.may_share_memory(a, f) for f in self._fixed)]
        call = BoundCall(executor, args, None, fixed, frame.numbers(i.symbols))
        self._calls.append(call)
        for into, array in zip(i.into, call.results, strict=True):
            frame.registers[into] = array

    def run(self) -> list[Array]:
        """Call the function; see `BoundCall.run`."""
        for call in self._calls:
            call.run()
        for array, made in zip(self.results, self._made):
            if array is not made:
                np.copyto(array, made)
        return self.results


def _check_fixed(function: str, names: Collection[str], fixed: Collection[str]) -> None:
    """Raise UserError for names that are no parameters."""
    if not set(fixed) <= set(names):
        unknown = ", ".join(sorted(set(fixed) - set(names)))
        raise UserError(
            f"{function}: fixed: wanted names of parameters, {', '.join(names) or 'and it has none'}; found {unknown}"
        )
