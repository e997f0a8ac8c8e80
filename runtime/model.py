"""An artifact on a device, ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor, check_binders
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.program.host_program import HostProgram, parts_of
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.runtime.signature import Spec
from relax_tune.runtime.vm import Host, VirtualMachine
from relax_tune.runtime.weights import DeviceWeights

T = TypeVar("T")


class ModelSource(Protocol):
    """The parts of an `Artifact` that a running model needs."""

    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def host_programs(self) -> tuple[HostProgram, ...]: ...
    @property
    def constants(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def path(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def functions(self) -> tuple[str, ...]: ...
    @property
    def program(self) -> Program: ...
    @property
    def inputs(self) -> tuple[Spec, ...]: ...
    @property
    def outputs(self) -> tuple[Spec, ...]: ...


def choose_function(functions: Mapping[str, T], name: str | None, where: str = "") -> T:
    """Return a function by name; without one, `main` or the only one. Raises UserError naming what there is."""
    chosen = name
    if chosen is None:
        chosen = "main" if "main" in functions else next(iter(functions)) if len(functions) == 1 else None
    if chosen is None or chosen not in functions:
        found = "none named" if name is None else repr(name)
        of = f"artifact {where}: " if where else ""
        raise UserError(f"{of}wanted one of its functions, {', '.join(functions)}; found {found:.80}; name one of them")
    return functions[chosen]


def open_model(
    artifact: ModelSource,
    device: Device | str | None = None,
    libraries: Mapping[str, Library] | None = None,
    host: Mapping[str, Host] | None = None,
    shapes: ShapeProfile | None = None,
) -> Model:
    """Compile and upload all functions of an artifact; see `Artifact.open`."""
    if device is None or isinstance(device, str):
        opened = open_device(device or artifact.device_kind)
    elif hasattr(device, "info"):
        opened = device
    else:
        raise UserError(f"device: wanted a device's name or an open device, found a {type(device).__name__}")
    owned = opened is not device
    if shapes is not None:
        shapes.of_model(str(artifact.manifest["extra"].get("model", "")))
    weights = DeviceWeights(opened, artifact.constants)
    executors: dict[str, Executor] = {}
    name = artifact.path or ", ".join(artifact.functions)
    try:
        if opened.info.kind != artifact.device_kind:
            raise ArtifactError(
                f"artifact {name}: wanted a device of kind {artifact.device_kind}, found "
                f"{opened.info.kind} ({opened.info.name}); build it with --target {opened.info.kind}"
            )
        measured = artifact.manifest["extra"].get("fingerprint")
        if isinstance(measured, dict) and measured != dict(opened.info.fingerprint):
            found = dict(opened.info.fingerprint)
            differing = sorted(key for key in set(measured) | set(found) if measured.get(key) != found.get(key))
            warnings.warn(
                f"artifact {name} was tuned elsewhere ({', '.join(differing)} differ): "
                "results are right, the choice of kernels may not be the fastest here",
                stacklevel=3,
            )
        parts = parts_of(artifact.host_programs)
        for program in artifact.programs:
            if program.name not in parts:
                check_binders(program)
            executors[program.name] = executor = Executor(program, opened, weights, libraries)
            if shapes is not None and program.symbols:
                executor.record = shapes.recorder(program.name, [s.name for s in program.symbols])
    except BaseException:
        for executor in executors.values():
            executor.close()
        weights.close()
        if owned:
            opened.close()
        raise
    return Model(artifact, executors, weights, opened if owned else None, host)


class Model:
    """An artifact on a device, ready to run. Use as a context manager, or call `close`. Not thread-safe.

    Its functions share the device's memory of their constants.
    """

    def __init__(
        self,
        artifact: ModelSource,
        executors: Mapping[str, Executor],
        weights: DeviceWeights,
        owned_device: Device | None,
        host: Mapping[str, Host] | None = None,
    ) -> None:
        self.artifact, self.executors, self._host = artifact, executors, dict(host or {})
        self._virtual_machine = VirtualMachine(artifact.host_programs, executors, artifact.constants)
        self._host_programs = {d.name for d in artifact.host_programs}
        self._weights, self._owned_device = weights, owned_device

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions."""
        return self.artifact.functions

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

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        function: str | None = None,
        host: Mapping[str, Host] | None = None,
    ) -> list[Any]:
        """Call the model: arrays by parameter name, or in order; results in order, as fresh arrays. Where a function has them,
        shapes are tuples of whole numbers and scalars are numbers; a tuple that is returned is given field by field.

        function: which of its functions; by default `main`, or the only one. host: routines of the host program, by
        name, for this call; they take arrays that must not be written. A routine given here takes precedence over one
        given at `Artifact.open`.

        Raises: UserError naming the parameter, what was wanted of it (rank, dtype, dims, declared bounds) and what was found.
        """
        name = choose_function({n: n for n in self.functions}, function, self.artifact.path)
        if name in self._host_programs:
            return self._virtual_machine.run(name, inputs, {**self._host, **(host or {})})
        return self.executors[name].run(inputs, in_place=True)

    def close(self) -> None:
        """Free memory, and close the device if this opened it."""
        for executor in self.executors.values():
            executor.close()
        self._weights.close()
        if self._owned_device is not None:
            self._owned_device.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
