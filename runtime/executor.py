"""Executing a `Program` on a device: binding symbols once per shape, then launching.

An `Executor` compiles everything up front, uploads constants and runs the `prepare` steps once. A call has two parts:

* `bind` turns symbol values into a `BoundProgram`. One evaluation of the scalar list gives sizes, grids, checks and the variant of
  every call. Bindings are cached (LRU).
* `launch` copies arguments and enqueues the steps. Each step is a closure that is reused until the memory it refers to moves.

`run`, sessions and bound calls (`runtime/calls`) are callers of these two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError, ModelStateError, UserError
from relax_tune.runtime.arguments import check_arguments, check_computed, check_values, find_binders, match_symbols
from relax_tune.runtime.bound_program import NO_BUFFERS, BoundProgram, Buffers, ChosenSteps, Launches, Numbers
from relax_tune.runtime.device.base import Device, DeviceBuffer, JoinsLaunches, Launch, SharesMemory
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.registry import library_kernels, needed_libraries
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.memory.weights import DeviceWeights, load_constants
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import SIZE_LIMIT, LaunchStep, Program, format_message, verify_program
from relax_tune.runtime.program.scalars import compile_scalars, constant_values
from relax_tune.runtime.program_memory import ProgramMemory
from relax_tune.runtime.shapes import Recorder
from relax_tune.summary import bounds_advice

# Bindings of an executor, the least recently used one first out. A binding holds launches; memory belongs to the
# executor.
MAX_BINDINGS = 64
CLOSED = "one that was closed; open it again"
FORKED = "one that was opened before fork(), whose threads do not survive it; open it after the fork"
"""Reasons of an executor that refuses calls."""


Array: TypeAlias = NDArray[Any] | DeviceArray


class _Call:
    """The device's turn for a call of an executor; see `Executor.call`. A class, since a generator takes 0.5 us longer."""

    __slots__ = ("_executor", "_turn")

    def __init__(self, executor: Executor) -> None:
        self._executor, self._turn = executor, executor.device.turn

    def __enter__(self) -> None:
        self._turn.acquire()
        try:
            self._executor.refuse_within()
        # An interruption here must not leave the turn taken: all other threads would wait for ever.
        except BaseException:
            self._turn.release()
            raise
        self._executor.running = True

    def __exit__(self, *_: object) -> None:
        self._executor.running = False
        self._turn.release()


class Executor:
    """An executor of one program on one device. The caller owns the device; `close` frees the memory.

    Threads may call `run`, `bind` and `close` at once: they wait for the device's turn. A `BoundProgram` is used by one thread.

    Args:
        program: The program.
        device: Its device.
        constants: An array for every buffer of role `const`, of its dtype and shape; or `DeviceWeights` of several programs, which
            the caller closes.
        libraries: Libraries for library steps; None opens the installed ones if the program needs any.
        shared: Device buffers to use for named inputs, constants or outputs; they are never freed or grown.

    Attributes:
        binders: Position and dim of the input that gives each symbol its value.
        refusal: Why it refuses calls; empty if it does not.
        running: Whether a call is active.
        record: Called with the symbol values of every call unless None.
        shares_memory: Whether other libraries have arrays in the device's memory.

    Raises:
        ArtifactError: The program cannot run: foreign kernels, prepare steps that depend on symbols, missing constants.
        BuildError: Compiling fails, or a library is missing.
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
        self.shares_memory = isinstance(device, SharesMemory)  # asked once: the answer takes as long as a small kernel
        self._evaluate = compile_scalars(program.scalars, len(program.symbols))
        self.binders = find_binders(program)
        self._libraries = needed_libraries(program, libraries)
        self._bindings: OrderedDict[tuple[int, ...], BoundProgram] = OrderedDict()
        self.sizes, self.variants = BufferSizes(program), ChosenSteps(program)
        self.refusal, self.running = "", False
        self.record: Recorder | None = None
        self.memory = ProgramMemory(program, device, self.sizes, shared)
        # Libraries compile theirs here too, so that nothing is compiled in the first call.
        kernels = [*program.kernels, *(library_kernels([program]) if device.info.kind == "c" else ())]
        self._kernels = device.compile(kernels) if kernels else {}
        self._weights = constants if isinstance(constants, DeviceWeights) else DeviceWeights(device, constants)
        # Given `DeviceWeights` are shared by the executors of a model, which frees them.
        self._owns_weights = self._weights is not constants
        try:
            with device.turn:
                values = constant_values(program.scalars, len(program.symbols))
                run = self._prepare_step(values)
                load_constants(program, values, self._weights, self.memory.shared, run, self.memory.constants)
                self.device.synchronize()
        except BaseException:
            if self._owns_weights:
                self._weights.close()
            raise

    def _prepare_step(self, values: Sequence[int | None]) -> Callable[[LaunchStep], None]:
        # Preparing steps depend on no symbol (`load_constants` refuses others), so they read none of these zeros.
        numbers = [0 if value is None else value for value in values]
        return lambda step: self._launch_of(step, numbers, self.memory.buffer)()

    def pack_weights(self) -> None:
        """Pack the constants again after their elements have changed. The caller has the turn of the device."""
        self.check_open()
        run = self._prepare_step(constant_values(self.program.scalars, len(self.program.symbols)))
        constants = self.memory.constants
        constants |= {
            i: self._weights.present(b.name)
            for i, b in enumerate(self.program.buffers)
            if b.role == "const" and i in constants
        }
        for step in self.program.prepare:
            run(step)
        self.device.synchronize()

    def match(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        symbols: Sequence[int] | None = None,
        checked: Collection[int] = (),
        in_place: bool = False,
    ) -> tuple[list[Array], tuple[int, ...], list[int]]:
        """Check arguments except their elements, and find the values of the symbols.

        Args:
            inputs: Arrays by parameter name, or in order.
            symbols: The value of each symbol, for a program whose inputs do not determine all; their dims must agree with it.
            checked: Positions of arrays that need no check of type and rank, in a list of all.
            in_place: Refuse arguments that must be copied to be arrays of the parameters' types.

        Returns:
            The arrays in order, the values of the symbols, and the values of all slots.

        Raises:
            UserError: An argument does not fit; the message names the function and the parameter.
        """
        arrays = check_arguments(self.program, inputs, self.device, checked, in_place)
        return arrays, *match_symbols(self.program, self.binders, arrays, symbols, self._values)

    def bind(
        self,
        symbols: Mapping[str, int] | tuple[int, ...],
        values: list[int] | None = None,
        cached: bool = True,
    ) -> BoundProgram:
        """Return the binding of symbol values.

        Args:
            symbols: Values by name, or in order.
            values: Values of all slots, from `match`.
            cached: Reuse and keep the binding, and allocate its memory now. Without, `launch` allocates what the caller's buffers
                leave to the executor.

        Raises:
            UserError: A symbol is missing, unknown or outside its declared bounds, or a run-time check fails.
            MeasureError: Memory runs out.
            ModelStateError: The executor is closed.
        """
        key = symbols if isinstance(symbols, tuple) else self._in_order(symbols)
        if values is None:
            values = self._values(key)
        with self.device.turn:
            self.check_open()
            bound = self._bindings.get(key) if cached else None
            if bound is not None:
                self._bindings.move_to_end(key)
                return bound
            # Checks depend on symbol values only, so a binding that is cached has passed them.
            for check in self.program.checks:
                if not values[check.slot]:
                    message = format_message(check.message, [values[slot] for slot in check.values])
                    raise UserError(f"{self.program.name}: {message}")
            bound = BoundProgram(self, key, values)
            # A binding that is not cached is prepared by its caller, over other buffers.
            if cached:
                self.prepare(bound)
                self._bindings[key] = bound
                if len(self._bindings) > MAX_BINDINGS:
                    self._bindings.popitem(last=False)
            return bound

    def _in_order(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        names = [symbol.name for symbol in self.program.symbols]
        if set(symbols) != set(names):
            raise UserError(f"{self.program.name}: expected values for the symbols {names}, got {sorted(symbols)}")
        return tuple(int(symbols[name]) for name in names)

    def _values(self, key: tuple[int, ...], origin: Callable[[int], str] = lambda _: "") -> list[int]:
        """Return the values of all slots for symbol values. Declared bounds are checked on first use.

        Args:
            key: Values of the symbols.
            origin: Names the source of a symbol's value, for messages.
        """
        # A binding has passed the checks below, and has the values.
        bound = self._bindings.get(key)
        if bound is not None:
            return bound.values
        program = self.program
        for index, (symbol, value) in enumerate(zip(program.symbols, key)):
            upper = SIZE_LIMIT if symbol.upper is None else symbol.upper
            if not symbol.lower <= value <= upper:
                limit = f">= {symbol.lower}" if value < symbol.lower else f"<= {upper}"
                advice = (
                    "pad the input, or build for smaller ones"
                    if value < symbol.lower
                    else ("give a smaller input, or build for larger ones")
                )
                source = f" (from {known})" if (known := origin(index)) else ""
                raise UserError(
                    f"{program.name}: expected {symbol.name} {limit}, got {value}{source}; {advice} "
                    f"({bounds_advice(symbol.name, 'LOW', 'HIGH')})"
                )
        try:
            return self._evaluate(key)
        except UserError as error:
            raise UserError(f"{program.name}: {dict(zip((s.name for s in program.symbols), key))}: {error}") from None

    def prepare(self, bound: BoundProgram, buffers: Buffers = NO_BUFFERS, launches: Launches | None = None) -> None:
        """Grow memory for a binding as needed, and renew its launches where memory has moved. Arguments as of `launch`."""
        launches = bound.own if launches is None else launches
        if not launches.current(bound, buffers, self.memory.generation):
            self._renew(bound, buffers, launches)

    def _renew(self, bound: BoundProgram, buffers: Buffers, launches: Launches) -> None:
        buffer = self.memory.buffer
        try:
            self.memory.grow(bound, buffers)
            at = cache(lambda index: buffer(index, buffers))
            launch_of = lambda step, live: self._launch_of(step, bound.values, at, live)
            launches.renew(bound, buffers, self.memory.generation, launch_of)
        except MeasureError as error:
            shape = ", ".join(f"{symbol.name} = {value}" for symbol, value in zip(self.program.symbols, bound.symbols))
            # the same class: a device that lacks memory is not a device that is lost
            raise type(error)(
                f"{self.program.name}{f' at {shape}' if shape else ''}: {error}; use a smaller input"
            ) from None

    def launches_over(self, bound: BoundProgram, buffers: Buffers, numbers: Numbers) -> list[Launch]:
        """Return the launches of a binding over buffers of the caller, valid until the memory moves.

        Args:
            bound: The binding, whose memory was allocated (`memory.grow`).
            buffers: As of `launch`.
            numbers: Values of all slots, from which kernels read their scalars whenever they run, on a device that joins launches.
        """
        at = cache(lambda index: self.memory.buffer(index, buffers))
        return [self._launch_of(step, bound.values, at, numbers) for step in bound.steps]

    def _launch_of(
        self,
        step: LaunchStep,
        values: Sequence[int],
        at: Callable[[int], DeviceBuffer | None],
        live: Numbers | None = None,
    ) -> Launch:
        """Return the launch of a step.

        Args:
            step: The step.
            values: Values of all slots.
            at: Returns the device buffer of a buffer.
            live: Array of the same values, from which a kernel reads its scalars whenever it runs; None binds them now.
        """
        buffers = [at(index) for index in step.buffers]
        numbers = [values[slot] for slot in step.scalars]
        if step.kind == "library":
            return self._libraries[step.target.split(".")[0]].bind(step.target, self.device, buffers, numbers)
        if live is not None and self._joins is not None:
            return self._joins.bind_numbers(self._kernels[step.target], buffers, step.scalars, live)
        grid = [values[slot] for slot in step.grid]
        return self.device.bind(self._kernels[step.target], buffers, numbers, grid, step.local)

    def launch(
        self,
        bound: BoundProgram,
        buffers: Buffers = NO_BUFFERS,
        arguments: Iterable[tuple[int, Array]] = (),
        in_place: bool = False,
        outputs: Sequence[int] = (),
        launches: Launches | None = None,
    ) -> dict[int, NDArray[Any]]:
        """Copy arguments to the device and enqueue the steps of a binding, within `call`. `memory.read` reads the results.

        Args:
            bound: The binding.
            buffers: Device buffers to use in place of own ones, by the number of the input or output.
            arguments: Number and array of each input that `buffers` does not replace.
            in_place: Let launches read arguments in the host's memory where the device can. The executor's own buffers then do not
                contain them.
            outputs: Numbers of outputs that launches shall write to fresh host arrays where the device can. For small outputs, this
                takes longer than copying them.
            launches: Launches to reuse, for calls over buffers of the caller; by default `bound.own`.

        Returns:
            Host arrays that launches read or write in place, by number.

        Raises:
            MeasureError: Memory runs out, or the device is lost.
            UserError: An index that the call computed is out of range.
        """
        launches, memory = bound.own if launches is None else launches, self.memory
        if not launches.current(bound, buffers, memory.generation):
            self._renew(bound, buffers, launches)
        if self.record is not None:
            self.record(bound.symbols)
        placed: dict[int, NDArray[Any]] = {}
        try:
            if in_place:
                memory.results.begin()
            if outputs:
                memory.place_results(bound, outputs, placed)
            for index, array in arguments:
                memory.give(bound, index, array, in_place, placed)
            launches.enqueue()
        finally:
            # also after an error: a later call must not touch the caller's arrays
            if placed:
                memory.unplace(placed)
            memory.return_borrowed()
        # Results that index computed values are only known now. The caller gets the error instead of the results.
        for check in self.program.checked:
            dtype, shape = np.dtype(self.program.buffers[check.buffer].dtype), bound.shape(check.buffer)
            indices = self.device.download(memory.buffer(check.buffer, buffers), dtype, shape)
            check_computed(self.program, check, indices, bound.values[check.size])
        return placed

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        symbols: Sequence[int] | None = None,
        in_place: bool = False,
        pool: BufferPool | None = None,
    ) -> list[Any]:
        """Call the program.

        Args:
            inputs: Arrays by name or in order.
            symbols: As of `match`.
            in_place: Let launches read arguments and write results in the host's memory where the device can.
            pool: Return the results as arrays of this pool, in the device's memory; inputs may be such arrays too.

        Returns:
            Outputs in order, as fresh arrays.

        Raises:
            UserError: An argument does not fit; the message names the function and the parameter.
            ModelStateError: The executor is closed.
        """
        arrays, key, values = self.match(inputs, symbols)
        # outside of the device's turn, so that the calls of other threads run meanwhile
        check_values(self.program, arrays, values)
        with self.call():
            bound = self.bind(key, values)
            outputs = self.program.outputs if in_place else ()
            placed = self.launch(bound, NO_BUFFERS, zip(self.program.inputs, arrays), in_place, outputs)
            return [self.memory.read(bound, index, NO_BUFFERS, placed, pool) for index in self.program.outputs]

    def call(self) -> _Call:
        """Return a context that has the device's turn for a call, from the first copy to the last.

        Entering it raises ModelStateError as `refuse_within`.
        """
        return _Call(self)

    def check_open(self) -> None:
        """Raise ModelStateError if calls are refused."""
        if self.refusal:
            raise ModelStateError(f"{self.program.name}: expected an open model, got {self.refusal}")

    def refuse_within(self) -> None:
        """Raise ModelStateError inside a call. Only the same thread gets there, for example in the handler of a signal."""
        if self.running:
            raise ModelStateError(
                f"{self.program.name}: expected no call or close of a model inside its own call, got one in the same thread (a "
                "signal's handler?); do it when the call has returned"
            )

    def buffer(self, name: str) -> DeviceBuffer:
        """Return the present device buffer of a named buffer. It may change when a larger shape is bound.

        Raises:
            UserError: There is no such buffer, or it has no memory yet.
        """
        for index, spec in enumerate(self.program.buffers):
            if spec.name == name:
                buffer = self.memory.buffer(index)
                if buffer is None:
                    raise UserError(f"{self.program.name}: buffer {name} has no memory before the first bind")
                return buffer
        raise UserError(f"{self.program.name}: expected a buffer of the program, got {name!r}")

    def close(self) -> None:
        """Free all memory of this executor, after the running call. It cannot run afterwards. May be called twice."""
        with self.device.turn:
            if self.refusal == CLOSED:
                return
            # The turn is reentrant: without this check, a signal's handler would free the memory that its own thread
            # is using.
            self.refuse_within()
            self.refusal = CLOSED
            self.device.synchronize()
            self.memory.close()
            if self._owns_weights:
                self._weights.close()
            self._bindings.clear()
