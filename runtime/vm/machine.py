"""The virtual machine of host programs: it works on registers, and executors run the programs of their subgraphs.

On one device an instruction is complete before the next starts. An artifact for several devices has a queue for each device: a
part or a transfer is queued, its registers hold `Pending` values, and the other instructions wait for what they read. The queue of
a device runs its work in program order, so parts on different devices overlap wherever neither reads the other's results.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, MeasureError, MemoryLack, ModelStateError, UserError, warn
from relax_tune.home import HOME
from relax_tune.runtime.arguments import in_order
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import pool_of
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.program.host_program import (
    Branch,
    CallHostProgram,
    CallHostRoutine,
    CallSubgraph,
    GetItem,
    HostProgram,
    Instruction,
    LoadWeight,
    Move,
    Pack,
    Repeat,
    Transfer,
)
from relax_tune.runtime.program.placement import NOWHERE, Placement
from relax_tune.runtime.vm.instructions import (
    EXECUTE,
    CallFrame,
    Code,
    Execute,
    FunctionValue,
    Host,
    argument,
    condition,
    describe,
    fresh,
    item,
    read_only,
    sets_into,
)
from relax_tune.runtime.vm.policy import PlacementChooser, PlacementOptions
from relax_tune.runtime.vm.queues import Pending, Work, WorkQueue
from relax_tune.runtime.vm.repeat import StepLoop
from relax_tune.runtime.vm.shape_plans import ShapePlans

MAX_DEPTH = 1000
"""Maximum depth of nested calls. A tail call does not count."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """The start or the end of a piece of work in the queue of a device.

    Attributes:
        name: Name of the part, or `SOURCE -> TARGET` of a transfer.
        nbytes: Bytes copied between devices.
    """

    what: Literal["part", "transfer"]
    name: str
    device: str
    when: Literal["start", "end"]
    nbytes: int = 0


class _Call:
    """An active call on several devices.

    Attributes:
        work: The last work of the call in each queue, by device: once it is done, all of the call's work in the queue is. Earlier
            work is not referenced, so its results can be freed.
        versions: Copies of host arrays on other devices, by the array's identity; the arrays live as long as the call.
        secs: Seconds of the parts on each device.
        chosen: Functions whose placement was chosen, with its number and the values of the symbols.
        failure: The device whose work failed first, and the reason.
    """

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}
        self.versions: dict[int, tuple[Any, dict[str, Pending]]] = {}
        self.secs: dict[str, float] = {}
        self.chosen: list[tuple[str, int, dict[str, int]]] = []
        self.failure: tuple[str, str] | None = None

    def wait(self) -> None:
        """Wait until the queues have run all work of the call."""
        for work in self.work.values():
            work.wait()

    @contextlib.contextmanager
    def failing(self, device: str) -> Iterator[None]:
        """Note the device whose work fails first. A device that lacks memory for a call is not lost."""
        try:
            yield
        except MemoryLack:
            raise
        except MeasureError as error:
            self.failure = self.failure or (device, str(error))
            raise


class VirtualMachine:
    """An interpreter of verified host programs. Threads may call `run` at once; each call has its own frames.

    Calls are frames on a list, so neither a deep recursion nor a long loop of calls grows Python's stack.

    Args:
        host_programs: The programs.
        executors: One for each subgraph, by name.
        constants: Constants that host programs load.
        devices: Open devices by kind.
        placement: The device of each part; empty for an artifact for one device.
        options: How placements are chosen.

    Attributes:
        chooser: Chooser of placements, which knows the load of the devices and the lost ones.
        observe: Called with every `DeviceEvent` unless None, in the thread that runs the work.
        copied: Bytes that were copied between devices, by (source, target).
    """

    def __init__(
        self,
        host_programs: Sequence[HostProgram],
        executors: Mapping[str, Executor],
        constants: Mapping[str, NDArray[Any]],
        devices: Mapping[str, Device] | None = None,
        placement: Placement = NOWHERE,
        options: PlacementOptions | None = None,
    ) -> None:
        self.executors, self.placed = executors, bool(placement.parts)
        self._execute = QUEUED if self.placed else IMMEDIATE
        self._codes = {d.name: Code(d) for d in host_programs}
        self._weights: dict[str, NDArray[Any] | DeviceArray] = {
            w.name: read_only(constants[w.name]) for d in host_programs for w in d.weights
        }
        self._devices = dict(devices or {})
        # `pool_of` allocates memory to find out whether a device has its own: not needed without host programs.
        self._pools = {kind: pool_of(device) for kind, device in self._devices.items()} if host_programs else {}
        self._pool = None if self.placed else next(iter(self._pools.values()), None)
        self._pools.setdefault(HOME, None)
        self._part_devices = placement.devices
        self.chooser = PlacementChooser(options or PlacementOptions(), {f.function: f for f in placement.functions})
        # By identity, as in `Code.computes`.
        self._reads = {id(i): i.reads for d in host_programs for i in d.instructions()} if self.placed else {}
        self._has_effects = any(isinstance(i, CallHostRoutine) for d in host_programs for i in d.instructions())
        self._loops: dict[int, StepLoop] = {}
        # With memory of their own, devices would need transfers, and with a placement, queues.
        self._plans = None if self.placed or self._pool is not None else ShapePlans({d.name: d for d in host_programs})
        self._closed = False
        self._queues: dict[str, WorkQueue] = {}
        self._starting = threading.Lock()
        self._counting = threading.Lock()
        self._local = threading.local()
        self.observe: Callable[[DeviceEvent], None] | None = None
        self.copied: Counter[tuple[str, str]] = Counter()

    def run(
        self, name: str, inputs: Mapping[str, Any] | Sequence[Any], hosts: Mapping[str, Host] | None = None
    ) -> list[Any]:
        """Call a host program.

        A call that loses a device is repeated with a placement without that device if the options say so.

        Args:
            name: Name of the function.
            inputs: Values by parameter name, or in order.
            hosts: Routines of the host program, by name.

        Returns:
            Results in order, as fresh arrays.

        Raises:
            UserError: A value does not fit; the message names the function and the value.
            MeasureError: A device is lost; the message names it.
            MemoryLack: A device lacks memory for the call.
            ModelStateError: The machine was closed.
        """
        if not self.placed:
            return self._fresh_results(name, inputs, hosts)
        outer = getattr(self._local, "call", None)  # a host routine may call the model
        while True:
            call = self._local.call = _Call()
            try:
                results = self._fresh_results(name, inputs, hosts)
            except MeasureError as error:
                call.wait()  # no work of a failed call runs on after it
                if call.failure is None:
                    raise
                self._lose(name, *call.failure, error)
                continue
            finally:
                self._local.call = outer
                call.wait()
            # the seconds are measured per call: with several choices, they belong to none of them
            if len(call.chosen) == 1:
                self.chooser.observe(*call.chosen[0], call.secs)
            return results

    def _fresh_results(
        self, name: str, inputs: Mapping[str, Any] | Sequence[Any], hosts: Mapping[str, Host] | None
    ) -> list[Any]:
        returned = set[int]()
        if self._plans is None or hosts:
            return [fresh(value, returned) for value in self.results_of(name, inputs, hosts)]
        program, values = self._values(name, inputs)
        convert = partial(self._arguments, program, values, name)
        return self._plans.call(program.name, values, convert, partial(self._results, program, {}), self._execute)

    def results_of(
        self,
        name: str,
        inputs: Mapping[str, Any] | Sequence[Any],
        hosts: Mapping[str, Host] | None = None,
        call_subgraph: Execute | None = None,
    ) -> list[Any]:
        """Call a host program as `run`; its results may be borrowed from arguments and weights.

        Args:
            name: Name of the function.
            inputs: Values by parameter name, or in order.
            hosts: Routines of the host program, by name.
            call_subgraph: Execution of `CallSubgraph` for this call, such as one that only records it.
        """
        program, values = self._values(name, inputs)
        execute = self._execute if call_subgraph is None else {**self._execute, CallSubgraph: call_subgraph}
        return self._results(program, hosts or {}, self._arguments(program, values, name), execute)

    def _values(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> tuple[HostProgram, list[Any]]:
        """Return the host program of a function, and the values of its parameters in order."""
        host_program = self._codes[self._chosen(name, inputs)].program
        return host_program, in_order(name, [p.name for p in host_program.params], inputs)

    def _arguments(self, host_program: HostProgram, values: Sequence[Any], name: str) -> list[Any]:
        device = None if self._pool is None else self._pool.device
        return [argument(a, p, name, device) for a, p in zip(values, host_program.params, strict=True)]

    def _results(
        self,
        host_program: HostProgram,
        hosts: Mapping[str, Host],
        args: Sequence[Any],
        execute: Mapping[type[Instruction], Execute],
    ) -> list[Any]:
        """Run a host program."""
        returned = self._complete(self._call(host_program.name, args, hosts, execute))
        results = []
        for result in host_program.results:
            value = returned
            for index in result.path:
                value = item(value, index, host_program.name)
            results.append(value)
        return results

    def _call(
        self,
        name: str,
        args: Sequence[Any],
        hosts: Mapping[str, Host],
        execute: Mapping[type[Instruction], Execute],
    ) -> Any:
        frames = [CallFrame(self._codes[name], args, 0, hosts)]
        while True:
            frame = frames[-1]
            block, at = frame.at
            blocks = frame.code.program.blocks
            if at == len(blocks[block]):
                if frame.outer:
                    frame.at = frame.outer.pop()
                    continue
                frames.pop()
                result = frame.registers[frame.code.program.result]
                if not frames:
                    return result
                frames[-1].registers[frame.into] = result
                continue
            i = blocks[block][at]
            # Advance first: when a call returns, its caller goes on with the next instruction.
            here, frame.at = frame.at, (block, at + 1)
            if isinstance(i, CallHostProgram):
                code, values = self._callee(i, frame)
                if here in frame.code.tail_calls:
                    # The frame is replaced, so a loop that is written as a recursion takes constant memory.
                    frames[-1] = CallFrame(code, values, frame.into, hosts)
                    continue
                if len(frames) > MAX_DEPTH:
                    raise UserError(
                        f"{frame.name}: expected at most {MAX_DEPTH} calls inside one another, got more at the call "
                        f"of {code.program.name}; does its recursion end? (a call whose result is returned as it is does not count)"
                    )
                frames.append(CallFrame(code, values, i.into, hosts))
            elif isinstance(i, Branch):
                frame.outer.append(frame.at)
                if self.placed:
                    self.await_reads(i, frame)
                frame.at = (i.then if condition(frame, i) else i.orelse, 0)
            elif type(i) in execute:
                execute[type(i)](self, i, frame)
            else:
                raise ArtifactError(f"{frame.name}: expected an instruction, got {i!r:.200}")

    def _callee(self, i: CallHostProgram, frame: CallFrame) -> tuple[Code, list[Any]]:
        r, where = frame.registers, frame.name
        name = i.function
        if i.callee is not None:
            target = r[i.callee]
            if not isinstance(target, FunctionValue):
                raise UserError(f"{where}: expected a function to call, got {describe(target)}")
            name = target.name
        assert name is not None
        values = frame.values(i.args)
        code = self._codes[self._chosen(name, values)]
        if len(i.args) != len(code.program.params):
            raise UserError(f"{name}: expected {len(code.program.params)} arguments, got {len(i.args)}")
        return code, values

    def _chosen(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> str:
        """Return the host program to run for a function: itself, or its chosen placement."""
        if name not in self.chooser.functions:
            return name
        values = self._symbols(name, inputs)
        option = self.chooser.choose(name, values)
        if option is None:
            return name
        call: _Call = self._local.call
        # Recorded for `run`, which compares the seconds of the call with the prediction for this option.
        call.chosen.append((name, option, values))
        return self.chooser.functions[name].alternatives[option].function

    def _symbols(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, int]:
        """Return the values of the symbols that are themselves dims of arrays."""
        params = self._codes[name].program.params
        values = inputs if isinstance(inputs, Mapping) else dict(zip((p.name for p in params), inputs, strict=False))
        names = self.chooser.functions[name].symbols
        symbols: dict[str, int] = {}
        for p in params:
            shape = getattr(self._complete(values.get(p.name)), "shape", ())
            symbols |= {d: int(x) for d, x in zip(p.dims or (), shape, strict=False) if d in names}
        return symbols

    def run_part(self, i: CallSubgraph, frame: CallFrame) -> None:
        """Run a part of the program; its arguments move to the device, where later parts use them too."""
        for r in i.args if self._pool is not None else ():
            frame.registers[r] = self._resident(frame.registers[r])
        numbers = frame.numbers(i.symbols)
        results = self.executors[i.part].run(frame.values(i.args), numbers, in_place=True, pool=self._pool)
        for into, array in zip(i.into, results, strict=True):
            frame.registers[into] = array

    def run_loop(self, i: Repeat, frame: CallFrame) -> None:
        """Run a counted loop."""
        for r in (*i.states, *i.args) if self._pool is not None else ():
            frame.registers[r] = self._resident(frame.registers[r])
        (begin, end), symbols = frame.numbers((i.begin, i.end)), frame.numbers(i.symbols)
        states, rows, args = map(frame.values, (i.states, i.rows, i.args))
        loop = self._loops.get(id(i)) or self._loops.setdefault(id(i), StepLoop(self.executors[i.part], i))
        results = loop.run(range(begin, end), symbols, states, rows, args, self._pool)
        for into, array in zip(i.into, results, strict=True):
            frame.registers[into] = array

    def _resident(self, value: Any) -> Any:
        """Return an array in the device's memory; other values unchanged."""
        if self._pool is None or not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            return value
        return self._pool.upload(value)

    def weight(self, name: str) -> NDArray[Any] | DeviceArray:
        """Return a constant; it is copied to the device once."""
        weight = self._weights[name]
        if self._pool is not None and isinstance(weight, np.ndarray):
            weight = self._weights[name] = self._pool.upload(weight)
        return weight

    def replace_weights(self, constants: Mapping[str, NDArray[Any]]) -> None:
        """Load other constants from now on."""
        self._weights = {name: read_only(constants[name]) for name in self._weights}
        if self._plans is not None:
            self._plans.clear()

    def await_reads(self, i: Instruction, frame: CallFrame) -> list[tuple[int, Pending]]:
        """Wait for the values that an instruction reads. Returns the registers that were pending, with their pending values."""
        pending = []
        registers = frame.registers
        for r in self._reads[id(i)]:
            value = registers[r]
            if type(value) is Pending:
                pending.append((r, value))
                registers[r] = value.value()
            elif type(value) is tuple:
                registers[r] = self._complete(value)
        return pending

    def _complete(self, value: Any) -> Any:
        """Return a value after waiting for what is pending in it."""
        if isinstance(value, Pending):
            return value.value()
        if type(value) is tuple and any(isinstance(v, (Pending, tuple)) for v in value):
            return tuple(map(self._complete, value))
        return value

    def _enqueue(self, device: str, do: Callable[[], Any], reads: Sequence[Any]) -> Work:
        """Put work that reads these values into the queue of a device. Raises ModelStateError after `close`."""
        needs = [p.work for p in _pending(reads)]
        with self._starting:
            # Under the lock of `close`, so that no work enters a queue whose thread has ended.
            self._check_open()
            if device not in self._queues:
                self._queues[device] = WorkQueue(device, self._queues.values())
            work = self._queues[device].put(do, needs)
        call: _Call = self._local.call
        call.work[device] = work
        return work

    def wake(self) -> None:
        """Have the devices start the work that is ready, while the caller does something else."""
        for queue in tuple(self._queues.values()):
            queue.wake_if_ready()

    def queue_part(self, i: CallSubgraph, frame: CallFrame) -> None:
        """Queue a part of the program on its device."""
        # Registers are read now, since later instructions may overwrite them before the work runs.
        args, numbers = frame.values(i.args), frame.numbers(i.symbols)
        device = self._part_devices[i.part]
        call: _Call = self._local.call

        def work() -> list[Any]:
            arrays = [self._complete(a) for a in args]
            self._notify(DeviceEvent("part", i.part, device, "start"))
            start = time.perf_counter()
            with call.failing(device):
                moved = [self._moved(a, device) for a in arrays]
                results = self.executors[i.part].run(moved, numbers, in_place=True, pool=self._pools[device])
                if self.observe is not None or self.chooser.options.policy == "load":
                    with self._turn(device):  # so that the time covers the work, not only its launches
                        self._devices[device].synchronize()
            call.secs[device] = call.secs.get(device, 0.0) + time.perf_counter() - start  # only this queue writes it
            self._notify(DeviceEvent("part", i.part, device, "end"))
            return results

        queued = self._enqueue(device, work, args)
        for number, into in enumerate(i.into):
            frame.registers[into] = Pending(queued, device, number)

    def queue_transfer(self, i: Transfer, frame: CallFrame) -> None:
        """Queue a transfer, unless the value has a version on the target. The device that is not the host's runs it."""
        value = frame.registers[i.value]
        call: _Call = self._local.call
        if isinstance(value, Pending):
            source, versions = value.device, value.versions
        else:
            source, (_, versions) = HOME, call.versions.setdefault(id(value), (value, {}))
        if source == i.device:
            frame.registers[i.into] = value
            return
        if i.device not in versions:
            name, owner = f"{source} -> {i.device}", source if i.device == HOME else i.device

            def work() -> Any:
                array = self._complete(value)
                self._notify(DeviceEvent("transfer", name, i.device, "start", array.nbytes))
                with call.failing(owner):
                    moved = self._moved(array, i.device, source)
                self._notify(DeviceEvent("transfer", name, i.device, "end", array.nbytes))
                return moved

            versions[i.device] = Pending(self._enqueue(owner, work, [value]), i.device)
        frame.registers[i.into] = versions[i.device]

    def _moved(self, value: Any, device: str, source: str = HOME) -> Any:
        """Return an array in the memory that launches of a device read: the device's own if it has one, else the host's."""
        pool = self._pools[device]
        if isinstance(value, DeviceArray) and (pool is None or source != HOME):
            if value.host is None:
                self._count(source, HOME, value.nbytes)
                with self._turn(source):
                    value.numpy()
            value = value.numpy()
        if pool is None or not isinstance(value, np.ndarray):
            return value
        self._count(HOME, device, value.nbytes)
        with self._turn(device):
            return pool.upload(value)

    @contextlib.contextmanager
    def _turn(self, device: str) -> Iterator[None]:
        """Take the turn of a device, which `close` waits for. Raises ModelStateError after `close`."""
        opened = self._devices.get(device)
        with contextlib.nullcontext() if opened is None else opened.turn:
            self._check_open()
            yield

    def _lose(self, name: str, device: str, reason: str, error: MeasureError) -> None:
        """Continue without a device. Raises MeasureError if the options or earlier effects of the call forbid it."""
        if self.chooser.options.when_lost == "fail":
            raise MeasureError(
                f"{name}: the device {device} failed in a call: {reason}; open the model again, or with when_lost=move, which goes on "
                "with a placement without it"
            ) from error
        if self._has_effects:
            raise MeasureError(
                f"{name}: the device {device} failed in a call: {reason}; the call is not repeated, because it may have called "
                "host routines already"
            ) from error
        self.chooser.lose(device, reason)
        warn(f"{name}: the device {device} failed ({reason}); going on without it")

    def _check_open(self) -> None:
        if self._closed:
            name = next(iter(self._codes))
            raise ModelStateError(f"{name}: expected an open model, got one that was closed in the call; open it again")

    def _count(self, source: str, target: str, nbytes: int) -> None:
        with self._counting:
            self.copied[source, target] += nbytes

    def _notify(self, event: DeviceEvent) -> None:
        if self.observe is not None:
            self.observe(event)

    def close(self) -> None:
        """Free the memory. The caller has the turns of the devices; work that is still queued raises ModelStateError."""
        with self._starting:
            # Set under the lock of `_enqueue`: either work is queued before the queues close, or it is refused.
            self._closed = True
        self._weights.clear()
        if self._plans is not None:
            self._plans.clear()
        for queue in self._queues.values():
            queue.close()
        for pool in self._pools.values():
            if pool is not None:
                pool.close()


def _pending(values: Iterable[Any]) -> Iterator[Pending]:
    """Yield the pending values among values and inside tuples of them."""
    for value in values:
        if isinstance(value, Pending):
            yield value
        elif type(value) is tuple:
            yield from _pending(value)


def after_reads(run: Execute) -> Execute:
    """Return the execution of an instruction that first waits for the values it reads."""

    def execute(vm: VirtualMachine, i: Any, frame: CallFrame) -> None:
        pending = vm.await_reads(i, frame)
        if isinstance(i, CallHostRoutine):
            vm.wake()
        run(vm, i, frame)
        for r, value in pending:  # put back, because only a pending value knows its device and versions
            frame.registers[r] = value

    return execute


def _get_item(vm: VirtualMachine, i: GetItem, frame: CallFrame) -> None:
    """Take a field of a tuple. Only the tuple must be complete, not its fields."""
    if isinstance(frame.registers[i.value], Pending):
        vm.await_reads(i, frame)
    EXECUTE[GetItem](vm, i, frame)


IMMEDIATE: Mapping[type[Instruction], Execute] = {
    **EXECUTE,
    CallSubgraph: VirtualMachine.run_part,
    Repeat: VirtualMachine.run_loop,
    LoadWeight: sets_into(lambda vm, i, frame: vm.weight(i.name)),
}
"""Executions on one device."""

QUEUED: Mapping[type[Instruction], Execute] = {
    **{kind: after_reads(run) for kind, run in IMMEDIATE.items()},
    CallSubgraph: VirtualMachine.queue_part,
    Transfer: VirtualMachine.queue_transfer,
    Pack: EXECUTE[Pack],
    Move: EXECUTE[Move],
    GetItem: _get_item,
}
"""Executions on several devices. The ones without `after_reads` work on pending values."""
