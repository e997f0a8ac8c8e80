"""The names of `cuda.bindings.nvrtc` that are used, over the emulation's compiler. A program is [source, log, code]."""

import ctypes
import os
import re
import tempfile
from enum import Enum
from pathlib import Path

from tests.cuda_emulation.driver import EmulatedCompiler

from relax_tune.errors import BuildError
from relax_tune.runtime.program.program import KernelSource

_COMPILER = EmulatedCompiler(Path(tempfile.mkdtemp(dir=os.environ.get("RELAX_TUNE_CACHE"))))
_REPORT = """Compiling entry function '{}' for 'sm_80'
0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
Used {} registers, {} bytes smem
"""


class nvrtcResult(Enum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


_DONE = nvrtcResult.NVRTC_SUCCESS


def nvrtcVersion():
    return _DONE, 0, 0


def nvrtcCreateProgram(source, name, count, headers, names):
    return _DONE, [source.decode(), b"", b""]


def nvrtcCompileProgram(program, count, options):
    names = re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(", program[0])
    flags = [o.decode() for o in options if o.startswith(b"-D")]
    first, *others = names
    kernels = [KernelSource(first, "cuda", program[0]), *(KernelSource(name, "cuda", "") for name in others)]
    try:
        compiled = _COMPILER.compile(kernels, flags)
    except BuildError as error:
        program[1] = str(error).encode()
        return (nvrtcResult.NVRTC_ERROR_COMPILATION,)
    reports = [_REPORT.format(k, r.registers, r.shared_bytes) for k, r in compiled.kernels.items()]
    program[1:] = ["".join(reports).encode(), compiled.code]
    return (_DONE,)


def nvrtcGetProgramLogSize(program):
    return _DONE, len(program[1])


def nvrtcGetCUBINSize(program):
    return _DONE, len(program[2])


def _fill(target, data):
    ctypes.memmove(target, data, len(data))
    return (_DONE,)


def nvrtcGetProgramLog(program, target):
    return _fill(target, program[1])


def nvrtcGetCUBIN(program, target):
    return _fill(target, program[2])


def nvrtcDestroyProgram(program):
    return (_DONE,)
