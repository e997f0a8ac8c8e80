"""The C device: kernels compiled by the system's gcc, loaded with ctypes, run in this process.

Kernels are parallel inside: their loops run on one team of threads of this process (`team.c`). Compiled libraries are cached in a
folder (`binaries.cache_folder`) under a hash of everything that went in: text, flags, compiler, and what `-march=native` means here.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.child_process import find_program
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch, Turn
from relax_tune.runtime.device.binaries import (
    cache_folder,
    hashed,
    private_folder,
    seal,
    sealed_content,
    warn_of_damage,
)
from relax_tune.runtime.device.c_launches import LAUNCHES, REPEAT, KernelLaunch, call_all, joined, repeated
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, limited, no_new_privileges, only
from relax_tune.runtime.device.device_class import DeviceClass
from relax_tune.runtime.device.memory import Slabs, aligned_bytes, check_transfer, even_runs
from relax_tune.runtime.device.quirks import refusal, refused_option, with_quirks
from relax_tune.runtime.device.service_kernels import C_KERNELS
from relax_tune.runtime.device.source import group_by_flags, join_sources
from relax_tune.runtime.program.program import KernelSource

# No -ffast-math: it would reorder sums and drop NaN and infinity, so that results would differ from the reference by
# more than rounding.
KERNEL_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
"""Flags that results depend on, wherever kernels are compiled."""
BASE_FLAGS = (*KERNEL_FLAGS, "-march=native", "-std=gnu11", "-shared", "-fPIC")
PARALLEL_FOR = """void relax_tune_team_run(void (*)(const void *, __INT64_TYPE__, __INT64_TYPE__), const void *, __INT64_TYPE__, int);
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) \\
  ((pays) ? relax_tune_team_run(part, data, count, uneven) : part(data, 0, count))
"""
"""The head of each translation unit: how kernels run loops on the threads of the team."""
TEAM = Path(__file__).with_name("team.c")
UNIT_KERNELS = 12  # kernels per translation unit: a few units let the compiler use every processor
# Characters of a translation unit from which it is compiled by -O1: -O3 takes minutes for megabytes of straight-line code.
LARGE_UNIT = 1 << 20
_COMPILE_SECONDS = 300
_ANOTHER = "set CC to a working gcc, or unset it"
# What gcc, its assembler and its linker say of a full disk; on some file systems the linker dies of it.
_NO_SPACE = ("No space left", "Disk quota exceeded", "File too large", "ld terminated with signal 7")
MOST_THREADS = 1024
"""Threads of the team at most, as in `team.c`."""
_SHARED_BYTES = 1 << 20
"""Bytes of a copy that all threads take part in."""
_COPY = """#include <stdint.h>
#include <string.h>
struct runs { char* to; const char* from; int64_t n0, s0, n1, s1, run, parts; };
static void copy_parts(const void* data, int64_t first, int64_t end) {
  const struct runs r = *(const struct runs*)data;
  for (int64_t at = first; at < end; ++at) {
    const int64_t p = at % r.parts, j = at / r.parts % r.n1, i = at / r.parts / r.n1;
    const int64_t low = r.run * p / r.parts, high = r.run * (p + 1) / r.parts;
    memcpy(r.to + (i * r.n1 + j) * r.run + low, r.from + i * r.s0 + j * r.s1 + low, high - low);
  }
}
void relax_tune_copy(char* to, const char* from, int64_t n0, int64_t s0, int64_t n1, int64_t s1, int64_t run) {
  const struct runs r = {to, from, n0, s0, n1, s1, run, n0 * n1 < 64 ? 16 : 1};
  RT_PARALLEL_FOR(copy_parts, &r, n0 * n1 * r.parts, 0, 1);
}
"""
_PROBE = "#include <math.h>\nvoid relax_tune_probe(float* x) { *x = expf(*x); }\n"


class CBuffer:
    """Host memory of a C device.

    array: byte view, 64-byte aligned
    address: its first byte
    pointer: argument of launches, which `CDevice.place` may redirect
    placed: byte view of the array they use instead of this memory, if any
    """

    __slots__ = ("address", "array", "nbytes", "placed", "pointer")

    def __init__(self, nbytes: int, array: NDArray[np.uint8]) -> None:
        self.array: NDArray[np.uint8] | None = array
        self.address = int(self.array.__array_interface__["data"][0])
        self.nbytes = nbytes
        self.placed: NDArray[np.uint8] | None = None
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
    def choices(cls) -> str:
        return f"c ({host.cpu_model()})"

    def __init__(self, threads: int | None = None) -> None:
        """Open the device.

        Args:
            threads: Threads of its kernels; None for as many as `host.worker_threads` permits.
        """
        emulated = host.emulator()
        if emulated is not None:
            raise BuildError(
                f"C device: expected a real processor, whose times count, got {emulated}; compile a C export for it instead"
            )
        self._compiler = find_compiler()
        self._version, self._isa = _identity(self._compiler)
        workers = self._start_team(host.worker_threads() if threads is None else threads)
        fingerprint = {
            "compiler": self._version,
            "cpu": host.cpu_model(),
            "isa": self._isa,
            "kind": "c",
            "threads": str(workers),
        }
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
        self._try_compiler()

    def _start_team(self, threads: int) -> int:
        """Start the team of threads, once in a process, and return how many threads this device's loops have."""
        if CDevice._team is None:
            with self._opened_cache() as folder, self._explained():
                path = self._build(TEAM.read_text(encoding="utf-8"), ("-pthread",), folder)
                try:
                    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # kernels call it by name
                except OSError as error:
                    path.unlink(missing_ok=True)
                    raise self._not_loaded(error) from None
            # One team per process and not per device: two teams would have more threads than processors.
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

    def _not_loaded(self, error: OSError) -> BuildError:
        return BuildError(
            f"C device: expected a library that can be loaded from {self._compiler}, got: {error}; {_ANOTHER}"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of a compiler's refusal what may be missing, since the sources of this module are right."""
        try:
            yield
        except BuildError as error:
            reason, _, log = str(error).partition("\n")
            if not log:
                raise
            raise BuildError(
                f"C device: expected a gcc that compiles C with threads, got: {reason} {' '.join(log.split())[:600]}; "
                f"install what it misses (Debian, Ubuntu: apt-get install gcc libc6-dev) or {_ANOTHER}"
            ) from None

    def _try_compiler(self) -> None:
        """Try the compiler, once per cache, so that a missing part is reported before any kernel is compiled."""
        sources = {
            "relax_tune_probe": _PROBE, "relax_tune_copy": _COPY, "relax_tune_launches": LAUNCHES, "relax_tune_repeat": REPEAT,
        }  # fmt: skip
        with self._explained():
            own = self.compile([KernelSource(name, "c", text) for name, text in sources.items()])
        self._copy, self._launch, self._repeat = (own[f"relax_tune_{name}"] for name in ("copy", "launches", "repeat"))

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
        units: list[tuple[list[KernelSource], tuple[str, ...]]] = []
        for flags, group in group_by_flags(kernels).items():
            units += [(group[at : at + UNIT_KERNELS], flags) for at in range(0, len(group), UNIT_KERNELS)]
        with self._opened_cache() as folder:
            # threads of their own: what they start can gain no privileges
            with ThreadPoolExecutor(max(1, host.usable_cpus()), initializer=no_new_privileges) as pool:
                paths = list(pool.map(lambda unit: self._build(join_sources(unit[0]), unit[1], folder), units))
            libraries = [self._load(path, group) for path, (group, _) in zip(paths, units)]
        self._libraries += libraries
        handles: dict[str, Any] = {}
        for library, (group, _) in zip(libraries, units):
            for kernel in group:
                try:
                    function = getattr(library, kernel.name)
                except AttributeError:
                    raise BuildError(f"C device: the source of kernel {kernel.name} defines no such function") from None
                # ctypes assumes `int` otherwise and reads a register that a void function leaves undefined.
                function.restype = None
                handles[kernel.name] = function
        return handles

    @contextmanager
    def _opened_cache(self) -> Iterator[Path]:
        """Open the folder of compiled libraries. Raises MeasureError if it cannot be created."""
        folder = cache_folder() / "c"
        try:
            with private_folder(folder) as opened:
                yield opened
        except OSError as error:
            raise _unwritable(folder, error) from None

    def _load(self, path: Path, group: Sequence[KernelSource]) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # a damaged file of the cache: compile it again
        try:
            path.unlink(missing_ok=True)
            self._build(join_sources(group), group[0].flags, path.parent)
            return ctypes.CDLL(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._not_loaded(error) from None

    def _build(self, source: str, flags: tuple[str, ...], folder: Path) -> Path:
        """Return the shared library of one translation unit, from the cache `folder` when it is there and ours."""
        command = [*BASE_FLAGS, *host.vector_flags(), *flags]
        if len(source) > LARGE_UNIT:
            command.append("-O1")
        if "#pragma omp" in source:  # kernels of artifacts that were built before there was a team
            command.append("-fopenmp")
        source = PARALLEL_FOR + source
        # No argument contains NUL, so different commands have different keys.
        target = folder / f"{hashed(('sealed', self._version, self._isa, chr(0).join(command), source))}.so"
        if sealed_content(target) is not None:
            return target
        warn_of_damage(target)
        try:
            with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
                Path(work, "unit.c").write_text(source, encoding="utf-8")
                self._compile_in(work, command)
                seal(Path(work, "unit.so"))
                os.replace(Path(work, "unit.so"), target)  # atomic: another process sees all of it or nothing
        except OSError as error:
            raise _unwritable(cache_folder() / "c", error) from None
        return target

    def _compile_in(self, work: str, command: Sequence[str]) -> None:
        """Compile `unit.c` to `unit.so` in a folder. Raises BuildError; OSError on a full disk."""
        run = [self._compiler, *command, "unit.c", "-o", "unit.so", "-lm"]
        try:
            done = subprocess.run(
                limited(run, host.memory_bytes()),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPILE_SECONDS,
                check=False,
                cwd=work,
                env=only(COMPILER_VARIABLES) | {"LC_ALL": "C", "TMPDIR": "."},  # its own files go where its output goes
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{self._compiler}: expected an answer within {_COMPILE_SECONDS} s, got none; is the machine overloaded?"
            ) from None
        # The compiler reports a full disk by text only. It must not become a record that this candidate cannot be
        # built. `LC_ALL=C` above keeps the text English.
        if done.returncode and any(part in done.stderr for part in _NO_SPACE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.returncode:
            raise BuildError(
                f"{self._compiler} refused the source ({' '.join(command)}), exit code {done.returncode}:\n"
                f"{done.stderr[:8000].strip() or 'it gave no reason'}"
            )
        if not Path(work, "unit.so").is_file():
            raise BuildError(
                f"C device: expected a library from {self._compiler}, but it wrote none and gave no error; {_ANOTHER}"
            )

    def alloc(self, nbytes: int, lasting: bool = False) -> CBuffer:
        return CBuffer(nbytes, self._slabs.take(nbytes) if lasting else aligned_bytes(nbytes))

    def upload(self, buffer: CBuffer, array: NDArray[Any]) -> None:
        memory = buffer.live() if buffer.placed is None else buffer.placed
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
        own = [(buffer, buffer.live()[: buffer.nbytes]) for buffer in buffers]
        return lambda: function([view if buffer.placed is None else buffer.placed for buffer, view in own])

    def place(self, buffer: CBuffer, array: NDArray[Any] | None) -> bool:
        buffer.placed = None if array is None else array.reshape(-1).view(np.uint8)
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


def _unwritable(folder: Path, error: OSError) -> MeasureError:
    return MeasureError(
        f"C device: expected to write compiled kernels to {folder}, got: {error.strerror or error}; "
        "point RELAX_TUNE_CACHE at a writable folder with space (TMPDIR while tuning)"
    )


def find_compiler() -> str:
    """Return the C compiler: `$CC`, else gcc, else cc. Raises BuildError when there is none, or a quirk refuses `$CC`."""
    chosen = os.environ.get("CC")
    others: list[tuple[str, str, str]] = []
    for name in (chosen,) if chosen else ("gcc", "cc"):
        path = find_program(name)
        if path is None:
            continue
        asked = {"compiler": _ask([path, "--version"])}
        refused = refusal("c", asked)
        if refused is None:
            return path
        others.append((refused.matched(asked), refused.symptom, path))
    if chosen:
        missing = "no such program (it must be a name on PATH or an absolute path, without options)"
        got = others[0][0] if others else missing
        why = f" ({others[0][1]})" if others else ""
        raise BuildError(f"C device: expected gcc, got {got} in CC={chosen}{why}; set CC=gcc or unset it")
    got = f"only {others[0][0]} ({others[0][2]}: {others[0][1]})" if others else "no gcc or cc"
    raise BuildError(
        f"C device: expected gcc, got {got} on PATH; "
        "install it (Debian, Ubuntu: apt-get install gcc; Fedora: dnf install gcc)"
    )


def _ask(command: list[str]) -> str:
    # the answer is part of the fingerprint: it must not depend on the language or the width of the terminal
    plain = {k: v for k, v in only(COMPILER_VARIABLES).items() if not k.startswith(("LANG", "LC_"))} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False, env=plain
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"C device: {' '.join(command)} gave no answer: {error}; {_ANOTHER}") from None
    if done.returncode:
        raise BuildError(
            f"C device: expected an answer from {' '.join(command)}, got exit code {done.returncode}; {_ANOTHER}"
        )
    return done.stdout


def _identity(compiler: str) -> tuple[str, str]:
    """Return (version line, hash of every target option that -march=native resolves to here)."""
    version = (_ask([compiler, "--version"]).splitlines() or [""])[0].strip()
    options = _ask([compiler, "-march=native", "-Q", "--help=target"])
    if not version or "-march=" not in options:
        raise BuildError(f"C device: expected gcc, but {compiler} does not answer like it; {_ANOTHER}")
    return version, host.short_hash(options)
