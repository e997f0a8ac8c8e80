"""Executing a `Program` on a device: binding symbols once per shape, then launching.

An `Executor` compiles everything up front, uploads constants and runs `prepare` once. `bind` turns symbol values into a
`Bound`: one evaluation of the scalar list gives sizes, grids, checks and the variant of every call, and each step
becomes a closure. Bindings are cached (LRU), so a repeated shape only launches.

Memory is a pool that only grows, shared by all bindings: one slab per storage, input and output. When a slab grows, the
closures of other bindings refer to the old one, so they are remade when they are next used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError, ModelStateError, UserError
from relax_tune.runtime.arguments import check_arguments, check_computed, check_values, find_binders, match_symbols
from relax_tune.runtime.bound_program import BoundProgram, ChosenSteps, LastLaunches, Numbers
from relax_tune.runtime.device.base import Device, DeviceBuffer, JoinsLaunches, Launch
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.registry import needed_libraries
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.host_pool import HostPool
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.memory.weights import DeviceWeights, check_size, load_constants
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import LaunchStep, Program, format_message, verify_program
from relax_tune.runtime.program.scalars import compile_scalars, constant_values
from relax_tune.runtime.program.sharing import stored_dims, unshared, viewed_inputs
from relax_tune.runtime.shapes import Recorder

At = Callable[[int], DeviceBuffer | None]
MAX_BINDINGS = 64
CLOSED = "one that was closed; open it again"
FORKED = "one of the process that forked this one, which lacks its threads; open it after the fork"
"""Why an executor refuses calls."""


class Executor:
    """An executor of one program on one device. The caller owns the device; `close` frees the memory.

    Threads may call `run`, `bind` and `close` at once: they wait for the device's turn. A `BoundProgram` is used by one thread.

    constants: an array for every buffer of role `const`, of its dtype and shape; or the `Weights` of several programs, which
    stay their caller's.
    libraries: libraries for library steps; None opens the installed ones, if the program needs any.
    shared: device buffers to use for named inputs, constants or outputs instead of own ones (never freed or grown here).
    refusal: an attribute; why it cannot be called any more, or empty
    record: an attribute; called with the symbol values of every `run` unless None, as it is at first.

    Raises: ArtifactError for a program that cannot run (foreign kernels, prepare steps that depend on symbols, missing
    constants); BuildError when compiling fails or a library is missing.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        constants: Mapping[str, NDArray[Any]] | DeviceWeights,
        libraries: Mapping[str, Library] | None = None,
        shared: Mapping[str, DeviceBuffer] | None = None,
    ) -> None:
        verify_program(program)
        self.program, self.device = program, device
        self._joins = device if isinstance(device, JoinsLaunches) else None
        self._evaluate = compile_scalars(program.scalars, len(program.symbols))
        self._binders = find_binders(program)
        self._libraries = needed_libraries(program, libraries)
        self._bindings: OrderedDict[tuple[int, ...], BoundProgram] = OrderedDict()
        self.generation = 0
        self.sizes, self.variants = BufferSizes(program), ChosenSteps(program)
        self._crossing = [n for n, b in enumerate(program.buffers) if b.role in ("input", "output")]
        self._storages: list[DeviceBuffer | None] = [None] * len(program.storages)
        self._own: dict[int, DeviceBuffer] = {}
        self._results = HostPool()
        names = {spec.name: index for index, spec in enumerate(program.buffers)}
        unknown = sorted(set(shared or {}) - set(names))
        if unknown:
            raise UserError(f"{program.name}: shared buffers: wanted names of the program, found {unknown}")
        self.refusal, self._running = "", False
        self.record: Recorder | None = None
        self._shared = {names[name]: buffer for name, buffer in (shared or {}).items()}
        if any(program.buffers[index].role in ("temp", "packed", "view") for index in self._shared):
            raise UserError(f"{program.name}: shared buffers: wanted inputs, constants or outputs only")
        self.placeable = unshared(program) - self._shared.keys()
        self._viewed = {i: view for i, view in viewed_inputs(program).items() if i not in self._shared}
        self._views: dict[int, list[int]] = {}
        for number, spec in enumerate(program.buffers):
            if spec.base is not None:
                self._views.setdefault(spec.base, []).append(number)
        self._replaced: dict[int, DeviceBuffer] = {}
        self._kernels = device.compile(program.kernels) if program.kernels else {}
        self._weights = constants if isinstance(constants, DeviceWeights) else DeviceWeights(device, constants)
        self._owns_weights = self._weights is not constants
        self._fixed: dict[int, DeviceBuffer] = {}
        try:
            with device.turn:
                values = constant_values(program.scalars, len(program.symbols))
                numbers = [0 if value is None else value for value in values]
                run = lambda step: self._launch_of(step, numbers, self.device_buffer)()
                load_constants(program, values, self._weights, self._shared, run, self._fixed)
                self.device.synchronize()
        except BaseException:
            if self._owns_weights:
                self._weights.close()
            raise

    def bind(self, symbols: Mapping[str, int]) -> BoundProgram:
        """Return the binding for these symbol values, made on first use.

        Raises: UserError for missing or unknown symbols, values outside declared bounds and failing run-time checks;
        MeasureError when memory runs out.
        """
        program = self.program
        names = [symbol.name for symbol in program.symbols]
        if set(symbols) != set(names):
            raise UserError(f"{program.name}: wanted values for the symbols {names}, found {sorted(symbols)}")
        key = tuple(int(symbols[name]) for name in names)
        with self.device.turn:
            return self.open_binding(key, self._values(key))

    def _values(self, key: tuple[int, ...], origin: Callable[[int], str] = lambda _: "") -> list[int]:
        """Return the value of every slot for these symbol values. Declared bounds are checked on first use.

        origin: says where a symbol's value came from
        """
        bound = self._bindings.get(key)
        if bound is not None:
            return bound.values
        program = self.program
        for index, (symbol, value) in enumerate(zip(program.symbols, key)):
            if value < symbol.lower:
                source = f" (from {known})" if (known := origin(index)) else ""
                raise UserError(
                    f"{program.name}: wanted {symbol.name} >= {symbol.lower}, found {value}{source}; pad the input, or "
                    f"build for smaller ones (--bound {symbol.name}=LOW:HIGH)"
                )
            if symbol.upper is not None and value > symbol.upper:
                source = f" (from {known})" if (known := origin(index)) else ""
                raise UserError(
                    f"{program.name}: wanted {symbol.name} <= {symbol.upper}, found {value}{source}; give a smaller "
                    f"input, or build for larger ones (--bound {symbol.name}=LOW:HIGH)"
                )
        try:
            return self._evaluate(key)
        except UserError as error:
            raise UserError(f"{program.name}: {dict(zip((s.name for s in program.symbols), key))}: {error}") from None

    def open_binding(self, key: tuple[int, ...], values: list[int]) -> BoundProgram:
        """Return the binding of checked symbol values, with their slots, in the device's turn. Raises as `bind`."""
        self.check_open()
        bound = self._bindings.get(key)
        if bound is not None:
            self._bindings.move_to_end(key)
            return bound
        program = self.program
        bound = self.new_binding(key, values)
        try:
            bound.prepare()
        except MeasureError as error:
            shape = ", ".join(f"{symbol.name} = {value}" for symbol, value in zip(program.symbols, key))
            raise type(error)(
                f"{program.name}{f' at {shape}' if shape else ''}: {error}; use a smaller input"
            ) from None
        self._bindings[key] = bound
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return bound

    def new_binding(self, key: tuple[int, ...], values: list[int]) -> BoundProgram:
        """Return a binding of checked symbol values, with their slots, which is not kept. Raises as `bind`."""
        self.check_open()
        for check in self.program.checks:
            if not values[check.slot]:
                message = format_message(check.message, [values[slot] for slot in check.values])
                raise UserError(f"{self.program.name}: {message}")
        return BoundProgram(self, key, values)

    def buffer(self, name: str) -> DeviceBuffer:
        """Return the present device buffer of a named buffer. It may change when a larger shape is bound.

        Raises: UserError when there is no such buffer, or no memory for it yet.
        """
        for index, spec in enumerate(self.program.buffers):
            if spec.name == name:
                found = self.device_buffer(index)
                if found is None:
                    raise UserError(f"{self.program.name}: buffer {name} has no memory before the first bind")
                return found
        raise UserError(f"{self.program.name}: wanted a buffer of the program, found {name!r}")

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        symbols: Sequence[int] | None = None,
        in_place: bool = False,
        pool: BufferPool | None = None,
    ) -> list[Any]:
        """Call the program: inputs by name or in order, outputs in order, as fresh arrays.

        symbols: the value of each, for a program whose inputs do not determine all; their dims must agree with it. in_place:
        where the device can, read the inputs and write the results where they are in the host's memory, without copies; the
        executor's own buffers then hold neither, so that launching a binding again would compute something else. pool: give the
        results as arrays of it in the device's memory; inputs may be such arrays too.

        Raises: UserError naming the function, the parameter, what was wanted and what was found; ModelStateError after `close`.
        """
        arrays, key, values = self.matched(inputs, symbols)
        check_values(self.program, arrays, values)
        with self.call():
            return self._run(key, values, arrays, in_place, pool)

    def matched(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        symbols: Sequence[int] | None = None,
        known: Collection[int] = (),
    ) -> tuple[list[NDArray[Any] | DeviceArray], tuple[int, ...], list[int]]:
        """Check arguments but their elements; return them in order, the values of the symbols and of all slots. Raises as `run`.

        known: positions of arrays of the right types and ranks, in a list of all
        """
        arrays = check_arguments(self.program, inputs, known)
        return arrays, *match_symbols(self.program, self._binders, arrays, symbols, self._values)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Hold the device's turn for a call. Raises ModelStateError inside another call, which only this thread can reach."""
        with self.device.turn:
            self.refuse_within()
            self._running = True
            try:
                yield
            finally:
                self._running = False

    def launches_over(self, bound: BoundProgram, buffers: Mapping[int, DeviceBuffer]) -> list[Launch]:
        """Return launches of a binding that use these buffers for inputs and outputs; valid as long as `generation` is the same."""
        self._replaced.update(buffers)
        try:
            self._grow(bound)
            return self._launches_of(bound)
        finally:
            self._replaced.clear()

    def run_over(
        self,
        bound: BoundProgram,
        buffers: dict[int, DeviceBuffer],
        inputs: Sequence[tuple[int, NDArray[Any] | DeviceArray]],
        outputs: Sequence[int],
        last: LastLaunches,
    ) -> list[NDArray[Any]]:
        """Run a binding of a session, within `call`, over these buffers in place of own ones. Raises as `run`.

        inputs: the other inputs' numbers and arrays; outputs: numbers of the results to return; last: becomes this call's
        """
        placed: dict[int, NDArray[Any]] = {}
        self._replaced.update(buffers)
        try:
            self._grow(bound)
            at = cache(self.device_buffer)
            launch_of = lambda step, live: self._launch_of(step, bound.values, at, live)
            last.renew(bound, (self.generation, buffers), self._joins, launch_of)
            for index, array in inputs:
                self._give(bound, index, array, True, placed)
            for launch in last.joined:
                launch()
            if self.record is not None:
                self.record(bound.symbols)
            self.device.synchronize()  # arrays of a pool may be freed as soon as this returns
            self.check_computed(bound)
            return [self._result(bound, index, placed, None) for index in outputs]
        finally:
            self._unplace(placed)
            self._replaced.clear()

    def check_open(self) -> None:
        """Raise ModelStateError where `refusal` says why it cannot be called any more."""
        if self.refusal:
            raise ModelStateError(f"{self.program.name}: wanted an open model, found {self.refusal}")

    def refuse_within(self) -> None:
        """Raise ModelStateError inside a call, which only this thread can reach, by a handler of a signal for example."""
        if self._running:
            raise ModelStateError(
                f"{self.program.name}: wanted no call or close of a model inside its own call, found one in the same thread (a "
                "signal's handler?); do it when the call has returned"
            )

    def _run(
        self,
        key: tuple[int, ...],
        values: list[int],
        arrays: Sequence[NDArray[Any] | DeviceArray],
        in_place: bool,
        pool: BufferPool | None,
    ) -> list[Any]:
        """See `run`, of checked arrays: in the turn of the device."""
        bound = self.open_binding(key, values)
        if self.record is not None:
            self.record(key)
        if bound.generation != self.generation:
            bound.prepare()
        program = self.program
        placed: dict[int, NDArray[Any]] = {}
        self._results.begin()
        try:
            for index, given in zip(program.inputs, arrays):
                self._give(bound, index, given, in_place, placed)
            for index in program.outputs if in_place else ():
                spec = program.buffers[index]
                made = self._results.empty(np.dtype(spec.dtype), stored_dims(spec, bound.shape(index)))
                self._place(index, made, placed)
            bound.launch()
        finally:
            self._unplace(placed)
        self.check_computed(bound)
        return [self._result(bound, index, placed, pool) for index in program.outputs]

    def _give(
        self,
        bound: BoundProgram,
        index: int,
        given: NDArray[Any] | DeviceArray,
        in_place: bool,
        placed: dict[int, NDArray[Any]],
    ) -> None:
        """Copy an argument to the device, or let launches read it where it is."""
        if isinstance(given, DeviceArray):
            self.device.copy(self.device_buffer(index), given.buffer, given.nbytes)
            return
        spec = self.program.buffers[index]
        stored = np.moveaxis(given, spec.outer, 0) if spec.outer else given
        view = self._viewed.get(index)
        if in_place and view is not None and self.room(bound, index):
            result = self.program.buffers[view]
            memory = self._results.empty(np.dtype(result.dtype), stored_dims(result, bound.shape(view)))
            if memory.size >= stored.size and self.device.place(self._own[index], memory):
                placed[index] = placed[view] = memory
                self.device.upload(self._own[index], stored)
                return
        contiguous = np.ascontiguousarray(stored)
        if not (in_place and self._place(index, contiguous, placed)):
            self.device.upload(self.device_buffer(index), contiguous)

    def _unplace(self, placed: Mapping[int, NDArray[Any]]) -> None:
        for index in placed:
            if index in self._own:
                self.device.place(self._own[index], None)

    def check_computed(self, bound: BoundProgram) -> None:
        """Check the indices that a call made itself. Raises UserError naming the operator and the value."""
        for found in self.program.checked:
            spec = self.program.buffers[found.buffer]
            shape = bound.shape(found.buffer)
            array = self.device.download(self.device_buffer(found.buffer), np.dtype(spec.dtype), shape)
            check_computed(self.program, found, array, bound.values[found.size])

    def _result(
        self, bound: BoundProgram, index: int, placed: Mapping[int, NDArray[Any]], pool: BufferPool | None
    ) -> Any:
        """Return a result as an array of the host, or of the pool."""
        spec = self.program.buffers[index]
        dtype, shape = np.dtype(spec.dtype), bound.shape(index)
        if pool is not None and index not in placed:
            made = pool.empty(dtype, shape)
            self.device.copy(made.buffer, self.device_buffer(index), made.nbytes)
            return made
        stored = placed.get(index)
        if stored is None:
            stored = self.device.download(self.device_buffer(index), dtype, stored_dims(spec, shape))
        return np.moveaxis(stored, 0, spec.outer) if spec.outer else stored

    def _place(self, index: int, array: NDArray[Any], placed: dict[int, NDArray[Any]]) -> bool:
        """Let launches use the array as an input or output whose memory nothing shares. Returns whether the device
        does.
        """
        alone = index in self.placeable and array.nbytes > 0 and array.flags.aligned
        if not alone or not self.device.place(self._own[index], array):
            return False
        placed[index] = array
        return True

    def close(self) -> None:
        """Free all memory of this executor, after the running call. It cannot run afterwards. May be called twice."""
        with self.device.turn:
            if self.refusal == CLOSED:
                return
            self.refuse_within()
            self.refusal = CLOSED
            self.device.synchronize()
            for buffer in [*self._own.values(), *(s for s in self._storages if s is not None)]:
                self.device.free(buffer)
            self._own.clear()
            self._results.close()
            self._fixed.clear()
            if self._owns_weights:
                self._weights.close()
            self._storages = [None] * len(self.program.storages)
            self._bindings.clear()
            self.generation += 1

    def device_buffer(self, index: int) -> DeviceBuffer | None:
        """Return the present device buffer of a program's buffer; None before it has memory."""
        if index in self._replaced:
            return self._replaced[index]
        if index in self._shared:
            return self._shared[index]
        if index in self._fixed:
            return self._fixed[index]
        spec = self.program.buffers[index]
        if spec.base is not None:
            return self.device_buffer(spec.base)
        storage = spec.storage
        return self._own.get(index) if storage is None else self._storages[storage]

    def refresh(self, bound: BoundProgram) -> None:
        """Enlarge memory for a binding as needed, and remake its closures if memory has moved."""
        self._grow(bound)
        if bound.generation != self.generation:
            bound.renew(self._launches_of(bound), self.generation)

    def _grow(self, bound: BoundProgram) -> None:
        """Make every slab as large as this binding needs."""
        program, values = self.program, bound.values
        for number, slot in enumerate(program.storages):
            self._storages[number] = self._slab(self._storages[number], values[slot])
        for index in self._shared:
            check_size(program, index, self._shared[index], self.room(bound, index))
        for index in self._crossing:
            if index not in self._shared and index not in self._replaced:
                self._own[index] = self._slab(self._own.get(index), self.room(bound, index))

    def room(self, bound: BoundProgram, index: int) -> int:
        """Return the bytes of the memory of an array: a result may extend an input in place."""
        return max([bound.nbytes(index), *(bound.nbytes(view) for view in self._views.get(index, ()))])

    def kinds_at(self, index: int) -> tuple[int, ...]:
        """Return the kinds (`BufferSizes`) of an array and its views: equal ones always have equal dims and `room`."""
        return tuple(self.sizes.kinds[n] for n in (index, *self._views.get(index, ())))

    def _slab(self, slab: DeviceBuffer | None, nbytes: int) -> DeviceBuffer:
        if slab is not None and slab.nbytes >= nbytes:
            return slab
        if slab is not None:
            nbytes = max(nbytes, slab.nbytes + slab.nbytes // 2)
            self.device.synchronize()
        larger = self.device.alloc(nbytes)
        if slab is not None:
            self.device.free(slab)
            self.generation += 1
        return larger

    def _launches_of(self, bound: BoundProgram) -> list[Launch]:
        """Return a launch for each step over the present buffers."""
        at = cache(self.device_buffer)
        return [self._launch_of(step, bound.values, at) for step in bound.steps]

    def _launch_of(self, step: LaunchStep, values: Sequence[int], at: At, live: Numbers | None = None) -> Launch:
        """Return a launch of a step. live: the values, from which it reads its own each time, where the device can"""
        buffers = [at(index) for index in step.buffers]
        numbers = [values[slot] for slot in step.scalars]
        if step.kind == "library":
            return self._libraries[step.target.split(".")[0]].bind(step.target, self.device, buffers, numbers)
        if live is not None and self._joins is not None:
            return self._joins.bind_numbers(self._kernels[step.target], buffers, step.scalars, live)
        grid = [values[slot] for slot in step.grid]
        return self.device.bind(self._kernels[step.target], buffers, numbers, grid, step.local)
