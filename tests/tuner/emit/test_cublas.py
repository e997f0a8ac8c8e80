"""cuBLAS and cuBLASLt as variants on CUDA devices: offered, dispatched from an artifact, and noted where they are missing. Both are the
emulation's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tests.cuda_emulation.cublas import NAMES, StandIn, library_folder
from tests.cuda_emulation.driver import EmulatedCompiler, EmulatedDriver
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, job_dispatching

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import DType, bf16, f16, f32
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.library.cublaslt import CuBlasLt
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.device_process.compiling import CompiledKernels
from relax_tune.tuner.task.unfused_variants import routines_of

LIBRARIES = (("cublas", "version 13.1.2; workspace 33554432"), ("cublaslt", "version 13.1.2; workspace 33554432"))
PAPER_CUDA = replace(PAPER_DEVICE, kind="cuda", libraries=LIBRARIES)


def product(dtype: DType = f32) -> IRModule:
    """relu(x w + b) over n rows of `dtype`."""
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 33), 24), dtype)
    w, b = graph.input("w", (24, 40), dtype), graph.input("b", (40,), dtype)
    return graph.finish(graph.call(Relu(), graph.call(Add(), graph.call(Matmul(), x, w), b)))


def routines(program: Program) -> set[str]:
    return {s.target for c in program.calls for v in c.variants for s in v.steps if s.kind == "library"}


def on(info: DeviceInfo, dtype: DType) -> set[str]:
    task_variants = device_job(product(dtype), info, MemoryStore(), QUICK).task_variants.values()
    return {r for c in task_variants for v in c.library.variants for r in routines_of(v)}


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_cublas_routines_are_offered_by_operand_type(dtype: DType) -> None:
    assert on(PAPER_CUDA, dtype) == {f"cublas.gemm_{dtype}", f"cublaslt.matmul_{dtype}"}
    assert not on(replace(PAPER_CUDA, kind="opencl"), dtype)


@pytest.mark.ccompiler
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_artifact_calls_cublas_routines(dtype: DType, tmp_path: Path) -> None:
    driver, module = EmulatedDriver(), product(dtype)
    device = CUDADevice(0, driver, lambda architecture: EmulatedCompiler(tmp_path), lambda: driver)
    asked = StandIn(library_folder(tmp_path) / NAMES[0], driver)
    info = replace(device.info, libraries=LIBRARIES)
    job = job_dispatching(info, module, lambda task_variants, _: task_variants.library.variants)
    built = job.build()
    assert routines(built.program) == {f"cublas.gemm_{dtype}", f"cublaslt.matmul_{dtype}"}
    path, rng, before = job.artifact(built).save(tmp_path / "model.rta"), np.random.default_rng(2), asked.products
    libraries = {"cublas": CuBlas(asked.dll), "cublaslt": CuBlasLt(asked.dll)}
    with load_artifact(path).open(device, libraries=libraries) as model:
        runs = [1, 7, 33, 7, 7]
        for n in runs:
            arrays = [rng.standard_normal(shape).astype(dtype.numpy) for shape in ((n, 24), (24, 40), (40,))]
            wanted = run_function(module, "main", arrays)
            bound = 1e-5 if dtype is f32 else 2e-2
            np.testing.assert_allclose(model.run(arrays)[0], wanted, rtol=bound, atol=bound)
        assert asked.products == before + len(runs)
    device.close()


@pytest.mark.ccompiler
def test_cublas_binds_through_a_device_wrapper(tmp_path: Path) -> None:
    """As it does while candidates are measured."""
    driver = EmulatedDriver()
    device = CUDADevice(0, driver, lambda architecture: EmulatedCompiler(tmp_path), lambda: driver)
    asked, before = StandIn(library_folder(tmp_path) / NAMES[0], driver), cast(Device, CompiledKernels(device, {}))
    buffers = [before.alloc(16) for _ in range(3)]
    for buffer in buffers:
        before.upload(buffer, np.ones(4, np.float32))
    for library, more in ((CuBlas(asked.dll), 0), (CuBlasLt(asked.dll), 7)):
        scalars = [2, 2, 2, 0, 0, 2, 2, 2, *[0] * more]
        library.bind(next(iter(library.routines)), before, buffers, scalars)()
    assert before.download(buffers[2], np.dtype(np.float32), (4,)).tolist() == [2] * 4
    device.close()


@pytest.mark.slow
def test_missing_cublas_note_states_the_gain() -> None:
    runner = RecordedRunner(lambda program, symbols: 1e-6 if routines(program) else 1.0, info=PAPER_CUDA)
    store = MemoryStore()
    job = device_job(product(), PAPER_CUDA, store, QUICK)
    job.tune(runner)
    assert routines(job.build().program)
    bare = device_job(product(), replace(PAPER_CUDA, libraries=()), store, QUICK).build()
    missing = [n for n in bare.notes if "is not installed" in n]
    assert not routines(bare.program) and len(missing) == 2 and all("relax-tune[cuda]" in n for n in missing)
