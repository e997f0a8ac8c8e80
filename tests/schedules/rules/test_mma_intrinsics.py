"""The `mma` of a warp: meaning of its loops, text where a device has it, and nests that stay loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.cuda_emulation.gpus import PLACES, gpu
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.schedules.rules.warp_tiles import by_warps, product
from tests.support.effort import thinned
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.dtype import DType, bf16, f16
from relax_tune.ir.core.expr import lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, Stmt, loops, rewrite
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import simplify_func

FORMS = ("nn", "nt", "tn", "tt")
SIZES = ({"m": 33, "n": 17, "k": 37}, {"m": 1, "n": 1, "k": 1}, {"m": 32, "n": 64, "k": 32}, {"m": 5, "n": 3, "k": 0})


def scheduled(form: str, dtype: DType, **options: object) -> PrimFunc:
    return simplify_func(by_warps(form, dtype, **options).func)  # type: ignore[arg-type]


def wrong(run: Compiled, form: str, dtype: DType, sizes: Mapping[str, int]) -> float:
    """How far a run is from the product."""
    rng = np.random.default_rng(sizes["m"])
    a, b = (rng.standard_normal(s).astype(dtype.numpy) for s in ((sizes["m"], sizes["k"]), (sizes["k"], sizes["n"])))
    given = [np.ascontiguousarray(x.T if turned == "t" else x) for x, turned in zip((a, b), form, strict=True)]
    (actual,) = run([*given, np.full((sizes["m"], sizes["n"]), np.nan, np.float32)])
    difference = np.abs(actual - (a.astype(np.float64) @ b.astype(np.float64) + 1))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))


def calls(func: PrimFunc) -> int:
    return kernels_of(func, "cuda")[0].source.split("/*end prelude*/")[1].count("rt_mma_")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_mma_schedule_keeps_meaning(form: str) -> None:
    func = scheduled(form, f16)
    assert structural_equal(parse_prim_func(print_text(func)), func)
    assert_same_meaning(product(form, f16), func, {"m": 3, "n": 5, "k": 7})


@pytest.mark.parametrize("where", PLACES)
def test_mma_intrinsics_compute_reference_products(tmp_path: Path, where: str) -> None:
    device = gpu(where, tmp_path)
    padded, turned = 8, None
    cases = [("nt", bf16, padded), ("tn", f16, turned)]
    if where != "backwards":
        cases = [*((form, f16, turned) for form in FORMS), ("nn", bf16, padded), ("tt", f16, padded)]
    runs = Compiled.together(device, "cuda", [scheduled(form, dtype, pad=pad) for form, dtype, pad in cases])
    for (form, dtype, _), run in zip(cases, runs, strict=True):
        assert calls(run.func) == 1
        for sizes in SIZES:
            assert wrong(run, form, dtype, sizes) < 1e-4, (form, dtype, sizes)
    device.close()


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize(
    ("old", "new"),
    thinned(
        [
            ("(l >> 4) * 8", "(l >> 3 & 1) * 8"),
            ("columns + 2 * q", "columns + q"),
            ("r / per_line % ", "r % "),
            ("__syncthreads();", ""),
        ]
    ),
)
def test_wrong_layout_gives_wrong_results(tmp_path: Path, old: str, new: str) -> None:
    device = emulated(tmp_path)
    run = Compiled(device, "cuda", scheduled("nt", f16, pad=None))
    (kernel,) = run.sources("cuda")
    assert old in kernel.source
    run.handles = device.compile([KernelSource(kernel.name, "cuda", kernel.source.replace(old, new))])
    assert wrong(run, "nt", f16, {"m": 32, "n": 32, "k": 64}) > 0.1
    device.close()


def guarded(func: PrimFunc, loop: str) -> PrimFunc:
    """The product only for some iterations of a loop."""
    (var,) = (f.var for f in loops(func.body) if f.var.name == loop)

    def narrowed(n: Stmt) -> Stmt:
        return replace(n, predicate=lt(var, 2)) if isinstance(n, Block) and n.name == "mm" else n

    return replace(func, body=rewrite(func.body, narrowed))


@pytest.mark.process
@pytest.mark.ccompiler
def test_mma_nests_without_whole_warps_stay_loops(tmp_path: Path) -> None:
    device = emulated(tmp_path)
    others = {
        "rows that begin anywhere": scheduled("nt", f16, pad=3),
        "items that are no warp's": scheduled("nn", f16, items=(4, 8), mark=False),
        "operands of their own": scheduled("nn", f16, mark=False),
    }
    runs = Compiled.together(device, "cuda", list(others.values()))
    for (what, func), run in zip(others.items(), runs, strict=True):
        assert calls(func) == 0, what
        assert wrong(run, func.name[-2:], f16, SIZES[0]) < 1e-4, what
    device.close()
    marked = scheduled("nn", f16)
    assert [calls(guarded(marked, loop)) for loop in ("mm_j_3", "mm_i_0")] == [0, 0]


@pytest.mark.nvrtc
def test_mma_intrinsics_assemble() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    kernels = [
        KernelSource(k.name, "cuda", k.source)
        for form, dtype in (("nn", f16), ("tt", bf16))
        for k in kernels_of(scheduled(form, dtype), "cuda")
    ]
    for architecture in ("sm_75", "sm_80", "sm_90"):  # the first has no such products
        reports = CUDACompiler(architecture).compile(kernels).kernels.values()
        assert all(r.spill_stores == r.stack_bytes == 0 for r in reports), architecture
