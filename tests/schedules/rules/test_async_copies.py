"""Copies that arrive later: what copy_async refuses, that rings filled ahead mean what they did, and that waits are where they must be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cuda_emulation.driver import emulated
from tests.cuda_emulation.gpus import PLACES, gpu
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.schedules.rules.test_mma_intrinsics import calls, scheduled, wrong
from tests.schedules.rules.warp_tiles import product
from tests.support import schedule_functions as make
from tests.support.effort import thinned
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource

# Columns and steps whose rows begin at multiples of eight elements, which tiles do not divide.
DIMS = (24, 136)
SIZES = tuple({"m": m, "n": DIMS[0], "k": DIMS[1]} for m in (33, 1, 0))
CUT = step("split", loop="inc_i", factors=[None, 4])
LANES = step("set_kind", loop="inc_i_1", kind="vectorized")
REFUSALS = [
    refuse("a loop of another kind", make.chain, step("copy_async", loop="inc_i"), message="expects a vectorized loop"),
    refuse("what is no copy", make.chain, CUT, LANES, step("copy_async", loop="inc_i_1"), message="got 'inc', which .* global memory"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_copy_async_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.slow
def test_ring_buffers_keep_meaning_of_product() -> None:
    for form, stages in (("nt", 2), ("nn", 4)):
        func = scheduled(form, f16, stages=stages, dims=DIMS)
        assert structural_equal(parse_prim_func(print_text(func)), func)
        assert "async_copy=True" in print_text(func)
        assert_same_meaning(product(form, f16, DIMS), func, {"m": 3})


def text(form: str, stages: int) -> str:
    (kernel,) = kernels_of(scheduled(form, f16, stages=stages, dims=DIMS), "cuda")
    return kernel.source.split("/*end prelude*/")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "stages"), [("nt", 2), ("nt", 3), ("nn", 4)])
def test_kernels_have_one_barrier_per_slice(form: str, stages: int) -> None:
    source = text(form, stages)
    before, after = source.split("rt_mma_")
    assert source.count("__syncthreads") == 1 and "__syncthreads" in before
    # the loops that start the rings send a lot each, and so does every iteration; all but the one in use may be on their way
    assert before.count("rt_sent();") == (2 if stages == 2 else 3) and before.count(f"rt_arrived<{stages - 2}>();") == 1
    assert after.count("rt_arrived<0>();") == 1 and "rt_sent" not in after


def test_async_copies_without_pipeline_are_waited_for() -> None:
    func = scheduled("nt", f16, dims=DIMS)
    late = parse_prim_func(print_text(func).replace("in vectorized(8)", "in vectorized(8, async_copy=True)"))
    source = kernels_of(late, "cuda")[0].source.split("/*end prelude*/")[1]
    first, second = source.split("rt_arrived<0>();")
    assert first.count("rt_copy<8>") == source.count("rt_copy") == 2 and second.lstrip().startswith("__syncthreads();")
    assert "rt_sent" not in source


@pytest.mark.parametrize("where", PLACES)
def test_async_copies_late_or_early_give_right_results(tmp_path: Path, where: str) -> None:
    """Forwards as late as they may, backwards at once."""
    device = gpu(where, tmp_path)
    cases = [("nt", f16, 3, 8)] if where == "backwards" else [("nt", f16, 3, None), ("nn", bf16, 2, None)]
    runs = Compiled.together(device, "cuda", [scheduled(f, d, stages=s, dims=DIMS, pad=p) for f, d, s, p in cases])
    for (form, dtype, *_), run in zip(cases, runs, strict=True):
        assert calls(run.func) == 1
        for sizes in SIZES:
            assert wrong(run, form, dtype, sizes) < 1e-4, (form, dtype, sizes)
    device.close()


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize(
    ("old", "new", "backwards"),
    thinned(
        [
            ("rt_arrived<1>();", "rt_arrived<2>();", False),
            ("__syncthreads();", "", False),
            ("__syncthreads();", "", True),
        ]
    ),
)
def test_missing_wait_gives_wrong_results(tmp_path: Path, old: str, new: str, backwards: bool) -> None:
    device = emulated(tmp_path, backwards)
    run = Compiled(device, "cuda", scheduled("nt", f16, stages=3, dims=DIMS))
    (kernel,) = run.sources("cuda")
    assert kernel.source.count(old) == 1
    run.handles = device.compile([KernelSource(kernel.name, "cuda", kernel.source.replace(old, new))])
    assert wrong(run, "nt", f16, SIZES[0]) > 0.1
    device.close()


@pytest.mark.nvrtc
def test_async_copies_assemble() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    kernels = [
        KernelSource(k.name, "cuda", k.source) for k in kernels_of(scheduled("nt", f16, stages=3, dims=DIMS), "cuda")
    ]
    for architecture in ("sm_75", "sm_80", "sm_90"):
        assert CUDACompiler(architecture).compile(kernels).kernels
