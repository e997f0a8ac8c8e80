"""CUDA source to machine code, through NVRTC (extra `cuda-compiler`). Neither a driver nor a GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from relax_tune.errors import BuildError, UserError
from relax_tune.runtime.device.binaries import Binaries, cache_folder, hashed
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.program.program import KernelSource

# -v has the assembler report; 177 is what is declared and never used, as prelude functions may be.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--diag-suppress=177")
INSTALL = "pip install 'relax-tune[cuda-compiler]'"

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The assembler's report on a kernel.

    registers: per thread; shared_bytes: statically declared shared memory; the other fields: bytes per thread.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Machine code of one architecture, and a report for each of its kernels."""

    code: bytes
    kernels: Mapping[str, KernelReport]


def load_nvrtc() -> Any:
    """Return the module cuda.bindings.nvrtc with a loaded library. Raises UserError naming the extra to install."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())[:300]
        raise UserError(f"CUDA compiler: expected NVRTC by the package cuda-bindings, got {text}; {INSTALL}") from None
    return nvrtc


class CUDACompiler:
    """NVRTC for one architecture (`sm_80`, `sm_90a`). Binaries are cached (`binaries.Binaries`) by text, options and
    version.

    version: the compiler's name and version; unit: 1, so that several kernels are compiled separately and in parallel.
    Raises: UserError when it is not installed.
    """

    unit = 1

    def __init__(self, architecture: str) -> None:
        self._nvrtc = load_nvrtc()
        self.architecture = architecture
        self._binaries = Binaries(cache_folder() / "cuda")
        self.version = "NVRTC " + ".".join(str(x) for x in self._nvrtc.nvrtcVersion()[1:])

    def compile(self, kernels: Sequence[KernelSource], flags: Sequence[str] = ()) -> CompiledModule:
        """Compile all kernels as one translation unit. Raises: BuildError with the compiler's log."""
        options = [f"--gpu-architecture={self.architecture}", *OPTIONS, *flags]
        source = join_sources(kernels)
        # The version is part of the key, so a new compiler compiles everything again.
        name = f"{hashed((self.version, *options, source))}.cubin"
        cached = self._binaries.find(name)
        if cached is not None and all(k.name in cached[1] for k in kernels):
            return CompiledModule(cached[0], {kernel: KernelReport(*numbers) for kernel, numbers in cached[1].items()})
        module = self._compiled(kernels, source, options)
        self._binaries.store(name, module.code, {kernel: astuple(report) for kernel, report in module.kernels.items()})
        return module

    def _compiled(self, kernels: Sequence[KernelSource], source: str, options: Sequence[str]) -> CompiledModule:
        nvrtc, names = self._nvrtc, ", ".join(k.name for k in kernels)
        with self._program(source) as program:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
            log = self._text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise BuildError(
                    f"{self.version} refused kernels {names} ({' '.join(options)}): {status.name}\n{log[:8000]}"
                )
            code = self._text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        reported = reports(log)
        missing = [k.name for k in kernels if k.name not in reported]
        if missing:
            raise BuildError(f"{self.version}: the source of kernel {missing[0]} gives no such kernel\n{log[:2000]}")
        return CompiledModule(code, reported)

    @contextmanager
    def _program(self, source: str) -> Iterator[Any]:
        status, program = self._nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"{self.version}: expected to start a program, got {status.name}")
        try:
            yield program
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def _text(self, program: Any, size: Any, get: Any) -> bytes:
        """Return the text that the library writes into a buffer of its caller."""
        status, length = size(program)
        content: bytes = b" " * length
        done = (status, *get(program, content))
        if any(s != self._nvrtc.nvrtcResult.NVRTC_SUCCESS for s in done):
            raise BuildError(f"{self.version}: expected what a program was compiled to, got {done[-1].name}")
        return content.rstrip(b"\0") if get is self._nvrtc.nvrtcGetProgramLog else content


def _numbers(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.search(text)
    return ("0",) * pattern.groups if match is None else match.groups()


def reports(log: str) -> dict[str, KernelReport]:
    """Return the reports of an assembler's log (`-v`), by kernel."""
    by_name: dict[str, KernelReport] = {}
    starts = [*_ENTRY.finditer(log)]
    for entry, after in zip(starts, [*(m.start() for m in starts[1:]), len(log)], strict=True):
        text = log[entry.end() : after]
        numbers = [int(x) for pattern in (_REGISTERS, _SHARED, _STACK) for x in _numbers(pattern, text)]
        by_name[entry[1]] = KernelReport(*numbers)
    return by_name
