"""A call of a function over the same arrays each time (input/output binding, as of ONNX Runtime).

Tests: `tests/runtime/test_bound_call.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arguments import check_values, in_order
from relax_tune.runtime.arrays import any_tensor, as_array, as_tensors
from relax_tune.runtime.bound_program import Launches
from relax_tune.runtime.device.base import DeviceBuffer
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.borrowed import address_of, borrow, is_borrowed, is_on
from relax_tune.runtime.memory.resident import DeviceArray, on_host
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
from relax_tune.runtime.results import Results, named
from relax_tune.runtime.vm.instructions import CallFrame
from relax_tune.runtime.vm.machine import VirtualMachine

Array = NDArray[Any]


class BoundCall:
    """A call whose arguments and results are the same arrays each time: `run` reads what they contain then, and writes the results.

    Shapes, variants and launches are settled once. Where launches reach the arrays' memory, nothing is copied: the host's on target c,
    CUDA tensors on their device if they are aligned to 64 bytes. Other calls of the model may run in between; runs of one
    `BoundCall` must not overlap.

    Args:
        executor: Executor of the function.
        inputs: Arrays by name or in order: of the parameters' types, in the memory of the host or the device, of NumPy, torch or with
            `__dlpack__`.
        results: Arrays to write, in order; by default fresh ones of the host, tensors of torch if some inputs are.
        fixed: Names of arguments whose elements never change. Indices among them are checked once, other indices in every run.
        symbols: The value of each symbol, where the inputs do not determine all.

    Raises:
        UserError: As `Executor.run`; or results do not fit, are no plain memory or overlap another array.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Mapping[str, Any] | Sequence[Any],
        results: Sequence[Any] | None = None,
        fixed: Collection[str] = (),
        symbols: Sequence[int] | None = None,
    ) -> None:
        program, self._executor = executor.program, executor
        given = in_order(program.name, [program.buffers[i].name for i in program.inputs], inputs)
        arrays, key, values = executor.match(given, symbols, in_place=True)
        check_values(program, arrays, values)
        self._inputs: list[Array | DeviceArray] = [a if is_borrowed(a) else on_host(a) for a in arrays]
        self._producers = list(zip(given, self._inputs))
        numbers = {program.buffers[i].name: i for i in program.inputs}
        _check_fixed(program.name, numbers, fixed)
        self._fixed = {numbers[name] for name in fixed}
        with executor.device.turn:
            # Not cached: its launches are over the caller's arrays, which no other call may use.
            self._bound = executor.bind(key, values, cached=False)
            self._arrays = self._checked(results)
            self._written = [] if results is None else list(zip(results, self._arrays))
            self._borrows = any(isinstance(a, DeviceArray) for a in (*self._inputs, *self._arrays))
            self._buffers = self._wrapped()
            self._arguments = [(i, a) for i, a in zip(program.inputs, self._inputs) if i not in self._buffers]
            self._copied = [(i, a) for i, a in zip(program.outputs, self._arrays) if i not in self._buffers]
            self._launches = Launches(executor.device)
            executor.prepare(self._bound, self._buffers, self._launches)
        self.results = _named(
            self._arrays, results, any_tensor(inputs), [program.buffers[i].name for i in program.outputs]
        )

    def _checked(self, results: Sequence[Any] | None) -> list[Array | DeviceArray]:
        """Return the arrays of the results: checked ones, or fresh ones without any."""
        program = self._executor.program
        specs = [program.buffers[i] for i in program.outputs]
        expected = [(np.dtype(s.dtype), self._bound.shapes[s.name]) for s in specs]
        if results is None:
            return [np.empty(shape, dtype) for dtype, shape in expected]
        if len(results) != len(expected):
            raise UserError(f"{program.name}: expected arrays for {len(expected)} results, got {len(results)}")
        arrays: list[Array | DeviceArray] = []
        for number, (result, (dtype, shape)) in enumerate(zip(results, expected)):
            where = f"{program.name}: array of result {number}"
            array: Array | DeviceArray
            if is_on(result, self._executor.device):
                array = borrow(result, self._executor.device, where, dtype.name, write=True)
            else:
                array = _result_array(result, where, f"{dtype} {shape}")
            if (array.dtype, array.shape) != (dtype, shape):
                raise UserError(f"{where}: expected an array of {dtype} {shape}, got {array.dtype} {array.shape}")
            if isinstance(array, np.ndarray) and not (
                array.flags.c_contiguous and array.flags.aligned and array.flags.writeable
            ):
                raise UserError(f"{where}: expected writable memory in C order, got other; use numpy.empty")
            if any(_may_overlap(array, other) for other in (*self._inputs, *arrays)):
                raise UserError(f"{where}: expected separate memory, got some of another array of the call")
            arrays.append(array)
        return arrays

    def _wrapped(self) -> dict[int, DeviceBuffer]:
        """Return buffers over the memory of the arrays that launches can use where they are."""
        executor = self._executor
        buffers: dict[int, DeviceBuffer] = {}
        program = executor.program
        for index, array in (*zip(program.inputs, self._inputs), *zip(program.outputs, self._arrays)):
            if isinstance(array, DeviceArray):
                if index in executor.memory.placeable and not program.buffers[index].outer and _is_aligned(array):
                    buffers[index] = array.buffer
                continue
            plain = array.flags.c_contiguous and array.flags.aligned and not program.buffers[index].outer
            if index in executor.memory.placeable and plain and array.nbytes:
                buffer = executor.device.wrap(array)
                # None: launches of this device cannot reach the array, for example because of its alignment, so it is
                # copied.
                if buffer is not None:
                    buffers[index] = buffer
        return buffers

    def run(self) -> Results:
        """Call the function; return the arrays of its results, which the next run overwrites.

        Raises:
            UserError: An element that is used as an index is out of range.
            ModelStateError: The model is closed.
        """
        executor = self._executor
        inputs, written = self._inputs, list[Any]()
        if self._borrows:
            # Until the end of the run: each capsule orders the device's queue behind the producer's work.
            inputs = [self._again(value, array) for value, array in self._producers]
            written = [self._again(value, array, write=True) for value, array in self._written]
        check_values(executor.program, inputs, self._bound.values, self._fixed)
        with executor.call():
            executor.check_open()
            placed = executor.launch(self._bound, self._buffers, self._arguments, launches=self._launches)
            executor.device.synchronize()
            for index, array in self._copied:
                result = executor.memory.read(self._bound, index, self._buffers, placed)
                if isinstance(array, DeviceArray):
                    executor.device.upload(array.buffer, np.ascontiguousarray(result))
                else:
                    array[...] = result
        del inputs, written
        return self.results

    def _again(self, value: Any, array: Array | DeviceArray, write: bool = False) -> Array | DeviceArray:
        """Return an array, borrowed again if it is in the device's memory. Raises UserError if it has moved."""
        if not isinstance(array, DeviceArray):
            return array
        where = f"{self._executor.program.name}: bound array of {array.dtype} {array.shape}"
        again = borrow(value, self._executor.device, where, array.dtype.name, write)
        if (address_of(again), again.shape) != (address_of(array), array.shape):
            raise UserError(f"{where}: expected the memory that was bound, got other; bind it again")
        return again


ALLOWED = (CheckValue, Compute, Require, GetItem, Pack, Move, Number, LoadWeight, CallSubgraph)
"""Instructions whose effects depend only on shapes and numbers."""


class BoundSteps:
    """A call of a host program over the same arrays each time, as `BoundCall`: the calls of its subgraphs, in order.

    Shapes and numbers among the arguments stay the same too. Arguments as of `BoundCall`.

    Raises:
        UserError: As `BoundCall`; or the steps of the program depend on more than shapes and numbers.
    """

    def __init__(
        self,
        machine: VirtualMachine,
        program: HostProgram,
        inputs: Mapping[str, Any] | Sequence[Any],
        results: Sequence[Any] | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        other = next((type(i).__name__ for i in program.instructions() if not isinstance(i, ALLOWED)), None)
        if other is not None:
            raise UserError(
                f"{program.name}: expected a function whose steps depend only on shapes, got a step {other}; use run"
            )
        names = [p.name for p in program.params]
        arguments = [
            as_array(a, f"{program.name}: parameter {p.name}", p.text, p.dtype, in_place=True)
            if p.want == "tensor"
            else a
            for p, a in zip(program.params, in_order(program.name, names, inputs), strict=True)
        ]
        _check_fixed(program.name, names, fixed)
        self._fixed = [a for name, a in zip(names, arguments) if name in fixed and isinstance(a, np.ndarray)]
        self._calls: list[BoundCall] = []
        self._computed = machine.results_of(program.name, arguments, call_subgraph=self._bind)
        expected = [_type_of(a) for a in self._computed]
        if None in expected:
            raise UserError(f"{program.name}: expected a function whose results are arrays, got another; use run")
        # A result that is no result of a bound call is an argument or a weight, which its caller may not get.
        written = {id(a) for call in self._calls for a in call.results}
        where = f"{program.name}: results"
        if results is None:
            self._arrays = [a if id(a) in written else a.copy() for a in self._computed]
        else:
            self._arrays = [_result_array(a, where, "the type of the result") for a in results]
        if [_type_of(a) for a in self._arrays] != expected:
            got = [_type_of(a) for a in self._arrays]
            raise UserError(f"{program.name}: results: expected arrays of {expected}, got {got}")
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        for number, array in enumerate(() if results is None else self._arrays):
            if any(np.may_share_memory(array, other) for other in (*arrays, *self._arrays[:number])):
                raise UserError(
                    f"{program.name}: array of result {number}: expected separate memory, got some of another array of the call"
                )
        self.results = _named(self._arrays, results, any_tensor(inputs), [r.name for r in program.results])

    def _bind(self, machine: VirtualMachine, i: CallSubgraph, frame: CallFrame) -> None:
        executor, args = machine.executors[i.part], [on_host(a) for a in frame.values(i.args)]
        names = [executor.program.buffers[n].name for n in executor.program.inputs]
        fixed = [name for name, a in zip(names, args) if any(np.may_share_memory(a, f) for f in self._fixed)]
        call = BoundCall(executor, args, None, fixed, frame.numbers(i.symbols))
        self._calls.append(call)
        for into, array in zip(i.into, call.results, strict=True):
            frame.registers[into] = array

    def run(self) -> Results:
        """Call the function; see `BoundCall.run`."""
        for call in self._calls:
            call.run()
        for array, computed in zip(self._arrays, self._computed):
            if array is not computed:
                np.copyto(array, computed)
        return self.results


def _may_overlap(array: Array | DeviceArray, other: Array | DeviceArray) -> bool:
    """Return whether the address ranges of two arrays overlap.

    The exact test, `numpy.shares_memory`, takes exponential time in the worst case (its reference).
    """
    if isinstance(array, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(array, other)
    if isinstance(array, np.ndarray) or isinstance(other, np.ndarray):
        return False
    start, begin = address_of(array), address_of(other)
    return start < begin + other.nbytes and begin < start + array.nbytes


def _is_aligned(array: DeviceArray) -> bool:
    """Return whether launches may use a borrowed array in place: kernels load vectors, and rely on the alignment of `Device.alloc`."""
    return array.nbytes > 0 and address_of(array) % 64 == 0


def _named(
    arrays: Sequence[Array | DeviceArray], given: Sequence[Any] | None, tensors: bool, names: Sequence[str]
) -> Results:
    """Return results as their caller gave them, or else as tensors if its arguments are some."""
    if given is not None:
        return named(given, names)
    return named(as_tensors(arrays) if tensors else arrays, names)


def _result_array(result: object, where: str, expected: str) -> Array:
    """Return the memory of an object that a caller gave for a result. Raises UserError for one that cannot be written in place."""
    return as_array(result, where, expected, None, in_place=True)


def _type_of(value: object) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return dtype and shape of an array; None for other values."""
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else None


def _check_fixed(function: str, names: Collection[str], fixed: Collection[str]) -> None:
    """Raise UserError for names that are no parameters."""
    if not set(fixed) <= set(names):
        unknown = ", ".join(sorted(set(fixed) - set(names)))
        raise UserError(
            f"{function}: fixed: expected names of parameters, {', '.join(names) or 'and it has none'}; got {unknown}"
        )
