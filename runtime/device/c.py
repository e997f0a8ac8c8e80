"""The C device: kernels compiled by the system's gcc (`c_compiler`), or compiled objects of an artifact (`c_objects`), loaded with ctypes
and run in this process.

Kernels are parallel inside: their loops run on one team of threads of this process (`team.c`).

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch, Turn
from relax_tune.runtime.device.c_compiler import (
    ANOTHER,
    DEVICE_KERNELS,
    Gcc,
    build_units,
    explained,
    opened_cache,
    team_unit,
    units_of,
)
from relax_tune.runtime.device.c_launches import KernelLaunch, advances, call_all, joined, repeated
from relax_tune.runtime.device.c_objects import CompiledObjects, best_objects, suited_family, why_unfit
from relax_tune.runtime.device.device_class import DeviceClass
from relax_tune.runtime.device.memory import Slabs, aligned_bytes, check_transfer, even_runs
from relax_tune.runtime.device.quirks import refused_option, with_quirks
from relax_tune.runtime.device.service_kernels import C_KERNELS
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.program.program import KernelSource

MOST_THREADS = 1024
"""Threads of the team at most, as in `team.c`."""
_SHARED_BYTES = 1 << 20
"""Bytes of a copy that all threads take part in."""


class CBuffer:
    """Host memory of a C device.

    array: byte view, 64-byte aligned
    address: its first byte
    pointer: argument of launches, which `CDevice.place` may redirect
    placed: the contiguous array they use instead of this memory, if any
    """

    __slots__ = ("address", "array", "nbytes", "placed", "pointer")

    def __init__(self, nbytes: int, array: NDArray[np.uint8]) -> None:
        self.array: NDArray[np.uint8] | None = array
        self.address = int(self.array.__array_interface__["data"][0])
        self.nbytes = nbytes
        self.placed: NDArray[Any] | None = None
        # One pointer object for all launches over the buffer: `place` changes its value, and bound launches see it
        # without being bound again.
        self.pointer = Pointer(self.address, array)

    def live(self) -> NDArray[np.uint8]:
        if self.array is None:
            raise MeasureError("C device: expected a live buffer, got one that was freed")
        return self.array


class Pointer(ctypes.c_void_p):
    """A pointer argument that keeps a buffer's memory alive."""

    def __init__(self, address: int, array: NDArray[np.uint8]) -> None:
        super().__init__(address)
        self.array = array


class _Turn:
    """The turn of a device: one thread at a time has it, several times if it likes. The threads of the device run loops meanwhile.

    Args:
        threads: Their number. Devices of different numbers share the team of the process; where two run at once, the later one's counts.
    """

    def __init__(self, threads: int) -> None:
        self._lock, self._threads = threading.RLock(), threads

    def acquire(self) -> None:
        self._lock.acquire()
        if CDevice._taking_part != self._threads:
            try:
                CDevice.take_part(self._threads)
            except BaseException:  # an interruption
                self._lock.release()
                raise

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def threads_of(part: str) -> int | None:
    """Return the number of threads that `c:threads=N` states; None for another part. Raises MeasureError for a wrong number."""
    name, equals, number = part.partition("=")
    if name != "threads" or not equals:
        return None
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= MOST_THREADS):
        raise MeasureError(f"C device: expected 1 to {MOST_THREADS} threads, got {number!r:.40}")
    return int(number)


class CDevice(DeviceClass):
    """The `Device` contract on the processor itself. `launch` runs the kernel at once, so launches are in order.

    All devices of a process share its team of threads; a loop that begins while the team runs another one stays on its caller's thread."""

    kind = "c"
    forms = ("c", "c:PART")
    service = C_KERNELS
    compiles_in_threads = True
    _team: ClassVar[Any] = None  # the process's threads: the functions of `team.c`
    _taking_part: ClassVar[int] = 0  # threads of the team that run loops now

    @classmethod
    def open_part(cls, part: str | None) -> CDevice | None:
        threads = None if part is None else threads_of(part)
        if threads is not None:
            return cls(threads)
        return cls() if part is None or part.lower() in host.cpu_model().lower() else None

    @classmethod
    def open_compiled(cls, part: str | None, objects: Sequence[CompiledObjects]) -> CDevice | None:
        if cls is not CDevice or not objects:
            return cls.open_part(part)
        threads = None if part is None else threads_of(part)
        named = part is None or threads is not None or part.lower() in host.cpu_model().lower()
        return cls(threads, objects) if named else None

    @classmethod
    def choices(cls) -> str:
        return f"c ({host.cpu_model()})"

    def __init__(self, threads: int | None = None, objects: Sequence[CompiledObjects] = ()) -> None:
        """Open the device.

        Args:
            threads: Threads of its kernels; None for as many as `host.worker_threads` permits.
            objects: Compiled kernels. The best that run here replace the compiler, unless there is one and they leave wider vectors or
                dot products of the processor unused.
        """
        emulated = host.emulator()
        if emulated is not None:
            raise BuildError(
                f"C device: expected a real processor, whose times count, got {emulated}; compile a C export for it instead"
            )
        self.objects, self._compiler = _objects_or_compiler(objects)
        source = self.objects or self.compiler
        workers = self._start_team(host.worker_threads() if threads is None else threads)
        fingerprint = {
            "compiler": source.compiler if isinstance(source, CompiledObjects) else source.version,
            "cpu": host.cpu_model(),
            "isa": source.isa,
            "kind": "c",
            "threads": str(workers),
        }
        if self.objects is not None and self.objects.uses_all():
            del fingerprint["isa"]  # nothing of this processor is left unused, as by -march=native
        limits = {
            "workers": workers,
            "vector_bits": host.vector_bits(),
            "max_vector_lanes": host.vector_bits() // 32,
            "registers": host.vector_registers(),
            "max_local_bytes": 0,
            "max_group_size": 1,
            **host.cache_bytes(),
            **host.dot_products(),
        }
        self.info = DeviceInfo(
            kind="c",
            name=host.cpu_model(),
            fingerprint=tuple(sorted(fingerprint.items())),
            limits=tuple(sorted(with_quirks("c", fingerprint, limits).items())),
            unit=host.processor_unit(),
        )
        self._threads = workers
        self.turn = self.new_turn()
        self._libraries: list[ctypes.CDLL] = []
        self._slabs = Slabs()
        self._open_own()

    @property
    def compiler(self) -> Gcc:
        """The compiler, which is looked for when it is first needed. Raises BuildError if there is none."""
        if self._compiler is None:
            self._compiler = Gcc()
        return self._compiler

    def provenance(self) -> dict[str, Any]:
        """Return the name of the objects, None for the compiler; the number of libraries; how many of these were compiled now."""
        compiled = [] if self._compiler is None else self._compiler.compiled
        name = None if self.objects is None else self.objects.name
        return {"objects": name, "libraries": 1 + len(self._libraries), "compiled": len(compiled)}

    def _start_team(self, threads: int) -> int:
        """Start the team of threads, once in a process, and return how many threads this device's loops have."""
        # Also where there is a team, so that a cache that is filled for other processes has everything.
        with opened_cache() as folder, explained():
            if self.objects is None:
                path = self._build(*team_unit(), folder)
            else:
                path = self.objects.team(folder)
            # One team per process and not per device: two teams would have more threads than processors. Kernels call it by name.
            first = CDevice._team is None
            library = self._loaded(path, ctypes.RTLD_GLOBAL if first else ctypes.DEFAULT_MODE)
            if first:
                CDevice._team = library
        return CDevice.take_part(threads)

    def new_turn(self) -> Turn:
        """Return a turn that nobody has, in which this device's number of threads run loops."""
        return _Turn(self._threads)

    @classmethod
    def take_part(cls, threads: int) -> int:
        """Let this number of threads run loops from now on, and return how many do: fewer where the system creates no more."""
        cls._taking_part = int(cls._team.relax_tune_team_use(threads))
        return cls._taking_part

    def _loaded(self, path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        """Load a library. Raises BuildError, and removes it, if that fails."""
        try:
            return ctypes.CDLL(str(path), mode)
        except OSError as error:
            path.unlink(missing_ok=True)
            if self.objects is not None and path.name.startswith("object-"):
                raise BuildError(
                    f"C device: expected objects {self.objects.name} that can be loaded here, got: {error}; "
                    "build the artifact on a system like this one"
                ) from None
            raise BuildError(
                f"C device: expected a library that can be loaded from {self.compiler.program}, got: {error}; {ANOTHER}"
            ) from None

    def _open_own(self) -> None:
        """Open the device's functions; this tries the compiler, so that a missing part is reported before any kernel is compiled."""
        if self.objects is None:
            with explained():
                own = self.compile(DEVICE_KERNELS)
        else:
            with opened_cache() as folder:
                own = self._functions(self._loaded(self.objects.device(folder)), DEVICE_KERNELS)
        functions = [own[f"relax_tune_{name}"] for name in ("copy", "launches", "repeat", "advance")]
        self._copy, self._launch, self._repeat, self._advance = functions
        self._advance.restype = ctypes.c_int64

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        """Compile all kernels.

        Raises: BuildError with gcc's messages, which name the kernel as the file; MeasureError when the cache cannot be
        written, for which no kernel is at fault.
        """
        for kernel in kernels:
            if kernel.language != "c":
                raise BuildError(f"C device: expected kernels in c, got {kernel.name} in {kernel.language}")
            refused = refused_option("c", dict(self.info.fingerprint), kernel.flags)
            if refused is not None:
                raise BuildError(
                    f"C device: expected other options for kernel {kernel.name} than {refused[0]}: {refused[1].symptom}"
                )
        handles: dict[str, Any] = {}
        stored = {} if self.objects is None else self.objects.units(kernels)
        compiled = {kernel.name for group in stored.values() for kernel in group}
        units = units_of([kernel for kernel in kernels if kernel.name not in compiled])
        with opened_cache() as folder:
            for name, kernels_of_object in stored.items():
                assert self.objects is not None
                handles |= self._functions(self._loaded(self.objects.path(name, folder)), kernels_of_object)
            if units:
                paths = build_units(units, lambda source, flags: self._build(source, flags, folder))
                for path, (group, _) in zip(paths, units):
                    handles |= self._functions(self._load(path, group), group)
        return handles

    def _functions(self, library: ctypes.CDLL, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        """Return the functions of a library by name."""
        self._libraries.append(library)
        handles: dict[str, Any] = {}
        for kernel in kernels:
            try:
                function = getattr(library, kernel.name)
            except AttributeError:
                raise BuildError(f"C device: the source of kernel {kernel.name} defines no such function") from None
            # ctypes assumes `int` otherwise and reads a register that a void function leaves undefined.
            function.restype = None
            handles[kernel.name] = function
        return handles

    def _build(self, source: str, flags: tuple[str, ...], folder: Path) -> Path:
        return self.compiler.library(source, flags, folder)

    def _load(self, path: Path, group: Sequence[KernelSource]) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)  # a damaged file of the cache: compile it again
        self._build(join_sources(group), group[0].flags, path.parent)
        return self._loaded(path)

    def alloc(self, nbytes: int, lasting: bool = False) -> CBuffer:
        return CBuffer(nbytes, self._slabs.take(nbytes) if lasting else aligned_bytes(nbytes))

    def upload(self, buffer: CBuffer, array: NDArray[Any]) -> None:
        memory = buffer.live() if buffer.placed is None else _bytes_of(buffer.placed)
        check_transfer("C device upload", array.nbytes, min(memory.nbytes, buffer.nbytes))
        self._move(memory[: array.nbytes].view(array.dtype).reshape(array.shape), array)

    def _move(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy an array to one of its shape that is contiguous, on all threads where that is faster."""
        # Waking the team takes longer than one thread needs for a small copy.
        runs = even_runs(source) if source.nbytes >= _SHARED_BYTES else None
        if runs is None:
            target[...] = source
            return
        numbers = [ctypes.c_int64(x) for x in (*runs[0], *runs[1], runs[2])]
        self._copy(ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data), *numbers)

    def download(self, buffer: CBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        result = np.empty(shape, dtype)
        check_transfer("C device download", result.nbytes, buffer.nbytes)
        self._move(result.reshape(-1).view(np.uint8), buffer.live()[: result.nbytes])
        return result

    def copy(self, target: CBuffer, source: CBuffer, nbytes: int) -> None:
        check_transfer("C device copy", nbytes, min(target.nbytes, source.nbytes))
        self._move(target.live()[:nbytes], source.live()[:nbytes])

    def free(self, buffer: CBuffer) -> None:
        # Launches that are still bound keep the memory alive through their pointers; it is freed with the last of
        # them.
        buffer.array = None

    def bind(
        self, kernel: Any, buffers: Sequence[CBuffer], scalars: Sequence[int], grid: Sequence[int], local: Sequence[int]
    ) -> Launch:
        if grid or local:
            raise MeasureError(f"C device: expected no grid (kernels loop inside), got grid {grid} local {local}")
        return _bound(kernel, buffers, map(_number, scalars))

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[CBuffer]) -> Launch:
        # Views are taken when it runs: `point` may have changed the memory.
        return lambda: function([b.live()[: b.nbytes] if b.placed is None else _bytes_of(b.placed) for b in buffers])

    def place(self, buffer: CBuffer, array: NDArray[Any] | None) -> bool:
        buffer.placed = array
        buffer.pointer.value = buffer.address if array is None else int(array.__array_interface__["data"][0])
        return True

    def wrap(self, array: NDArray[Any]) -> CBuffer:
        return CBuffer(array.nbytes, array.reshape(-1).view(np.uint8))

    def native(self, buffers: Sequence[CBuffer]) -> None:
        """Return None: there is no queue."""

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return the launches with each run of kernels as one call; None where no two are next to each other."""
        fewer = self.joined(launches)
        return None if len(fewer) == len(launches) else partial(call_all, fewer)

    def joined(self, launches: Sequence[Launch]) -> list[Launch]:
        """Return launches that do the same, each run of several kernels as one call of a loop in C."""
        return joined(self._launch, launches)

    def point(self, buffer: CBuffer, other: CBuffer) -> None:
        buffer.array, buffer.address, buffer.nbytes = other.live(), other.address, other.nbytes
        buffer.pointer.value, buffer.pointer.array = other.address, other.live()

    def view(self, buffer: CBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = math.prod(shape) * dtype.itemsize
        check_transfer("C device view", nbytes, buffer.nbytes)
        return buffer.live()[:nbytes].view(dtype).reshape(shape)

    def advances(
        self,
        code: NDArray[np.int64],
        symbols: NDArray[np.int64],
        moves: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> Callable[[], bool]:
        return advances(self._advance, code, symbols, moves, numbers)

    def cell(self, buffer: CBuffer) -> int:
        return ctypes.addressof(buffer.pointer)

    def repeated(
        self, launches: Sequence[Launch], cells: NDArray[np.int64], moves: NDArray[np.int64]
    ) -> Callable[[NDArray[np.int64]], None] | None:
        return repeated(self._repeat, launches, cells, moves)

    def bind_numbers(
        self, kernel: Any, buffers: Sequence[CBuffer], slots: Sequence[int], numbers: NDArray[np.int64]
    ) -> Launch:
        # The cells share the memory of `numbers`: a launch bound once reads the sizes that stand there at each call.
        cells = [ctypes.c_int64.from_buffer(numbers.data, slot * numbers.itemsize) for slot in slots]
        return _bound(kernel, buffers, cells)

    def synchronize(self) -> None:
        """Return at once: launches return when they are done."""

    def close(self) -> None:
        self._libraries.clear()  # the code stays mapped: closures that still exist must not jump into nothing


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _objects_or_compiler(objects: Sequence[CompiledObjects]) -> tuple[CompiledObjects | None, Gcc | None]:
    """Choose the source of this system's kernels: compiled objects, or the compiler. Both are None for the usual compiler.

    Raises:
        BuildError: No objects run here, and there is no compiler.
    """
    best = best_objects(objects)
    if not objects or (best is not None and best.uses_all()):
        return best, None
    try:
        return None, Gcc()
    except BuildError as error:
        if best is None:
            raise BuildError(
                f"C device: expected compiled objects that run here, got {why_unfit(objects)}; this is {host.cpu_model()}. Build the "
                f"artifact with --cpu {suited_family()}, or provide a compiler: {error}"
            ) from None
        warnings.warn(
            f"C device: expected objects for all vectors and dot products of {host.cpu_model()}, got {best.name}; kernels are slower than "
            f"this processor permits. Build the artifact with --cpu {suited_family()}, or with --cpu native on such a processor.",
            UserWarning,
            stacklevel=2,
        )
        return best, None


def _bound(kernel: Any, buffers: Sequence[CBuffer], numbers: Iterable[ctypes.c_int64]) -> KernelLaunch:
    """Return a launch over buffers. Raises MeasureError for one that was freed."""
    for buffer in buffers:
        if buffer.array is None:
            buffer.live()  # which says so
    return KernelLaunch(kernel, *[buffer.pointer for buffer in buffers], *numbers)


@lru_cache(maxsize=1 << 14)
def _number(value: int) -> ctypes.c_int64:
    """Return a kernel's argument, which nothing changes: a decoder binds much the same ones at every step."""
    return ctypes.c_int64(value)
