"""An artifact on a device, ready to run.

Tests: `tests/runtime/test_threads.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.after_fork import watch
from relax_tune.runtime.arrays import any_tensor, as_tensors
from relax_tune.runtime.calls.bound_call import BoundCall, BoundSteps
from relax_tune.runtime.calls.session import Session
from relax_tune.runtime.calls.stream import Stream
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import CLOSED, FORKED, Executor
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.memory.borrowed import is_on
from relax_tune.runtime.memory.buffer_pool import BufferPool, pool_of
from relax_tune.runtime.model_source import ModelSource, source_facts
from relax_tune.runtime.opened import DeviceSpec, OpenedArtifact, OpenOptions, check_swap, close_all, open_devices
from relax_tune.runtime.replaced_weights import check_same
from relax_tune.runtime.results import Results, named
from relax_tune.runtime.shapes import ShapeRecorder
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


def open_model(
    artifact: ModelSource,
    device: DeviceSpec = None,
    libraries: Mapping[str, Library] | None = None,
    host: Mapping[str, Host] | None = None,
    shapes: ShapeRecorder | None = None,
    placing: PlacementOptions | None = None,
    threads: int | None = None,
) -> Model:
    """Compile and upload all functions of an artifact; see `Artifact.open`."""
    if placing is not None and not artifact.placement.devices:
        raise UserError(
            f"placing: expected an artifact for several devices, got one for {artifact.device_kind}; leave it out"
        )
    options = OpenOptions(libraries, shapes, placing)
    devices, owned = open_devices(artifact, device, threads)
    try:
        if shapes is not None:
            shapes.of_model(str(artifact.manifest["extra"].get("model", "")))
    except BaseException:
        close_all(owned)
        raise
    opened = OpenedArtifact(artifact, devices, owned, options)
    return Model(opened, options, host, partial(open_devices, device=device, threads=threads))


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
        opened: OpenedArtifact,
        options: OpenOptions,
        host: Mapping[str, Host] | None,
        reopen: Callable[[ModelSource], tuple[dict[str, Device], list[Device]]],
    ) -> None:
        self._opened, self._options, self._reopen, self._host = opened, options, reopen, dict(host or {})
        self._earlier = weakref.WeakSet[OpenedArtifact]()  # what `swap` replaced, while something still uses it
        self._pools: dict[str, BufferPool | None] = {}
        self._refusal = ""  # why it cannot be called any more
        self._starting, self._swapping = threading.Lock(), threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        watch(self)

    def _summary(self) -> tuple[str, Facts]:
        devices = listed([f"{kind}, {device.info.name}" for kind, device in self._opened.devices.items()])
        closed = f", not open: {self._refusal}" if self._refusal else ""
        return f"Model {self._name()} on {devices}{closed}", source_facts(self.artifact)

    @property
    def artifact(self) -> ModelSource:
        """The artifact whose programs calls run now."""
        return self._opened.artifact

    @property
    def executors(self) -> Mapping[str, Executor]:
        """The executors of its programs, by name; others after `swap`."""
        return self._opened.executors

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions."""
        return self.artifact.functions

    @property
    def placed(self) -> VirtualMachine:
        """The machine of a model over several devices, which knows what was copied and which device is slow or lost.

        Raises UserError for other models."""
        machine = self._opened.machine
        if not machine.placed:
            kind = self.artifact.device_kind
            raise UserError(f"{self._name()}: expected a model over several devices, got one for {kind}")
        return machine

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
        given = dict(zip(self._opened.params[name], arrays))
        twice = [n for n in given if n in by_name]
        if twice or len(arrays) > len(given):
            got = f"{twice[0]} by position and by name" if twice else f"{len(arrays)} by position"
            raise UserError(
                f"{name}: expected an argument for each of {', '.join(self._opened.params[name])}, got {got}"
            )
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
        while True:
            opened = self._opened
            if name in opened.host_programs:
                if on_device:
                    raise UserError(
                        f"{name}: on_device: expected a function of one program, got one that a host program runs"
                    )
                if opened.enter():
                    try:
                        results = opened.machine.run(name, inputs, {**self._host, **(host or {})})
                    finally:
                        opened.leave()
                    break
            else:
                executor = opened.executors[name]
                stays = executor.shares_memory and _any_on(inputs, executor.device) if on_device is None else on_device
                try:
                    results = executor.run(inputs, in_place=True, pool=self._pool(executor.device) if stays else None)
                    break
                except ModelStateError:
                    if opened is self._opened:
                        raise
            if opened is self._opened:
                raise self._refused()
            # another artifact was swapped in while the call waited
        return named(as_tensors(results) if any_tensor(inputs) else results, opened.results[name])

    def _entered(self) -> OpenedArtifact:
        """Return the programs that calls run now, open until `leave`. Raises ModelStateError after `close`."""
        while True:
            opened = self._opened
            if opened.enter():
                return opened
            if opened is self._opened:
                raise self._refused()

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
        choose_function(self._opened.names, function, self.artifact.path)
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
        if start is None:
            if INITIAL_STATE not in self._opened.names:
                raise UserError(f"{name}: expected a model with a state, got one without; give the arrays of `start`")
            start = self.run([], INITIAL_STATE)
        opened = self._entered()
        try:
            if name in opened.host_programs:
                raise UserError(
                    f"{name}: expected a function without branches for a session, got one that a host program runs"
                )
            session = _session(opened.executors[name], start, replaced_by)
        except BaseException:
            opened.leave()
            raise
        opened.leave_with(session)
        return session

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
        opened = self._entered()
        bound: BoundCall | BoundSteps
        try:
            if name not in opened.host_programs:
                bound = BoundCall(opened.executors[name], inputs, results, fixed)
            elif opened.machine.placed:
                raise UserError(
                    f"{name}: expected a model for one device to bind arrays to, got one for several; use run"
                )
            else:
                bound = BoundSteps(opened.machine, opened.host_programs[name], inputs, results, fixed)
        except BaseException:
            opened.leave()
            raise
        opened.leave_with(bound)
        return bound

    def _function(self, function: str | None) -> str:
        """Return the name of a function. Raises UserError for none, ModelStateError after `close`."""
        if self._refusal:
            raise self._refused()
        return choose_function(self._opened.names, function, self.artifact.path)

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
        with self._swapping, (opened := self._opened).turn():
            try:
                for resident in opened.weights.values():
                    resident.replace(given.constants, opened.pack_weights)
            except BaseException:
                self._refusal = "one whose weights were replaced in part"
                opened.refuse(self._refusal)
                raise
            opened.machine.replace_weights(given.constants)
            opened.artifact = given

    def swap(self, artifact: ModelSource, warm: Callable[[Mapping[str, Executor]], object] | None = None) -> None:
        """Run the programs of another artifact from the next call on: for example of the same model, tuned for the shapes it is served.

        It is compiled and its weights are placed while calls go on with the present programs. Any thread may call the model meanwhile:
        every call runs one of the two from its start to its end. Sessions, bound calls and calls of host programs end with the programs
        that they began with. When the last of them is gone, and the last running call has ended, the memory of the replaced programs is
        freed.

        Args:
            artifact: It has the same functions and signatures, for at least the same sizes, and is for the same kind of device. Its
                weights may be others.
            warm: Called with the new executors before calls run on them, for example to run common shapes: the first call of a shape
                takes longer than the next ones. An error that it raises ends the swap.

        Raises:
            UserError: Another signature, narrower bounds, another kind of device, or a model over several devices.
            BuildError: Compiling fails.
            ModelStateError: The model is closed, or this is inside a call in the same thread. In each case the present programs stay.
        """
        if self._refusal:
            raise self._refused()
        with self._swapping:
            now = self._opened
            check_swap(now.artifact, artifact, self._name())
            with now.turn():  # refused inside a call, whose memory cannot be freed
                pass
            # The objects of an artifact belong to the device that is opened for it.
            reopened = bool(now.owned) and bool(artifact.objects or now.artifact.objects)
            devices, owned = self._reopen(artifact) if reopened else (now.devices, [])
            opened = OpenedArtifact(artifact, devices, owned, self._options)
            try:
                if warm is not None:
                    warm(opened.executors)
                with self._starting:
                    if self._refusal:
                        raise self._refused()
                    if not reopened:
                        opened.owned, now.owned = now.owned, []
                    self._opened = opened
                    self._earlier.add(now)
            except BaseException:
                opened.free()
                raise
            now.retire()

    def close(self) -> None:
        """Free memory, and close the device if this opened it, after the running call. May be called twice.

        Raises: ModelStateError inside a call in the same thread, as a signal's handler may be.
        """
        if self._refusal == FORKED:
            return  # the memory is the first process's
        with self._starting:
            self._refusal = CLOSED  # before the turn, so that new calls are refused at once
            every = [*self._earlier, self._opened]
        try:
            with contextlib.ExitStack() as turns:
                for opened in every:
                    turns.enter_context(opened.turn())
                for pool in self._pools.values():
                    if pool is not None:
                        pool.close()
                for opened in every:  # the last one owns the devices
                    opened.free()
        except ModelStateError:
            # The close was refused inside a call, so the model stays open.
            self._refusal = ""
            raise
        with self._starting:
            if self._worker is not None:
                self._worker.shutdown(wait=False)  # waiting calls raise ModelStateError

    def after_fork(self) -> None:
        """Refuse calls in this process, and renew the locks that other threads of the first one may hold."""
        for opened in (*self._earlier, self._opened):
            opened.after_fork()
        self._starting, self._swapping = threading.Lock(), threading.Lock()
        self._refusal = self._refusal or FORKED

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _session(
    executor: Executor, start: Sequence[Any] | Mapping[str, Any], replaced_by: Mapping[str, int] | None
) -> Session:
    """Open a session; arguments as of `Model.session`."""
    program = executor.program
    name = program.name
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
