"""The emulation of CUDA runs kernels like a GPU and reports their errors; after one, all calls of its device fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import EmulatedCompiler, EmulatedDriver, emulated
from tests.ir.codegen.codegen_runner import Compiled
from tests.ir.codegen.grid_cases import TEXTS, function
from tests.tuner.job.flushed import every_line_is_read

from relax_tune.errors import BuildError, MeasureError
from relax_tune.ir.interp.interp import run_prim
from relax_tune.runtime.device.cuda import PINNED_BYTES, CUDADevice
from relax_tune.runtime.device.cuda_compiler import CompiledModule
from relax_tune.runtime.device.service_kernels import LINE_BYTES
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.measure.device_process.flush import CacheFlush

pytestmark = pytest.mark.ccompiler

ROOT = Path(__file__).parents[2]
F32 = np.dtype(np.float32)
# Reverses rows of 32 elements through shared memory, by 32 threads. `{barrier}` is where a barrier is needed.
TURN = """extern "C" __global__ void __launch_bounds__(32) turn(const float *x, float *y) {
  __shared__ float tile[32];
  const int t = threadIdx.x;
  tile[t] = x[t];
  {barrier}
  y[t] = tile[31 - t];
}
"""
ONE_PER_THREAD = 'extern "C" __global__ void one_per_thread(float *y) { y[threadIdx.x] = 1.0f; }\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def device(folder: Path, request: pytest.FixtureRequest) -> Iterator[CUDADevice]:
    opened = emulated(folder, request.param)
    yield opened
    opened.close()


@pytest.mark.process
def test_cache_flush_reads_every_line(device: CUDADevice) -> None:
    flush = CacheFlush(device, 70 * LINE_BYTES)  # two groups, one of them in part
    every_line_is_read(device, flush)


def reverses_rows(device: CUDADevice, barrier: str) -> bool:
    """Whether the kernel reverses a row when this text is its barrier."""
    handle = device.compile([KernelSource("turn", "cuda", TURN.replace("{barrier}", barrier))])["turn"]
    x, y = device.alloc(128), device.alloc(128)
    row = np.arange(32, dtype=F32)
    device.upload(x, row)
    device.bind(handle, [x, y], [], (1,), (32,))()
    return bool((device.download(y, F32, (32,)) == row[::-1]).all())


@pytest.mark.process
def test_emulator_missing_barrier_gives_wrong_results(device: CUDADevice) -> None:
    assert reverses_rows(device, "__syncthreads();") and not reverses_rows(device, "")


@pytest.mark.process
def test_emulator_shuffles_exchange_registers(device: CUDADevice) -> None:
    assert reverses_rows(device, "y[t] = __shfl_xor_sync(~0u, __shfl_xor_sync(~0u, x[t], 24), 7); return;")


@pytest.mark.process
@pytest.mark.parametrize(
    ("barrier", "says"),
    [
        ("if (t < 3) __syncthreads();", "a barrier in line 5 that 29 of 32 threads never reach"),
        ("if (t < 3)\n __syncthreads(); else\n __syncthreads();", "wait at different barriers, in lines [67] and [67]"),
        ("if (t == 5) return; __syncthreads();", "1 of 32 threads never reach"),
        (
            "if (t < 3) tile[t] = __shfl_xor_sync(~0u, x[t], 1);",
            "an exchange in line 5 that 29 of 32 threads of a warp never reach",
        ),
    ],
)
def test_a_barrier_where_threads_part_is_an_error(device: CUDADevice, barrier: str, says: str) -> None:
    with pytest.raises(MeasureError, match=f"{says}; the device is lost"):
        reverses_rows(device, barrier)


@pytest.mark.process
def test_device_is_lost_after_write_out_of_bounds(folder: Path) -> None:
    device = emulated(folder)
    handle = device.compile([KernelSource("one_per_thread", "cuda", ONE_PER_THREAD)])["one_per_thread"]
    buffer = device.alloc(64)
    launch = device.bind(handle, [buffer], [], (1,), (17,))
    launch()  # what was enqueued has not been executed yet
    uses = (
        device.synchronize, launch, lambda: device.upload(buffer, np.zeros(1, F32)), lambda: device.alloc(1),
        lambda: device.download(buffer, F32, (1,)), lambda: device.free(buffer),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(MeasureError, match=r"illegal memory access .*device is lost"):
            use()
    device.close()


@pytest.mark.process
def test_device_pushes_and_pops_context_around_every_call(folder: Path) -> None:
    driver = EmulatedDriver()
    device = CUDADevice(0, driver, lambda architecture: EmulatedCompiler(folder))
    assert reverses_rows(device, "__syncthreads();") and driver.depth == 0 and driver.deepest == 1
    with pytest.raises(MeasureError, match=r"expected 1099511627777 bytes failed: .*out of memory$"):
        device.alloc(2**40 + 1)
    assert driver.depth == 0 and reverses_rows(device, "__syncthreads();"), "not every failure is the end"
    device.close()
    with pytest.raises(driver.LogicError, match="invalid device context"):
        driver.mem_alloc(1)
    with pytest.raises(MeasureError, match="expected device 1, got 1 of them"):
        CUDADevice(1, driver)


@pytest.mark.process
@pytest.mark.parametrize("calls", [1, 3])
def test_several_kernels_are_compiled_at_a_time(calls: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilations run in parallel; loading needs the context, which is current in one thread at a time."""
    driver = EmulatedDriver()
    meeting = threading.Barrier(3)

    class Compiler(EmulatedCompiler):
        unit = 1

        def compile(self, kernels: Sequence[KernelSource], flags: Sequence[str] = ()) -> CompiledModule:
            meeting.wait(20)
            return super().compile(kernels, flags)

    device = CUDADevice(0, driver, lambda architecture: Compiler(folder), lambda: None)

    monkeypatch.setattr("relax_tune.runtime.device.host.usable_cpus", lambda: 3)
    kernels = [
        KernelSource(name, "cuda", ONE_PER_THREAD.replace("one_per_thread", name)) for name in ("one", "two", "three")
    ]
    with ThreadPoolExecutor(3) as pool:
        loaded = [*pool.map(device.compile, [kernels[at::calls] for at in range(calls)])]
    assert {name for handles in loaded for name in handles} == {"one", "two", "three"}
    device.close()


@pytest.mark.process
def test_emulator_misaligned_vector_ends_process(folder: Path) -> None:
    """As a GPU refuses it."""
    source = """struct alignas(16) four { float v[4]; };
extern "C" __global__ void moved(const float *x, float *y) { *(four *)y = *(const four *)(x + AT); }
"""
    code = """import sys, numpy as np
from pathlib import Path
from tests.cuda_emulation.driver import emulated
from relax_tune.runtime.program.program import KernelSource
device = emulated(Path(sys.argv[1]))
handle = device.compile([KernelSource("moved", "cuda", sys.argv[2])])["moved"]
x, y = device.alloc(64), device.alloc(64)
device.bind(handle, [x, y], [], (1,), (1,))()
device.synchronize()
"""
    ends = [
        subprocess.run([sys.executable, "-c", code, str(folder), source.replace("AT", at)], cwd=ROOT).returncode
        for at in ("4", "1")
    ]
    assert ends == [0, -signal.SIGILL]


@pytest.mark.process
def test_device_without_usable_context_reports_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmulatedDriver()
    device = CUDADevice(0, driver, lambda architecture: EmulatedCompiler(folder), lambda: None)
    launch = device.bind(
        device.compile([KernelSource("one_per_thread", "cuda", ONE_PER_THREAD)])["one_per_thread"],
        [device.alloc(64)],
        [],
        (1,),
        (1,),
    )

    def refuse() -> None:
        raise driver.LogicError("cuCtxPushCurrent failed: context is destroyed")

    monkeypatch.setattr(device._context, "push", refuse)
    for use in (launch, device.synchronize):
        with pytest.raises(MeasureError, match=r"context current failed: .*device is lost"):
            use()
    assert driver.depth == 0


@pytest.mark.process
def test_arrays_larger_than_the_pinned_buffers(device: CUDADevice) -> None:
    for size in (PINNED_BYTES - 1, PINNED_BYTES, 3 * PINNED_BYTES + 5):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        buffer = device.alloc(size)
        device.upload(buffer, data)
        assert (device.download(buffer, data.dtype, data.shape) == data).all()
        device.free(buffer)


@pytest.mark.process
def test_limits_are_checked_before_the_driver(device: CUDADevice) -> None:
    source = ONE_PER_THREAD.replace("float *y", "float *y, long long n")
    handle = device.compile([KernelSource("one_per_thread", "cuda", source)])["one_per_thread"]
    buffer = device.alloc(64)

    def refused(says: str, grid: tuple[int, ...], local: tuple[int, ...], *scalars: int) -> None:
        with pytest.raises(MeasureError, match=says):
            device.bind(handle, [buffer], scalars, grid, local)

    refused("1 buffers and 2 scalars do not fit it, which takes 1 and 1", (1,), (1,), 1, 2)
    refused("local size 1025 on axis 0, allowed 1..1024", (1,), (1025,), 1)
    refused("2048 threads in a block, allowed 1024", (1, 1), (64, 32), 1)
    refused("at most 65535 on axis 1, got", (1, 65536), (1, 1), 1)
    refused("expected a grid of 1 to 3 axes", (), (), 1)
    device.bind(handle, [buffer], [1], (0,), (1,))()
    big = TURN.replace("tile[32]", "tile[50000]").replace("{barrier}", "")
    with pytest.raises(BuildError, match=r"expected 200000 bytes .* 166912"):
        device.compile([KernelSource("turn", "cuda", big)])
    with pytest.raises(BuildError, match="no such kernel"):
        device.compile([KernelSource("turn", "cuda", TURN.replace("__global__", "").replace("{barrier}", ""))])


@pytest.mark.process
def test_launches_ask_for_shared_memory_beyond_the_static_limit(device: CUDADevice) -> None:
    source = """extern "C" __global__ void turn(const float *x, float *y) {
  extern __shared__ __align__(16) unsigned char rt_shared[]; /*shared 65536*/
  float *const tile = (float *)(rt_shared + 61440);
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[1023 - threadIdx.x];
}
"""
    handle = device.compile([KernelSource("turn", "cuda", source)])["turn"]
    row = np.arange(1024, dtype=F32)
    x, y = device.alloc(row.nbytes), device.alloc(row.nbytes)
    device.upload(x, row)
    device.bind(handle, [x, y], [], (1,), (1024,))()
    assert (device.download(y, F32, (1024,)) == row[::-1]).all()


@pytest.mark.process
def test_bound_loops_match_serial_loops(device: CUDADevice) -> None:
    names = list(TEXTS)
    runs = Compiled.together(device, "cuda", [function(name) for name in names])
    rng = np.random.default_rng(1)
    for name, run in zip(names, runs, strict=True):
        for n in (0, 1, 5):
            dims: dict[str, Any] = {"n": n, "m": 3}
            shapes = [[int(str(dims.get(str(d), d))) for d in b.shape] for b in run.func.buffers]
            arrays = [rng.standard_normal(s).astype(F32) for s in shapes]
            expected = [a.copy() for a in arrays]
            run_prim(run.func, expected)
            for actual, e in zip(run(arrays), expected[1:], strict=True):
                np.testing.assert_allclose(actual, e, rtol=1e-6, err_msg=name)
