"""An artifact on a device, ready to run.

Tests: `tests/runtime/test_threads.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from relax_tune.errors import ArtifactError, ModelStateError, UserError, warn
from relax_tune.runtime.after_fork import watch
from relax_tune.runtime.arguments import check_binders
from relax_tune.runtime.arrays import any_tensor, as_tensors
from relax_tune.runtime.calls.bound_call import BoundCall, BoundSteps
from relax_tune.runtime.calls.session import Session
from relax_tune.runtime.calls.stream import Stream
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.c_objects import CompiledObjects
from relax_tune.runtime.device.registry import name_of_measured, open_device
from relax_tune.runtime.executor import CLOSED, FORKED, Executor
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.memory.borrowed import is_on
from relax_tune.runtime.memory.buffer_pool import BufferPool, pool_of
from relax_tune.runtime.memory.weights import DeviceWeights, read_by_calls
from relax_tune.runtime.model_source import ModelSource, source_facts
from relax_tune.runtime.program.host_program import parts_of
from relax_tune.runtime.replaced_weights import check_same
from relax_tune.runtime.results import Results, named
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.runtime.signature import Spec
from relax_tune.runtime.vm.instructions import Host
from relax_tune.runtime.vm.machine import VirtualMachine
from relax_tune.runtime.vm.policy import PlacementOptions
from relax_tune.summary import Facts, Summarised, listed

T = TypeVar("T")
INITIAL_STATE = "initial_state"
"""The function of the values that the last parameters of `main` have at first."""

_WORKING = threading.local()
"""`model`: the one whose asynchronous call this thread is busy with."""


def choose_function(functions: Mapping[str, T], name: str | None, where: str = "") -> T:
    """Return a function by name; without one, `main` or the only one. Raises UserError naming what there is."""
    chosen = name
    if chosen is None:
        chosen = "main" if "main" in functions else next(iter(functions)) if len(functions) == 1 else None
    if chosen is None or chosen not in functions:
        got = "none named" if name is None else repr(name)
        of = f"artifact {where}: " if where else ""
        raise UserError(f"{of}expected one of its functions, {', '.join(functions)}; got {got:.80}; name one of them")
    return functions[chosen]


DeviceSpec = Device | str | Mapping[str, Device | str] | None
"""An open device, a device's name, either of them by kind, or None for the default devices of an artifact's kinds."""


def open_model(
    artifact: ModelSource,
    device: DeviceSpec = None,
    libraries: Mapping[str, Library] | None = None,
    host: Mapping[str, Host] | None = None,
    shapes: ShapeProfile | None = None,
    placing: PlacementOptions | None = None,
    threads: int | None = None,
) -> Model:
    """Compile and upload all functions of an artifact; see `Artifact.open`."""
    parts = artifact.placement.devices
    if placing is not None and not parts:
        raise UserError(
            f"placing: expected an artifact for several devices, got one for {artifact.device_kind}; leave it out"
        )
    kinds = tuple(sorted(set(parts.values()))) or (artifact.device_kind,)
    measured = {kind: _measured(artifact, kind) for kind in kinds}
    given = device if threads is None else _with_threads(device, kinds, threads)
    opened, owned = _open_devices(measured, given, artifact.objects)
    if shapes is not None:
        shapes.of_model(str(artifact.manifest["extra"].get("model", "")))
    # One set of weights per device for all functions: a prefill and a decode step read the same weights.
    weights = {kind: DeviceWeights(opened[kind], artifact.constants) for kind in opened}
    executors: dict[str, Executor] = {}
    try:
        for kind, device_of_kind in opened.items():
            _check_device(artifact, kind, device_of_kind)
        inner = parts_of(artifact.host_programs)
        for program in artifact.programs:
            # Only functions that are called from outside find their symbols in the shapes of arguments. A host
            # program hands them to its parts.
            if program.name not in inner:
                check_binders(program)
            kind = parts.get(program.name, kinds[0])
            executors[program.name] = executor = Executor(program, opened[kind], weights[kind], libraries)
            if shapes is not None and program.symbols:
                executor.record = shapes.recorder(program.name, [s.name for s in program.symbols])
        # Not before all programs are there: several may pack one weight.
        for kind, resident in weights.items():
            of_kind = [p for p in artifact.programs if parts.get(p.name, kinds[0]) == kind]
            with opened[kind].turn:
                resident.keep_only(set().union(*map(read_by_calls, of_kind)))
        return Model(artifact, executors, weights, owned, host, placing)
    except BaseException:
        for executor in executors.values():
            executor.close()
        for resident in weights.values():
            resident.close()
        for owned_device in owned:
            owned_device.close()
        raise


def _open_devices(
    measured: Mapping[str, object], device: DeviceSpec, objects: Sequence[CompiledObjects]
) -> tuple[dict[str, Device], list[Device]]:
    """Return the devices by kind, and those opened here. Devices of other kinds are ignored.

    Args:
        measured: By kind, the fingerprint of the device that the plans were measured on; it is opened by default.
        device: Devices or names of devices, as of `Artifact.open`.
        objects: Compiled kernels of the artifact.

    Raises:
        UserError: The devices are not of these kinds.
    """
    given, kinds = device, tuple(measured)
    if isinstance(given, str) and (len(kinds) > 1 or "," in given):
        given = {spec.partition(":")[0]: spec for spec in map(str.strip, given.split(","))}
    if not isinstance(given, Mapping):
        if len(kinds) > 1 and given is not None:
            raise UserError(f"device: expected devices by kind, {', '.join(kinds)}, got one; leave it out or name each")
        given = {} if given is None else {kinds[0]: given}
    if given and not set(given) & set(kinds):
        raise UserError(f"device: expected devices of the kinds {', '.join(kinds)}, got {', '.join(given)}")
    opened: dict[str, Device] = {}
    owned: list[Device] = []
    try:
        for kind in kinds:
            chosen = given[kind] if kind in given else name_of_measured(kind, measured[kind])
            if isinstance(chosen, str):
                owned.append(open_device(chosen, objects))
                opened[kind] = owned[-1]
            elif hasattr(chosen, "info"):
                opened[kind] = chosen
            else:
                raise UserError(f"device: expected a device's name or an open device, got a {type(chosen).__name__}")
    except BaseException:
        for owned_device in owned:
            owned_device.close()
        raise
    return opened, owned


def _with_threads(device: DeviceSpec, kinds: Sequence[str], threads: int) -> DeviceSpec:
    """Return the devices with the processor's as one of this number of threads. Raises UserError where there is none of target c."""
    name = f"c:threads={threads}"
    if device is None and kinds == ("c",):
        return name
    given = {"c": device} if isinstance(device, str) and kinds == ("c",) else device or {}
    if not isinstance(given, Mapping) or "c" not in kinds or given.get("c", "c") != "c":
        raise UserError(
            f"threads: expected an artifact for target c on its default device, got one for {', '.join(kinds)}"
            f"{'' if device is None else ' and a device'}; name the device with its threads, as {name!r}"
        )
    return {**given, "c": name}


def _measured(artifact: ModelSource, kind: str) -> object:
    """Return what the manifest holds as the fingerprint of the device of a kind that the plans were measured on."""
    extra = artifact.manifest["extra"]
    several = extra.get("fingerprints")
    return several.get(kind) if isinstance(several, dict) else extra.get("fingerprint")


def _check_device(artifact: ModelSource, kind: str, opened: Device) -> None:
    """Raise ArtifactError for a device of another kind; warn of one that the plans were not measured on."""
    name = artifact.path or ", ".join(artifact.functions)
    if opened.info.kind != kind:
        raise ArtifactError(
            f"artifact {name}: expected a device of kind {kind}, got "
            f"{opened.info.kind} ({opened.info.name}); build it for target {opened.info.kind}"
        )
    stored = _measured(artifact, kind)
    measured = stored if isinstance(stored, dict) else {}
    fingerprint = dict(opened.info.fingerprint)
    # A fact that one of them lacks is unknown: compiled objects that use the whole processor have no `isa`.
    differing = sorted(key for key in measured.keys() & fingerprint.keys() if measured[key] != fingerprint[key])
    if differing:
        warn(
            f"artifact {name} was tuned on another device ({', '.join(differing)} differ): "
            "results are right, other kernels may be faster on this one"
        )


def _any_on(inputs: Mapping[str, Any] | Sequence[Any], device: Device) -> bool:
    """Return whether some arguments are arrays of other libraries in the memory of a device."""
    if not isinstance(inputs, (Mapping, Sequence)):
        return False  # refused later
    return any(is_on(value, device) for value in (inputs.values() if isinstance(inputs, Mapping) else inputs))


class Model(Summarised):
    """An artifact on a device, ready to run. Use as a context manager, or call `close`. Its functions share the device's memory of
    their constants.

    Any thread may call it, several at once, with equal or different shapes; so may several models on one device. Calls take
    turns, for a kernel already runs on all of the device, and one workspace serves all threads. A call that waits its turn lasts
    longer, so a process serves more by batching than by threads. `run_async` is the same for coroutines.

    `close` waits for the call that runs; calls after it, and those still waiting, raise ModelStateError. So do calls in a process
    that is forked.
    """

    def __init__(
        self,
        artifact: ModelSource,
        executors: Mapping[str, Executor],
        weights: Mapping[str, DeviceWeights],
        owned: Sequence[Device],
        host: Mapping[str, Host] | None = None,
        placing: PlacementOptions | None = None,
    ) -> None:
        self.artifact, self.executors, self._host = artifact, executors, dict(host or {})
        devices = {kind: resident.device for kind, resident in weights.items()}
        self._virtual_machine = VirtualMachine(
            artifact.host_programs, executors, artifact.constants, devices, artifact.placement, placing
        )
        self._host_programs = {d.name for d in artifact.host_programs}
        self._weights, self._owned = dict(weights), list(owned)
        self._names = {name: name for name in artifact.functions}
        self._params: dict[str, tuple[str, ...]] = {}
        self._results: dict[str, tuple[str, ...]] = {}
        for program in artifact.programs:
            self._params[program.name] = tuple(program.buffers[i].name for i in program.inputs)
            self._results[program.name] = tuple(program.buffers[i].name for i in program.outputs)
        for host_program in artifact.host_programs:
            self._params[host_program.name] = tuple(p.name for p in host_program.params)
            self._results[host_program.name] = tuple(r.name for r in host_program.results)
        self._pools: dict[str, BufferPool | None] = {}
        self._refusal = ""  # why it cannot be called any more
        self._starting = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        watch(self)

    def _summary(self) -> tuple[str, Facts]:
        devices = listed([f"{kind}, {resident.device.info.name}" for kind, resident in self._weights.items()])
        closed = f", not open: {self._refusal}" if self._refusal else ""
        return f"Model {self._name()} on {devices}{closed}", source_facts(self.artifact)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions."""
        return self.artifact.functions

    @property
    def placed(self) -> VirtualMachine:
        """The machine of a model over several devices, which knows what was copied and which device is slow or lost.

        Raises UserError for other models."""
        if not self._virtual_machine.placed:
            kind = self.artifact.device_kind
            raise UserError(f"{self._name()}: expected a model over several devices, got one for {kind}")
        return self._virtual_machine

    @property
    def executor(self) -> Executor:
        """The executor of `main`, or of the only function. Raises UserError when there are several, none of them `main`, or it is no
        single program."""
        return self.executors[self.artifact.program.name]

    @property
    def inputs(self) -> tuple[Spec, ...]:
        """The parameters of `main`, or of the only function, in order."""
        return self.artifact.inputs

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """The results of `main`, or of the only function, in order."""
        return self.artifact.outputs

    def __call__(self, *arrays: Any, **by_name: Any) -> Results:
        """Call `main`, or the only function: arguments in order, by parameter name, or both; see `run`."""
        if not by_name:
            return self.run(arrays[0] if len(arrays) == 1 and isinstance(arrays[0], Mapping) else arrays)
        name = self._function(None)
        given = dict(zip(self._params[name], arrays))
        twice = [n for n in given if n in by_name]
        if twice or len(arrays) > len(given):
            got = f"{twice[0]} by position and by name" if twice else f"{len(arrays)} by position"
            raise UserError(f"{name}: expected an argument for each of {', '.join(self._params[name])}, got {got}")
        return self.run({**given, **by_name})

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        function: str | None = None,
        host: Mapping[str, Host] | None = None,
        on_device: bool | None = None,
    ) -> Results:
        """Call the model: arguments by parameter name, or in order; results by name and in order, as fresh arrays.

        An argument is a NumPy array, nested lists, a number, a tensor of torch or JAX, a `DeviceArray`, or an object with
        `__dlpack__` or `__array__`. Results are NumPy arrays, or tensors of torch if some arguments are; their memory is not copied
        for that. A model on a CUDA device reads arrays of other libraries in the memory of this device. Where a function has them,
        shapes are tuples of whole numbers and scalars are numbers; a tuple that is returned is given field by field.

        Args:
            inputs: Arguments by parameter name, or in order.
            function: Name of the function; by default `main`, or the only one.
            host: Routines of the host program for this call, by name; their arrays must not be written. They take precedence over
                the routines of `Artifact.open`.
            on_device: Leave results in the memory of the device, as `DeviceArray`; NumPy arrays where this is the host's, and CUDA tensors
                if arguments are tensors of torch. By default where arguments of other libraries are in this memory.

        Raises:
            UserError: An argument does not fit; the message names the parameter and what was expected (rank, dtype, dims, bounds).
            ModelStateError: The model is closed.
        """
        name = self._function(function)
        if name not in self._host_programs:
            executor = self.executors[name]
            if on_device is None:
                on_device = executor.shares_memory and _any_on(inputs, executor.device)
            results = executor.run(inputs, in_place=True, pool=self._pool(executor.device) if on_device else None)
        elif on_device:
            raise UserError(f"{name}: on_device: expected a function of one program, got one that a host program runs")
        else:
            results = self._virtual_machine.run(name, inputs, {**self._host, **(host or {})})
        return named(as_tensors(results) if any_tensor(inputs) else results, self._results[name])

    def _pool(self, device: Device) -> BufferPool | None:
        """Return the memory of results that stay on a device; None where launches reach the host's arrays."""
        kind = device.info.kind
        with device.turn:
            if kind not in self._pools:
                self._pools[kind] = pool_of(device)
            return self._pools[kind]

    def stream(
        self,
        inputs: Iterable[Mapping[str, Any] | Sequence[Any]],
        depth: int = 4,
        function: str | None = None,
        host: Mapping[str, Host] | None = None,
    ) -> Stream[Results]:
        """Call the model for each of many inputs, while the next ones are read and earlier results are used.

        Results come in order, the same as of `run`; `Stream.then` adds stages. The error of a call comes in place of its result, and
        ends the stream.

        Args:
            inputs: Read in a separate thread, at most a few more than `depth` ahead.
            depth: Number of items that may wait before and after the model.
            function: As of `run`, for every call.
            host: As of `run`, for every call.

        Raises:
            UserError: There is no such function, or the depth is less than 1.
            ModelStateError: The model is closed.
        """
        if self._refusal:
            raise self._refused()
        choose_function(self._names, function, self.artifact.path)
        return Stream(inputs, [partial(self.run, function=function, host=host)], depth)

    def session(
        self,
        start: Sequence[Any] | Mapping[str, Any] | None = None,
        function: str | None = None,
        replaced_by: Mapping[str, int] | None = None,
    ) -> Session:
        """Open a session: calls in which results replace arguments without leaving the device, such as a decoder's caches.

        Args:
            start: The arguments that stay there. A list has the last parameters, which the last results replace; a mapping has
                parameters by name. By default the results of the function `initial_state`, which imported programs that write to their
                buffers have.
            function: As of `run`; it must not branch.
            replaced_by: For a mapping, the number of the result that replaces each parameter that changes between calls.

        Raises:
            UserError: A name, a number or an array does not fit.
            ModelStateError: The model is closed.
        """
        name = self._function(function)
        if name in self._host_programs:
            raise UserError(
                f"{name}: expected a function without branches for a session, got one that a host program runs"
            )
        executor, program = self.executors[name], self.executors[name].program
        if start is None:
            if INITIAL_STATE not in self._names:
                raise UserError(f"{name}: expected a model with a state, got one without; give the arrays of `start`")
            start = self.run([], INITIAL_STATE)
        if not isinstance(start, Mapping):
            names = [program.buffers[i].name for i in program.inputs[len(program.inputs) - len(start) :]]
            first = len(program.outputs) - len(start)
            if replaced_by is not None or first < 0 or len(names) != len(start):
                raise UserError(
                    f"{name}: expected arrays for the last parameters, which the last results replace, got {len(start)} for "
                    f"{len(program.inputs)} parameters and {len(program.outputs)} results; give them by name, with `replaced_by`"
                )
            start, replaced_by = dict(zip(names, start)), {n: first + at for at, n in enumerate(names)}
        return Session(executor, start, replaced_by or {})

    def bind(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        results: Sequence[Any] | None = None,
        function: str | None = None,
        fixed: Collection[str] = (),
    ) -> BoundCall | BoundSteps:
        """Bind a function to arrays that stay the same: each `run` of what is returned reads and writes them in place.

        For small models called often: shapes are checked once, and nothing is allocated in a call.

        Args:
            inputs: Arrays by parameter name, or in order: of the parameters' types, in the host's memory, of NumPy, torch or with
                `__dlpack__`.
            results: Arrays to write, in order; by default fresh ones.
            function: As of `run`; its steps must depend only on shapes.
            fixed: Parameters whose elements never change: indices among them are checked once.

        Raises:
            UserError: An array does not fit.
            ModelStateError: The model is closed.
        """
        name = self._function(function)
        if name not in self._host_programs:
            return BoundCall(self.executors[name], inputs, results, fixed)
        if self._virtual_machine.placed:
            raise UserError(f"{name}: expected a model for one device to bind arrays to, got one for several; use run")
        program = next(d for d in self.artifact.host_programs if d.name == name)
        return BoundSteps(self._virtual_machine, program, inputs, results, fixed)

    def _function(self, function: str | None) -> str:
        """Return the name of a function. Raises UserError for none, ModelStateError after `close`."""
        if self._refusal:
            raise self._refused()
        return choose_function(self._names, function, self.artifact.path)

    async def run_async(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        function: str | None = None,
        host: Mapping[str, Host] | None = None,
    ) -> Results:
        """Call the model in its worker thread, and wait without blocking the event loop. Arguments, results and errors as of `run`.

        Several at once run in the order of their calls. Cancelling one that waits takes it out of the queue; one that runs goes on
        to its end, and its results are dropped. The arrays must not change until it returns.

        Raises: ModelStateError within a host routine of such a call, which would wait for itself.
        """
        if getattr(_WORKING, "model", None) is self:
            raise ModelStateError(
                f"{self._name()}: expected no asynchronous call of a model inside another, got one in a host routine; call run there"
            )
        # The worker thread must see the caller's context variables, such as the id of a request.
        call = partial(contextvars.copy_context().run, self._work, inputs, function, host)
        with self._starting:
            if self._refusal:
                raise self._refused()
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="relax-tune-model")
            future = self._worker.submit(call)
        return await asyncio.wrap_future(future)

    def _work(
        self, inputs: Mapping[str, Any] | Sequence[Any], function: str | None, host: Mapping[str, Host] | None
    ) -> Results:
        _WORKING.model = self
        try:
            return self.run(inputs, function, host)
        finally:
            _WORKING.model = None

    def _name(self) -> str:
        return self.artifact.path or ", ".join(self.functions)

    def _refused(self) -> ModelStateError:
        return ModelStateError(f"{self._name()}: expected an open model, got {self._refusal}")

    def replace_weights(self, weights: ModelSource | Mapping[str, Any]) -> None:
        """Compute with other weights of the same shapes and types from the next call on, in the memory of the present ones.

        Sessions and bound calls go on with them. A call of a model that branches or depends on data must not run meanwhile.

        Args:
            weights: An artifact of the same programs (`rt.replace_weights`, `Artifact.with_weights`), or some arrays by the names of
                `Artifact.with_weights`.

        Raises:
            UserError: Weights of another model, or a model over several devices.
            ModelStateError: The model is closed.
        """
        if self._refusal:
            raise self._refused()
        given = self.artifact.with_weights(weights) if isinstance(weights, Mapping) else weights
        check_same(self.artifact, given, self._name())
        with contextlib.ExitStack() as turns:
            for resident in self._weights.values():
                turns.enter_context(resident.device.turn)
            for executor in self.executors.values():
                executor.refuse_within()
            try:
                for resident in self._weights.values():
                    resident.replace(given.constants, self._pack_weights)
            except BaseException:
                self._refusal = "one whose weights were replaced in part"
                for executor in self.executors.values():
                    executor.refusal = executor.refusal or self._refusal
                raise
            self._virtual_machine.replace_weights(given.constants)
            self.artifact = given

    def _pack_weights(self) -> None:
        for executor in self.executors.values():
            executor.pack_weights()

    def close(self) -> None:
        """Free memory, and close the device if this opened it, after the running call. May be called twice.

        Raises: ModelStateError inside a call in the same thread, as a signal's handler may be.
        """
        if self._refusal == FORKED:
            return  # the memory is the first process's
        self._refusal = CLOSED  # before the turn, so that new calls are refused at once
        try:
            with contextlib.ExitStack() as turns:
                for weights in self._weights.values():
                    # All turns before anything is freed: a call over several devices uses all of them.
                    turns.enter_context(weights.device.turn)
                for executor in self.executors.values():
                    executor.refuse_within()
                for executor in self.executors.values():
                    executor.close()
                self._virtual_machine.close()
                for pool in self._pools.values():
                    if pool is not None:
                        pool.close()
                for weights in self._weights.values():
                    weights.close()
                while self._owned:
                    self._owned.pop().close()
        except ModelStateError:
            # The close was refused inside a call, so the model stays open.
            self._refusal = ""
            raise
        with self._starting:
            if self._worker is not None:
                self._worker.shutdown(wait=False)  # waiting calls raise ModelStateError

    def after_fork(self) -> None:
        """Refuse calls in this process, and renew the locks that other threads of the first one may hold."""
        for weights in self._weights.values():
            # A lock that another thread holds at the fork is never released in the child.
            weights.device.turn = weights.device.new_turn()
        self._starting = threading.Lock()
        self._refusal = self._refusal or FORKED
        for executor in self.executors.values():
            executor.refusal = executor.refusal or FORKED

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
