"""clang for WebAssembly.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from relax_tune.errors import BuildError
from relax_tune.runtime.child_process import find_program
from relax_tune.runtime.device.c_compiler import KERNEL_FLAGS
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, only

PROCESSOR, VECTOR_FLAGS = "wasm32", ("-msimd128",)
COMPILE_FLAGS = ("--target=wasm32-wasi", *VECTOR_FLAGS, *KERNEL_FLAGS, "-w")
THREADS_FLAGS = ("-matomics", "-mbulk-memory")
"""Flags of code that runs on several threads (`team.c`)."""
PACKAGES = "Debian, Ubuntu: apt-get install clang lld wasi-libc libclang-rt-dev-wasm32"
_SECONDS = 900


class Clang:
    """The clang of this machine, with lld and wasi-libc. Raises BuildError where one is missing.

    version: the first line of what it says of itself
    """

    def __init__(self) -> None:
        programs = {name: find_program(name) for name in ("clang", "wasm-ld")}
        missing = [name for name, path in programs.items() if path is None]
        if missing:
            raise BuildError(
                f"WebAssembly: expected clang with lld and wasi-libc, got no {' and no '.join(missing)}; install them ({PACKAGES})"
            )
        self.path = str(programs["clang"])
        self.version = (self._run(["--version"], Path("/")).stdout.splitlines() or ["clang"])[0]

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        """Compile or link in a folder. Raises BuildError with its messages."""
        done = self._run(arguments, folder)
        if done.returncode:
            raise BuildError(
                "clang: expected a module for WebAssembly, got an error; are wasi-libc and compiler-rt for wasm32 installed "
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
                f"clang: expected an answer within {_SECONDS} s, got none; is the machine overloaded?"
            ) from None
