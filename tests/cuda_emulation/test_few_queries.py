"""Attention of few queries over many keys as a GPU runs it: one group for all keys, or one for each block of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_emulation.gpus import gpu, on
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.support.candidates import CASES, arguments, drawn, problems
from tests.support.effort import thinned

from relax_tune.ir.core.function import PrimFunc
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import GPU_RULES, Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo

# The default candidates, and random ones.
FUNCTIONS = {True: "attention, f16", False: "attention over a cache"}
FORMS = ("flash_attention.keys", "flash_decoding")
# A small GPU with warp shuffles.
MACHINE = HardwareInfo.from_limits(
    "cuda", {"workers": 4, "warp": 32, "max_group_size": 128, "max_local_bytes": 48 << 10}
)
SIZES = ((1, 1), (1, 31), (2, 32), (3, 33), (1, 127), (5, 67))


def sketches(guessed: bool) -> tuple[PrimFunc, dict[str, Sketch]]:
    func = CASES[FUNCTIONS[guessed]][0]()
    generated = generate_sketches(func, MACHINE, {"gpu_flash_decoding": GPU_RULES["gpu_flash_decoding"]})
    return func, {s.name: s for s in generated}


def candidates(guessed: bool) -> list[PrimFunc]:
    """One candidate of each form, with default or random numbers."""
    by_name, rng = sketches(guessed)[1], random.Random("few queries")
    values = {form: by_name[form].guesses[0] if guessed else drawn(by_name[form], rng) for form in FORMS}
    return [replace(instantiate(by_name[form], values[form]), name=f"f{at}") for at, form in enumerate(FORMS)]


@pytest.mark.slow
def test_flash_decoding_uses_shuffles_in_first_kernel_only() -> None:
    for func in candidates(False):
        first, *second = kernels_of(func, "cuda")
        assert "rt_across_add" in first.source and "rt_across_max" in first.source
        assert not any("__syncthreads" in k.source or "__shfl" in k.source for k in second)


@pytest.mark.parametrize(
    ("guessed", "where"),
    [*thinned([on("backwards", True), on("forwards", False)]), on("cuda", True), on("cuda", False)],
)
def test_flash_decoding_kernels_match_attention(guessed: bool, where: str, tmp_path: Path) -> None:
    device = gpu(where, tmp_path)
    func, instances = sketches(guessed)[0], candidates(guessed)
    for candidate, run in zip(instances, Compiled.together(device, "cuda", instances), strict=True):
        for seed, (n, m) in enumerate(SIZES):
            dims = {"n": n, "m": m}
            arrays, scalars = arguments(candidate, dims, seed)
            wrong = problems(func, arrays, run(arrays, scalars), dims)
            assert not wrong, f"{candidate.name}: {wrong}"
    device.close()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", thinned(["sm_90", "sm_80"]))
def test_flash_decoding_kernels_compile(architecture: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    for k in (k for func in candidates(True) for k in kernels_of(func, "cuda")):
        (report,) = CUDACompiler(architecture).compile([KernelSource(k.name, "cuda", k.source)]).kernels.values()
        assert 0 < report.registers <= 255
