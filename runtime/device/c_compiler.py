"""The system's gcc: translation units compiled to shared libraries, which are cached.

Compiled libraries are in a folder (`binaries.cache_folder`) under a hash of everything that went in: text, flags, compiler, and what
`-march` means to it here.

Tests: `tests/runtime/device/test_sealed_files.py`, `tests/runtime/device/test_sources.py`, `tests/wrong_input/test_targets.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.child_process import find_program
from relax_tune.runtime.device import host
from relax_tune.runtime.device.binaries import (
    cache_folder,
    hashed,
    private_folder,
    seal,
    sealed_content,
    warn_of_damage,
)
from relax_tune.runtime.device.c_launches import ADVANCE, LAUNCHES, REPEAT
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, limited, no_new_privileges, only
from relax_tune.runtime.device.quirks import refusal
from relax_tune.runtime.device.source import group_by_flags, join_sources
from relax_tune.runtime.program.program import KernelSource

# No -ffast-math: it would reorder sums and drop NaN and infinity, so that results would differ from the reference by
# more than rounding.
KERNEL_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
"""Flags that results depend on, wherever kernels are compiled."""
BASE_FLAGS = (*KERNEL_FLAGS, "-std=gnu11", "-shared", "-fPIC")
NATIVE = "-march=native"
PARALLEL_FOR = """void relax_tune_team_run(void (*)(const void *, __INT64_TYPE__, __INT64_TYPE__), const void *, __INT64_TYPE__, int);
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) \\
  ((pays) ? relax_tune_team_run(part, data, count, uneven) : part(data, 0, count))
"""
"""The head of each translation unit: how kernels run loops on the threads of the team."""
# Characters of a translation unit from which it is compiled by -O1: -O3 takes minutes for megabytes of straight-line code.
LARGE_UNIT = 1 << 20
TEAM = Path(__file__).with_name("team.c")
UNIT_KERNELS = 12  # kernels per translation unit: a few units let the compiler use every processor
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
DEVICE_KERNELS = (
    KernelSource("relax_tune_probe", "c", _PROBE),
    KernelSource("relax_tune_copy", "c", _COPY),
    KernelSource("relax_tune_launches", "c", LAUNCHES),
    KernelSource("relax_tune_repeat", "c", REPEAT),
    KernelSource("relax_tune_advance", "c", ADVANCE),
)
"""The functions of the device itself, which also try whether the compiler works."""
Unit = tuple[Sequence[KernelSource], tuple[str, ...]]
"""Kernels of a translation unit, and their flags."""
_COMPILE_SECONDS = 300
ANOTHER = "set CC to a working gcc, or unset it"
# What gcc, its assembler and its linker say of a full disk; on some file systems the linker dies of it.
_NO_SPACE = ("No space left", "Disk quota exceeded", "File too large", "ld terminated with signal 7")


def units_of(kernels: Sequence[KernelSource]) -> list[Unit]:
    """Return the translation units of some kernels."""
    units: list[Unit] = []
    for flags, group in group_by_flags(kernels).items():
        units += [(group[at : at + UNIT_KERNELS], flags) for at in range(0, len(group), UNIT_KERNELS)]
    return units


def team_unit() -> tuple[str, tuple[str, ...]]:
    """Return the text and the flags of the team of threads."""
    return TEAM.read_text(encoding="utf-8"), ("-pthread",)


def build_units(units: Sequence[Unit], library: Callable[[str, tuple[str, ...]], Path]) -> list[Path]:
    """Return the library of each translation unit. Several are compiled at once by `library`, given text and flags."""
    # threads of their own: what they start can gain no privileges
    with ThreadPoolExecutor(max(1, host.usable_cpus()), initializer=no_new_privileges) as pool:
        return list(pool.map(lambda unit: library(join_sources(unit[0]), unit[1]), units))


def copy_own_libraries(cache: Path) -> None:
    """Copy the libraries of the device itself into another cache, so that a process that opens the device with it compiles none.

    Where they cannot be compiled or copied, that process says why.
    """
    functions = [(join_sources(group), flags) for group, flags in units_of(DEVICE_KERNELS)]
    with suppress(BuildError, MeasureError, OSError):
        compiler = Gcc()
        with opened_cache() as own, private_folder(cache / "c") as target:
            for source, flags in (team_unit(), *functions):
                library = compiler.library(source, flags, own)
                shutil.copy2(library, target / library.name)


@contextmanager
def opened_cache() -> Iterator[Path]:
    """Open the folder of compiled libraries.

    Raises:
        MeasureError: It cannot be created or written.
    """
    folder = cache_folder() / "c"
    try:
        with private_folder(folder) as opened:
            yield opened
    except OSError as error:
        raise unwritable(folder, error) from None


@contextmanager
def explained() -> Iterator[None]:
    """Say of a compiler's refusal what may be missing, since the sources of this package are right."""
    try:
        yield
    except BuildError as error:
        reason, _, log = str(error).partition("\n")
        if not log:
            raise
        raise BuildError(
            f"C device: expected a gcc that compiles C with threads, got: {reason} {' '.join(log.split())[:600]}; "
            f"install what it misses (Debian, Ubuntu: apt-get install gcc libc6-dev) or {ANOTHER}"
        ) from None


class Gcc:
    """The C compiler of this machine, for one kind of processor.

    Args:
        march: Its option for the processor.

    Attributes:
        program: Its path.
        version: The line by which it names itself.
        isa: Hash of every target option that `march` stands for here.
        compiled: Libraries that it has compiled; others were cached.

    Raises:
        BuildError: There is no compiler, or it does not know the processor.
    """

    def __init__(self, march: str = NATIVE) -> None:
        self.program = find_compiler()
        self.machine = (march, *(host.vector_flags() if march == NATIVE else ()))
        self.version = (_ask([self.program, "--version"]).splitlines() or [""])[0].strip()
        options = _ask([self.program, march, "-Q", "--help=target"])
        if not self.version or "-march=" not in options:
            raise BuildError(f"C device: expected gcc, but {self.program} does not answer like it; {ANOTHER}")
        self.isa = host.short_hash(options)
        self.compiled: list[str] = []

    def library(self, source: str, flags: Sequence[str], folder: Path) -> Path:
        """Return the shared library of one translation unit, from the cache `folder` when it is there and ours."""
        command = [*BASE_FLAGS, *self.machine, *flags]
        if len(source) > LARGE_UNIT:
            command.append("-O1")
        if "#pragma omp" in source:  # kernels of artifacts that were built before there was a team
            command.append("-fopenmp")
        source = PARALLEL_FOR + source
        # No argument contains NUL, so different commands have different keys.
        target = folder / f"{hashed(('sealed', self.version, self.isa, chr(0).join(command), source))}.so"
        if sealed_content(target) is not None:
            return target
        warn_of_damage(target)
        try:
            with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
                Path(work, "unit.c").write_text(source, encoding="utf-8")
                self.compile_in(work, command)
                seal(Path(work, "unit.so"))
                os.replace(Path(work, "unit.so"), target)  # atomic: another process sees all of it or nothing
        except OSError as error:
            raise unwritable(cache_folder() / "c", error) from None
        self.compiled.append(target.name)
        return target

    def compile_in(self, work: str, command: Sequence[str]) -> None:
        """Compile `unit.c` to `unit.so` in a folder. Raises BuildError; OSError on a full disk."""
        run = [self.program, *command, "unit.c", "-o", "unit.so", "-lm"]
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
                f"{self.program}: expected an answer within {_COMPILE_SECONDS} s, got none; is the machine overloaded?"
            ) from None
        # The compiler reports a full disk by text only. It must not become a record that this candidate cannot be
        # built. `LC_ALL=C` above keeps the text English.
        if done.returncode and any(part in done.stderr for part in _NO_SPACE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.returncode:
            raise BuildError(
                f"{self.program} refused the source ({' '.join(command)}), exit code {done.returncode}:\n"
                f"{done.stderr[:8000].strip() or 'it gave no reason'}"
            )
        if not Path(work, "unit.so").is_file():
            raise BuildError(
                f"C device: expected a library from {self.program}, but it wrote none and gave no error; {ANOTHER}"
            )


def unwritable(folder: Path, error: OSError) -> MeasureError:
    """Return the error of a cache that cannot be written, for which no kernel is at fault."""
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
        "install it (Debian, Ubuntu: apt-get install gcc; Fedora: dnf install gcc), or serve an artifact that was built with --cpu"
    )


def _ask(command: list[str]) -> str:
    # the answer is part of the fingerprint: it must not depend on the language or the width of the terminal
    plain = {k: v for k, v in only(COMPILER_VARIABLES).items() if not k.startswith(("LANG", "LC_"))} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False, env=plain
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"C device: {' '.join(command)} gave no answer: {error}; {ANOTHER}") from None
    if done.returncode:
        raise BuildError(
            f"C device: expected an answer from {' '.join(command)}, got exit code {done.returncode}; {ANOTHER}"
        )
    return done.stdout
