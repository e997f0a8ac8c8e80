"""Products of few rows on GPUs: how the matrix is read, and on the emulation what candidates for CUDA compute."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.support import schedule_functions as make
from tests.support.candidates import arguments, drawn, problems
from tests.support.effort import some

from relax_tune.ir.codegen.generate import GeneratedKernel
from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.core.function import PrimFunc
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.rules.gpu import gemv as gpu_gemv
from relax_tune.schedules.sketch import Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo

MACHINE = HardwareInfo.from_limits("cuda", {"workers": 108, "warp": 32, "max_group_size": 256, "max_local_bytes": 48 << 10,
                                       "registers_per_sm": 64 << 10, "vector_bits": 128})  # fmt: skip
# What is stored: (function, whether it is multiplied along the matrix, elements of 16 bytes).
STORED: Mapping[str, tuple[Callable[[], PrimFunc], str, int]] = {
    "f32": (lambda: make.dense(64, 512), "gemv.dots", 4),
    "bf16": (lambda: make.dense(64, 512, stored=bf16), "gemv.dots", 8),
    "int8": (lambda: make.quantised(64, 512, 8), "gemv.dots", 16),
    "f16, KN": (lambda: make.matmul(128, 256, stored=f16), "gemv.columns", 8),
    "int4": (lambda: make.quantised(256, 512, 4, 32), "gemv.columns", 16),
}


def of(func: PrimFunc, name: str) -> Sketch:
    sketches = generate_sketches(func, MACHINE, {"gpu_gemv": gpu_gemv.sketches})
    return next(s for s in sketches if s.name == name)


def guessed(name: str) -> GeneratedKernel:
    """The kernel that the first guess makes of a case."""
    make_func, sketch, _ = STORED[name]
    candidate = of(make_func(), sketch)
    func = replace(instantiate(candidate, candidate.guesses[0]), name=re.sub(r"\W", "_", name))
    return kernels_of(func, "cuda")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_the_matrix_is_read_sixteen_bytes_at_a_time(name: str) -> None:
    text = guessed(name).source.split("/*end prelude*/")[1]
    each = STORED[name][2]
    kind = {"f32": "f32", "int8": "i8", "int4": "u8"}.get(name, "u16")
    assert set(re.findall(rf"rt_load<{kind}x{each}, (\d+)>", text)) == {str(each)}, text
    assert "rt_load_first" not in text


@pytest.mark.slow
def test_a_factor_of_a_group_of_steps_is_multiplied_by_once() -> None:
    """And several reads of the matrix are on their way at once."""
    text = guessed("int4").source.split("/*end prelude*/")[1]
    assert text.count("rt_load<u8x16, 16>") == 2 * 4
    assert text.count("(scale_cache_ +") == 1


@pytest.mark.nvrtc
def test_gemv_unpacked_values_stay_in_registers() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    kernels = [guessed(name) for name in ("int8", "int4", "f16, KN")]
    compiled = CUDACompiler("sm_80").compile([KernelSource(k.name, "cuda", k.source) for k in kernels])
    assert [r.stack_bytes for r in compiled.kernels.values()] == [0, 0, 0]


@pytest.mark.process
@pytest.mark.ccompiler
def test_gemv_candidates_match_function(tmp_path: Path) -> None:
    rng = random.Random("matvec")
    instances = []
    for name, end in some((("int4", ".split_k"), ("bf16", ""), ("int8", ".split_k"), ("int4", "")), 2):
        make_func, sketch, _ = STORED[name]
        candidate = of(make_func(), sketch + end)
        values = drawn(candidate, rng)
        instances.append(
            (
                f"{name} {candidate.name} {values}",
                make_func(),
                replace(instantiate(candidate, values), name=f"f{len(instances)}"),
            )
        )
    device = emulated(tmp_path, False)
    for (what, func, _), run in zip(
        instances, Compiled.together(device, "cuda", [f for _, _, f in instances]), strict=True
    ):
        for dims in ({"m": 1}, {"m": 5}):
            arrays, scalars = arguments(func, dims)
            wrong = problems(func, arrays, run(arrays, scalars), dims)
            assert not wrong, f"{what}: {wrong}"
    device.close()
