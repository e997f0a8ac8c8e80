"""clang for WebAssembly."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from relax_tune.errors import BuildError
from relax_tune.runtime.device.c import KERNEL_FLAGS
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, only

PROCESSOR, VECTOR_FLAGS = "wasm32", ("-msimd128",)
COMPILE_FLAGS = ("--target=wasm32-wasi", *VECTOR_FLAGS, *KERNEL_FLAGS, "-w")
THREADS_FLAGS = ("-matomics", "-mbulk-memory", "-Xclang", "-fopenmp")
"""Flags of kernels whose parallel loops run on several threads (`threads_source`)."""
MOST_ARGUMENTS = 64
"""Variables that a parallel loop may share with the code around it."""
PACKAGES = "Debian, Ubuntu: apt-get install clang lld wasi-libc libclang-rt-dev-wasm32"
_SECONDS = 900


class Clang:
    """The clang of this machine, with lld and wasi-libc. Raises BuildError where one is missing.

    version: the first line of what it says of itself
    """

    def __init__(self) -> None:
        found = {name: shutil.which(name) for name in ("clang", "wasm-ld")}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise BuildError(
                f"WebAssembly: wanted clang with lld and wasi-libc, found no {' and no '.join(missing)}; install them ({PACKAGES})"
            )
        self.path = str(found["clang"])
        self.version = (self._run(["--version"], Path("/")).stdout.splitlines() or ["clang"])[0]

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        """Compile or link in a folder. Raises BuildError with its messages."""
        done = self._run(arguments, folder)
        if done.returncode:
            raise BuildError(
                "clang: wanted a module for WebAssembly, found an error; are wasi-libc and compiler-rt for wasm32 installed "
                f"({PACKAGES})?\n{done.stderr[:4000].strip()}"
            )

    def _run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.path, *arguments],
                cwd=folder,
                env=only(COMPILER_VARIABLES) | {"LC_ALL": "C"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"clang: wanted an answer within {_SECONDS} s, found none; is the machine overloaded?"
            ) from None


def threads_source() -> str:
    """Return the C text that runs parallel loops on threads that share the module's memory."""
    text = files(__package__).joinpath("threads.c").read_text()
    numbers = range(MOST_ARGUMENTS + 1)
    kinds = [", ".join(["int *", "int *", *["A"] * n]) for n in numbers]
    values = [", ".join(["n", "n", *(f"a[{k}]" for k in range(n))]) for n in numbers]
    cases = (f"  case {n}: ((void (*)({kinds[n]}))f)({values[n]}); return;" for n in numbers)
    return text.replace("@MOST@", str(MOST_ARGUMENTS)).replace("@CASES@", "\n".join(cases))
