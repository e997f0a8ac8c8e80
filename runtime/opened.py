"""The programs of an artifact on devices: the part of a model that `Model.swap` replaces.

Tests: `tests/runtime/test_swap.py`, `tests/runtime/test_threads.py`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import ArtifactError, ModelStateError, UserError, warn
from relax_tune.runtime.arguments import check_binders
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import name_of_measured, open_device
from relax_tune.runtime.executor import FORKED, Executor
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.memory.weights import DeviceWeights, read_by_calls
from relax_tune.runtime.model_source import ModelSource
from relax_tune.runtime.program.host_program import HostProgram, parts_of
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.shapes import ShapeRecorder
from relax_tune.runtime.signature import Spec, function_specs
from relax_tune.runtime.vm.machine import VirtualMachine
from relax_tune.runtime.vm.policy import PlacementOptions

DeviceSpec = Device | str | Mapping[str, Device | str] | None
"""An open device, a device's name, either of them by kind, or None for the default devices of an artifact's kinds."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How artifacts are opened.

    Attributes:
        libraries: Libraries for library steps; None: the installed ones.
        shapes: Counts the symbols of every call.
        placing: How placements are chosen, for several devices.
    """

    libraries: Mapping[str, Library] | None = None
    shapes: ShapeRecorder | None = None
    placing: PlacementOptions | None = None


class OpenedArtifact:
    """Programs of an artifact, compiled, with their weights on devices of the caller.

    Calls of an executor need no registration: the executor refuses them once it is closed. Sessions, bound calls and host programs hold
    the programs (`enter`), whose memory is freed when the last of them has ended after `retire`.

    Args:
        artifact: The artifact.
        devices: Open devices by kind.
        owned: The devices among them that are closed with it.
        options: How it is opened.

    Raises:
        ArtifactError: A device is of another kind.
        BuildError: Compiling fails.
    """

    def __init__(
        self,
        artifact: ModelSource,
        devices: Mapping[str, Device],
        owned: Sequence[Device],
        options: OpenOptions,
    ) -> None:
        self.artifact, self.devices, self.owned = artifact, dict(devices), list(owned)
        # One set of weights per device for all functions: a prefill and a decode step read the same weights.
        self.weights = {kind: DeviceWeights(device, artifact.constants) for kind, device in devices.items()}
        self.executors: dict[str, Executor] = {}
        self._users, self._retired, self._lock = 0, False, threading.Lock()
        try:
            self._open_programs(options)
        except BaseException:
            for executor in self.executors.values():
                executor.close()
            for resident in self.weights.values():
                resident.close()
            close_all(self.owned)
            raise
        self.machine = VirtualMachine(
            artifact.host_programs, self.executors, artifact.constants, devices, artifact.placement, options.placing
        )
        self.host_programs = {d.name: d for d in artifact.host_programs}
        self.names = {name: name for name in artifact.functions}
        self.params: dict[str, tuple[str, ...]] = {}
        self.results: dict[str, tuple[str, ...]] = {}
        for program in artifact.programs:
            self.params[program.name] = tuple(program.buffers[i].name for i in program.inputs)
            self.results[program.name] = tuple(program.buffers[i].name for i in program.outputs)
        for host_program in artifact.host_programs:
            self.params[host_program.name] = tuple(p.name for p in host_program.params)
            self.results[host_program.name] = tuple(r.name for r in host_program.results)

    def _open_programs(self, options: OpenOptions) -> None:
        artifact, kinds, parts = self.artifact, list(self.devices), self.artifact.placement.devices
        for kind, device in self.devices.items():
            _check_device(artifact, kind, device)
        inner = parts_of(artifact.host_programs)
        for program in artifact.programs:
            # Only functions that are called from outside find their symbols in the shapes of arguments. A host
            # program hands them to its parts.
            if program.name not in inner:
                check_binders(program)
            kind = parts.get(program.name, kinds[0])
            executor = Executor(program, self.devices[kind], self.weights[kind], options.libraries)
            self.executors[program.name] = executor
            if options.shapes is not None and program.symbols:
                executor.record = options.shapes.recorder(program.name, [s.name for s in program.symbols])
        # Not before all programs are there: several may pack one weight.
        for kind, resident in self.weights.items():
            of_kind = [p for p in artifact.programs if parts.get(p.name, kinds[0]) == kind]
            with self.devices[kind].turn:
                resident.keep_only(set().union(*map(read_by_calls, of_kind)))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Have the turns of all devices. Raises ModelStateError inside a call in the same thread, as a signal's handler may be."""
        with contextlib.ExitStack() as turns:
            # All turns before anything changes: a call over several devices uses all of them.
            for device in self.devices.values():
                turns.enter_context(device.turn)
            for executor in self.executors.values():
                executor.refuse_within()
            yield

    def enter(self) -> bool:
        """Have the programs stay open until `leave`. Returns False where they are closed."""
        with self._lock:
            is_open = not self._retired or self._users > 0
            self._users += is_open
            return is_open

    def leave(self) -> None:
        """Note the end of what `enter` began."""
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            # refused within a call of these programs in the same thread; then `Model.close` frees them
            with contextlib.suppress(ModelStateError):
                self.free()

    def leave_with(self, user: object) -> None:
        """Call `leave` when an object is gone."""
        # Not at exit: the device may be closed by that time, and its memory ends with the process.
        weakref.finalize(user, self.leave).atexit = False

    def retire(self) -> None:
        """Free the memory once the calls, sessions and bound calls that hold the programs have ended; at once if there are none."""
        with self._lock:
            self._retired = True
            last = not self._users
        if last:
            self.free()

    def free(self) -> None:
        """Free the memory after the running call, and close the devices that it owns. May be called twice."""
        with self.turn():
            for executor in self.executors.values():
                executor.close()
            self.machine.close()
            for resident in self.weights.values():
                resident.close()
            while self.owned:
                self.owned.pop().close()

    def refuse(self, reason: str) -> None:
        """Refuse further calls of programs that do not refuse them already."""
        for executor in self.executors.values():
            executor.refusal = executor.refusal or reason

    def pack_weights(self) -> None:
        """Pack all constants again after their elements have changed."""
        for executor in self.executors.values():
            executor.pack_weights()

    def after_fork(self) -> None:
        """Refuse calls in this process, and renew the turns that other threads of the first one may hold."""
        for device in self.devices.values():
            # A lock that another thread holds at the fork is never released in the child.
            device.turn = device.new_turn()
        self.refuse(FORKED)


def open_devices(
    artifact: ModelSource, device: DeviceSpec, threads: int | None
) -> tuple[dict[str, Device], list[Device]]:
    """Return the devices of an artifact by kind, and those opened here. Devices of other kinds are ignored.

    Args:
        artifact: The artifact. By default the device that its plans were measured on is opened.
        device: Devices or names of devices, as of `Artifact.open`.
        threads: As of `Artifact.open`.

    Raises:
        UserError: The devices are not of the artifact's kinds.
    """
    kinds = tuple(sorted(set(artifact.placement.devices.values()))) or (artifact.device_kind,)
    given = device if threads is None else _with_threads(device, kinds, threads)
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
            chosen = given[kind] if kind in given else name_of_measured(kind, _measured(artifact, kind))
            if isinstance(chosen, str):
                owned.append(open_device(chosen, artifact.objects))
                opened[kind] = owned[-1]
            elif hasattr(chosen, "info"):
                opened[kind] = chosen
            else:
                raise UserError(f"device: expected a device's name or an open device, got a {type(chosen).__name__}")
    except BaseException:
        close_all(owned)
        raise
    return opened, owned


def close_all(devices: Iterable[Device]) -> None:
    """Close devices."""
    for device in devices:
        device.close()


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


Signature = tuple[tuple[Spec, ...], tuple[Spec, ...]]


def check_swap(now: ModelSource, given: ModelSource, name: str) -> None:
    """Raise UserError unless an artifact can take the place of another one: the same functions, for at least the same sizes.

    Args:
        now: The artifact that is open.
        given: The other one.
        name: Name of the model, for messages.
    """
    if now.placement.devices or given.placement.devices:
        raise UserError(
            f"{name}: expected a model for one device to swap, got one for several; open the other artifact"
        )
    if now.device_kind != given.device_kind:
        raise UserError(
            f"{name}: expected an artifact for {now.device_kind} to swap in, got one for {given.device_kind}; "
            f"build it for target {now.device_kind}"
        )
    old, new = _signatures(now), _signatures(given)
    if old.keys() != new.keys():
        raise UserError(
            f"{name}: expected an artifact with the functions {', '.join(sorted(old))} to swap in, got {', '.join(sorted(new))}"
        )
    for function, signature in old.items():
        if new[function] != signature:
            raise UserError(
                f"{name}: {function}: expected an artifact of the same signature to swap in, {_text(signature)}, "
                f"got {_text(new[function])}; build it from the same model"
            )
    bounds = {(p.name, s.name): s for p in given.programs for s in p.symbols}
    for function, symbol in ((p.name, s) for p in now.programs if p.name in old for s in p.symbols):
        other = bounds.get((function, symbol.name))
        upper = None if other is None else other.upper
        narrower = upper is not None and (symbol.upper is None or upper < symbol.upper)
        if other is None or other.lower > symbol.lower or narrower:
            got = "no such symbol" if other is None else f"{other.lower} to {other.upper}"
            raise UserError(
                f"{name}: {function}: expected an artifact for {symbol.name} from {symbol.lower} to {symbol.upper} to swap in, "
                f"got {got}; build it with the same bounds"
            )


def _signatures(artifact: ModelSource) -> dict[str, Signature]:
    every: dict[str, Program | HostProgram] = {p.name: p for p in artifact.programs}
    every |= {d.name: d for d in artifact.host_programs}
    return {name: function_specs(every[name]) for name in artifact.functions}


def _text(signature: Signature) -> str:
    inputs, outputs = signature
    return f"({', '.join(map(str, inputs))}) -> {', '.join(map(str, outputs))}"
