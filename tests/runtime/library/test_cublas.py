"""cuBLAS and cuBLASLt as the runtime calls them, on the emulated GPU: the libraries are a stand-in that computes on the processor
and answers wrong arguments as they do. No real one was asked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.cuda_emulation.cublas import NAMES, StandIn, library_folder
from tests.cuda_emulation.driver import EmulatedCompiler, EmulatedDriver
from tests.runtime.library.library_matrices import ACTIVATIONS, filled

from relax_tune.errors import ArtifactError, BuildError, MeasureError
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.library import cublas_api
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.library.cublaslt import FOLLOWS, CuBlasLt
from relax_tune.runtime.library.registry import how_to_install, open_libraries
from relax_tune.runtime.program.program import KernelSource

pytestmark = pytest.mark.ccompiler

Array = np.ndarray[Any, Any]
TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TURNS = [(False, False), (False, True), (True, False), (True, True)]
CHAINS: list[tuple[str, ...]] = [
    *[(), ("bias",), ("residual",), ("relu",), ("gelu_tanh",), ("bias", "gelu_tanh"), ("residual", "relu")],
    *[("bias", "residual"), ("residual", "bias", "gelu_tanh")],
]


class Emulated:
    """An emulated GPU with both libraries on it."""

    def __init__(self, folder: Path) -> None:
        self.driver = EmulatedDriver()
        self.device = CUDADevice(0, self.driver, lambda architecture: EmulatedCompiler(folder), lambda: self.driver)
        self.asked = StandIn(library_folder(folder) / NAMES[0], self.driver)
        self.blas, self.lt = CuBlas(self.asked.dll), CuBlasLt(self.asked.dll)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cublas")


@pytest.fixture
def gpu(folder: Path) -> Iterator[Emulated]:
    found = Emulated(folder)
    before = found.asked.alive
    yield found
    found.device.close()
    assert found.asked.alive == before and found.driver.depth == 0, "handles are given back with the device"


def stored(
    rng: np.random.Generator, dtype: np.dtype[Any], batch: int, rows: int, columns: int, turned: bool
) -> tuple[Array, Array, int]:
    """Matrices in f64, the memory that holds them (with a gap behind every row), and the length of its rows."""
    values = rng.standard_normal((batch, rows, columns)).astype(dtype)
    lying = values.transpose(0, 2, 1) if turned else values
    lead = lying.shape[2] + 2 * int(rng.integers(0, 2)) + lying.shape[2] % 2  # even: see `cublas.cpp`
    memory = np.zeros((batch, lying.shape[1], lead), dtype)
    memory[:, :, : lying.shape[2]] = lying
    return values.astype(float), memory, lead


def code(follows: Sequence[str]) -> int:
    return sum((FOLLOWS.index(name) + 1) << (4 * at) for at, name in enumerate(follows))


def check(
    gpu: Emulated, kind: str, sizes: Sequence[int], turned: Sequence[bool], follows: Sequence[str] | None, seed: int = 0
) -> None:
    """One product of `cublas`, or of `cublaslt` where something follows it, twice."""
    (batch, m, n, k), rng = sizes, np.random.default_rng([seed, *sizes])
    operand, result = TYPES[kind.split("_")[0]], TYPES[kind.split("_")[-1]]
    plain = batch == 1 and bool(rng.integers(2))
    a, a_memory, lda = stored(rng, operand, batch, m, k, turned[0])
    shared = batch > 1 and bool(rng.integers(2))
    b, b_memory, ldb = stored(rng, operand, 1 if shared else batch, k, n, turned[1])
    _, c_memory, ldc = stored(rng, result, batch, m, n, False)
    c_memory[...] = 77
    y, arrays, strides = a @ b, list[Array](), list[int]()
    for name in follows or ():
        if name in ACTIVATIONS:
            y = ACTIVATIONS[name](y)
            continue
        more = rng.standard_normal((batch, m, n) if name == "residual" else (n,)).astype(result)
        y = y + more.astype(float)
        arrays.append(more)
        strides += [m * n, n, 1] if name == "residual" else [0, 0, 1]
    scalars = [m, n, k, *map(int, turned), lda, ldb, ldc]
    if not plain:
        per_a, per_b = a_memory[:1].size, b_memory[:1].size
        scalars = [batch, *scalars, per_a, 0 if shared else per_b, m * ldc]
    routine = f"cublas.gemm_{kind}"
    if follows is not None:
        routine = f"cublaslt.matmul_{kind}"
        scalars += [code(follows), *strides, *[0] * (6 - len(strides))]
    buffers = [filled(gpu.device, x) for x in (a_memory, b_memory, *arrays, c_memory)]
    library = gpu.blas if follows is None else gpu.lt
    launch = library.bind(routine if plain else f"{routine}_batched", gpu.device, buffers, scalars)
    for _ in range(2):
        launch()
    found = gpu.device.download(buffers[-1], result, c_memory.shape).astype(float)
    bound = 1e-5 if result == np.float32 else 1e-3 if result == np.float16 else 8e-3
    np.testing.assert_allclose(
        found[:, :, :n], y, rtol=bound, atol=bound * (1 + k) ** 0.5, err_msg=f"{routine} {scalars}"
    )
    assert (found[:, :, n:] == 77).all(), "what lies between rows is left alone"


@pytest.mark.process
@pytest.mark.parametrize("kind", list(cublas_api.ELEMENTS))
@pytest.mark.parametrize("turned", TURNS)
def test_products(gpu: Emulated, kind: str, turned: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(5)
    shapes = [
        (1, 1, 1, 1),
        (1, 7, 1, 31),
        (1, 1, 65, 8),
        (3, 5, 6, 7),
        (2, 1, 17, 1),
        (1, 4, 6, 0),
        (2, 4, 6, 0),
        (1, 0, 3, 2),
    ]
    for seed, sizes in enumerate([*shapes, *(tuple(map(int, rng.integers(1, 20, 4))) for _ in range(3))]):
        check(gpu, kind, sizes, turned, None, seed)
        check(gpu, kind, sizes, turned, (), seed)


@pytest.mark.process
@pytest.mark.parametrize("follows", CHAINS, ids="-".join)
def test_product_applies_epilogue(gpu: Emulated, follows: tuple[str, ...]) -> None:
    for seed, (kind, sizes) in enumerate(
        zip([*cublas_api.ELEMENTS, "f32"], [(1, 9, 13, 5), (2, 3, 8, 16)] * 3, strict=True)
    ):
        check(gpu, kind, sizes, TURNS[seed % 4], follows, seed)
    check(gpu, "f32", (1, 3, 4, 0), (False, False), follows)


def square(gpu: Emulated, library: CuBlas | CuBlasLt, kind: str, n: int = 8) -> tuple[list[Any], list[int], str]:
    """Buffers, scalars and routine of a square product, the buffers full of ones."""
    width = TYPES[kind.split("_")[0]]
    buffers = [filled(gpu.device, np.ones((n, n), t)) for t in (width, width, TYPES[kind.split("_")[-1]])]
    scalars = [n, n, n, 0, 0, n, n, n]
    if library is gpu.blas:
        return buffers, scalars, f"cublas.gemm_{kind}"
    return buffers, [*scalars, *[0] * 7], f"cublaslt.matmul_{kind}"


ADD = """extern "C" __global__ void add(float *y) { y[threadIdx.x] += 1.0f; }
"""


@pytest.mark.process
def test_cublas_products_run_in_order_in_recordings(gpu: Emulated) -> None:
    add = gpu.device.compile([KernelSource("add", "cuda", ADD)])["add"]
    for library in (gpu.blas, gpu.lt):
        buffers, scalars, routine = square(gpu, library, "f32")
        product = library.bind(routine, gpu.device, buffers, scalars)
        more = gpu.device.bind(add, [buffers[0]], [], (1,), (64,))
        before = gpu.asked.products
        recorded = gpu.device.record([more, product, more])
        assert recorded is not None and gpu.asked.products == before, "nothing has run"
        recorded()
        recorded()
        assert gpu.device.download(buffers[2], TYPES["f32"], (8, 8)).tolist() == [[8 * 4.0] * 8] * 8
        assert gpu.asked.products == before + 2


@pytest.mark.process
def test_a_device_has_one_handle_and_nothing_is_allocated_by_a_call(gpu: Emulated) -> None:
    before = gpu.asked.alive
    for library in (gpu.blas, gpu.lt):
        buffers, scalars, routine = square(gpu, library, "f16")
        library.bind(routine, gpu.device, buffers, scalars)()
        memory, chosen = len(gpu.driver.allocations), gpu.asked.chosen
        again = [library.bind(routine, gpu.device, buffers, scalars) for _ in range(3)]
        for launch in again:
            launch()
        assert len(gpu.driver.allocations) == memory and gpu.asked.chosen == chosen, "an algorithm is chosen once"
        del again, launch
    assert gpu.asked.alive == before + 2, "a handle each; descriptions are given back with their launch"


@pytest.mark.process
def test_wrong_guards_are_refused(gpu: Emulated) -> None:
    """Rows, memory, what follows, alignment and types, each where it is wrong."""
    for library in (gpu.blas, gpu.lt):
        buffers, scalars, routine = square(gpu, library, "f16")

        def refused(error: type[Exception], says: str, scalars: Sequence[int], given: Sequence[Any] = buffers) -> None:
            with pytest.raises(error, match=says):
                library.bind(routine, gpu.device, given, scalars)  # noqa: B023

        refused(MeasureError, "lda: expected at least 8, got 7", [*scalars[:5], 7, *scalars[6:]])
        refused(MeasureError, "buffer B: expected 142 bytes, got 128", [*scalars[:6], 9, *scalars[7:]])
        refused(MeasureError, r"scalar m: expected 0\.\.", [-1, *scalars[1:]])
        refused(ArtifactError, "expected the scalars|3 buffers and the scalars", scalars[1:])
        refused(ArtifactError, "expected 3 buffers", scalars, buffers[:2])
        with pytest.raises(ArtifactError, match="expected one of "):
            library.bind(f"{library.name}.gemm_f8", gpu.device, buffers, scalars)
        with pytest.raises(MeasureError, match="expected a CUDA device, got"):
            library.bind(routine, CDevice(), buffers, scalars)
        widened = routine.replace("f16", "f16_f32")
        with pytest.raises(MeasureError, match="buffer C: expected 256 bytes, got 128"):
            library.bind(widened, gpu.device, buffers, scalars)


@pytest.mark.process
def test_wrong_arrays_after_a_product_are_refused(gpu: Emulated) -> None:
    buffers, scalars, routine = square(gpu, gpu.lt, "f32")
    plain, (a, b, c) = scalars[:8], buffers

    def bind(follows: Sequence[str], strides: Sequence[int], *arrays: Any) -> None:
        strides = [*strides, *[0] * (6 - len(strides))]
        gpu.lt.bind(routine, gpu.device, [a, b, *arrays, c], [*plain, code(follows), *strides])

    small, full = gpu.device.alloc(28), gpu.device.alloc(256)
    bind(("bias", "residual"), (0, 0, 1, 64, 8, 1), full, full)
    for follows in (("relu", "bias"), ("bias", "bias"), ("relu", "gelu_tanh")):
        with pytest.raises(ArtifactError, match=r"once each, .*at most one activation"):
            bind(follows, (0, 0, 1, 0, 0, 1), full, full)
    with pytest.raises(ArtifactError, match="expected 4 buffers for bias"):
        bind(("bias",), (0, 0, 1))
    with pytest.raises(MeasureError, match="bias: expected 32 bytes, got 28"):
        bind(("bias",), (0, 0, 1), small)
    with pytest.raises(MeasureError, match=r"bias: expected rows of 8 .*one for all"):
        bind(("bias",), (0, 8, 1), full)
    with pytest.raises(MeasureError, match="residual: expected rows of 8"):
        bind(("residual",), (0, 1, 8), full)
    with pytest.raises(ArtifactError, match=r"expected places 1\.\.4, got 9"):
        gpu.lt.bind(routine, gpu.device, [a, b, c], [*plain, 9, *[0] * 6])


@pytest.mark.process
def test_bind_refuses_product_without_algorithm(gpu: Emulated) -> None:
    """The stand-in has no algorithm for odd rows of 16-bit floats."""
    buffers, scalars, routine = square(gpu, gpu.lt, "bf16", 7)
    with pytest.raises(MeasureError, match="algorithm for a product, got none"):
        gpu.lt.bind(routine, gpu.device, buffers, scalars)


@pytest.mark.process
def test_a_status_is_an_error(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, scalars, routine = square(gpu, gpu.blas, "f32")
    gpu.blas.bind(routine, gpu.device, buffers, scalars)
    monkeypatch.setattr(gpu.blas._cublas, "raw", lambda name: lambda *arguments: 13)
    launch = gpu.blas.bind(routine, gpu.device, buffers, scalars)
    monkeypatch.undo()
    with pytest.raises(MeasureError, match="expected cublasGemmEx to succeed, got status 13"):
        launch()
    assert gpu.driver.depth == 0


def test_missing_libraries_name_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_api, "MAJORS", (99,))
    for kind in (CuBlas, CuBlasLt):
        with pytest.raises(BuildError, match=r"library libcublas(Lt)?\.so\.99, got .*pip install"):
            kind()
        assert kind.name not in open_libraries() and "relax-tune[cuda]" in how_to_install(kind.name)
    with pytest.raises(BuildError, match="expected the function cublasCreate_v2, got none"):
        CuBlas(ctypes.CDLL(None))


@pytest.mark.process
def test_fingerprint_names_version(gpu: Emulated) -> None:
    for library in (gpu.blas, gpu.lt):
        assert dict(library.fingerprint()) == {"version": "13.1.2", "workspace": str(32 << 20)}
