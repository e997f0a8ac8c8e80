"""Compiled kernels of an artifact: shared objects for kinds of processors, so that a server needs no compiler.

An object fits a system that has its instructions and a C library of its version or a newer one. It holds the device's own functions
too, hence a server loads nothing but objects, the C library and its `libm`.

Tests: `tests/runtime/device/test_c_objects.py`, `tests/runtime/test_served_objects.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_tune.errors import ArtifactError, BuildError, UserError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device import host
from relax_tune.runtime.device.binaries import cache_folder, hashed, seal, sealed_content
from relax_tune.runtime.device.c_compiler import (
    DEVICE_KERNELS,
    NATIVE,
    TEAM,
    Gcc,
    build_units,
    opened_cache,
    units_of,
    unwritable,
)
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.program.program import KernelSource

INTERFACE = 2
"""Version of the functions that this package and kernels call in an object: the team's, and `DEVICE_KERNELS`."""
_V2 = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType({
    "x86-64-v2": ("x86_64", _V2),
    "x86-64-v3": ("x86_64", _V3),
    "x86-64-v4": ("x86_64", _V4),
})  # fmt: skip
"""Machine and instruction flags, as Linux names them, of each level of the x86-64 psABI."""
_TEAM, _DEVICE = "team", "device"
_C_LIBRARY = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledObjects:
    """The kernels of an artifact, compiled for one kind of processor.

    Attributes:
        name: The kind, of `FAMILIES` or `native`.
        machine: Architecture, as `platform.machine` names it.
        flags: Instructions that it needs.
        sve_bits: Width of SVE's vectors that it needs; 0 for none.
        c_library: Oldest version of the GNU C library that it needs.
        compiler: Version of its compiler.
        isa: Hash of the compiler's target options.
        kernels: Name of the library of each kernel, by `kernel_key`.
        libraries: Shared objects by name.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    sve_bits: int
    c_library: tuple[int, int]
    compiler: str
    isa: str
    kernels: Mapping[str, str]
    libraries: Mapping[str, bytes]

    def missing(self) -> tuple[str, ...]:
        """Return what this system lacks of what they need; nothing if they run here."""
        if self.machine != platform.machine():
            return (f"a processor {self.machine}",)
        instructions = sorted(set(self.flags) - host.cpu_flags())
        lacks = [f"instructions {', '.join(instructions)}"] if instructions else []
        if self.sve_bits and self.sve_bits != host.sve_bits():
            lacks.append(f"SVE of {self.sve_bits} bits")
        installed = host.c_library()
        if installed is None or installed < self.c_library:
            lacks.append(f"glibc {self.c_library[0]}.{self.c_library[1]} or newer")
        return tuple(lacks)

    def uses_all(self) -> bool:
        """Tell whether they use the widest vectors and all dot products of this processor, as far as kernels can."""
        flags = frozenset(self.flags)
        return host.vector_bits(flags) == host.vector_bits() and host.dot_products(flags) == host.dot_products()

    def path(self, name: str, folder: Path) -> Path:
        """Return the file of a library in the cache `folder`; it is written unless it is there, whole and ours.

        Raises:
            MeasureError: It cannot be written.
        """
        data = self.libraries[name]
        target = folder / f"object-{hashlib.blake2b(data, digest_size=20).hexdigest()}.so"
        if sealed_content(target) == data:
            return target
        try:
            with tempfile.TemporaryDirectory(prefix=".object-", dir=folder) as work:
                file = Path(work, "object.so")
                file.write_bytes(data)
                seal(file)
                os.replace(file, target)  # atomic: another process sees all of it or nothing
        except OSError as error:
            raise unwritable(cache_folder() / "c", error) from None
        return target

    def team(self, folder: Path) -> Path:
        """Return the file of the team of threads; see `path`."""
        return self.path(_TEAM, folder)

    def device(self, folder: Path) -> Path:
        """Return the file of `DEVICE_KERNELS`; see `path`."""
        return self.path(_DEVICE, folder)

    def units(self, kernels: Iterable[KernelSource]) -> dict[str, list[KernelSource]]:
        """Return the kernels that they have, by library."""
        units: dict[str, list[KernelSource]] = {}
        for kernel in kernels:
            library = self.kernels.get(kernel_key(kernel))
            if library is not None:
                units.setdefault(library, []).append(kernel)
        return units

    def to_json(self) -> dict[str, Any]:
        """Return everything but the libraries, for an artifact's manifest."""
        return {
            "interface": INTERFACE,
            "name": self.name,
            "machine": self.machine,
            "flags": list(self.flags),
            "sve_bits": self.sve_bits,
            "c_library": list(self.c_library),
            "compiler": self.compiler,
            "isa": self.isa,
            "kernels": dict(sorted(self.kernels.items())),
        }


_SHAPE = {
    "interface": int, "name": str, "machine": str, "flags": list, "sve_bits": int, "c_library": (int, int), "compiler": str, "isa": str,
    "kernels": dict,
}  # fmt: skip


def objects_from_json(entries: object, libraries: Mapping[str, bytes]) -> tuple[CompiledObjects, ...]:
    """Read what `to_json` returned. Executes nothing. Objects of another interface are left out: their kernels are compiled.

    Args:
        entries: The list in a manifest.
        libraries: Shared objects by `NAME/LIBRARY`.

    Raises:
        ArtifactError: Entries and libraries do not belong together.
    """
    if not isinstance(entries, list) or not all(has_shape(entry, _SHAPE) for entry in entries):
        raise ArtifactError("expected descriptions of compiled objects, got others")
    objects: list[CompiledObjects] = []
    used: set[str] = set()
    for entry in entries:
        name = entry["name"]
        own = {n.partition("/")[2]: data for n, data in libraries.items() if n.partition("/")[0] == name}
        used |= {f"{name}/{n}" for n in own}
        named = {_TEAM, _DEVICE, *map(str, entry["kernels"].values())}
        if named != set(own) or name in {o.name for o in objects}:
            raise ArtifactError(
                f"compiled objects {name!r:.40}: expected the libraries that its kernels name, got others"
            )
        if not all(isinstance(flag, str) for flag in entry["flags"]):
            raise ArtifactError(f"compiled objects {name!r:.40}: expected names of instructions, got others")
        major, minor = entry["c_library"]
        if entry["interface"] == INTERFACE:
            objects.append(
                CompiledObjects(
                    name, entry["machine"], tuple(entry["flags"]), entry["sve_bits"], (major, minor),
                    entry["compiler"], entry["isa"], dict(entry["kernels"]), own,
                )
            )  # fmt: skip
    if used != set(libraries):
        raise ArtifactError(
            f"expected libraries of compiled objects, got {', '.join(sorted(set(libraries) - used)):.200}"
        )
    return tuple(objects)


def kernel_key(kernel: KernelSource) -> str:
    """Return the hash by which compiled objects name a kernel."""
    return hashed((kernel.name, kernel.source, *kernel.flags))


def check_families(names: Sequence[str]) -> tuple[str, ...]:
    """Return distinct kinds of processors. Raises UserError for one that this machine's compiler does not compile for."""
    if isinstance(names, str):
        raise UserError(f"cpu: expected a list of kinds of processors, got the text {names!r:.40}")
    known = [name for name, (machine, _) in FAMILIES.items() if machine == platform.machine()]
    for name in names:
        if name not in (*known, "native"):
            raise UserError(f"cpu: expected {', '.join([*known, 'native'])}, got {name!r:.40}")
    return tuple(dict.fromkeys(names))


def compile_objects(kernels: Sequence[KernelSource], name: str) -> CompiledObjects:
    """Compile kernels for a kind of processor.

    Args:
        kernels: Kernels in C.
        name: The kind, of `FAMILIES` or `native`.

    Raises:
        UserError: There is no such kind.
        BuildError: Compiling fails, or an object needs more than the C library.
        MeasureError: The cache of compiled libraries cannot be written.
    """
    check_families([name])
    native = name == "native"
    compiler = Gcc(NATIVE if native else f"-march={name}")
    units = units_of(list({kernel_key(kernel): kernel for kernel in kernels}.values()))
    with opened_cache() as folder:

        def library(source: str, flags: tuple[str, ...]) -> Path:
            return compiler.library(source, (*flags, "-s"), folder)  # without symbols that nobody calls

        texts = {_TEAM: (TEAM.read_text(encoding="utf-8"), ("-pthread",)), _DEVICE: (join_sources(DEVICE_KERNELS), ())}
        paths = {name: library(*text) for name, text in texts.items()}
        paths |= {str(at): path for at, path in enumerate(build_units(units, library))}
        libraries = {name: sealed_content(path) or b"" for name, path in paths.items()}
    for data in libraries.values():
        if b"libgomp" in data:
            raise BuildError(
                "compiled objects: expected kernels that run on the team of threads, got some with OpenMP; build the artifact again"
            )
    needed = [(int(major), int(minor)) for data in libraries.values() for major, minor in _C_LIBRARY.findall(data)]
    return CompiledObjects(
        name, platform.machine(), tuple(sorted(host.instruction_flags())) if native else FAMILIES[name][1],
        host.sve_bits() if native and host.vector_flags() else 0, max(needed, default=(2, 0)), compiler.version, compiler.isa,
        {kernel_key(kernel): str(at) for at, (group, _) in enumerate(units) for kernel in group}, libraries,
    )  # fmt: skip


def best_objects(objects: Sequence[CompiledObjects]) -> CompiledObjects | None:
    """Return the objects that run here and use most of this processor; None if none run."""
    fitting = [o for o in objects if not o.missing()]
    return max(fitting, key=lambda o: (host.vector_bits(frozenset(o.flags)), len(o.flags)), default=None)


def suited_family() -> str:
    """Return the highest level of `FAMILIES` that this processor has; `native` if there is none."""
    flags = host.cpu_flags()
    fitting = [name for name, (m, needed) in FAMILIES.items() if m == platform.machine() and flags.issuperset(needed)]
    return fitting[-1] if fitting else "native"


def why_unfit(objects: Sequence[CompiledObjects]) -> str:
    """Return one sentence on what each of the objects lacks here."""
    return "; ".join(f"{o.name} needs {', '.join(o.missing())}" for o in objects)
