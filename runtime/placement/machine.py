"""The virtual machine of an artifact for several devices: parts and transfers in a queue for each device.

A register holds a `Pending` until its part or transfer is done. The queue of a device takes its work in the order of the program, and
a piece of work waits for what it reads. So parts on different devices run side by side wherever none reads the other. The caller does
the work that it waits for itself (`queues`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError, MemoryLack, ModelStateError
from relax_tune.home import HOME
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import BufferPool, pool_of
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.placement.policy import PlacementChooser, PlacementOptions
from relax_tune.runtime.placement.queues import Work, WorkQueue
from relax_tune.runtime.program.host_program import (
    CallHostRoutine,
    CallSubgraph,
    GetItem,
    HostProgram,
    Instruction,
    Move,
    Pack,
    Transfer,
)
from relax_tune.runtime.program.placement import Placement
from relax_tune.runtime.vm import EXECUTE, CallFrame, Execute, Host, VirtualMachine


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """The start or the end of a piece of work in the queue of a device.

    name: the part, or `SOURCE -> TARGET` of a transfer; nbytes: bytes copied between devices
    """

    what: Literal["part", "transfer"]
    name: str
    device: str
    when: Literal["start", "end"]
    nbytes: int = 0


class Pending:
    """A value that the queue of a device makes. `versions`: the same value on other devices, each made once."""

    __slots__ = ("_index", "device", "versions", "work")

    def __init__(self, work: Work, device: str, index: int | None = None) -> None:
        self.work, self._index, self.device = work, index, device
        self.versions: dict[str, Pending] = {}

    def value(self) -> Any:
        """Wait for the value. Raises the error of the work that makes it."""
        made = self.work.result()
        return made if self._index is None else made[self._index]


class _Call:
    """A call under way.

    work: the last that it has put into each queue, after which the queue has done all; earlier results are free to go
    versions: versions of arrays of the host on other devices, by identity; the arrays live as long as the call
    secs: seconds of the parts on each device
    chosen: the functions whose placement was chosen, with its number and the values of the symbols
    failed: the device whose work failed first, and why
    """

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}
        self.versions: dict[int, tuple[Any, dict[str, Pending]]] = {}
        self.secs: dict[str, float] = {}
        self.chosen: list[tuple[str, int, dict[str, int]]] = []
        self.failed: tuple[str, str] | None = None

    def end(self) -> None:
        """Wait until the queues have done all work of the call."""
        for work in self.work.values():
            work.end()


@contextlib.contextmanager
def _losing(call: _Call, device: str) -> Iterator[None]:
    """Note the device whose work fails first. One that lacks memory for a call is not lost."""
    try:
        yield
    except MemoryLack:
        raise
    except MeasureError as error:
        call.failed = call.failed or (device, str(error))
        raise


class PlacedMachine(VirtualMachine):
    """A virtual machine over several devices. Threads may call `run` at once.

    devices: the open devices by kind; placement, options: where programs run, and how that is chosen
    chooser: an attribute; what chooses placements, with the load of devices and the lost ones
    observe: an attribute; called with every `DeviceEvent` unless None, in the thread of the device's queue
    copied: an attribute; bytes that were copied between devices, by (from, to)
    """

    def __init__(
        self,
        host_programs: Sequence[HostProgram],
        executors: Mapping[str, Executor],
        constants: Mapping[str, NDArray[Any]],
        devices: Mapping[str, Device],
        placement: Placement,
        options: PlacementOptions,
    ) -> None:
        super().__init__(host_programs, executors, constants)
        self._parts = placement.devices
        self.chooser = PlacementChooser(options, {f.function: f for f in placement.functions})
        self._reads = {id(i): i.reads for d in host_programs for i in d.instructions()}
        self._effects = any(isinstance(i, CallHostRoutine) for d in host_programs for i in d.instructions())
        self._pools: dict[str, BufferPool | None] = {kind: pool_of(device) for kind, device in devices.items()}
        self._pools.setdefault(HOME, None)
        self._devices = dict(devices)
        self._closed = False
        self._queues: dict[str, WorkQueue] = {}
        self._starting = threading.Lock()
        self._counting = threading.Lock()
        self._local = threading.local()
        self.observe: Callable[[DeviceEvent], None] | None = None
        self.copied: Counter[tuple[str, str]] = Counter()
        self.execute = {**{kind: _waiting(run) for kind, run in EXECUTE.items()}, **_UNHINDERED}

    def run(
        self, name: str, inputs: Mapping[str, Any] | Sequence[Any], hosts: Mapping[str, Host] | None = None
    ) -> list[Any]:
        """See `VirtualMachine.run`. A call that loses a device is made again with a placement without it, if the options say so.

        Raises: as `VirtualMachine.run`; MeasureError naming a device that is lost; MemoryLack; ModelStateError after `close`.
        """
        outer = getattr(self._local, "call", None)
        while True:
            call = self._local.call = _Call()
            try:
                found = super().run(name, inputs, hosts)
            except MeasureError as error:
                call.end()  # nothing of a call that failed goes on after it
                if call.failed is None:
                    raise
                self._lose(name, *call.failed, error)
                continue
            finally:
                self._local.call = outer
                call.end()
            if len(call.chosen) == 1:
                self.chooser.observe(*call.chosen[0], call.secs)
            return found

    def _lose(self, name: str, device: str, why: str, error: MeasureError) -> None:
        """Go on without a device, or raise the error in words."""
        if self.chooser.options.when_lost == "fail":
            raise MeasureError(
                f"{name}: the device {device} failed in a call: {why}; open the model again, or with when_lost=move, which goes on "
                "with a placement without it"
            ) from error
        if self._effects:
            raise MeasureError(
                f"{name}: the device {device} failed in a call: {why}; the call is not made again, for it may have called "
                "host routines already"
            ) from error
        self.chooser.lose(device, why)
        warnings.warn(f"{name}: the device {device} failed ({why}); going on without it", stacklevel=4)

    def resolved(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> str:
        if name not in self.chooser.functions:
            return name
        values = self._symbols(name, inputs)
        option = self.chooser.choose(name, values)
        if option is None:
            return name
        call: _Call = self._local.call
        call.chosen.append((name, option, values))
        return self.chooser.functions[name].alternatives[option].function

    def _symbols(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, int]:
        """Return the values of the symbols that are dims of arrays by themselves."""
        params = self._codes[name].program.params
        given = inputs if isinstance(inputs, Mapping) else dict(zip((p.name for p in params), inputs, strict=False))
        wanted = self.chooser.functions[name].symbols
        found: dict[str, int] = {}
        for p in params:
            shape = getattr(self.complete(given.get(p.name)), "shape", ())
            found |= {d: int(x) for d, x in zip(p.dims or (), shape, strict=False) if d in wanted}
        return found

    def await_reads(self, i: Instruction, frame: CallFrame) -> list[tuple[int, Pending]]:
        """Wait for the values that an instruction reads. Returns the registers that queues had still to fill, with what held them."""
        held = []
        registers = frame.registers
        for r in self._reads[id(i)]:
            value = registers[r]
            if type(value) is Pending:
                held.append((r, value))
                registers[r] = value.value()
            elif type(value) is tuple:
                registers[r] = self.complete(value)
        return held

    def complete(self, value: Any) -> Any:
        if isinstance(value, Pending):
            return value.value()
        if type(value) is tuple and any(isinstance(v, (Pending, tuple)) for v in value):
            return tuple(map(self.complete, value))
        return value

    def enqueue(self, device: str, do: Callable[[], Any], reads: Sequence[Any]) -> Work:
        """Put work that reads these values into the queue of a device. Raises ModelStateError after `close`."""
        needs = [p.work for p in _pending(reads)]
        with self._starting:
            self._check_open()
            if device not in self._queues:
                self._queues[device] = WorkQueue(device, self._queues.values())
            work = self._queues[device].put(do, needs)
        call: _Call = self._local.call
        call.work[device] = work
        return work

    def wake(self) -> None:
        """Have the devices begin what they can, beside the caller."""
        for queue in tuple(self._queues.values()):
            queue.wake_if_ready()

    def start_part(self, i: CallSubgraph, frame: CallFrame) -> None:
        """Queue a part of the program."""
        args, numbers = frame.values(i.args), frame.numbers(i.symbols)
        device = self._parts[i.part]

        call: _Call = self._local.call

        def work() -> list[Any]:
            given = [self.complete(a) for a in args]
            self._tell(DeviceEvent("part", i.part, device, "start"))
            start = time.perf_counter()
            with _losing(call, device):
                moved = [self._moved(a, device) for a in given]
                found = self.executors[i.part].run(moved, numbers, in_place=True, pool=self._pools[device])
                if self.observe is not None or self.chooser.options.policy == "load":
                    self._end(device)
            call.secs[device] = call.secs.get(device, 0.0) + time.perf_counter() - start  # only this queue writes it
            self._tell(DeviceEvent("part", i.part, device, "end"))
            return found

        made = self.enqueue(device, work, args)
        for number, into in enumerate(i.into):
            frame.registers[into] = Pending(made, device, number)

    def _end(self, device: str) -> None:
        """Wait for the work of a device: what is told of it is the time of work, not of launches."""
        with self._turn(device):
            self._devices[device].synchronize()

    @contextlib.contextmanager
    def _turn(self, device: str) -> Iterator[None]:
        """Take the turn of a device, which `close` waits for. Raises ModelStateError after `close`."""
        known = self._devices.get(device)
        with contextlib.nullcontext() if known is None else known.turn:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            name = next(iter(self._codes))
            raise ModelStateError(f"{name}: wanted an open model, found one that was closed in the call; open it again")

    def start_transfer(self, i: Transfer, frame: CallFrame) -> None:
        """Queue a transfer, unless the value is there or has a version there. It is done by the device that is not the host's."""
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
                given = self.complete(value)
                self._tell(DeviceEvent("transfer", name, i.device, "start", given.nbytes))
                with _losing(call, owner):
                    found = self._moved(given, i.device, source)
                self._tell(DeviceEvent("transfer", name, i.device, "end", given.nbytes))
                return found

            versions[i.device] = Pending(self.enqueue(owner, work, [value]), i.device)
        frame.registers[i.into] = versions[i.device]

    def _moved(self, value: Any, device: str, source: str = HOME) -> Any:
        """Return an array as launches of a device read it: in its memory if it has one of its own, else the host's."""
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

    def _count(self, source: str, target: str, nbytes: int) -> None:
        with self._counting:
            self.copied[source, target] += nbytes

    def _tell(self, event: DeviceEvent) -> None:
        if self.observe is not None:
            self.observe(event)

    def close(self) -> None:
        """Give the memory back. The caller holds the turns of the devices; work that still waits is refused when it begins."""
        with self._starting:
            self._closed = True
        super().close()
        for queue in self._queues.values():
            queue.close()
        for pool in self._pools.values():
            if pool is not None:
                pool.close()


def _start_part(vm: VirtualMachine, i: CallSubgraph, frame: CallFrame) -> None:
    assert isinstance(vm, PlacedMachine)
    vm.start_part(i, frame)


def _start_transfer(vm: VirtualMachine, i: Transfer, frame: CallFrame) -> None:
    assert isinstance(vm, PlacedMachine)
    vm.start_transfer(i, frame)


def _pending(values: Iterable[Any]) -> Iterator[Pending]:
    """Yield what is still to be made of values, inside tuples too."""
    for value in values:
        if isinstance(value, Pending):
            yield value
        elif type(value) is tuple:
            yield from _pending(value)


def _waiting(run: Execute) -> Execute:
    """Make the execution of an instruction that first waits for what it reads."""

    def execute(vm: Any, i: Any, frame: CallFrame) -> None:
        held = vm.await_reads(i, frame)
        if isinstance(i, CallHostRoutine):
            vm.wake()
        run(vm, i, frame)
        for r, v in held:  # it still tells where the value is
            frame.registers[r] = v

    return execute


def _item(vm: Any, i: GetItem, frame: CallFrame) -> None:
    """Take a field of a tuple, which the queues may still have to fill."""
    if isinstance(frame.registers[i.value], Pending):
        vm.await_reads(i, frame)
    EXECUTE[GetItem](vm, i, frame)


_UNHINDERED: Mapping[type[Instruction], Execute] = {
    CallSubgraph: _start_part,
    Transfer: _start_transfer,
    Pack: EXECUTE[Pack],
    Move: EXECUTE[Move],
    GetItem: _item,
}
"""The execution of the instructions that wait for nothing."""
