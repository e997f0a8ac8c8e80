"""Candidates of every rule as CUDA: machine code for two architectures, and on the emulation the reference's outputs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from tests.cuda_emulation.gpus import PLACES, gpu, on
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.support.candidates import CASES, GPU_CASES, MACHINES, arguments, drawn, problems
from tests.support.effort import some, thinned

from relax_tune.ir.core.function import PrimFunc
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import Rule, Sketch, generate_sketches, instantiate, rules_for

ARCHITECTURES = ("sm_80", "sm_90")


@cache
def chosen(machine: str) -> list[tuple[str, str, PrimFunc]]:
    """(case, what it is, instance) of a candidate of each rule: of a few the one with the shortest text, as others compile for
    seconds. `opencl`: as processors get them; `gpu`: as GPUs do."""
    rng = random.Random("cuda")
    cases = [case for case in CASES if case in GPU_CASES]
    rng.shuffle(cases)
    instances = []
    for at, (rule, generator) in enumerate(some(rules_for(MACHINES[machine]).items(), 4)):
        of_rule = ((case, s) for case in cases for s in _sketches(case, machine, {rule: generator}))
        options = []
        for case, sketch in islice(of_rule, 2):
            for values in [drawn(sketch, rng) for _ in range(4)]:
                instance = replace(instantiate(sketch, values), name=f"f{at}")
                options.append((case, f"{sketch.name} {values}", instance))
        if options:  # tests/schedules/rules/gpu/test_mma.py tests what only CUDA has
            instances.append(min(options, key=lambda s: sum(len(k.source) for k in kernels_of(s[2], "cuda"))))
    return instances


def _sketches(case: str, machine: str, rules: Mapping[str, Rule]) -> tuple[Sketch, ...]:
    """One of the sketches that a rule gives for a case, if it gives any."""
    sketches = generate_sketches(CASES[case][0](), MACHINES[machine], rules)
    return (random.Random(case).choice(sketches),) if sketches else ()


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES))
def test_cuda_kernels_compile(architecture: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    mine = some(chosen("opencl")[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)], 4)
    kernels = [k for _, _, func in mine for k in kernels_of(func, "cuda")]
    compiled = CUDACompiler(architecture).compile([KernelSource(k.name, "cuda", k.source) for k in kernels])
    assert set(compiled.kernels) == {k.name for k in kernels}
    assert all(0 < report.registers <= 255 for report in compiled.kernels.values())


@pytest.mark.parametrize(
    ("machine", "where"),
    [
        *thinned([on("forwards", "opencl"), on("forwards", "gpu")]),
        on("backwards", "gpu"),
        on("cuda", "opencl"),
        on("cuda", "gpu"),
    ],
)
def test_cuda_kernels_match_function(machine: str, where: str, tmp_path: Path) -> None:
    device = gpu(where, tmp_path)
    runs = Compiled.together(device, "cuda", [func for _, _, func in chosen(machine)])
    for (case, what, func), run in zip(chosen(machine), runs, strict=True):
        for seed, dims in enumerate(CASES[case][1]):
            arrays, scalars = arguments(func, dims, seed)
            wrong = problems(CASES[case][0](), arrays, run(arrays, scalars), dims)
            assert not wrong, f"{case}, {what}: {wrong}"
    device.close()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("case", ["paged attention", "paged attention, f16", "paged write"])
def test_cuda_paged_kernels_match_function(case: str, where: str, tmp_path: Path) -> None:
    rng, func = random.Random(case), CASES[case][0]()
    sketches = generate_sketches(func, MACHINES["gpu"])
    instances = [replace(instantiate(s, drawn(s, rng)), name=f"f{at}") for at, s in enumerate(sketches)]
    device = gpu(where, tmp_path)
    for run, sketch in zip(Compiled.together(device, "cuda", instances), sketches, strict=True):
        for seed, dims in enumerate(CASES[case][1]):
            arrays, scalars = arguments(func, dims, seed)
            wrong = problems(func, arrays, run(arrays, scalars), dims)
            assert not wrong, f"{case}, {sketch.name}: {wrong}"
    device.close()
