"""A built model as one file.

The file (suffix `.rta`) is an uncompressed zip, so any tool can look inside, of three members: `manifest.json` (schema,
tool version, device kind, target fingerprint, hashes), `programs.json` and `constants.safetensors`; a fourth, `drivers.json`,
where functions branch, call or depend on data. One file rather than a folder, because replacing a file is atomic. The zip's
comment is the BLAKE2 hash of every byte before it: a truncated or altered file is refused before anything in it is read. There
are no timestamps: the same model gives the same bytes.

Loading executes nothing. Programs hold kernels, which are native code: `Artifact.open` compiles and can run them, so
open artifacts only from people you would take a program from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, Union

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from relax_tune.errors import ArtifactError, UserError, system_reason
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.model import Model, choose_function, open_model
from relax_tune.runtime.program.host_program import (
    HostProgram,
    host_programs_from_json,
    parts_of,
    verify_host_programs,
)
from relax_tune.runtime.program.program import SMALL, Program, programs_from_json, verify_names, verify_program
from relax_tune.runtime.program.scalars import constant_values
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.runtime.signature import Spec, function_specs
from relax_tune.runtime.vm import Host

FORMAT = "relax-tune artifact"
ARTIFACT_SCHEMA = 2
SUFFIX = ".rta"
_MANIFEST, _PROGRAM, _CONSTANTS = "manifest.json", "programs.json", "constants.safetensors"
_HOST_PROGRAMS = "drivers.json"  # the member's name since the first format
_MEMBERS = (_MANIFEST, _PROGRAM, _CONSTANTS)
_TENSOR_TYPES: Mapping[str, str] = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_COMMENT = b"blake2b:"
_COMMENT_BYTES = len(_COMMENT) + 64

Programs = Union[Program, Sequence[Program]]
T = TypeVar("T")


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def tool_version() -> str:
    """Return the installed version of relax-tune; `0` when run from a folder that is not installed."""
    try:
        return version("relax-tune")
    except PackageNotFoundError:
        return "0"


def device_kind(programs: Sequence[Program], without: str = "c") -> str:
    """Return the kind of device that runs the programs: the language of their kernels, or `without` if there are none.

    Raises: ArtifactError when kernels of several languages are mixed.
    """
    languages = sorted({kernel.language for program in programs for kernel in program.kernels}) or [without]
    if len(languages) > 1:
        names = ", ".join(p.name for p in programs)
        raise ArtifactError(f"{names}: wanted kernels in one language, found {', '.join(languages)}")
    return languages[0]


def save_artifact(
    path: str | os.PathLike[str],
    programs: Programs,
    constants: Mapping[str, NDArray[Any]],
    manifest_extra: Mapping[str, Any] | None = None,
    host_programs: Sequence[HostProgram] = (),
    kind: str = "c",
) -> Path:
    """Write an artifact; readers see the old file or the whole new one. Same arguments, same bytes.

    programs: one, or several with distinct names. constants: exactly the named ones.
    manifest_extra: JSON values kept under `extra` in the manifest; its key `fingerprint` (text to text) is the device
    the plans were measured on, which `Artifact.open` compares. host_programs: their subgraphs are among `programs`.
    kind: of the device it is for, where the programs have no kernels to tell it.

    Raises: ArtifactError when program and constants do not belong together, or the file cannot be written.
    """
    found, ordered = _checked(programs, constants, host_programs)
    packed = {n: _codes(np.ascontiguousarray(constants[n])).reshape(constants[n].shape) for n in sorted(constants)}
    text = f"[{','.join(p.to_json() for p in found)}]"
    members = {_PROGRAM: text.encode(), _CONSTANTS: safetensors.numpy.save(packed)}
    if ordered:
        members[_HOST_PROGRAMS] = f"[{','.join(d.to_json() for d in ordered)}]".encode()
    manifest = {
        "format": FORMAT,
        "schema": ARTIFACT_SCHEMA,
        "tool_version": tool_version(),
        "device_kind": device_kind(found, kind),
        "members": {name: {"bytes": len(data), "blake2b": _hash(data)} for name, data in members.items()},
        "extra": dict(manifest_extra or {}),
    }
    try:
        members[_MANIFEST] = _json(manifest)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"artifact {path}: wanted JSON values in manifest_extra, found others: {error}") from None
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in (_MEMBERS, (*_MEMBERS, _HOST_PROGRAMS))[bool(ordered)]:
            entry = zipfile.ZipInfo(name, _ZIP_DATE)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, members[name])
        archive.comment = _COMMENT + b"0" * 64
    view = stream.getbuffer()
    view[-64:] = _hash(view[:-_COMMENT_BYTES]).encode()
    target = Path(path)
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a folder" if os.path.isdir(target) else "a device or pipe"
        raise ArtifactError(
            f"artifact {target}: wanted the name of a file to write, found {what}; give another, such as model{SUFFIX}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, view)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"artifact {target}: wanted to write it, found: {reason(error)}") from None
    return target


def _read_file(where: str, path: Path) -> bytes:
    """Return the bytes of an artifact. A large file of another kind is not read to its end."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ArtifactError(f"{where}: wanted a readable file, found a folder; give the {SUFFIX} file in it")
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{where}: wanted a readable file, found a device or pipe; copy it into a file first")
        with path.open("rb") as file:
            start = file.read(4)
            if start != b"PK\x03\x04":
                kind = "an empty file" if not start else "another kind of file"
                raise ArtifactError(f"{where}: wanted a {FORMAT} ({SUFFIX}), found {kind}; give one that was built")
            return start + file.read()
    except FileNotFoundError:
        raise ArtifactError(
            f"{where}: wanted a readable file, found no such file; check its name, or build it"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{where}: wanted a readable file, found: {system_reason(error)}; check its name and permissions"
        ) from None
    except MemoryError:
        raise ArtifactError(
            f"{where}: wanted it in memory, found too little; free some, or use a larger machine"
        ) from None


def load_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read and verify an artifact. Executes nothing.

    Raises: ArtifactError for a file that is missing, truncated, altered, not an artifact, of a newer schema, or whose
    parts do not belong together.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(f"artifact: wanted the path of a file, found a {type(path).__name__}; give text or a Path")
    where = f"artifact {path}"
    data = _read_file(where, Path(path))
    comment = data[-_COMMENT_BYTES:]
    if not comment.startswith(_COMMENT):
        raise ArtifactError(
            f"{where}: wanted a content hash at its end, found none: truncated, or another kind of zip; copy or build it again"
        )
    if _hash(memoryview(data)[:-_COMMENT_BYTES]).encode() != comment[len(_COMMENT) :]:
        raise ArtifactError(
            f"{where}: wanted content that fits its hash, found other: altered or damaged; build or copy it again"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if [entry.filename for entry in entries] not in (list(_MEMBERS), [*_MEMBERS, _HOST_PROGRAMS]):
                raise ArtifactError(
                    f"{where}: wanted the members {_MEMBERS}, found {[e.filename for e in entries]!r:.300}; build it again"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ArtifactError(
                    f"{where}: wanted stored members, found compressed or encrypted ones; build it again"
                )
            members = {entry.filename: archive.read(entry.filename) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise ArtifactError(f"{where}: wanted a zip file, found a damaged one: {error}; build it again") from None
    manifest = _read_manifest(where, members)
    programs = _read_text(where, _PROGRAM, members[_PROGRAM], programs_from_json)
    host_programs = (
        _read_text(where, _HOST_PROGRAMS, members[_HOST_PROGRAMS], host_programs_from_json)
        if _HOST_PROGRAMS in members
        else ()
    )
    try:
        constants = _read_constants(members[_CONSTANTS], _small_constants(programs, host_programs))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"{where}: {_CONSTANTS}: wanted safetensors, found something else: {error}; build it again"
        ) from None
    try:
        _check_functions(programs, host_programs)
        check_constants(programs, constants, host_programs)
        kind = device_kind(programs, manifest["device_kind"])
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}; build it again") from None
    if manifest["device_kind"] != kind:
        raise ArtifactError(
            f"{where}: wanted one kind of device, found that its manifest says {manifest['device_kind']!r:.40} and its kernels {kind}; "
            "build it again"
        )
    return Artifact(programs, constants, manifest, str(path), host_programs)


def _read_text(where: str, member: str, data: bytes, read: Callable[[str], T]) -> T:
    try:
        return read(data.decode())
    except UnicodeDecodeError:
        raise ArtifactError(f"{where}: {member}: wanted UTF-8 text, found something else; build it again") from None
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {member}: {error}; build it again, or update relax-tune") from None


def _codes(a: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a small type as its bytes, since safetensors lacks most of these types."""
    return a.view(np.uint8) if a.dtype.name in SMALL else a


def _read_constants(data: bytes, small: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Read constants as `safetensors.numpy.load` does, and types that it does not know. small: those of a small type."""
    return {
        name: np.frombuffer(
            tensor["data"], small.get(name, "uint8") if tensor["dtype"] == "U8" else _TENSOR_TYPES[tensor["dtype"]]
        ).reshape(tensor["shape"])
        for name, tensor in safetensors.deserialize(data)
    }


def _small_constants(programs: Sequence[Program], host_programs: Sequence[HostProgram]) -> dict[str, str]:
    found = [(spec.name, spec.dtype) for p in programs for spec in p.buffers if spec.role == "const"]
    found += [(w.name, w.dtype) for d in host_programs for w in d.weights]
    return {name: dtype for name, dtype in found if dtype in SMALL}


def _read_manifest(where: str, members: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        manifest = json.loads(members[_MANIFEST])
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{where}: {_MANIFEST}: wanted JSON, found something else: {error}; build it again"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{where}: {_MANIFEST}: wanted format {FORMAT!r}, found another; build it again")
    schema = manifest.get("schema")
    if type(schema) is not int or schema != ARTIFACT_SCHEMA:
        raise ArtifactError(
            f"{where}: wanted schema {ARTIFACT_SCHEMA} (relax-tune {tool_version()}), found {schema!r:.40} "
            f"(written by {manifest.get('tool_version')!r:.40}); update relax-tune or build again"
        )
    listed: Any = manifest.get("members")
    extra: Any = manifest.get("extra")
    if not has_shape((listed, extra), (dict, dict)) or set(listed) != set(members) - {_MANIFEST}:
        raise ArtifactError(
            f"{where}: {_MANIFEST}: wanted hashes of {_PROGRAM} and {_CONSTANTS}, and `extra`, found others; build it again"
        )
    for name, facts in listed.items():
        if facts != {"bytes": len(members[name]), "blake2b": _hash(members[name])}:
            raise ArtifactError(
                f"{where}: {name}: wanted the hash in the manifest, found another: altered; build it again"
            )
    if not has_shape(manifest, {"device_kind": str}):
        raise ArtifactError(
            f"{where}: {_MANIFEST}: wanted a device kind, found {manifest.get('device_kind')!r:.40}; build it again"
        )
    return manifest


def _checked(
    programs: Programs, constants: Mapping[str, NDArray[Any]], host_programs: Sequence[HostProgram]
) -> tuple[tuple[Program, ...], tuple[HostProgram, ...]]:
    """Verify programs and host programs; return them in order of their names."""
    found = (programs,) if isinstance(programs, Program) else tuple(sorted(programs, key=lambda p: p.name))
    for program in found:
        verify_program(program)
    verify_names(found)
    ordered = tuple(sorted(host_programs, key=lambda d: d.name))
    _check_functions(found, ordered)
    check_constants(found, constants, ordered)
    return found, ordered


def _check_functions(programs: Sequence[Program], host_programs: Sequence[HostProgram]) -> None:
    if not programs and not host_programs:
        raise ArtifactError("wanted at least one program, found none")
    verify_host_programs(host_programs, programs)


def check_constants(
    programs: Sequence[Program], constants: Mapping[str, NDArray[Any]], host_programs: Sequence[HostProgram] = ()
) -> None:
    """Raise ArtifactError unless `constants` are exactly those of the programs and host programs, in dtype and shape."""
    names = ", ".join([*(p.name for p in programs), *(d.name for d in host_programs)])
    weights = [w for d in host_programs for w in d.weights]
    used = {spec.name for p in programs for spec in p.buffers if spec.role == "const"} | {w.name for w in weights}
    missing, unknown = sorted(used - set(constants)), sorted(set(constants) - used)
    if missing or unknown:
        raise ArtifactError(f"{names}: wanted its constants, found missing {missing!r:.300}, unknown {unknown!r:.300}")
    for w in weights:
        array = constants[w.name]
        if array.shape != w.shape or array.dtype != np.dtype(w.dtype):
            raise ArtifactError(
                f"{names}: constant {w.name}: wanted {w.dtype} {w.shape}, found {array.dtype} {array.shape}"
            )
    for program in programs:
        try:
            values = constant_values(program.scalars, len(program.symbols))
        except UserError as error:
            raise ArtifactError(f"{program.name}: wanted sizes that can be evaluated, found {error}") from None
        for spec in program.buffers:
            if spec.role != "const":
                continue
            shape, array = tuple(values[slot] for slot in spec.shape), constants[spec.name]
            if array.shape != shape or array.dtype != np.dtype(spec.dtype):
                raise ArtifactError(
                    f"{program.name}: constant {spec.name}: wanted {spec.dtype} {shape}, found {array.dtype} {array.shape}"
                )


def new_artifact(
    programs: Programs,
    constants: Mapping[str, NDArray[Any]],
    manifest_extra: Mapping[str, Any] | None = None,
    host_programs: Sequence[HostProgram] = (),
    kind: str = "c",
) -> Artifact:
    """Return an artifact that is not on disk yet; `Artifact.save` writes it. Arguments and errors are those of
    `save_artifact`.
    """
    found, ordered = _checked(programs, constants, host_programs)
    manifest = {"device_kind": device_kind(found, kind), "extra": dict(manifest_extra or {})}
    return Artifact(found, constants, manifest, "", ordered)


def load(path: str | os.PathLike[str], device: Device | str | None = None, shapes: ShapeProfile | None = None) -> Model:
    """Open an artifact on a device, ready to run: `load_artifact(path).open(device, shapes=shapes)`.

    Raises: as `load_artifact` and `Artifact.open`.
    """
    return load_artifact(path).open(device, shapes=shapes)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact in memory: programs and host programs, in order of their names, and the constants they share.

    A function is a program, or a host program with the programs of its subgraphs. `manifest["extra"]` holds the values
    that the build stored.
    """

    programs: tuple[Program, ...]
    constants: Mapping[str, NDArray[Any]]
    manifest: Mapping[str, Any]
    path: str = ""
    host_programs: tuple[HostProgram, ...] = ()

    @property
    def device_kind(self) -> str:
        """The kind of device it is for."""
        return str(self.manifest["device_kind"])

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
        found = self._chosen(name)
        if isinstance(found, HostProgram):
            raise UserError(
                f"{found.name}: wanted a function that is one program, found one that branches, calls or depends on data; "
                "run it with Model.run"
            )
        return found

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
        found = self.manifest["extra"].get("notes")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one file; see `save_artifact`. Saving what was loaded gives the same bytes."""
        return save_artifact(
            path, self.programs, self.constants, self.manifest["extra"], self.host_programs, self.device_kind
        )

    def open(
        self,
        device: Device | str | None = None,
        libraries: Mapping[str, Library] | None = None,
        host: Mapping[str, Host] | None = None,
        shapes: ShapeProfile | None = None,
    ) -> Model:
        """Compile and upload. Warns (UserWarning) when the plans were measured on another device.  device: an open
        device (stays the caller's), a name for `open_device`, or None for the default device of the artifact's kind
        host: routines of the host program that the functions call, by name shapes: counts the symbols of every call
        from now on

        Raises: ArtifactError when the device is of another kind; UserError, BuildError as opening and compiling do.
        """
        return open_model(self, device, libraries, host, shapes)
