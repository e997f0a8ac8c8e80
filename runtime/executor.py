"""Executing a `Program` on a device: binding symbols once per shape, then launching.

An `Executor` compiles everything up front, uploads constants and runs `prepare` once. `bind` turns symbol values into a
`Bound`: one evaluation of the scalar list gives sizes, grids, checks and the variant of every call, and each step
becomes a closure. Bindings are cached (LRU), so a repeated shape only launches.

Memory is a pool that only grows, shared by all bindings: one slab per storage, input and output. When a slab grows, the
closures of other bindings refer to the old one, so they are remade when they are next used.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, MeasureError, ModelStateError, UserError
from relax_tune.runtime.arguments import check_arguments, check_binders, check_computed, check_values, find_binders
from relax_tune.runtime.buffer_pool import BufferPool
from relax_tune.runtime.device.base import Device, DeviceBuffer, Launch
from relax_tune.runtime.device.memory import aligned_array
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.registry import needed_libraries
from relax_tune.runtime.program.program import LaunchStep, Program, format_message, verify_program
from relax_tune.runtime.program.scalars import compile_scalars, constant_values
from relax_tune.runtime.program.sharing import unshared
from relax_tune.runtime.resident import DeviceArray
from relax_tune.runtime.shapes import Recorder
from relax_tune.runtime.weights import DeviceWeights

MAX_BINDINGS = 64


class BoundProgram:
    """A program with its symbols bound. `choices`: (call name, variant label) in call order; `values`: every slot."""

    def __init__(self, executor: Executor, symbols: tuple[int, ...], values: list[int]) -> None:
        self._executor = executor
        self.symbols, self.values = symbols, values
        self.shapes: dict[str, tuple[int, ...]] = {}
        program = executor.program
        for spec in program.buffers:
            shape = tuple(values[slot] for slot in spec.shape)
            if any(dim < 0 for dim in shape):
                raise ArtifactError(f"{program.name}: buffer {spec.name}: wanted dims of 0 or more, found {shape}")
            self.shapes[spec.name] = shape
        self.steps: list[LaunchStep] = []
        labels: list[tuple[str, str]] = []
        for call in program.calls:
            choice = values[call.choice]
            if not 0 <= choice < len(call.variants):
                raise ArtifactError(
                    f"{program.name}: call {call.name}: wanted a variant 0..{len(call.variants) - 1}, found {choice}"
                )
            variant = call.variants[choice]
            labels.append((call.name, variant.label))
            self.steps += variant.steps
        self.choices = tuple(labels)
        self._launches: list[Launch] = []
        self._recorded: Launch | None = None
        self._series: dict[int, Launch | None] = {}
        self._runs = 0
        self.generation = -1

    def prepare(self) -> None:
        """Enlarge memory and refresh the closures as needed. `launch` calls this; an earlier call keeps its cost out of
        a timing.
        """
        self._executor.refresh(self)

    def renew(self, launches: list[Launch], generation: int) -> None:
        """Replace the closures by ones over memory of this generation, and drop the recording."""
        self._launches, self.generation = launches, generation
        self._recorded, self._series, self._runs = None, {}, 0

    def launch(self) -> None:
        """Enqueue every step, in order; the device's `synchronize` waits for them. The second launch is recorded if the
        device can.
        """
        if self.generation != self._executor.generation:
            self.prepare()
        if self._recorded is not None:
            self._recorded()
            return
        for launch in self._launches:
            launch()
        if self._runs < 2:
            self._runs += 1
            if self._runs == 2:
                self._recorded = self._executor.device.record(self._launches)

    @property
    def launches(self) -> Sequence[Launch]:
        """One closure a step, in order, not recorded; valid until the next `prepare`."""
        return self._launches

    def series(self, times: int) -> Launch | None:
        """Record `times` repetitions of all steps as one launch. None if the device cannot record.

        Its time is that of the kernels, without the overhead of single launches. The recording has been launched once;
        it is valid until the next `prepare`.
        """
        if times not in self._series:
            self._series[times] = self._executor.device.record(self._launches * times)
        return self._series[times]


class Executor:
    """An executor of one program on one device. The caller owns the device; `close` frees the memory.

    Threads may call `run`, `bind` and `close` at once: they wait for the device's turn. A `BoundProgram` is used by one thread.

    constants: an array for every buffer of role `const`, of its dtype and shape; or the `Weights` of several programs, which
    stay their caller's.
    libraries: libraries for library steps; None opens the installed ones, if the program needs any.
    shared: device buffers to use for named inputs, constants or outputs instead of own ones (never freed or grown here).
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
        self._evaluate = compile_scalars(program.scalars, len(program.symbols))
        self._binders = find_binders(program)
        self._libraries = needed_libraries(program, libraries)
        self._bindings: OrderedDict[tuple[int, ...], BoundProgram] = OrderedDict()
        self.generation = 0
        self._storages: list[DeviceBuffer | None] = [None] * len(program.storages)
        self._own: dict[int, DeviceBuffer] = {}
        names = {spec.name: index for index, spec in enumerate(program.buffers)}
        unknown = sorted(set(shared or {}) - set(names))
        if unknown:
            raise UserError(f"{program.name}: shared buffers: wanted names of the program, found {unknown}")
        self._closed = self._running = False
        self.record: Recorder | None = None
        self._shared = {names[name]: buffer for name, buffer in (shared or {}).items()}
        if any(program.buffers[index].role in ("temp", "packed", "view") for index in self._shared):
            raise UserError(f"{program.name}: shared buffers: wanted inputs, constants or outputs only")
        self._placeable = unshared(program) - self._shared.keys()
        self._kernels = device.compile(program.kernels) if program.kernels else {}
        self._weights = constants if isinstance(constants, DeviceWeights) else DeviceWeights(device, constants)
        self._owns_weights = self._weights is not constants
        self._fixed: dict[int, DeviceBuffer] = {}
        try:
            with device.turn:
                self._load_constants()
        except BaseException:
            if self._owns_weights:
                self._weights.close()
            raise

    def _load_constants(self) -> None:
        """Place constants, then run the `prepare` steps. Arrays packed by another program of the same weights are
        shared.
        """
        program = self.program
        values = constant_values(program.scalars, len(program.symbols))
        sizes: dict[int, int] = {}
        for index, spec in enumerate(program.buffers):
            if spec.role not in ("const", "packed"):
                continue
            shape = _fixed(program, values, spec.shape, f"buffer {spec.name}")
            if any(dim < 0 for dim in shape):
                raise ArtifactError(f"{program.name}: buffer {spec.name}: wanted dims of 0 or more, found {shape}")
            dtype = np.dtype(spec.dtype)
            sizes[index] = math.prod(shape) * dtype.itemsize
            if index in self._shared:
                self._check_size(index, sizes[index])
            elif spec.role == "const":
                try:
                    self._fixed[index] = self._weights.constant(spec.name, dtype, shape)
                except ArtifactError as error:
                    raise ArtifactError(f"{program.name}: {error}") from None
        identity: dict[int, Hashable] = {
            i: (i, id(self._shared[i])) if i in self._shared else program.buffers[i].name for i in sizes
        }
        for position, step in enumerate(program.prepare):
            where = f"prepare step {position} ({step.target})"
            numbers = _fixed(program, values, (*step.scalars, *step.grid), where)
            made = [i for i in step.buffers if program.buffers[i].role == "packed" and i not in self._fixed]
            sources = tuple(None if i in made else identity[i] for i in step.buffers)
            fresh = not made
            for i in made:
                identity[i] = ("packed", step.target, sources, numbers, step.local, step.buffers.index(i))
                self._fixed[i], new = self._weights.packed(identity[i], sizes[i])
                fresh = fresh or new
            if fresh:
                self._launch_of(step, [0 if value is None else value for value in values])()
        for i in sizes:
            if i not in self._fixed and i not in self._shared:  # packed, and never written
                self._fixed[i], _ = self._weights.packed(("unwritten", program.name, i), sizes[i])
        self.device.synchronize()

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
            return self._bind(key, self._values(key, {}))

    def _values(self, key: tuple[int, ...], origin: Mapping[int, str]) -> list[int]:
        """Return the value of every slot for these symbol values. Declared bounds are checked on first use."""
        bound = self._bindings.get(key)
        if bound is not None:
            return bound.values
        program = self.program
        for index, (symbol, value) in enumerate(zip(program.symbols, key)):
            source = f" (from {origin[index]})" if index in origin else ""
            if value < symbol.lower:
                raise UserError(
                    f"{program.name}: wanted {symbol.name} >= {symbol.lower}, found {value}{source}; pad the input, or "
                    f"build for smaller ones (--bound {symbol.name}=LOW:HIGH)"
                )
            if symbol.upper is not None and value > symbol.upper:
                raise UserError(
                    f"{program.name}: wanted {symbol.name} <= {symbol.upper}, found {value}{source}; give a smaller "
                    f"input, or build for larger ones (--bound {symbol.name}=LOW:HIGH)"
                )
        try:
            return self._evaluate(key)
        except UserError as error:
            raise UserError(f"{program.name}: {dict(zip((s.name for s in program.symbols), key))}: {error}") from None

    def _bind(self, key: tuple[int, ...], values: list[int]) -> BoundProgram:
        if self._closed:
            raise ModelStateError(
                f"{self.program.name}: wanted an open model, found one that was closed; open it again"
            )
        bound = self._bindings.get(key)
        if bound is not None:
            self._bindings.move_to_end(key)
            return bound
        program = self.program
        for check in program.checks:
            if not values[check.slot]:
                message = format_message(check.message, [values[slot] for slot in check.values])
                raise UserError(f"{program.name}: {message}")
        bound = BoundProgram(self, key, values)
        try:
            bound.prepare()
        except MeasureError as error:
            shape = ", ".join(f"{symbol.name} = {value}" for symbol, value in zip(program.symbols, key))
            raise MeasureError(
                f"{program.name}{f' at {shape}' if shape else ''}: {error}; use a smaller input"
            ) from None
        self._bindings[key] = bound
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return bound

    def buffer(self, name: str) -> DeviceBuffer:
        """Return the present device buffer of a named buffer. It may change when a larger shape is bound.

        Raises: UserError when there is no such buffer, or no memory for it yet.
        """
        for index, spec in enumerate(self.program.buffers):
            if spec.name == name:
                found = self._device_buffer(index)
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
        arrays = check_arguments(self.program, inputs)
        key, values = self._match(arrays, symbols)
        check_values(self.program, arrays, values)
        with self.device.turn:
            if self._running:
                self.refuse_within()
            self._running = True
            try:
                return self._run(key, values, arrays, in_place, pool)
            finally:
                self._running = False

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
        bound = self._bind(key, values)
        if self.record is not None:
            self.record(key)
        if bound.generation != self.generation:
            bound.prepare()
        program, device = self.program, self.device
        placed: dict[int, NDArray[Any]] = {}
        try:
            for index, given in zip(program.inputs, arrays):
                if isinstance(given, DeviceArray):
                    device.copy(self._device_buffer(index), given.buffer, given.nbytes)
                elif not (in_place and self._place(index, np.ascontiguousarray(given), placed)):
                    device.upload(self._device_buffer(index), np.ascontiguousarray(given))
            for index in program.outputs if in_place else ():
                spec = program.buffers[index]
                self._place(index, aligned_array(np.dtype(spec.dtype), bound.shapes[spec.name]), placed)
            bound.launch()
        finally:
            for index in placed:
                device.place(self._own[index], None)
        for found in program.checked:
            spec = program.buffers[found.buffer]
            shape = bound.shapes[spec.name]
            array = device.download(self._device_buffer(found.buffer), np.dtype(spec.dtype), shape)
            check_computed(program, found, array, bound.values[found.size])
        results: list[Any] = []
        for index in program.outputs:
            spec = program.buffers[index]
            dtype, shape = np.dtype(spec.dtype), bound.shapes[spec.name]
            if index in placed:
                results.append(placed[index])
            elif pool is None:
                results.append(device.download(self._device_buffer(index), dtype, shape))
            else:
                made = pool.empty(dtype, shape)
                device.copy(made.buffer, self._device_buffer(index), made.nbytes)
                results.append(made)
        return results

    def _place(self, index: int, array: NDArray[Any], placed: dict[int, NDArray[Any]]) -> bool:
        """Let launches use the array as an input or output whose memory nothing shares. Returns whether the device
        does.
        """
        alone = index in self._placeable and array.nbytes > 0 and array.flags.aligned
        if not alone or not self.device.place(self._own[index], array):
            return False
        placed[index] = array
        return True

    def close(self) -> None:
        """Free all memory of this executor, after the running call. It cannot run afterwards. May be called twice."""
        with self.device.turn:
            if self._closed:
                return
            self.refuse_within()
            self._closed = True
            self.device.synchronize()
            for buffer in [*self._own.values(), *(s for s in self._storages if s is not None)]:
                self.device.free(buffer)
            self._own.clear()
            self._fixed.clear()
            if self._owns_weights:
                self._weights.close()
            self._storages = [None] * len(self.program.storages)
            self._bindings.clear()
            self.generation += 1

    def _match(
        self, arrays: Sequence[NDArray[Any] | DeviceArray], given: Sequence[int] | None
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return symbol values, given or read off the dims of the inputs, and all slots. Every other dim is checked."""
        program = self.program
        symbols = [0] * len(program.symbols)
        origin: dict[int, str] = {}
        if given is not None:
            symbols = list(given)
            origin = {index: "its caller" for index in range(len(symbols))}
        elif len(self._binders) < len(symbols):
            check_binders(program)
        for index, (position, dim) in self._binders.items() if given is None else ():
            symbols[index] = arrays[position].shape[dim]
            origin[index] = f"dim {dim} of parameter {program.buffers[program.inputs[position]].name}"
        key = tuple(symbols)
        values = self._values(key, origin)
        for index, array in zip(program.inputs, arrays):
            spec = program.buffers[index]
            for dim, slot in enumerate(spec.shape):
                if array.shape[dim] != values[slot]:
                    known = [f"{s.name} = {symbols[i]} from {origin[i]}" for i, s in enumerate(program.symbols)]
                    raise UserError(
                        f"{program.name}: parameter {spec.name}: wanted {values[slot]} in dim {dim}, "
                        f"found {array.shape[dim]} ({'; '.join([f'shape {array.shape}', *known])}); make the dims agree"
                    )
        return key, values

    def _device_buffer(self, index: int) -> DeviceBuffer | None:
        if index in self._shared:
            return self._shared[index]
        if index in self._fixed:
            return self._fixed[index]
        spec = self.program.buffers[index]
        if spec.base is not None:
            return self._device_buffer(spec.base)
        storage = spec.storage
        return self._own.get(index) if storage is None else self._storages[storage]

    def _check_size(self, index: int, nbytes: int) -> None:
        size = getattr(self._shared[index], "nbytes", None)
        if size is not None and size < nbytes:
            name = self.program.buffers[index].name
            raise UserError(f"{self.program.name}: shared buffer {name}: wanted {nbytes} bytes, found {size}")

    def refresh(self, bound: BoundProgram) -> None:
        """Enlarge memory for a binding as needed, and remake its closures if memory has moved."""
        self._grow(bound)
        if bound.generation != self.generation:
            bound.renew([self._launch_of(step, bound.values) for step in bound.steps], self.generation)

    def _grow(self, bound: BoundProgram) -> None:
        """Make every slab as large as this binding needs."""
        program, values = self.program, bound.values
        for number, slot in enumerate(program.storages):
            self._storages[number] = self._slab(self._storages[number], values[slot])
        for index, spec in enumerate(program.buffers):
            nbytes = math.prod(bound.shapes[spec.name]) * np.dtype(spec.dtype).itemsize
            if spec.storage is not None:
                if nbytes > values[program.storages[spec.storage]]:
                    raise ArtifactError(
                        f"{program.name}: buffer {spec.name}: wanted {nbytes} bytes, "
                        f"its storage has {values[program.storages[spec.storage]]}"
                    )
            elif spec.base is not None:
                base = program.buffers[spec.base]
                held = math.prod(bound.shapes[base.name]) * np.dtype(base.dtype).itemsize
                if nbytes > held:
                    raise ArtifactError(
                        f"{program.name}: buffer {spec.name}: wanted {nbytes} bytes, {base.name} that it views has {held}"
                    )
            elif index in self._shared:
                self._check_size(index, nbytes)
            elif spec.role in ("input", "output"):
                self._own[index] = self._slab(self._own.get(index), nbytes)

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

    def _launch_of(self, step: LaunchStep, values: Sequence[int]) -> Launch:
        buffers = [self._device_buffer(index) for index in step.buffers]
        numbers = [values[slot] for slot in step.scalars]
        if step.kind == "library":
            return self._libraries[step.target.split(".")[0]].bind(step.target, self.device, buffers, numbers)
        grid = [values[slot] for slot in step.grid]
        return self.device.bind(self._kernels[step.target], buffers, numbers, grid, step.local)


def _fixed(program: Program, values: Sequence[int | None], slots: Sequence[int], where: str) -> tuple[int, ...]:
    """Return the values of slots that must not depend on symbols."""
    found = [values[slot] for slot in slots]
    if any(value is None for value in found):
        raise ArtifactError(f"{program.name}: {where}: wanted sizes that depend on no symbol, found one that does")
    return tuple(value for value in found if value is not None)
