"""Products of f32 whose slices are copied asynchronously while others are multiplied: which are, what they mean, and that copies arrive."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.schedules.cost.test_gpu_features import number
from tests.schedules.rules.gpu.test_mma import MACHINE, text
from tests.schedules.test_occupancy import shared_bytes, value
from tests.support.candidates import CASES, arguments, drawn, problems
from tests.support.effort import some
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.codegen.generate import split_kernels
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.cost.gpu_features import bank_conflicts, warp_accesses
from relax_tune.schedules.occupancy import kernels, stored_bytes, stored_shape
from relax_tune.schedules.sketch import GPU_RULES, Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo

RULES = {name: GPU_RULES[name] for name in ("gpu_matmul", "gpu_convolution")}
# Operands with and without the steps leading, one that goes through registers, and one that is put together on the way.
AHEAD = {
    "matmul symbolic": ("matmul.data_parallel", "matmul.stream_k"),
    "NT, 128 steps": ("matmul.split_k", "matmul.stream_k", "matmul.data_parallel"),
    "matmul 96, bf16": ("matmul.data_parallel", "matmul.stream_k"),
    "convolution of 128 steps": ("convolution.implicit_gemm", "convolution.implicit_gemm_split_k"),
}


@cache
def sketches(case: str, machine: HardwareInfo = MACHINE) -> tuple[Sketch, ...]:
    return generate_sketches(CASES[case][0](), machine, RULES)


def ahead(case: str, machine: HardwareInfo = MACHINE) -> dict[str, Sketch]:
    return {s.name: s for s in sketches(case, machine) if any(t.name == "STAGES" for t in s.tunables)}


def sketch_of(case: str) -> Sketch:
    """That of one group for each tile, or where steps lie along rows that of groups which share them out."""
    return ahead(case)[AHEAD[case][0]]


@cache
def instance(case: str, name: str = "") -> PrimFunc:
    sketch = ahead(case)[name or AHEAD[case][0]]
    func = instantiate(sketch, drawn(sketch, random.Random(case)))
    return replace(func, name=f"f{list(AHEAD).index(case)}{name.partition('.')[2]}")


@pytest.mark.slow
def test_slices_are_copied_ahead_where_a_machine_can_and_operands_are_numbers() -> None:
    for case in some(AHEAD, 4):
        assert sorted(ahead(case)) == sorted(AHEAD[case]), case
    older, (case, *_) = replace(MACHINE, capability=75), AHEAD
    assert not ahead(case, older) and sketches(case, older)
    assert not ahead("int4, many columns") and sketches("int4, many columns"), "bytes of two steps"
    for case in some(AHEAD, 4):
        source = "".join(text(instance(case)))
        before, after = source.split("__syncthreads();")
        copies = 1 if "bf16" in case else 2
        assert before.count("rt_copy<") == after.count("rt_copy<") == copies, "before the loop over slices and in it"


@pytest.mark.slow
def test_pipelined_schedules_keep_meaning_and_shared_bytes() -> None:
    for case in list(AHEAD)[:2]:
        assert_same_meaning(CASES[case][0](), instance(case), {v.name: 5 for v in instance(case).symbols})
    for case in AHEAD:
        sketch = sketch_of(case)
        values = drawn(sketch, random.Random(case))
        generated = split_kernels(instantiate(sketch, values))
        for part, func in zip(kernels(sketch.func), generated, strict=True):
            assert value(stored_bytes(sketch.func, part, "shared"), sketch, values) == shared_bytes(func), values


@pytest.mark.slow
def test_warp_stores_have_no_bank_conflicts() -> None:
    sketch = ahead("NT, 128 steps")["matmul.data_parallel"]
    rng = random.Random(0)
    for values in [drawn(sketch, rng) for _ in range(3)]:
        env: dict[Var, Expr] = {t: const(values[t.name]) for t in sketch.tunables}
        stored = [x for k in kernels(sketch.func) for x in warp_accesses(sketch.func, k, True) if x.bank_words]
        assert len(stored) == 4
        for x in stored:
            items = sorted((p for p in x.path if p.kind == "item"), key=lambda p: p.axis)
            wide, high = (number(p.extent, env) for p in items)
            zero = {p.var: const(0) for p in x.path}
            shape = [number(d, env) for d in stored_shape(sketch.func, kernels(sketch.func)[0], x.buffer)]
            banks = Counter[int]()
            for lane in range(32):
                place = {**env, **zero, **{p.var: const(n) for p, n in zip(items, (lane % wide, lane // wide % high))}}
                at = 0
                for e, d in zip(x.where, shape, strict=True):
                    at = at * d + number(e, place)
                banks[at % 32] += 1
            assert number(bank_conflicts(x), env) == max(banks.values()) == 1, (x.buffer.name, values)


def check(device: Device, language: str, *instances: tuple[str, str]) -> None:
    funcs = [instance(*which) for which in instances]
    for (case, name), func, run in zip(instances, funcs, Compiled.together(device, language, funcs), strict=True):
        for seed, dims in enumerate(CASES[case][1]):
            arrays, scalars = arguments(func, dims, seed)
            wrong = problems(CASES[case][0](), arrays, run(arrays, scalars), dims)
            assert not wrong, f"{case} {name} at {dims}: {wrong}"
    device.close()


@pytest.mark.process
@pytest.mark.ccompiler
def test_async_copies_arriving_late_give_right_results(tmp_path: Path) -> None:
    streams = [(case, "matmul.stream_k") for case, names in AHEAD.items() if "matmul.stream_k" in names]
    check(emulated(tmp_path), "cuda", *((case, "") for case in AHEAD), *streams)


@pytest.mark.opencl
def test_devices_without_async_copies_compute_the_same() -> None:
    check(opened("opencl"), "opencl", (next(iter(AHEAD)), ""))


@pytest.mark.nvrtc
def test_pipelined_kernels_compile_without_spills() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    for architecture, case in zip(("sm_75", "sm_80", "sm_90", "sm_80"), AHEAD, strict=True):
        sources = [KernelSource(k.name, "cuda", k.source) for k in kernels_of(instance(case), "cuda")]
        compiled = CUDACompiler(architecture).compile(sources)
        assert all(report.spill_stores == report.stack_bytes == 0 for report in compiled.kernels.values())
