"""What is installed here, what is missing, and what would make it faster."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from relax_tune.database.store import open_store
from relax_tune.errors import BuildError, DatabaseError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.c import cache_folder, find_compiler
from relax_tune.runtime.device.registry import DeviceFailure, list_devices
from relax_tune.runtime.library.registry import open_libraries

State = Literal["ok", "advice", "missing"]

# Package -> (extra that brings it, what for). Those without an extra are needed everywhere.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "numpy": ("", "arrays"),
    "safetensors": ("", "weights"),
    "sqlalchemy": ("tune", "records"),
    "alembic": ("tune", "database versions"),
    "xgboost": ("tune", "the cost model"),
    "optuna": ("tune", "the optuna strategy"),
    "typer": ("tune", "commands"),
    "rich": ("tune", "tables"),
    "pyopencl": ("opencl", "OpenCL devices"),
    "pocl-binary-distribution": ("opencl", "an OpenCL device for any Linux machine"),
    "scipy-openblas32": ("openblas", "OpenBLAS"),
    "tokenizers": ("text", "sentences as input"),
    "distributed": ("cluster", "far devices"),
    "psycopg": ("postgres", "a shared database"),
}
# Variables that change how many threads run where, for kernels and libraries alike.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY"),
    *("OPENBLAS_NUM_THREADS", "POCL_MAX_PTHREAD_COUNT", "POCL_AFFINITY"),
)

# What OpenBLAS calls processors without 512-bit vectors.
_NARROW_CORES = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `advice` says what to do, and is empty when there is nothing to."""

    area: str
    name: str
    state: State
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """As plain values."""
        return asdict(self)


def examine(db: str | None, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything there is to say, by area. Opens and closes devices, libraries and the database; changes nothing."""
    variables = os.environ if environment is None else environment
    devices = list_devices()
    return [
        *_machine(),
        *_devices(devices),
        *_compilers(),
        *_libraries(),
        *_database(db),
        *_threads(variables),
        *_packages(),
    ]


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("machine", "processor", "ok", f"{host.cpu_model()}, {host.vector_bits()}-bit vectors")
    yield Finding("machine", "system", "ok", f"{platform.system()} {platform.release()}")


def _devices(devices: list[DeviceInfo | DeviceFailure]) -> Iterator[Finding]:
    for entry in devices:
        if isinstance(entry, DeviceFailure):
            yield Finding("device", entry.spec, "missing", "cannot be opened", entry.reason)
            continue
        facts = dict(entry.fingerprint)
        yield Finding("device", entry.kind, "ok", f"{entry.name} ({facts.get('platform', facts.get('compiler', ''))})")
    pocl = [e for e in devices if isinstance(e, DeviceInfo) and "PoCL 3.0" in dict(e.fingerprint).get("platform", "")]
    others = [e for e in devices if isinstance(e, DeviceInfo) and e.kind == "opencl" and e not in pocl]
    faster = [e for e in others if "oclgrind" not in dict(e.fingerprint).get("platform", "").lower()]
    if pocl and not faster and host.vector_bits() > 256:
        yield Finding(
            "device",
            "opencl speed",
            "advice",
            "only the PoCL 3.0 wheel, whose vectors are kept to 8 floats",
            "this processor has wider vectors: target `c` uses them, and so does a newer OpenCL driver "
            "(Debian, Ubuntu: apt-get install pocl-opencl-icd), chosen with --target opencl:PART of its name",
        )


def _compilers() -> Iterator[Finding]:
    try:
        yield Finding("compiler", "C", "ok", find_compiler())
    except BuildError as error:
        yield Finding("compiler", "C", "missing", "none", str(error))
    folder = cache_folder()
    place = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if os.access(place, os.W_OK):
        yield Finding("compiler", "cache", "ok", str(folder))
    else:
        advice = "point RELAX_TUNE_CACHE at a folder that may be written"
        yield Finding("compiler", "cache", "missing", f"{folder} cannot be written", advice)


def _libraries() -> Iterator[Finding]:
    libraries = open_libraries()
    for name, library in sorted(libraries.items()):
        yield Finding("library", name, "ok", ", ".join(f"{k} {v}" for k, v in library.fingerprint()))
        core = dict(library.fingerprint()).get("core", "")
        if core in _NARROW_CORES and host.vector_bits() > 256:
            yield Finding(
                "library",
                f"{name} speed",
                "advice",
                f"it took this processor for a {core}",
                "OPENBLAS_CORETYPE=SkylakeX makes it use the wider vectors there are; try, and set it when tuning and running",
            )
    if "openblas" not in libraries:
        advice = "pip install 'relax-tune[openblas]': matrix products then have a library to be compared with"
        yield Finding("library", "openblas", "advice", "none", advice)


def _database(db: str | None) -> Iterator[Finding]:
    try:
        with open_store(db, create=False, read_only=True) as store:
            targets = store.targets()
            count = sum(store.count(t.key) for t in targets)
            yield Finding("database", store.where, "ok", f"{count} measurements on {len(targets)} targets")
    except DatabaseError as error:
        yield Finding(
            "database", db or "default", "advice", "not opened", f"{error} (`tune` makes a new file by itself)"
        )


def _threads(variables: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("threads", "processors", "ok", f"{host.usable_cpus()} usable, kernels use {host.worker_threads()}")
    for name in THREAD_VARIABLES:
        if name in variables:
            yield Finding("threads", name, "ok", variables[name])
    if variables.get("OMP_PROC_BIND", "false").lower() not in ("", "false"):
        yield Finding(
            "threads",
            "binding",
            "advice",
            "OMP_PROC_BIND is set",
            "OpenCL and library threads started later inherit the binding; measure with the setting you run with",
        )
    if shutil.which("nproc") and (os.cpu_count() or 1) != host.usable_cpus():
        yield Finding("threads", "affinity", "ok", f"{host.usable_cpus()} of {os.cpu_count()} processors are allowed")


def _packages() -> Iterator[Finding]:
    for name, (extra, purpose) in PACKAGES.items():
        try:
            yield Finding("package", name, "ok", f"{version(name)} ({purpose})")
        except PackageNotFoundError:
            advice = f"pip install 'relax-tune[{extra}]' for {purpose}" if extra else f"pip install {name}"
            yield Finding("package", name, "advice" if extra else "missing", "not installed", advice)
