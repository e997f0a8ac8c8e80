"""Emulation of `pycuda.driver` and of the CUDA compiler on the processor, for tests without a GPU.

It has the functions that `runtime/device/cuda.py` uses, over host memory. As with the driver, enqueued operations are executed when the
host waits, every call needs a current context, and a kernel that writes out of bounds, or a barrier that not all threads reach, is an
error after which all calls fail. Kernels have the same text, compiled as C++ with `emulation.h`.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.print.c.prelude import SCALARS
from relax_tune.ir.core.dtype import dtype
from relax_tune.runtime.device.base import Launch
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.device.cuda_compiler import CompiledModule, KernelReport
from relax_tune.runtime.device.source import NARROW, join_sources
from relax_tune.runtime.program.program import KernelSource

HEADER = Path(__file__).with_name("emulation.h")
FLAGS = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
# an index beyond a kernel's local array ends the process, as do a vector that is not aligned to its size, and
# integers that overflow where C++ leaves that undefined
FLAGS += [
    "-fsanitize=bounds,alignment,signed-integer-overflow,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
]
GUARD = 256
# The properties of the emulated GPU: a small one with the limits of sm_80.
ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 4, "WARP_SIZE": 32, "MAX_THREADS_PER_BLOCK": 1024, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 163 << 10,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10, "MAX_REGISTERS_PER_MULTIPROCESSOR": 64 << 10,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32, "L2_CACHE_SIZE": 4 << 20,
    "CLOCK_RATE": 1_000_000, "MEMORY_CLOCK_RATE": 1_000_000, "GLOBAL_MEMORY_BUS_WIDTH": 256,
    "MAX_GRID_DIM_X": 2**31 - 1, "MAX_GRID_DIM_Y": 65535, "MAX_GRID_DIM_Z": 65535,
    "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024, "MAX_BLOCK_DIM_Z": 64,
}  # fmt: skip


class Error(Exception):
    """An error of the driver."""


class Names:
    """A namespace in which every attribute is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class EmulatedCompiler:
    """g++ in place of NVRTC. folder: for the libraries, which stand for machine code."""

    version, unit = "emulated", 100

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, kernels: Sequence[KernelSource], flags: Sequence[str] = ()) -> CompiledModule:
        source = join_sources(kernels).replace("extern __shared__", "extern")
        waits = (
            "true"
            if any(x in source for x in ("__syncthreads", "__shfl", "rt_matrices", "rt_copy<", "rt_begin_products"))
            else "false"
        )
        narrow = {k.name: "true" if NARROW in k.source else "false" for k in kernels}
        entries = "".join(f"\nRT_EMULATED({k.name}, {waits}, {narrow[k.name]})" for k in kernels)
        text = f'#include "{HEADER}"\n{source}{entries}\n'
        path = self.folder / f"{hashlib.blake2b(repr((text, flags)).encode(), digest_size=12).hexdigest()}.so"
        if not path.exists():
            code, new = (path.with_suffix(f".{threading.get_ident()}{end}") for end in (".cpp", ".new"))
            code.write_text(text)
            compilation = subprocess.run(
                ["g++", *FLAGS, *flags, str(code), "-o", str(new)], capture_output=True, text=True
            )
            if compilation.returncode:
                raise BuildError(
                    f"the emulation refused kernels {', '.join(k.name for k in kernels)}:\n{compilation.stderr[:4000]}"
                )
            new.rename(path)  # several threads may compile
        return CompiledModule(
            str(path).encode(), {k.name: KernelReport(32, _shared_bytes(k.source), 0, 0, 0) for k in kernels}
        )


def _shared_bytes(source: str) -> int:
    sizes = {text: dtype(short).bytes for short, text in SCALARS.items()}
    arrays = re.findall(r"__shared__ (?:__align__\(\d+\) )?([a-z0-9 ]+) \w+\[(\d+)\]", source)
    return sum(sizes[kind] * int(count) for kind, count in arrays)


class Allocation:
    """Memory with a margin of known bytes on both sides, filled with NaN at first."""

    def __init__(self, driver: EmulatedDriver, nbytes: int) -> None:
        if nbytes > 2**40:
            raise driver.MemoryError("cuMemAlloc failed: out of memory")
        raw = np.full(nbytes + 3 * GUARD, 0xFF, np.uint8)
        start = GUARD + -int(raw.ctypes.data) % GUARD
        self.all, self.bytes = raw, raw[start : start + nbytes]
        self.margins = raw[:start], raw[start + nbytes :]
        for margin in self.margins:
            margin[:] = 0xA5
        self.driver = driver
        driver.allocations[int(self)] = self

    def __int__(self) -> int:
        return int(self.bytes.ctypes.data) if len(self.bytes) else int(self.all.ctypes.data)

    def intact(self) -> bool:
        return all((margin == 0xA5).all() for margin in self.margins)

    def free(self) -> None:
        self.driver.check()
        self.driver.run()
        del self.driver.allocations[int(self)]


class EmulatedDriver:
    """One emulated GPU.

    Attributes:
        backwards: Whether threads and blocks run in descending order.
    """

    def __init__(self, backwards: bool = False) -> None:
        self.Error = Error
        self.LogicError, self.LaunchError, self.MemoryError = (
            type(name, (Error,), {}) for name in ("LogicError", "LaunchError", "MemoryError")
        )
        self.backwards = backwards
        self.allocations: dict[int, Allocation] = {}
        self.queue: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.current, self.deepest, self.broken = threading.local(), 0, ""
        self.device_attribute, self.function_attribute = Names(), Names()
        driver = self

        class Context:
            def push(self) -> None:
                driver.current.depth = driver.depth + 1
                driver.deepest = max(driver.deepest, driver.depth)

            @staticmethod
            def pop() -> None:
                driver.check()
                driver.current.depth = driver.depth - 1

            @staticmethod
            def synchronize() -> None:
                driver.check()
                driver.run()

            def detach(self) -> None:
                """It ends with the process."""

        class Device:
            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            @staticmethod
            def count() -> int:
                return 1

            def name(self) -> str:
                return "emulated"

            def pci_bus_id(self) -> str:
                return "0000:0A:00.0"

            def compute_capability(self) -> tuple[int, int]:
                return 8, 0

            def total_memory(self) -> int:
                return 2**40

            def get_attribute(self, name: str) -> int:
                return ATTRIBUTES[name]

            def retain_primary_context(self) -> Context:
                return Context()

        class Stream:
            handle = 0x57

            def __init__(self) -> None:
                driver.check()

            def synchronize(self) -> None:
                driver.check()
                driver.run()

        class Event:
            def __init__(self) -> None:
                self.left = 0

            def record(self, stream: Stream) -> None:
                driver.check()

            def synchronize(self) -> None:
                driver.check()
                driver.run()

        self.Context, self.Device, self.Stream, self.Event = Context, Device, Stream, Event

    @property
    def depth(self) -> int:
        """Of the stack of contexts, which every thread has for itself."""
        return int(getattr(self.current, "depth", 0))

    def get_version(self) -> tuple[int, int, int]:
        return 13, 0, 0

    def get_driver_version(self) -> int:
        return 13000

    def check(self) -> None:
        """Refuse a call without a current context, or after the context broke."""
        if self.broken:
            raise self.LaunchError(self.broken)
        if self.depth < 1:
            raise self.LogicError("failed: invalid device context")

    def enqueue(self, action: Callable[[], None]) -> None:
        (self.queue if self.recording is None else self.recording).append(action)

    def record(self, stream: int, enqueue: Callable[[], None]) -> Launch | None:
        """As `cuda_graphs.Graphs`."""
        self.check()
        self.recording = []
        try:
            enqueue()
        finally:
            launches, self.recording = self.recording, None
        return lambda: self.queue.extend(launches)

    def run(self) -> None:
        """Execute what was enqueued."""
        if self.recording is not None:
            raise self.LogicError("cuStreamSynchronize failed: operation not permitted when stream is capturing")
        queue, self.queue = self.queue, []
        for action in queue:
            action()

    def fail(self, text: str) -> None:
        self.broken = text
        raise self.LaunchError(text)

    def pagelocked_empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        self.check()
        return np.empty(shape, dtype)

    def mem_alloc(self, nbytes: int) -> Allocation:
        self.check()
        return Allocation(self, nbytes)

    def memcpy_htod_async(self, address: int, data: NDArray[np.uint8], stream: Any) -> None:
        self.check()
        self.enqueue(lambda: ctypes.memmove(address, data.ctypes.data, data.nbytes) and None)

    def memcpy_dtoh_async(self, data: NDArray[np.uint8], address: int, stream: Any) -> None:
        self.check()
        self.enqueue(lambda: ctypes.memmove(data.ctypes.data, address, data.nbytes) and None)

    def memcpy_dtod_async(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.check()
        self.enqueue(lambda: ctypes.memmove(target, source, nbytes) and None)

    def module_from_buffer(self, code: bytes) -> Any:
        self.check()
        library = ctypes.CDLL(code.decode())
        return SimpleNamespace(get_function=lambda name: Function(self, library, name))


class Function:
    """A kernel of a library."""

    def __init__(self, driver: EmulatedDriver, library: Any, name: str) -> None:
        self.driver = driver
        try:
            self.run = getattr(library, f"rt_run_{name}")
        except AttributeError:
            raise driver.LogicError("cuModuleGetFunction failed: named symbol not found") from None
        self.run.restype, self.asked = ctypes.c_char_p, 0

    def set_attribute(self, name: str, value: int) -> None:
        assert name == "MAX_DYNAMIC_SHARED_SIZE_BYTES"
        self.asked = value

    def get_attribute(self, name: str) -> int:
        assert name == "MAX_THREADS_PER_BLOCK"
        return 1024

    def _launch_kernel(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: bytes, shared: int, stream: Any
    ) -> None:
        driver = self.driver
        driver.check()
        if shared > max(self.asked, 48 << 10):
            raise driver.LogicError("cuLaunchKernel failed: invalid argument")
        three = [(ctypes.c_uint * 3)(*x, *(1 for _ in range(3 - len(x)))) for x in (grid, block)]

        def action() -> None:
            failure = self.run(arguments, *three, int(driver.backwards))
            if failure is not None:
                driver.fail(f"unspecified launch failure: {failure.decode()}")
            if not all(a.intact() for a in driver.allocations.values()):
                driver.fail("an illegal memory access was encountered: a kernel wrote out of bounds")

        driver.enqueue(action)


def emulated(folder: Path, backwards: bool = False) -> CUDADevice:
    """The device over an emulated GPU."""
    driver = EmulatedDriver(backwards)
    return CUDADevice(0, driver, lambda architecture: EmulatedCompiler(folder), lambda: driver)
