"""Devices that notice what a kernel does wrong with memory, and programs changed so that there is more to notice.

`SanitizedDevice` compiles for AddressSanitizer and UndefinedBehaviorSanitizer; every buffer is a block of exactly its size on
the heap that the sanitizer watches (its library must be preloaded). `RecordingDevice` has every load and store of a kernel
checked by `access_recorder.c`: bounds, bytes nothing has stored, and races between iterations of parallel loops.

What memory holds before anything is stored differs: bytes 0xFF (no number) and 0x3C (a small number) in buffers, 0xFE and 0 in
local variables. So when both devices give the same bits, no output depends on what was in memory before.

`SimulatedDevice` is oclgrind with buffers of exactly their size, which it then checks each access against; what memory and
private variables hold before is one of two things again.

Masked loads and stores of AVX-512 are builtins no sanitizer sees: kernels are compiled for the oldest machine, where they are
loops. The text is the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.device.base import Launch
from relax_tune.runtime.device.c import CDevice, Pointer
from relax_tune.runtime.device.opencl import OpenCLBuffer, OpenCLDevice
from relax_tune.runtime.program.program import KernelSource, Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode

RECORDER = Path(__file__).with_name("access_recorder.c")
COMMON = [
    "-Og",
    "-g1",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]
_HOST = "relax_tune_blas"  # the glue of a library, which is no kernel
_LANES = 8  # of the device the simulator stands for; its own is 1


def gcc(*arguments: str) -> None:
    """The compiler, without the sanitizer's library that is preloaded here."""
    plain = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(["gcc", *arguments], check=True, env=plain)


class Block:
    """Heap memory of exactly `nbytes`, looking like a C device's buffer."""

    def __init__(self, libc: Any, nbytes: int, poison: int) -> None:
        held = ctypes.c_void_p()
        if libc.posix_memalign(ctypes.byref(held), ctypes.c_size_t(64), ctypes.c_size_t(nbytes)):
            raise MemoryError(nbytes)
        assert held.value is not None
        self.address, self.nbytes = int(held.value), nbytes
        self.array: NDArray[np.uint8] | None = np.frombuffer(
            (ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8
        )
        self.array[:] = poison
        self.pointer = Pointer(self.address, self.array)
        self.placed: NDArray[np.uint8] | None = None

    def live(self) -> NDArray[np.uint8]:
        assert self.array is not None, "a buffer that was freed is used"
        return self.array


class WatchedDevice(CDevice):
    """A C device with exact allocations and other compiler flags. folder: where compiled kernels are put."""

    poison = 0xFF
    flags: tuple[str, ...] = ()
    link: tuple[str, ...] = ()

    def __init__(self, folder: Path, mutate: Callable[[str], str] = lambda text: text) -> None:
        self.folder, self.mutate = folder, mutate
        self._libc = ctypes.CDLL(None)
        self._started = False
        super().__init__()
        self._started = True

    def _build(self, source: str, flags: tuple[str, ...], folder: Path) -> Path:
        if not self._started or _HOST in source:
            return super()._build(source, flags, folder)
        text = self.prepared(self.mutate(source))
        digest = hashlib.blake2b("\0".join([text, *self.flags]).encode(), digest_size=10).hexdigest()
        target = self.folder / f"{digest}.so"
        if not target.exists():
            code, made = target.with_suffix(".c"), target.with_suffix(".o")
            code.write_text(text)
            gcc(*COMMON, *self.flags, "-c", str(code), "-o", str(made))
            gcc("-shared", *self.link, str(made), "-o", str(target), "-lm")
        return target

    def prepared(self, source: str) -> str:
        return source

    def alloc(self, nbytes: int, lasting: bool = False) -> Any:
        return Block(self._libc, nbytes, self.poison)

    def free(self, buffer: Any) -> None:
        buffer.array = None
        self._libc.free(ctypes.c_void_p(buffer.address))

    def place(self, buffer: Any, array: NDArray[Any] | None) -> bool:
        return False  # nobody watches memory that comes from elsewhere

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None, for the same reason."""


class SanitizedDevice(WatchedDevice):
    """AddressSanitizer and UndefinedBehaviorSanitizer; the first finding ends the process."""

    flags = (
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,object-size,pointer-overflow",  # what they find the other one does, and they take long to compile
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
        "-ftrivial-auto-var-init=pattern",
    )
    link = ("-fsanitize=address,undefined",)


class RecordingDevice(WatchedDevice):
    """Every access is checked; `complaints()` says what was found since it was last asked."""

    poison = 0x3C
    flags = ("-fsanitize=thread", "-fno-tree-loop-distribute-patterns", "-ftrivial-auto-var-init=zero")

    def __init__(self, folder: Path, mutate: Callable[[str], str] = lambda text: text) -> None:
        super().__init__(folder, mutate)
        library = folder / "recorder.so"
        if not library.exists():
            gcc("-O2", "-shared", "-fPIC", str(RECORDER), "-o", str(library))
        self._recorder = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._recorder.rec_report.restype = ctypes.c_char_p
        self._names: list[bytes] = []
        self._made = 0

    def prepared(self, source: str) -> str:
        return recorded_loops(source)

    def alloc(self, nbytes: int, lasting: bool = False) -> Any:
        buffer = super().alloc(nbytes)
        self._recorder.rec_register(ctypes.c_void_p(buffer.address), ctypes.c_uint64(nbytes), self._made)
        self._made += 1
        return buffer

    def free(self, buffer: Any) -> None:
        self._recorder.rec_forget(ctypes.c_void_p(buffer.address))
        super().free(buffer)

    def upload(self, buffer: Any, array: NDArray[Any]) -> None:
        super().upload(buffer, array)
        self._recorder.rec_stored(ctypes.c_void_p(buffer.address), ctypes.c_uint64(array.nbytes))

    def download(self, buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = math.prod(shape) * dtype.itemsize
        self._recorder.rec_wanted(ctypes.c_void_p(buffer.address), ctypes.c_uint64(nbytes))
        return super().download(buffer, dtype, shape)

    def bind(
        self, kernel: Any, buffers: Sequence[Any], scalars: Sequence[int], grid: Sequence[int], local: Sequence[int]
    ) -> Launch:
        launch = super().bind(kernel, buffers, scalars, grid, local)
        self._names.append(kernel.__name__.encode())
        name = ctypes.c_char_p(self._names[-1])

        def recorded() -> None:
            self._recorder.rec_launch(name)
            launch()

        return recorded

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[Any]) -> Launch:
        launch = super().bind_host(function, buffers)
        *sources, target = [(ctypes.c_void_p(b.address), ctypes.c_uint64(b.nbytes)) for b in buffers]

        def recorded() -> None:
            self._recorder.rec_launch(b"a library")
            for source in sources:
                self._recorder.rec_wanted(*source)
            launch()
            self._recorder.rec_stored(*target)

        return recorded

    def complaints(self) -> str:
        count = ctypes.c_int()
        text = self._recorder.rec_report(ctypes.byref(count))
        return f"{count.value} findings\n{text.decode()}" if count.value else ""


class SimulatedDevice(OpenCLDevice):
    """The OpenCL simulator. poison: 0 or 1, what memory holds before anything is stored; None leaves that to the simulator, which
    then can tell what nothing has stored."""

    def __init__(self, poison: int | None = None, mutate: Callable[[str], str] = lambda text: text) -> None:
        super().__init__("oclgrind")
        limits = dict(self.info.limits) | {"max_vector_lanes": _LANES, "vector_bits": 32 * _LANES}
        self.info = replace(self.info, limits=tuple(sorted(limits.items())))
        self.poison, self.mutate = poison, mutate
        self._compiled: dict[str, Any] = {}

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        new = [k for k in kernels if k.source not in self._compiled]
        made = super().compile([replace(k, source=self.prepared(k.source)) for k in new]) if new else {}
        self._compiled.update({k.source: made[k.name] for k in new})
        return {k.name: self._compiled[k.source] for k in kernels}

    def prepared(self, source: str) -> str:
        text = self.mutate(source)
        return text if self.poison is None else filled_privates(text, self.poison)

    def alloc(self, nbytes: int, lasting: bool = False) -> Any:
        flags, size = self._cl.mem_flags, max(nbytes, 1)
        if self.poison is None:
            return OpenCLBuffer(self._cl.Buffer(self._context, flags.READ_WRITE, size=size), None, nbytes)
        held = np.full(size, (0xFF, 0x3C)[self.poison], np.uint8)
        memory = self._cl.Buffer(self._context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=held)
        return OpenCLBuffer(memory, None, nbytes)


def filled_privates(source: str, poison: int) -> str:
    """The text with private variables given a value where they are declared: no number and 101, or 7."""
    out = []
    for line in source.split("\n"):
        out.append(line)
        found = _DECLARED.match(line)
        if not found:
            continue
        name, size = found["name"], found["size"]
        whole = found["type"] in ("int", "long", "uchar", "char") or found["type"].startswith(("i", "u"))
        value = "7" if poison else "101" if whole else "NAN"
        if size:
            out.append(f"for (int rt_fill = 0; rt_fill < {size}; rt_fill++) {name}[rt_fill] = {value};")
        else:
            out.append(f"{name} = ({found['type']})({value});")
    return "\n".join(out)


_TYPES = r"float|double|int|i64|long|signed char|unsigned char|char|uchar|half|_Float16|[a-z]+\d+x\d+"
_DECLARED = re.compile(rf"\s+(?P<type>{_TYPES}) (?P<name>\w+)(?:\[(?P<size>\d+)\])?(?: __attribute__.*)?;$")


RECORDED = """extern void rec_begin(void), rec_step(void), rec_end(void);
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) do { \\
  rec_begin(); \\
  for (__INT64_TYPE__ rt_step = 0; rt_step < (count); rt_step++) { rec_step(); part(data, rt_step, rt_step + 1); } \\
  rec_end(); } while (0)
"""
_SHARED = re.compile(r"^ *const struct rt_data_\w+ rt_data = \{(.*)\};$")


def recorded_loops(source: str) -> str:
    """The text with its parallel loops run in order, each iteration announced to the recorder.

    A local variable that is declared around a parallel loop and used in it would be shared by the threads; the recorder does not
    watch those, so it is an error here.
    """
    declared: set[str] = set()
    for line in source.split("\n"):
        if not line.startswith(" "):
            declared = set()  # a function ends or begins
        elif found := _DECLARED.match(line):
            declared.add(found["name"])
        elif names := _SHARED.match(line):
            shared = declared.intersection(names[1].split(", "))
            assert not shared, f"threads share the local variables {sorted(shared)}"
    return RECORDED + source


def _with_slots(program: Program, wanted: Sequence[tuple[Opcode, int, int]]) -> tuple[Program, list[int]]:
    first = len(program.scalars) // WIDTH
    code = [number for op, a, b in wanted for number in (int(op), a, b, 0)]
    return replace(program, scalars=(*program.scalars, *code)), list(range(first, first + len(wanted)))


def unshared(program: Program) -> Program:
    """Every temporary in memory of its own, of exactly its size."""
    storages: list[int] = []
    buffers = []
    for spec in program.buffers:
        if spec.storage is None:
            buffers.append(spec)
            continue
        program, (size,) = _with_slots(program, [(Opcode.CONST, np.dtype(spec.dtype).itemsize, 0)])
        for slot in spec.shape:
            program, (size,) = _with_slots(program, [(Opcode.MUL, size, slot)])
        buffers.append(replace(spec, storage=len(storages)))
        storages.append(size)
    return replace(program, buffers=tuple(buffers), storages=tuple(storages))


def forced(program: Program, number: int) -> Program:
    """Every call dispatches its variant `number` (counted round where it has fewer), at any shape."""
    calls = []
    for call in program.calls:
        program, (choice,) = _with_slots(program, [(Opcode.CONST, number % len(call.variants), 0)])
        calls.append(replace(call, choice=choice))
    return replace(program, calls=tuple(calls))
