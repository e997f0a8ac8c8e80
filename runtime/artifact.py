"""A built model as one file.

The file (suffix `.rta`) is a `hashed_zip` of three members: `manifest.json` (schema, tool version, device kind, target fingerprint,
hashes), `programs.json` and `constants.safetensors`; `drivers.json`, where functions branch, call or depend on data; and
`objects.safetensors`, where it has compiled kernels. One file rather than a folder, because replacing a file is atomic.

Loading executes nothing. Programs hold kernels, which are native code: `Artifact.open` compiles and can run them, so
open artifacts only from people you would take a program from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.c_objects import CompiledObjects, check_families, compile_objects, objects_from_json
from relax_tune.runtime.hashed_zip import MANIFEST, FileFormat, Member, read_file, read_text, write_file
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.registry import library_kernels
from relax_tune.runtime.model import Model, choose_function, open_model
from relax_tune.runtime.model_source import source_facts
from relax_tune.runtime.opened import DeviceSpec
from relax_tune.runtime.program.host_program import (
    HostProgram,
    Transfer,
    host_programs_from_json,
    parts_of,
    verify_host_programs,
)
from relax_tune.runtime.program.placement import NOWHERE, Placement, placement_from_json
from relax_tune.runtime.program.program import (
    LANGUAGES,
    SMALL,
    Program,
    programs_from_json,
    verify_names,
    verify_program,
)
from relax_tune.runtime.program.scalars import constant_values
from relax_tune.runtime.replaced_weights import replaced_constants, replaced_key
from relax_tune.runtime.shapes import ShapeRecorder
from relax_tune.runtime.signature import Spec, function_specs
from relax_tune.runtime.stored_weights import weights_from_bytes, weights_to_bytes
from relax_tune.runtime.vm.instructions import Host
from relax_tune.runtime.vm.policy import PlacementOptions
from relax_tune.summary import Facts, Summarised, listed

ARTIFACT_SCHEMA = 2
SUFFIX = ".rta"
INDEPENDENT_ROWS = "independent_rows"
"""The entry of `manifest["extra"]` with the proofs of `Artifact.independent_rows`."""
_PROGRAM, _CONSTANTS = "programs.json", "constants.safetensors"
_HOST_PROGRAMS = "drivers.json"  # the member's name since the first format
_OBJECTS = "objects.safetensors"
_MEMBERS = (_PROGRAM, _CONSTANTS)
ARTIFACT = FileFormat(
    "relax-tune artifact",
    "artifact",
    SUFFIX,
    ARTIFACT_SCHEMA,
    (_MEMBERS, (*_MEMBERS, _HOST_PROGRAMS), (*_MEMBERS, _OBJECTS), (*_MEMBERS, _HOST_PROGRAMS, _OBJECTS)),
    "build",
    "built",
    _CONSTANTS,
)
Programs = Union[Program, Sequence[Program]]


def device_kind(programs: Sequence[Program], without: str = "c") -> str:
    """Return the kind of device that runs the programs: the language of their kernels, or `without` if there are none.

    Raises: ArtifactError when kernels of several languages are mixed.
    """
    languages = sorted({kernel.language for program in programs for kernel in program.kernels}) or [without]
    if len(languages) > 1:
        names = ", ".join(p.name for p in programs)
        raise ArtifactError(f"{names}: expected kernels in one language, got {', '.join(languages)}")
    return languages[0]


def device_kinds(programs: Sequence[Program], devices: Mapping[str, str], without: str = "c") -> str:
    """Return the kind of device that runs the programs; of several, separated by commas.

    devices: the kind for each program of an artifact for several, else empty. without: as of `device_kind`

    Raises: ArtifactError when programs and devices do not belong together.
    """
    if not devices:
        return device_kind(programs, without)
    names = {p.name for p in programs}
    if names != set(devices):
        raise ArtifactError(f"expected a device for each program, {', '.join(sorted(names))}, got {', '.join(devices)}")
    for program in programs:
        kind = devices[program.name]
        if kind not in LANGUAGES or device_kind([program], kind) != kind:
            raise ArtifactError(f"{program.name}: expected kernels for {kind}, got {device_kind([program], kind)}")
    return ",".join(sorted(set(devices.values())))


def save_artifact(
    path: str | os.PathLike[str],
    programs: Programs,
    constants: Mapping[str, NDArray[Any]],
    manifest_extra: Mapping[str, Any] | None = None,
    host_programs: Sequence[HostProgram] = (),
    kind: str = "c",
    placement: Placement = NOWHERE,
    objects: Sequence[CompiledObjects] = (),
) -> Path:
    """Write an artifact; readers see the old file or the whole new one. Same arguments, same bytes.

    Args:
        path: The file.
        programs: One program, or several with distinct names.
        constants: An array for each constant of the programs, and no others.
        manifest_extra: JSON values for `extra` in the manifest; its key `fingerprint` (text to text) is the device that the plans were
            measured on, which `Artifact.open` compares.
        host_programs: Their subgraphs are among `programs`.
        kind: Kind of the device for programs without kernels.
        placement: Where the programs of an artifact for several devices run.
        objects: Compiled kernels for kinds of processors.

    Raises:
        ArtifactError: Programs and constants do not belong together, or the file cannot be written.
    """
    # Verified before anything is written: a file that cannot be loaded again must not exist.
    checked, ordered = _checked(programs, constants, host_programs)
    text = f"[{','.join(p.to_json() for p in checked)}]"
    members: dict[str, Member] = {_PROGRAM: text.encode(), _CONSTANTS: weights_to_bytes(constants)}
    if ordered:
        members[_HOST_PROGRAMS] = f"[{','.join(d.to_json() for d in ordered)}]".encode()
    _check_placement(placement, ordered)
    fields = {"device_kind": device_kinds(checked, placement.devices, kind), **placement.fields()}
    if objects:
        libraries = {
            f"{o.name}/{name}": np.frombuffer(data, np.uint8) for o in objects for name, data in o.libraries.items()
        }
        members[_OBJECTS] = weights_to_bytes(libraries)
        fields["objects"] = [o.to_json() for o in objects]
    return write_file(ARTIFACT, path, members, manifest_extra or {}, fields)


def load_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read and verify an artifact. Executes nothing.

    Raises: ArtifactError for a file that is missing, truncated, altered, not an artifact, of a newer schema, or whose
    parts do not belong together.
    """
    content = read_file(ARTIFACT, path)
    where, manifest, members = f"artifact {path}", content.manifest, content.members
    if not has_shape(manifest, {"device_kind": str}):
        raise ArtifactError(
            f"{where}: {MANIFEST}: expected a device kind, got {manifest.get('device_kind')!r:.40}; build it again"
        )
    programs = read_text(ARTIFACT, where, _PROGRAM, members[_PROGRAM], programs_from_json)
    host_programs = (
        read_text(ARTIFACT, where, _HOST_PROGRAMS, members[_HOST_PROGRAMS], host_programs_from_json)
        if _HOST_PROGRAMS in members
        else ()
    )
    try:
        constants = weights_from_bytes(content.mapped, _small_constants(programs, host_programs))
    except ValueError as error:
        raise ArtifactError(
            f"{where}: {_CONSTANTS}: expected safetensors, got something else: {error}; build it again"
        ) from None
    try:
        objects = _read_objects(manifest, members.get(_OBJECTS))
        _check_functions(programs, host_programs)
        # Sizes in the file are data. The executor allocates by them, so that they must match the constants before.
        check_constants(programs, constants, host_programs)
        placement = placement_from_json(manifest)
        _check_placement(placement, host_programs)
        kind = device_kinds(programs, placement.devices, manifest["device_kind"])
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}; build it again") from None
    if manifest["device_kind"] != kind:
        raise ArtifactError(
            f"{where}: expected one kind of device, but its manifest says {manifest['device_kind']!r:.40} and its kernels {kind}; "
            "build it again"
        )
    return Artifact(programs, constants, manifest, str(path), host_programs, objects)


def _read_objects(manifest: Mapping[str, Any], data: bytes | None) -> tuple[CompiledObjects, ...]:
    """Return the compiled objects of a manifest and its member. Raises ArtifactError where they do not belong together."""
    try:
        libraries = {} if data is None else {n: a.tobytes() for n, a in weights_from_bytes(data, {}).items()}
    except ValueError as error:
        raise ArtifactError(f"{_OBJECTS}: expected safetensors, got something else: {error}") from None
    return objects_from_json(manifest.get("objects", []), libraries)


def _small_constants(programs: Sequence[Program], host_programs: Sequence[HostProgram]) -> dict[str, str]:
    dtypes = [(spec.name, spec.dtype) for p in programs for spec in p.buffers if spec.role == "const"]
    dtypes += [(w.name, w.dtype) for d in host_programs for w in d.weights]
    return {name: dtype for name, dtype in dtypes if dtype in SMALL}


def _checked(
    programs: Programs, constants: Mapping[str, NDArray[Any]], host_programs: Sequence[HostProgram]
) -> tuple[tuple[Program, ...], tuple[HostProgram, ...]]:
    """Verify programs and host programs; return them in order of their names."""
    ordered_programs = (programs,) if isinstance(programs, Program) else tuple(sorted(programs, key=lambda p: p.name))
    for program in ordered_programs:
        verify_program(program)
    verify_names(ordered_programs)
    ordered = tuple(sorted(host_programs, key=lambda d: d.name))
    _check_functions(ordered_programs, ordered)
    check_constants(ordered_programs, constants, ordered)
    return ordered_programs, ordered


def _check_placement(placement: Placement, host_programs: Sequence[HostProgram]) -> None:
    """Raise ArtifactError unless transfers and alternatives are among devices and host programs that there are."""
    names = {d.name for d in host_programs}
    for f in placement.functions:
        unknown = sorted({f.function, *(a.function for a in f.alternatives)} - names)
        if unknown:
            raise ArtifactError(f"expected placements of host programs, got {', '.join(unknown):.200}")
    moves = [i for d in host_programs for i in d.instructions() if isinstance(i, Transfer)]
    if moves and not placement.devices:
        raise ArtifactError("expected the devices of the programs, since values move between devices; got none")
    unknown = sorted({i.device for i in moves} - {"c", *placement.devices.values()})
    if unknown:
        raise ArtifactError(f"expected transfers among the devices of the programs, got {', '.join(unknown):.200}")


def _check_functions(programs: Sequence[Program], host_programs: Sequence[HostProgram]) -> None:
    if not programs and not host_programs:
        raise ArtifactError("expected at least one program, got none")
    verify_host_programs(host_programs, programs)


def check_constants(
    programs: Sequence[Program], constants: Mapping[str, NDArray[Any]], host_programs: Sequence[HostProgram] = ()
) -> None:
    """Raise ArtifactError unless `constants` are exactly the constants of the programs and host programs, in dtype and shape."""
    names = ", ".join([*(p.name for p in programs), *(d.name for d in host_programs)])
    weights = [w for d in host_programs for w in d.weights]
    used = {spec.name for p in programs for spec in p.buffers if spec.role == "const"} | {w.name for w in weights}
    missing, unknown = sorted(used - set(constants)), sorted(set(constants) - used)
    if missing or unknown:
        raise ArtifactError(f"{names}: expected its constants, got missing {missing!r:.300}, unknown {unknown!r:.300}")
    for w in weights:
        array = constants[w.name]
        if array.shape != w.shape or array.dtype != np.dtype(w.dtype):
            raise ArtifactError(
                f"{names}: constant {w.name}: expected {w.dtype} {w.shape}, got {array.dtype} {array.shape}"
            )
    for program in programs:
        try:
            values = constant_values(program.scalars, len(program.symbols))
        except UserError as error:
            raise ArtifactError(f"{program.name}: expected sizes that can be evaluated, got {error}") from None
        for spec in program.buffers:
            if spec.role != "const":
                continue
            shape, array = tuple(values[slot] for slot in spec.shape), constants[spec.name]
            if array.shape != shape or array.dtype != np.dtype(spec.dtype):
                raise ArtifactError(
                    f"{program.name}: constant {spec.name}: expected {spec.dtype} {shape}, got {array.dtype} {array.shape}"
                )


def new_artifact(
    programs: Programs,
    constants: Mapping[str, NDArray[Any]],
    manifest_extra: Mapping[str, Any] | None = None,
    host_programs: Sequence[HostProgram] = (),
    kind: str = "c",
    placement: Placement = NOWHERE,
) -> Artifact:
    """Return an artifact that is not on disk yet; `Artifact.save` writes it. Arguments and errors as of
    `save_artifact`.
    """
    checked, ordered = _checked(programs, constants, host_programs)
    _check_placement(placement, ordered)
    kinds = device_kinds(checked, placement.devices, kind)
    manifest = {"device_kind": kinds, "extra": dict(manifest_extra or {}), **placement.fields()}
    return Artifact(checked, constants, manifest, "", ordered)


def load(
    path: str | os.PathLike[str],
    device: DeviceSpec = None,
    shapes: ShapeRecorder | None = None,
    threads: int | None = None,
) -> Model:
    """Open an artifact on a device, ready to run: `load_artifact(path).open(device, shapes=shapes, threads=threads)`.

    Raises: as `load_artifact` and `Artifact.open`.
    """
    return load_artifact(path).open(device, shapes=shapes, threads=threads)


@dataclass(frozen=True, slots=True, repr=False)
class Artifact(Summarised):
    """A verified artifact in memory: programs and host programs, in order of their names, and the constants they share.

    A function is a program, or a host program with the programs of its subgraphs. `manifest["extra"]` holds the values
    that the build stored. `objects` are its kernels compiled for kinds of processors.
    """

    programs: tuple[Program, ...]
    constants: Mapping[str, NDArray[Any]]
    manifest: Mapping[str, Any]
    path: str = ""
    host_programs: tuple[HostProgram, ...] = ()
    objects: tuple[CompiledObjects, ...] = ()

    def _summary(self) -> tuple[str, Facts]:
        extra = self.manifest["extra"]
        prints = extra.get("fingerprints") or {self.device_kind: extra.get("fingerprint") or {}}
        names = {k: p.get("cpu") or p.get("name") or p.get("device") or "" for k, p in prints.items()}
        devices = listed([f"{k}, {name}" if name else k for k, name in names.items()])
        return f"Artifact {self.path or 'not saved yet'} for {devices}", source_facts(self)

    @property
    def device_kind(self) -> str:
        """The kind of device it is for; of several, separated by commas."""
        return str(self.manifest["device_kind"])

    @property
    def placement(self) -> Placement:
        """The devices of the programs, in an artifact for several."""
        return placement_from_json(self.manifest)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions."""
        parts = parts_of(self.host_programs)
        names = {p.name for p in self.programs if p.name not in parts} | {d.name for d in self.host_programs if d.entry}
        return tuple(sorted(names))

    @property
    def program(self) -> Program:
        """The function `main`, or the only one. Raises UserError when there are several, none of them `main`."""
        return self.function()

    def function(self, name: str | None = None) -> Program:
        """Return the program of a function by name; without one, of `main` or the only one. Raises UserError naming what there is."""
        chosen = self._chosen(name)
        if isinstance(chosen, HostProgram):
            raise UserError(
                f"{chosen.name}: expected a function that is one program, got one that branches, calls or depends on data; "
                "run it with Model.run"
            )
        return chosen

    def _chosen(self, name: str | None = None) -> Program | HostProgram:
        every: dict[str, Program | HostProgram] = {p.name: p for p in self.programs}
        every |= {d.name: d for d in self.host_programs}
        return choose_function({n: every[n] for n in self.functions}, name, self.path)

    @property
    def inputs(self) -> tuple[Spec, ...]:
        """The parameters of `main`, or of the only function, in order."""
        return function_specs(self._chosen())[0]

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """The results of `main`, or of the only function, in order."""
        return function_specs(self._chosen())[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each shortcoming of the build, such as a task without records or a kernel that failed."""
        notes = self.manifest["extra"].get("notes")
        return tuple(map(str, notes)) if isinstance(notes, list) else ()

    @property
    def independent_rows(self) -> Mapping[str, str]:
        """By function, the symbol of its batch dim, where the build proved that no row of a result depends on another row of an input."""
        stored = self.manifest["extra"].get(INDEPENDENT_ROWS)
        return {str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one file; see `save_artifact`. Saving what was loaded gives the same bytes."""
        return save_artifact(
            path,
            self.programs,
            self.constants,
            self.manifest["extra"],
            self.host_programs,
            self.device_kind,
            self.placement,
            self.objects,
        )

    def compiled_for(self, cpu: Sequence[str]) -> Artifact:
        """Return the artifact with its kernels of target `c` compiled for kinds of processors, in place of those it has.

        A server opens it without a compiler where one of them runs. The same compiler gives the same bytes.

        Args:
            cpu: `x86-64-v2`, `x86-64-v3` or `x86-64-v4` of the x86-64 psABI, or `native` for processors with all instructions of this
                one.

        Raises:
            UserError: There is no such kind, or the artifact has no kernels for target `c`.
            BuildError: There is no compiler, or it refuses the kernels.
            MeasureError: The cache of compiled kernels cannot be written.
        """
        names = check_families(cpu)
        if "c" not in self.device_kind.split(","):
            raise UserError(f"cpu: expected an artifact for target c, got one for {self.device_kind}")
        devices = self.placement.devices
        programs = [p for p in self.programs if devices.get(p.name, "c") == "c"]
        kernels = [kernel for program in programs for kernel in program.kernels]
        kernels += library_kernels(programs)
        return replace(self, objects=tuple(compile_objects(kernels, name) for name in names))

    def with_weights(self, arrays: Mapping[str, Any]) -> Artifact:
        """Return the artifact with other weights of the same shapes and types: its programs, kernels and plans stay as they are.

        Args:
            arrays: By the names in `constants`, which the model has too unless the build computed with a weight;
                `rt.replace_weights` takes a whole model. Arrays of other libraries are read as in calls.

        Raises:
            UserError: A name, a shape or a type differs, or integers that may be indices.
        """
        extra = self.manifest["extra"]
        constants = replaced_constants(self.constants, arrays)
        key = replaced_key(extra.get("model"), {name: constants[name] for name in arrays})
        return self.of_weights(constants, key)

    def of_weights(self, constants: Mapping[str, NDArray[Any]], model: str) -> Artifact:
        """Return the artifact with these constants. model: their identity. Raises ArtifactError unless its programs have them."""
        check_constants(self.programs, constants, self.host_programs)
        manifest = {**self.manifest, "extra": {**self.manifest["extra"], "model": model}}
        return replace(self, constants=constants, manifest=manifest, path="")

    def without_objects(self) -> Artifact:
        """Return the artifact without compiled kernels: opening it compiles its source."""
        return replace(self, objects=())

    def open(
        self,
        device: DeviceSpec = None,
        libraries: Mapping[str, Library] | None = None,
        host: Mapping[str, Host] | None = None,
        shapes: ShapeRecorder | None = None,
        placing: PlacementOptions | None = None,
        threads: int | None = None,
    ) -> Model:
        """Compile and upload. Warns (RelaxTuneWarning) when the plans were measured on another device.

        Args:
            device: An open device, which the caller closes, a name for `open_device`, or None for the default device of the artifact's
                kind. For several devices a mapping by kind, or names separated by commas.
            libraries: Libraries for library steps; None opens the installed ones.
            host: Routines of the host program that the functions call, by name.
            shapes: Counts the symbols of every call.
            placing: How placements are chosen, for several devices.
            threads: Threads of the kernels on target `c`, as of the device `c:threads=N`. None: the least of the processors that this
                process may use, the whole processors of its container's quota, and `$OMP_NUM_THREADS`.

        Raises:
            ArtifactError: The device is of another kind.
            UserError: A device cannot be opened.
            BuildError: Compiling fails.
        """
        return open_model(self, device, libraries, host, shapes, placing, threads)
