"""NVRTC: machine code and the assembler's report without a GPU, and plain words where it is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_tune.errors import BuildError, UserError
from relax_tune.runtime.device.cuda_compiler import CUDACompiler, KernelReport, reports
from relax_tune.runtime.program.program import KernelSource

TURN = """extern "C" __global__ void __launch_bounds__(128) turn(float *__restrict__ a) {
  __shared__ float tile[128];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = tile[127 - threadIdx.x] * BY;
}
"""
PRELUDE = "/*prelude*/\n#ifndef BY\n#define BY 1\n#endif\n/*end prelude*/\n"


@pytest.fixture(scope="module")
def compiler() -> CUDACompiler:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    return CUDACompiler("sm_80")


@pytest.mark.nvrtc
def test_code_and_report(compiler: CUDACompiler) -> None:
    other = TURN.replace("turn", "other").replace("128", "256").replace("127", "255")
    made = compiler.compile(
        [KernelSource("turn", "cuda", PRELUDE + TURN), KernelSource("other", "cuda", PRELUDE + other)]
    )
    assert made.code.startswith(b"\x7fELF") and set(made.kernels) == {"turn", "other"}
    assert [made.kernels[k].shared_bytes for k in ("turn", "other")] == [512, 1024]
    for report in made.kernels.values():
        assert 0 < report.registers < 64 and report.stack_bytes == report.spill_stores == report.spill_loads == 0
    doubled = compiler.compile([KernelSource("turn", "cuda", PRELUDE + TURN)], ["-DBY=2"])
    assert doubled.code != compiler.compile([KernelSource("turn", "cuda", PRELUDE + TURN)]).code


@pytest.mark.nvrtc
def test_compiled_kernel_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another compiler of the same architecture; what was damaged meanwhile is."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    kernels, compiled = [KernelSource("turn", "cuda", PRELUDE + TURN)], list[str]()
    made = CUDACompiler("sm_80").compile(kernels)
    again = CUDACompiler("sm_80")
    compile_anew = again._compiled
    monkeypatch.setattr(again, "_compiled", lambda *given: (compiled.append("again"), compile_anew(*given))[1])
    assert again.compile(kernels) == made and not compiled
    assert again.compile(kernels, ["-DBY=2"]).code != made.code and len(compiled) == 1
    (first, _) = sorted((tmp_path / "cuda").iterdir(), key=lambda p: p.read_bytes().endswith(made.code), reverse=True)
    whole = first.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole.replace(b"[", b"[1, ", 1)):
        first.write_bytes(damaged)
        before = len(compiled)
        assert again.compile(kernels) == made and len(compiled) == before + 1
    assert not list((tmp_path / "cuda").glob(".build-*"))


@pytest.mark.nvrtc
def test_architectures_compile_separately(compiler: CUDACompiler) -> None:
    kernels = [KernelSource("turn", "cuda", PRELUDE + TURN)]
    codes = {CUDACompiler(name).compile(kernels).code for name in ("sm_80", "sm_90", "sm_90a")}
    assert len(codes) == 3
    with pytest.raises(BuildError, match="sm_1"):
        CUDACompiler("sm_1").compile(kernels)


@pytest.mark.nvrtc
def test_compile_error_has_log(compiler: CUDACompiler) -> None:
    with pytest.raises(BuildError, match=r"refused kernels broken .*sm_80.*\nbroken.* error: .*nonsense"):
        compiler.compile([KernelSource("broken", "cuda", 'extern "C" __global__ void broken() { nonsense; }')])
    with pytest.raises(BuildError, match=r"kernel missing .*no such kernel"):
        compiler.compile([KernelSource("missing", "cuda", PRELUDE + TURN)])


def test_a_report_is_read_kernel_by_kernel() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas         .     40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 49152 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
"""
    assert reports(log) == {"a": KernelReport(255, 49152, 40, 12, 16), "b": KernelReport(8, 0, 0, 0, 0)}


def test_missing_package_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match=r"pip install 'relax-tune\[cuda-compiler\]'"):
        CUDACompiler("sm_80")
