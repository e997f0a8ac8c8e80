"""The CUDA device, through pycuda (extra `cuda`) and NVRTC.

The device's primary context is used, which torch and other users in the process share; it is current only while a
method runs. One stream, in order. A launch is packed when it is bound, and allocates nothing. Host arrays travel
through two pinned buffers.

An error that leaves the context unusable (an illegal address, a trap, a watchdog's end) makes this and every later call
fail, so that the supervisor replaces the process.

Tests: `tests/cuda_emulation/test_emulation.py`.
"""

from __future__ import annotations

import atexit
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError, MemoryLack, RelaxTuneError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch
from relax_tune.runtime.device.cuda_compiler import CompiledModule, CUDACompiler, KernelReport
from relax_tune.runtime.device.cuda_graphs import GraphError, Recorder, load_recorder
from relax_tune.runtime.device.device_class import DeviceClass, DeviceFailure
from relax_tune.runtime.device.memory import check_transfer
from relax_tune.runtime.device.quirks import with_quirks
from relax_tune.runtime.device.service_kernels import CUDA_KERNELS
from relax_tune.runtime.device.source import INT_MOST, dynamic_shared_bytes, group_by_flags, wide_form
from relax_tune.runtime.program.program import KernelSource

T = TypeVar("T")

# Messages of the driver (cuGetErrorString) after which a context is unusable.
STICKY = re.compile(
    r"illegal|misaligned|unspecified launch failure|timed out|assert|hardware stack|invalid program counter|address space|"
    r"ECC|NVLink|context is destroyed|invalid device context|shutting down|MPS|tensor memory|unknown (internal )?error",
    re.IGNORECASE,
)
REGISTERS = 255
PINNED_BYTES = 4 << 20
DLPACK_CUDA = 2
RECORDED = 3  # fewest launches that are recorded
MODULES = 256  # modules cached for kernels that are compiled again

# name of a limit: the driver's attribute
LIMITS = {
    "workers": "MULTIPROCESSOR_COUNT",
    "warp": "WARP_SIZE",
    "max_group_size": "MAX_THREADS_PER_BLOCK",
    "max_local_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "local_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "groups_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "l2_bytes": "L2_CACHE_SIZE",
    "clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE",
    "memory_bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}
GRID = tuple(f"MAX_GRID_DIM_{axis}" for axis in "XYZ")
BLOCK = tuple(f"MAX_BLOCK_DIM_{axis}" for axis in "XYZ")


class Compiler(Protocol):
    """A compiler of kernels into binaries that the driver loads (`cuda_compiler.CUDACompiler`). Thread-safe.

    version: its name and version; unit: the most kernels of one translation unit.
    """

    version: str
    unit: int

    def compile(self, kernels: Sequence[KernelSource], flags: Sequence[str] = ()) -> CompiledModule: ...


def architecture(major: int, minor: int) -> str:
    """Return the architecture to compile for.

    `wgmma` is an architecture-specific feature of 9.0: NVRTC compiles it only for `sm_90a`, whose code runs on no other device.
    """
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def load_pycuda() -> Any:
    """Return the module pycuda.driver, initialised. Raises BuildError that says what is missing."""
    try:
        import pycuda.driver as driver
    except (ImportError, OSError) as error:
        raise BuildError(
            f"CUDA device: expected the package pycuda, got {error}; pip install 'relax-tune[cuda]' where CUDA's toolkit and "
            "NVIDIA's driver are installed"
        ) from None
    try:
        driver.init()
    except driver.Error as error:
        raise BuildError(f"CUDA device: expected a driver that starts, got {error}; install NVIDIA's driver") from None
    return driver


class CUDABuffer:
    """Device memory of `nbytes` at `address`."""

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory, self.address, self.nbytes = memory, int(memory), nbytes

    def live(self) -> int:
        if self.memory is None:
            raise MeasureError("CUDA device: expected a live buffer, got one that was freed")
        return self.address


@dataclass(frozen=True, slots=True)
class _Adopted:
    """Memory of another library, which lives as long as `owner`."""

    address: int
    owner: object

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        """Free nothing: the buffer only drops its reference to the owner."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A loaded kernel.

    pointers, scalars: numbers of its parameters
    shared_bytes: dynamic shared memory that a launch requests
    module: Its module, which must not be unloaded before it.
    wide: the kernel compiled for 64-bit integers
    """

    name: str
    function: Any
    module: Any
    pointers: int
    scalars: int
    shared_bytes: int
    group_size: int
    report: KernelReport
    wide: KernelSource | None


class CUDADevice(DeviceClass):
    """The `Device` contract over one NVIDIA GPU and one stream.

    driver: a module with the names of `pycuda.driver` that are used here; compiler: makes a compiler for an architecture;
    recorder: makes a recorder of launches, or None. Tests pass others, which need no GPU.
    """

    kind = "cuda"
    forms = ("cuda", "cuda:NUMBER")
    service = CUDA_KERNELS
    compiles_in_threads = True

    @classmethod
    def open_part(cls, part: str | None) -> CUDADevice | None:
        if part is not None and re.fullmatch(r"\d{1,3}", part, re.ASCII) is None:
            return None
        return cls(int(part or 0))

    @classmethod
    def available(cls) -> Iterator[tuple[str, DeviceInfo | DeviceFailure]]:
        try:
            count = int(load_pycuda().Device.count())
        except BuildError as error:
            yield cls.kind, DeviceFailure(cls.kind, str(error))
            return
        for number in range(count):
            spec = f"{cls.kind}:{number}"
            try:
                device = cls(number)
            except RelaxTuneError as error:
                yield spec, DeviceFailure(spec, str(error))
                continue
            device.close()
            yield spec, device.info

    @classmethod
    def choices(cls) -> str:
        specs = cls.all_of()
        return "" if specs == [cls.kind] else ", ".join(specs)

    @classmethod
    def all_of(cls) -> list[str]:
        try:
            count = int(load_pycuda().Device.count())
        except BuildError:
            return [cls.kind]
        return [f"{cls.kind}:{number}" for number in range(count)] or [cls.kind]

    def __init__(
        self,
        ordinal: int = 0,
        driver: Any = None,
        compiler: Callable[[str], Compiler] = CUDACompiler,
        recorder: Callable[[], Recorder | None] = load_recorder,
    ) -> None:
        real = driver is None
        self._driver = load_pycuda() if real else driver
        self._recorder, self.turn = recorder(), threading.RLock()
        self.dlpack = DLPACK_CUDA, ordinal
        count = self._driver.Device.count()
        if not 0 <= ordinal < count:
            raise MeasureError(f"CUDA: expected device {ordinal}, got {count} of them, numbered from 0")
        self._lost = ""
        try:
            self._device = self._driver.Device(ordinal)
            major, minor = self._device.compute_capability()
            self._compiler = compiler(architecture(major, minor))
            self._context = self._device.retain_primary_context()
            if real:
                # pycuda leaves a context that it releases current for the thread, where others would find a destroyed one
                atexit.register(self._context.detach)
        except self._driver.Error as error:
            raise MeasureError(f"CUDA: device {ordinal} is there but cannot be opened: {error}") from None
        self.info = self._describe()
        limits = dict(self.info.limits)
        self._max_local, self._max_group = limits["max_local_bytes"], limits["max_group_size"]
        self._grid, self._block = ([self._attribute(name) for name in names] for names in (GRID, BLOCK))
        self._modules: dict[tuple[object, ...], tuple[Any, CompiledModule]] = {}
        self._loading = threading.Lock()
        self._states: dict[object, tuple[Any, Callable[[], None]]] = {}
        self._stream, self._pinned = self._call("opening", self._open)

    def _open(self) -> tuple[Any, list[tuple[NDArray[np.uint8], Any]]]:
        driver = self._driver
        pinned = [(driver.pagelocked_empty((PINNED_BYTES,), np.uint8), driver.Event()) for _ in range(2)]
        return driver.Stream(), pinned

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        """Compile kernels; see `Device.compile`. Several threads may compile at once, and load in turn."""
        for kernel in kernels:
            if kernel.language != "cuda":
                raise BuildError(f"CUDA device: expected kernels in cuda, got {kernel.name} in {kernel.language}")
        size = self._compiler.unit
        groups = group_by_flags(kernels).items()
        units = [(flags, group[at : at + size]) for flags, group in groups for at in range(0, len(group), size)]
        with ThreadPoolExecutor(max(1, min(len(units), host.usable_cpus()))) as pool:
            binaries = list(pool.map(self._compiled, units))
        handles: dict[str, Any] = {}
        with self._loading:
            for (flags, group), binary in zip(units, binaries, strict=True):
                module = self._loaded(_key(flags, group), binary)
                for kernel in group:
                    handles[kernel.name] = self._handle(kernel, module, binary)
        return handles

    def _compiled(self, unit: tuple[tuple[str, ...], Sequence[KernelSource]]) -> CompiledModule:
        flags, group = unit
        cached = self._modules.get(_key(flags, group))
        return self._compiler.compile(group, flags) if cached is None else cached[1]

    def _loaded(self, key: tuple[object, ...], binary: CompiledModule) -> Any:
        def load() -> Any:
            while len(self._modules) >= MODULES:  # modules are unloaded here, where their context is current
                del self._modules[next(iter(self._modules))]
            self._modules[key] = self._driver.module_from_buffer(binary.code), binary

        if key not in self._modules:
            self._call("loading a module", load, BuildError)
        return self._modules[key][0]

    def _handle(self, kernel: KernelSource, module: Any, binary: CompiledModule) -> Handle:
        name, report = kernel.name, binary.kernels[kernel.name]
        shared = dynamic_shared_bytes(kernel.source)
        if report.shared_bytes + shared > self._max_local:
            raise BuildError(
                f"CUDA kernel {name}: expected {report.shared_bytes + shared} bytes of shared memory, allowed {self._max_local}"
            )
        attributes = self._driver.function_attribute

        def load() -> Handle:
            function = module.get_function(name)
            if shared:
                # More than 48 KiB need this opt-in (CUDA C++ Programming Guide, shared memory from compute capability
                # 7.0 on).
                function.set_attribute(attributes.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
            most = min(function.get_attribute(attributes.MAX_THREADS_PER_BLOCK), self._max_group)
            return Handle(name, function, module, *_parameters(kernel), shared, most, report, wide_form(kernel))

        return self._call(f"loading kernel {name}", load, BuildError)

    def alloc(self, nbytes: int, lasting: bool = False) -> CUDABuffer:
        if nbytes < 0:
            raise MeasureError(f"memory: expected a size of 0 or more bytes, got {nbytes}")
        what = f"memory: expected {nbytes} bytes"
        # cuMemAlloc refuses a size of 0.
        return self._call(what, lambda: CUDABuffer(self._driver.mem_alloc(max(nbytes, 1)), nbytes), MemoryLack)

    def upload(self, buffer: CUDABuffer, array: NDArray[Any]) -> None:
        check_transfer("CUDA upload", array.nbytes, buffer.nbytes)
        address, data = buffer.live(), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        copy = self._driver.memcpy_htod_async

        def transfer() -> None:
            for k, start in enumerate(range(0, data.nbytes, PINNED_BYTES)):
                (pinned, copied), part = self._pinned[k % 2], data[start : start + PINNED_BYTES]
                # Two pinned buffers take turns: one is filled while the other is copied. From the third part on, a
                # buffer's former copy must have ended before it is filled again.
                if k > 1:
                    copied.synchronize()
                pinned[: part.nbytes] = part
                copy(address + start, pinned[: part.nbytes], self._stream)
                copied.record(self._stream)
            # The next transfer fills the pinned buffers without waiting.
            self._stream.synchronize()

        if data.nbytes:
            self._call("upload", transfer)

    def download(self, buffer: CUDABuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        result = np.empty(shape, dtype)
        check_transfer("CUDA download", result.nbytes, buffer.nbytes)
        address, data = buffer.live(), result.reshape(-1).view(np.uint8)
        copy = self._driver.memcpy_dtoh_async
        starts = range(0, data.nbytes, PINNED_BYTES)

        def fetch(k: int) -> None:
            pinned, copied = self._pinned[k % 2]
            copy(pinned[: len(data[starts[k] : starts[k] + PINNED_BYTES])], address + starts[k], self._stream)
            copied.record(self._stream)

        def transfer() -> None:
            fetch(0)
            for k, start in enumerate(starts):
                if k + 1 < len(starts):
                    fetch(k + 1)
                pinned, copied = self._pinned[k % 2]
                copied.synchronize()
                part = data[start : start + PINNED_BYTES]
                part[:] = pinned[: part.nbytes]

        if data.nbytes:
            self._call("download", transfer)
        return result

    def copy(self, target: CUDABuffer, source: CUDABuffer, nbytes: int) -> None:
        check_transfer("CUDA copy", nbytes, min(target.nbytes, source.nbytes))
        if nbytes:
            into, begin, copy = target.live(), source.live(), self._driver.memcpy_dtod_async
            self._call("copy", lambda: copy(into, begin, nbytes, self._stream))

    def free(self, buffer: CUDABuffer) -> None:
        memory, buffer.memory = buffer.memory, None
        if memory is not None:
            self._call("freeing memory", memory.free)

    def bind(
        self,
        kernel: Handle,
        buffers: Sequence[CUDABuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        addresses = [buffer.live() for buffer in buffers]
        if (len(addresses), len(scalars)) != (kernel.pointers, kernel.scalars):
            raise MeasureError(
                f"CUDA kernel {kernel.name}: {len(addresses)} buffers and {len(scalars)} scalars do not fit it, which takes "
                f"{kernel.pointers} and {kernel.scalars}"
            )
        # Kernels compute in 32-bit integers, which are faster, unless the largest number that they compute, their
        # last scalar, needs more.
        if kernel.wide is not None and scalars[-1] > INT_MOST:
            kernel = self.compile([kernel.wide])[kernel.name]
        self._check_group(kernel, grid, local)
        if 0 in grid:
            return _nothing
        # What PyCUDA's own call does at every launch, packing the arguments, is done once here.
        packed = struct.pack(f"{len(addresses)}P{len(scalars)}q", *addresses, *scalars)
        enqueue, shared, stream = kernel.function._launch_kernel, kernel.shared_bytes, self._stream
        blocks, threads = tuple(int(g) for g in grid), tuple(int(x) for x in local)
        enter, pop, error_kind = self._enter, self._driver.Context.pop, self._driver.Error
        keep = (kernel, *buffers)

        def launch() -> None:
            enter()
            try:
                enqueue(blocks, threads, packed, shared, stream)
            except error_kind as error:
                with suppress(error_kind):
                    pop()
                raise self._failure(f"kernel {kernel.name}: launch of {blocks} by {threads}", error) from None
            pop()

        # The packed arguments hold addresses only, which keep neither the module nor the buffers alive.
        launch.__dict__["keep"] = keep
        return launch

    def _check_group(self, kernel: Handle, grid: Sequence[int], local: Sequence[int]) -> None:
        what = f"CUDA kernel {kernel.name}"
        if not 1 <= len(grid) <= 3 or len(grid) != len(local):
            raise MeasureError(f"{what}: expected a grid of 1 to 3 axes and as many local sizes, got {grid}, {local}")
        threads = 1
        for axis, (extent, size) in enumerate(zip(grid, local)):
            if not 0 <= extent <= self._grid[axis]:
                allowed = f"extents of 0 or more, at most {self._grid[axis]} on axis {axis}"
                raise MeasureError(f"{what}: expected grid {allowed}, got {tuple(grid)}")
            if not 1 <= size <= self._block[axis]:
                raise MeasureError(f"{what}: local size {size} on axis {axis}, allowed 1..{self._block[axis]}")
            threads *= size
        if threads > kernel.group_size:
            raise MeasureError(f"{what}: {threads} threads in a block, allowed {kernel.group_size}")

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[CUDABuffer]) -> Launch | None:
        """Return None: the device has separate memory."""
        return None

    def place(self, buffer: CUDABuffer, array: NDArray[Any] | None) -> bool:
        """Return False: kernels reach only the device's own memory."""
        return False

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None: kernels reach only the device's own memory."""

    def native(self, buffers: Sequence[CUDABuffer]) -> tuple[int, tuple[int, ...]]:
        """Return the stream's handle and addresses in device memory. They belong to the primary context."""
        return int(self._stream.handle), tuple(buffer.live() for buffer in buffers)

    def within(self, what: str, action: Callable[[], T]) -> T:
        """Run a library's action on the stream of `native`, with the device's context current."""
        return self._call(what, action)

    def state_of(self, owner: object, make: Callable[[], T], end: Callable[[T], None]) -> T:
        """Return the object that `owner` has for this device; `make` makes it once, with the context current.

        Closing the device calls `end`.
        """
        entry = self._states.get(owner)
        if entry is None:
            state = self._call("opening a library", make)
            entry = self._states[owner] = state, lambda: end(state)
        return cast(T, entry[0])

    def adopt(self, address: int, nbytes: int, owner: object) -> CUDABuffer:
        """Return a buffer over memory of the primary context, which other libraries use too."""
        return CUDABuffer(_Adopted(address, owner), nbytes)

    def finish(self) -> None:
        """Wait for all streams of the primary context."""
        self._call("waiting for all streams", self._driver.Context.synchronize)

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return a CUDA graph of the launches. None without cuda-bindings, for few launches, or if one cannot be recorded."""
        recorder, stream = self._recorder, int(self._stream.handle)
        if recorder is None or len(launches) < RECORDED:
            return None

        def enqueue() -> None:
            for launch in launches:
                launch()

        try:
            replay = self._call("recording launches", lambda: recorder.record(stream, enqueue))
        except MeasureError:
            if self._lost:
                raise
            return None
        return None if replay is None else lambda: self._call("launching a recording", replay)

    def synchronize(self) -> None:
        self._call("waiting", self._stream.synchronize)

    def close(self) -> None:
        """Wait for all enqueued work, then free all memory."""
        try:
            if not self._lost:
                self.synchronize()
                for _, end in self._states.values():
                    self._call("closing a library", end)
        finally:
            self._states.clear()
            self._modules.clear()
            self._pinned.clear()

    def _call(self, what: str, action: Callable[[], T], kind: type[RelaxTuneError] = MeasureError) -> T:
        """Run an action with the context current."""
        self._enter()
        try:
            return action()
        except (self._driver.Error, GraphError) as error:
            failure = self._failure(what, error)
            raise (failure if self._lost else kind(str(failure))) from None
        finally:
            with suppress(self._driver.Error):  # the context may be lost
                self._driver.Context.pop()

    def _enter(self) -> None:
        """Make the context current. Raises MeasureError if the device is lost."""
        if self._lost:
            raise MeasureError(self._lost)
        try:
            self._context.push()
        except self._driver.Error as error:
            raise self._failure("making its context current", error) from None

    def _failure(self, what: str, error: Exception) -> MeasureError:
        text = f"CUDA device {self.info.name}: {what} failed: {error}"
        if STICKY.search(str(error)):
            self._lost = text = f"{text}; the device is lost to this process"
        return MeasureError(text)

    def _attribute(self, name: str) -> int:
        return int(self._device.get_attribute(getattr(self._driver.device_attribute, name)))

    def _describe(self) -> DeviceInfo:
        major, minor = self._device.compute_capability()
        limits = {key: self._attribute(name) for key, name in LIMITS.items()}
        limits |= {"registers": REGISTERS, "vector_bits": 128, "max_vector_lanes": 4, "l1_bytes": 0, "l3_bytes": 0}
        limits |= {"compute_major": major, "compute_minor": minor}
        if (major, minor) == (9, 0):
            limits["wgmma"] = 1
        fingerprint = {
            "bus": f"{limits['memory_bus_bits']} bits at {limits['memory_clock_khz']} kHz",
            "compiler": self._compiler.version,
            "compute": f"{major}.{minor}",
            "cuda": ".".join(str(x) for x in self._driver.get_version()),
            "device": self._device.name(),
            "driver": str(self._driver.get_driver_version()),
            "kind": "cuda",
            "memory": str(self._device.total_memory()),
            "units": str(limits["workers"]),
        }
        limits = with_quirks("cuda", fingerprint, limits)
        return DeviceInfo(
            "cuda",
            fingerprint["device"],
            tuple(sorted(fingerprint.items())),
            tuple(sorted(limits.items())),
            unit=f"pci:{self._device.pci_bus_id().lower()}",
        )


def _key(flags: tuple[str, ...], group: Sequence[KernelSource]) -> tuple[object, ...]:
    return (flags, *((k.name, k.source) for k in group))


def _parameters(kernel: KernelSource) -> tuple[int, int]:
    """Count the pointers and the other parameters that a kernel's text declares."""
    match = re.search(rf"__global__[^;{{]*?\b{re.escape(kernel.name)}\s*\(([^)]*)\)", kernel.source)
    if match is None:
        raise BuildError(f"CUDA device: expected the text of kernel {kernel.name}, got no such kernel in its source")
    parameters = [p for p in match[1].split(",") if p.strip() not in ("", "void")]
    pointers = sum("*" in p for p in parameters)
    return pointers, len(parameters) - pointers


def _nothing() -> None:
    """Launch an empty grid: do nothing."""
