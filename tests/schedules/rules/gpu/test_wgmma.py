"""Candidates of the rule for `wgmma`: on the emulation and in machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.schedules.rules.gpu.test_mma import CASES
from tests.schedules.test_occupancy import shared_bytes, value
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES, arguments, problems
from tests.support.effort import thinned
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.codegen.generate import GeneratedKernel
from relax_tune.ir.core.dtype import f16
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.hardware.wgmma import CONDITION, MAX_TILES
from relax_tune.runtime.device import cuda_compiler
from relax_tune.runtime.device.cuda import architecture
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.occupancy import kernels, stored_bytes
from relax_tune.schedules.rules.gpu import wgmma as gpu_wgmma
from relax_tune.schedules.schedule import replay
from relax_tune.schedules.sketch import GPU_RULES, Sketch, generate_sketches, instantiate, replay_with, simplify_func
from relax_tune.schedules.target import HardwareInfo

# Limits of a Hopper GPU.
LIMITS = {
    "warp": 32,
    "max_group_size": 1024,
    "max_local_bytes": 227 << 10,
    "registers_per_sm": 64 << 10,
    "compute_major": 9,
}
MACHINE = replace(
    MACHINES["gpu"], language="cuda", capability=90, has_wgmma=True, group_size=256, local_bytes=227 << 10
)
RULE = {"gpu_wgmma": GPU_RULES["gpu_wgmma"]}
# Small tiles, which the emulation is through with sooner: each operand both ways, with copies ahead and without, by one group and by two.
SMALL: Mapping[str, dict[str, int]] = {
    "NT": {"WG": 2, "MT": 1, "NT": 8, "KS": 2, "STAGES": 3},
    "TN": {"WG": 1, "MT": 2, "NT": 4, "KS": 1},
    "NN, bias": {"WG": 2, "MT": 1, "NT": 8, "KS": 1, "STAGES": 2},
    "int8": {"WG": 1, "MT": 1, "NT": 8, "KS": 2, "STAGES": 2},
    "batched NN": {"WG": 1, "MT": 1, "NT": 4, "KS": 1},
}


@cache
def sketch_of(case: str) -> Sketch:
    (sketch,) = generate_sketches(CASES[case][0](), MACHINE, RULE)
    return sketch


@cache
def small(case: str) -> PrimFunc:
    return replace(instantiate(sketch_of(case), SMALL[case]), name=f"f{[*SMALL].index(case)}")


def text(func: PrimFunc) -> str:
    (kernel,) = kernels_of(func, "cuda")
    return kernel.source.split("/*end prelude*/")[1]


@pytest.mark.slow
def test_wgmma_rule_needs_limit_of_device() -> None:
    func = CASES["NT"][0]()
    hopper = HardwareInfo.from_limits("cuda", LIMITS | {"wgmma": 1})
    assert hopper.has_wgmma and [s.name for s in generate_sketches(func, hopper, RULE)] == ["wgmma"]
    for hardware in (HardwareInfo.from_limits("cuda", LIMITS), *MACHINES.values()):
        assert not hardware.has_wgmma and not generate_sketches(func, hardware, RULE)
    assert not generate_sketches(make.dense(64, 256), MACHINE, RULE), "f32"


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")])
def test_architecture_of_wgmma_devices_is_specific(capability: tuple[int, int], expected: str) -> None:
    assert architecture(*capability) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL)
def test_candidates_are_products_of_four_warps(case: str) -> None:
    sketch, values = sketch_of(case), SMALL[case]
    source = text(small(case))
    assert sketch.guesses and source.count("rt_wgmma_") == 1
    assert source.count("rt_proxy_fence();") == source.count("__syncthreads();") > 0, "before every barrier"
    assert ("rt_copy<8>" in source) == (case in ("NT", "NN, bias", "int8")), "where rows begin at multiples of a copy"
    replayed = replace(replay_with(sketch.trace, CASES[case][0](), values), name=small(case).name)
    assert text(replayed) == source
    (part,) = kernels(sketch.func)
    assert value(stored_bytes(sketch.func, part, "shared"), sketch, values) == shared_bytes(small(case))


def test_wgmma_loops_keep_meaning() -> None:
    assert_same_meaning(CASES["TN"][0](), small("TN"), {"m": 3, "n": 5, "k": 7})


@pytest.mark.slow
def test_wgmma_nests_without_instruction_stay_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix that do not follow one another, and more columns than an instruction has."""
    sketch, func = sketch_of("batched NN"), CASES["batched NN"][0]()
    s = replay(sketch.trace.with_values(SMALL["batched NN"]), func)
    shared = next(b.name for b in s.func.allocs if b.scope == "shared")
    s.apply("storage_align", buffer=shared, factor=8, offset=8)
    assert "rt_wgmma_" not in text(simplify_func(s.func))
    monkeypatch.setattr(gpu_wgmma, "COLUMN_TILES", (MAX_TILES + 8,))
    (wide,) = generate_sketches(func, MACHINE, RULE)
    assert "rt_wgmma_" not in text(instantiate(wide, SMALL["batched NN"] | {"NT": MAX_TILES + 8}))


Change = tuple[str, str]


def wrong(case: str, folder: Path, backwards: bool = False, change: Change = ("", ""), dims: int | None = None) -> str:
    """What is wrong with the outputs on the emulation, of a kernel whose text was changed."""
    device = emulated(folder, backwards)
    run = Compiled.__new__(Compiled)
    run.device, run.func = device, small(case)
    run.kernels = kernels_of(run.func, "cuda")
    run.handles = device.compile([changed(k, *change) for k in run.kernels])
    errors = []
    for seed, sizes in enumerate(CASES[case][1][:dims]):
        arrays, scalars = arguments(run.func, sizes, seed)
        errors += problems(CASES[case][0](), arrays, run(arrays, scalars), sizes)
    device.close()
    return "; ".join(errors)


def changed(kernel: GeneratedKernel, old: str, new: str, name: str = "") -> KernelSource:
    assert old in kernel.source
    source = kernel.source.replace(old, new)
    return KernelSource(name or kernel.name, "cuda", source.replace(f"{kernel.name}(", f"{name or kernel.name}("))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize(("case", "backwards"), thinned([("NN, bias", False), ("TN", True), ("int8", False)]))
def test_wgmma_kernels_match_function(case: str, backwards: bool, tmp_path: Path) -> None:
    assert not wrong(case, tmp_path, backwards)


@pytest.mark.process
@pytest.mark.ccompiler
def test_wgmma_kernel_without_instruction_matches_function(tmp_path: Path) -> None:
    assert not wrong("batched NN", tmp_path, change=(CONDITION, "0"))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize(
    ("old", "new", "backwards"),
    thinned(
        [
            ("rt_described(a, a_h, a_r)", "rt_described(a, a_r, a_h)", False),
            ("rt_proxy_fence();\n", "\n", False),
            ("__syncthreads();", "", True),
        ]
    ),
)
def test_emulation_of_altered_kernel_gives_wrong_results(tmp_path: Path, old: str, new: str, backwards: bool) -> None:
    assert wrong("NT", tmp_path, backwards, (old, new), 1)


@pytest.mark.nvrtc
def test_wgmma_kernels_assemble_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled, and no product waits for another one; that the assembler would say so shows where one has to."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    logs: list[str] = []
    read: Callable[[str], dict[str, cuda_compiler.KernelReport]] = cuda_compiler.reports
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_compiler, "reports", lambda log: logs.append(log) or read(log))
    func = make.dense(256, 256, stored=f16)
    (sketch,) = generate_sketches(func, MACHINE, RULE)
    large = instantiate(sketch, {"WG": 2, "MT": 2, "NT": 8, "KS": 1, "STAGES": 3})
    sums = '"wgmma.wait_group.sync.aligned 0;"'
    generated = [k for f in (large, small("TN"), small("batched NN")) for k in kernels_of(f, "cuda")]
    taken = [changed(k, "", "", f"k{at}") for at, k in enumerate(generated)]
    waiting = changed(generated[0], sums, '""')
    for target, sources in (("sm_90a", taken[:2]), ("sm_90", taken[2:]), ("sm_90a", [waiting])):
        compiled = cuda_compiler.CUDACompiler(target).compile(sources)
        assert all(r.spill_stores == r.stack_bytes == 0 for r in compiled.kernels.values())
    assert [log.count("(C75") > 0 for log in logs] == [False, False, True]
