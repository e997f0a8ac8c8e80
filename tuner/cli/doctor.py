"""A check of the installation: packages, compilers, devices, libraries, and advice on speed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from relax_tune.errors import BuildError, DatabaseError, MeasureError, RelaxTuneError, UserError
from relax_tune.printable import masked
from relax_tune.runtime.child_process import find_program, interpreter
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.binaries import cache_folder
from relax_tune.runtime.device.c_compiler import find_compiler
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.quirks import quirks_of
from relax_tune.runtime.device.registry import find_devices, is_probed_in_process, open_device, service_kernels
from relax_tune.runtime.device.webgpu.listing import run_separately
from relax_tune.runtime.library.registry import open_libraries
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.measure.device_process.sandbox import landlock_version
from relax_tune.tuner.measure.device_process.start import CONFINED
from relax_tune.tuner.settings import SettingSource
from relax_tune.tuner.task.alternatives import all_alternatives

State = Literal["ok", "advice", "missing"]

# Package -> (extra that brings it, what for). Those without an extra are needed everywhere.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "numpy": ("", "arrays"),
    "safetensors": ("", "weights"),
    "sqlalchemy": ("tune", "records"),
    "alembic": ("tune", "database versions"),
    "xgboost": ("tune", "the cost model"),
    "scipy": ("tune", "placement on several devices"),
    "optuna": ("tune", "the optuna strategy"),
    "cmaes": ("tune", "optuna's CMA-ES"),
    "typer": ("", "commands"),
    "rich": ("", "tables"),
    "pyopencl": ("opencl", "OpenCL devices"),
    "wgpu": ("webgpu", "WebGPU devices"),
    "pocl-binary-distribution": ("opencl", "an OpenCL device for any Linux machine"),
    "scipy-openblas32": ("openblas", "OpenBLAS"),
    "onednn-cpu-gomp": ("onednn", "oneDNN"),
    "pycuda": ("cuda", "NVIDIA GPUs"),
    "nvidia-cublas": ("cuda", "cuBLAS and cuBLASLt"),
    "nvidia-cuda-nvrtc": ("cuda-compiler", "compiling for NVIDIA GPUs"),
    "cuda-bindings": ("cuda-compiler", "compiling for NVIDIA GPUs"),
    "tokenizers": ("text", "sentences as input"),
    "distributed": ("cluster", "far devices"),
    "filelock": ("tune", "one job on a device"),
    "platformdirs": ("", "this user's folders"),
    "jinja2": ("report", "reports, dashboards, templates of chats"),
    "vl-convert-python": ("report", "pictures of reports"),
    "starlette": ("dashboard", "dashboards and servers"),
    "uvicorn": ("dashboard", "dashboards and servers"),
    "tornado": ("browser", "measuring in a browser's page"),
    "prometheus-client": ("dashboard", "metrics"),
    "python-json-logger": ("dashboard", "logs in JSON"),
    "onnx": ("onnx", "ONNX models"),
    "gguf": ("gguf", "GGUF files"),
    "torch": ("torch", "programs of torch.export"),
    "cryptography": ("sign", "signatures of files, and certificates of far devices"),
    "fsspec": ("jobs", "files of submitted jobs"),
    "dask-jobqueue": ("slurm", "workers on SLURM"),
    "psycopg": ("postgres", "a shared database"),
    "z3-solver": ("solver", "proofs about sizes that ours leave open"),
}
# Variables that change how many threads run where, for kernels and libraries alike.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),
    *("GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
    *("POCL_DEVICES", "POCL_MAX_PTHREAD_COUNT", "POCL_AFFINITY"),
)
QUIRK = "quirk"
"""Area of what is known of a device, and needs nothing to be done."""
TUNES = find_spec("sqlalchemy") is not None
"""Whether the packages of the extra `tune` are installed, as far as one of them tells."""
# Below this many free bytes a tuning job may fill the disk.
SPACE = 2 * 2**30

# What OpenBLAS calls processors without 512-bit vectors.
_NARROW_CORES = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        advice: a remedy; empty if none is needed.
    """

    area: str
    name: str
    state: State
    result: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields as plain values."""
        return asdict(self)


def examine(db: str | None, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Return all findings, by area.

    Devices, libraries and the database are opened and closed. Only the cache of compiled kernels changes.
    """
    variables = os.environ if environment is None else environment
    devices = find_devices()
    return [
        *_machine(),
        *_devices(devices),
        *_compilers(variables),
        *_libraries(variables),
        *(_database(db) if TUNES else [_runs_only()]),
        *_threads(variables),
        *_packages(),
        *_quirks(devices),
    ]


def settings_findings(sources: Mapping[str, SettingSource]) -> Iterator[Finding]:
    """Yield each setting that is not a default, with its source; one that a file may not choose yet has advice."""
    for name, source in sources.items():
        place = f"{source.path}" if source.path is not None else source.name
        text = f"{masked(str(source.value))}, from {place}"
        if source.refused:
            advice = (
                f"{place} is not allowed to choose it: read the file, then run `relax-tune allow`, or remove the line"
            )
            yield Finding("settings", name, "advice", f"{text}, refused", advice)
        else:
            yield Finding("settings", name, "ok", text)
    yield Finding("settings", "others" if sources else "all", "ok", "defaults")


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "python", "ok", f"{platform.python_version()} at {interpreter()}")
    yield Finding("machine", "processor", "ok", f"{host.cpu_model()}, {host.vector_bits()}-bit vectors")
    yield Finding("machine", "system", "ok", f"{platform.system()} {platform.release()}")
    load, cpus = os.getloadavg()[0], host.usable_cpus()
    busy = load > 0.5 * cpus
    advice = (
        "times mislead on a busy machine, and so does what is decided by them: tune when it is quiet" if busy else ""
    )
    text = f"load {load:.1f} on {cpus} processors over the last minute"
    yield Finding("machine", "load", "advice" if busy else "ok", text, advice)
    quota = host.cpu_quota()
    if quota is not None:
        text = f"this container may use {quota:g} processors, kernels use {host.worker_threads()} threads"
        yield Finding("machine", "quota", "ok", text)


def _devices(devices: list[tuple[str, DeviceInfo | DeviceFailure]]) -> Iterator[Finding]:
    for spec, entry in devices:
        if isinstance(entry, DeviceFailure):
            yield Finding("device", entry.spec, "missing", "cannot be opened", entry.reason)
            continue
        facts = dict(entry.fingerprint)
        driver = facts.get("platform", facts.get("compiler", ""))
        problem = (probe if is_probed_in_process(spec) else _probe_separately)(spec, entry.kind)
        if problem is None:
            yield Finding("device", entry.kind, "ok", f"{entry.name} ({driver:.60}), ran a kernel")
            if TUNES:
                yield _sandbox(spec, entry.kind)
        else:
            text = f"{entry.name} ({driver}) does not run a kernel"
            yield Finding("device", entry.kind, "missing", text, problem)
    opened = [e for _, e in devices if isinstance(e, DeviceInfo) and e.kind == "opencl"]
    pocl = [e for e in opened if any("max_vector_lanes" in q.caps for q in quirks_of(e.kind, e.fingerprint))]
    others = [e for e in opened if e not in pocl]
    faster = [e for e in others if "oclgrind" not in dict(e.fingerprint).get("platform", "").lower()]
    if pocl and not faster and host.vector_bits() > 256:
        yield Finding(
            "device",
            "opencl speed",
            "advice",
            "only an old PoCL, whose vectors are limited to 8 floats",
            "this processor has wider vectors: target `c` uses them, and so does a newer OpenCL driver "
            "(Debian, Ubuntu: apt-get install pocl-opencl-icd), chosen with --target opencl:PART of its name",
        )


def _quirks(devices: list[tuple[str, DeviceInfo | DeviceFailure]]) -> Iterator[Finding]:
    for entry in (e for _, e in devices if isinstance(e, DeviceInfo)):
        for quirk in quirks_of(entry.kind, entry.fingerprint):
            yield Finding(QUIRK, f"{entry.kind}: {quirk.name}", "ok", f"{quirk.changes} ({quirk.symptom})")


def probe(spec: str, kind: str) -> str | None:
    """Compile and run a small kernel on a device. Returns None if its result is correct, else the reason."""
    try:
        device = open_device(spec)
    except UserError as error:
        return str(error)
    try:
        start = np.arange(8, dtype=np.float32)
        service = service_kernels(kind)
        kernel = device.compile([KernelSource("probe", kind, service.probe)])["probe"]
        buffer = device.alloc(start.nbytes)
        device.upload(buffer, start)
        device.bind(kernel, [buffer], [], *service.launch_shape(8, 1))()
        result = device.download(buffer, start.dtype, start.shape)
        device.free(buffer)
    except RelaxTuneError as error:
        return str(error)
    finally:
        device.close()
    return None if np.array_equal(result, start + 1) else f"expected {(start + 1).tolist()}, got {result.tolist()}"


def _sandbox(spec: str, kind: str) -> Finding:
    """Check whether kernels of a device are measured in a sandbox, by opening the device as for measuring."""
    from relax_tune.tuner.measure.local import LocalRunner  # needs the extra `tune`

    try:
        with LocalRunner(spec, lock=False) as runner:
            version = runner.sandbox
    except MeasureError as error:
        return Finding("sandbox", kind, "missing", "cannot be opened in a separate process", str(error))
    if version:
        return Finding("sandbox", kind, "ok", f"kernels are measured in one (Landlock {version})")
    if kind in CONFINED and not landlock_version():
        why, advice = (
            "this system has no Landlock",
            "measure untrusted kernels on Linux 5.13 or newer, or as a user without files",
        )
        return Finding("sandbox", kind, "advice", f"none, kernels are measured with your rights: {why}", advice)
    why = "its driver does not work in one"
    return Finding("sandbox", kind, "ok", f"none, its programs and drivers have your rights: {why}")


def _probe_separately(spec: str, kind: str) -> str | None:
    """Run `probe` in a separate process, so that its drivers do not disturb other devices."""
    code = f"import json; from {__name__} import probe; print(json.dumps(probe({spec!r}, {kind!r})))"
    try:
        failure: str | None = json.loads(run_separately(["-c", code]))
    except BuildError as error:
        return str(error)
    return failure


def _compilers(variables: Mapping[str, str]) -> Iterator[Finding]:
    chosen = f", chosen by CC={variables['CC']}" if variables.get("CC") else ""
    try:
        yield Finding("compiler", "C", "ok", f"{find_compiler()}{chosen}")
    except BuildError as error:
        yield Finding("compiler", "C", "missing", f"none{chosen}", str(error))
    try:
        yield _folder("compiler", "cache", cache_folder(), "point RELAX_TUNE_CACHE at another folder")
    except BuildError as error:
        yield Finding("compiler", "cache", "missing", "none", str(error))


def _folder(area: str, name: str, folder: Path, otherwise: str) -> Finding:
    """Check that a folder can be written and has space."""
    place = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return Finding(area, name, "missing", f"{folder} cannot be written", otherwise)
    free = shutil.disk_usage(place).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    return Finding(
        area,
        name,
        "ok" if free >= SPACE else "advice",
        text,
        "" if free >= SPACE else f"free some space, or {otherwise}",
    )


def _libraries(variables: Mapping[str, str]) -> Iterator[Finding]:
    try:
        libraries = open_libraries()
        all_alternatives()
    except BuildError as error:  # a package that brings a library, and is wrong
        yield Finding(
            "library", "packages", "missing", str(error), "correct or remove that package: nothing is measured with it"
        )
        return
    for name, library in sorted(libraries.items()):
        yield Finding("library", name, "ok", ", ".join(f"{k} {v}" for k, v in library.fingerprint()))
        core = dict(library.fingerprint()).get("core", "")
        if core in _NARROW_CORES and host.vector_bits() > 256:
            asked = variables.get("OPENBLAS_CORETYPE", "")
            text = f"OPENBLAS_CORETYPE={asked} makes it" if asked else "it takes this processor for"
            do = "unset OPENBLAS_CORETYPE" if asked else "set OPENBLAS_CORETYPE=SkylakeX when tuning and running"
            advice = f"{do}: it then uses the 512-bit vectors there are (twice as fast where this was tried)"
            yield Finding("library", f"{name} speed", "advice", f"{text} a {core}, with narrow vectors", advice)
    if "openblas" not in libraries:
        advice = "pip install 'relax-tune[openblas]': matrix products then have a library to be compared with"
        yield Finding("library", "openblas", "advice", "none", advice)


def _database(db: str | None) -> Iterator[Finding]:
    from relax_tune.database.engine import default_url, parse_url, sqlite_path
    from relax_tune.database.store import MEMORY_URL, open_store

    try:
        with open_store(db, create=False, read_only=True) as store:
            targets = store.targets()
            count = sum(store.count(t.key) for t in targets)
            yield Finding("database", store.where, "ok", f"{count} measurements on {len(targets)} targets")
        path = sqlite_path(parse_url(db or default_url())) if db != MEMORY_URL else None
        if path is not None:
            yield _folder("database", "folder", path.parent, "choose another place with --db")
    except DatabaseError as error:
        with contextlib.suppress(DatabaseError):
            path = sqlite_path(parse_url(db or default_url()))
            if path is not None and not path.exists():
                yield Finding("database", str(path), "ok", "not there yet; `relax-tune tune` makes it")
                yield _folder("database", "folder", path.parent, "choose another place with --db")
                return
        yield Finding("database", db or "default", "missing", "cannot be opened", str(error))


def _threads(variables: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("threads", "processors", "ok", f"{host.usable_cpus()} usable, kernels use {host.worker_threads()}")
    for name in THREAD_VARIABLES:
        if name in variables:
            advice = thread_advice(name, variables[name], host.usable_cpus())
            yield Finding("threads", name, "advice" if advice else "ok", variables[name], advice)
    if find_program("nproc") and (os.cpu_count() or 1) != host.usable_cpus():
        yield Finding("threads", "affinity", "ok", f"{host.usable_cpus()} of {os.cpu_count()} processors are allowed")


def thread_advice(name: str, value: str, cpus: int) -> str:
    """Give advice on an environment variable of threads; an empty text where it does no harm.

    cpus: number of processors that may be used
    """
    value = value.strip().lower()
    first = value.split(",")[0].strip()
    count = int(first) if first.isdigit() else None
    same = "or tune and run with the same setting"
    if (
        name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "POCL_MAX_PTHREAD_COUNT")
        and count is not None
        and count != cpus
    ):
        if count < cpus:
            return f"kernels get {count} of {cpus} processors: unset it to use them all, {same}"
        if name == "OMP_NUM_THREADS":
            return f"there are {cpus} processors, and kernels use no more threads: unset it"
    if name == "OMP_DYNAMIC" and value in ("true", "1", "yes"):
        return f"a busy moment takes threads away, so times do not repeat: unset it, {same}"
    if name == "OMP_PROC_BIND" and value not in ("", "false"):
        return (
            f"OpenCL and library threads that start later inherit the binding and share a processor: unset it, {same}"
        )
    if name == "GOMP_CPU_AFFINITY" and value:
        return (
            f"OpenCL and library threads that start later inherit the binding and share a processor: unset it, {same}"
        )
    if (name == "OMP_WAIT_POLICY" and value == "active") or (name == "GOMP_SPINCOUNT" and (count or 0) > 10_000):
        return f"oneDNN's threads spin after its products and take processors from kernels: unset it, {same}"
    if name == "OPENBLAS_NUM_THREADS" and count is not None and count != cpus:
        return "it changes nothing here: OpenBLAS gets as many threads as kernels; OMP_NUM_THREADS sets both"
    if name == "POCL_DEVICES" and "basic" in value and "pthread" not in value:
        return f"PoCL's basic device uses one thread: unset it, {same}"
    return ""


def _runs_only() -> Finding:
    text = "none: this installation runs artifacts and tunes nothing"
    return Finding("database", "records", "ok", text, "to tune and build, pip install 'relax-tune[tune]'")


def _packages() -> Iterator[Finding]:
    for name, (extra, purpose) in PACKAGES.items():
        try:
            yield Finding("package", name, "ok", f"{version(name)} ({purpose})")
        except PackageNotFoundError:
            advice = f"pip install 'relax-tune[{extra}]' for {purpose}" if extra else f"pip install {name}"
            yield Finding("package", name, "advice" if extra else "missing", "not installed", advice)
