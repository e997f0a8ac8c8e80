"""OpenBLAS against NumPy, on both devices."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import ArtifactError, MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.library.openblas import OpenBlas
from relax_tune.runtime.library.registry import open_libraries

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("scipy_openblas32") is None, reason="needs the scipy-openblas32 package"
)
F32 = np.dtype(np.float32)
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def blas() -> OpenBlas:
    return OpenBlas()


def filled(device: Device, array: Any) -> Any:
    buffer = device.alloc(array.nbytes)
    device.upload(buffer, np.ascontiguousarray(array))
    return buffer


def test_library_is_found_with_fingerprint(blas: OpenBlas) -> None:
    assert "openblas" in open_libraries()
    facts = dict(blas.fingerprint())
    assert "OpenBLAS" in facts["config"] and facts["threads"] == str(blas.threads)
    assert list(blas.fingerprint()) == sorted(blas.fingerprint())


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (64, 48, 32), (1, 384, 96), (0, 4, 5), (4, 0, 5), (3, 4, 0), (200, 130, 70)]
)
def test_sgemm(device: Device, blas: OpenBlas, m: int, n: int, k: int, trans_a: int, trans_b: int) -> None:
    a, b = RNG.standard_normal((m, k), dtype=F32), RNG.standard_normal((k, n), dtype=F32)
    stored_a, stored_b = (a.T if trans_a else a), (b.T if trans_b else b)
    c = filled(device, np.full((m, n), np.nan, F32))
    scalars = [m, n, k, trans_a, trans_b, stored_a.shape[1], stored_b.shape[1], n]
    blas.bind("openblas.sgemm", device, [filled(device, stored_a), filled(device, stored_b), c], scalars)()
    np.testing.assert_allclose(device.download(c, F32, (m, n)), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [(0, 2, 2, 2), (1, 3, 4, 5), (6, 17, 9, 8), (3, 2, 4, 0), (5, 1, 1, 64)]
)
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("loop", [False, True])
def test_sgemm_batched(device: Device, batch: int, m: int, n: int, k: int, trans_b: int, loop: bool) -> None:
    blas = OpenBlas()
    if loop:
        blas._batched = None  # what an older wheel gives
    a, b = RNG.standard_normal((batch, m, k), dtype=F32), RNG.standard_normal((batch, k, n), dtype=F32)
    stored = np.ascontiguousarray(b.transpose(0, 2, 1)) if trans_b else b
    c = filled(device, np.full((batch, m, n), np.nan, F32))
    scalars = [batch, m, n, k, 0, trans_b, k, stored.shape[2], n, m * k, k * n, m * n]
    launch = blas.bind("openblas.sgemm_batched", device, [filled(device, a), filled(device, stored), c], scalars)
    launch()
    launch()
    np.testing.assert_allclose(device.download(c, F32, (batch, m, n)), a @ b, rtol=1e-4, atol=1e-4)


def test_library_opened_again_leaves_the_devices_threads(device: Device, blas: OpenBlas) -> None:
    """OpenBLAS's own threads would compute each piece of a product on the C device, and spin beside the kernels."""
    small = filled(device, np.zeros((2, 2), F32))
    for library in (blas, OpenBlas(), OpenBlas()):
        library.bind(
            "openblas.sgemm", device, [small, small, filled(device, np.zeros((2, 2), F32))], [2, 2, 2, 0, 0, 2, 2, 2]
        )()
        threads = library._symbol("openblas_get_num_threads")()
        assert threads == (1 if device.info.kind == "c" else library.threads)


def test_matrices_inside_larger_ones(device: Device, blas: OpenBlas) -> None:
    """Heads side by side in the rows of one matrix: leading dimensions larger than the matrices."""
    heads, n, d = 4, 6, 8
    x = RNG.standard_normal((n, heads * d), dtype=F32)
    out = filled(device, np.zeros((heads, n, n), F32))
    source = filled(device, x)
    scalars = [heads, n, n, d, 0, 1, heads * d, heads * d, n, d, d, n * n]
    blas.bind("openblas.sgemm_batched", device, [source, source, out], scalars)()
    split = x.reshape(n, heads, d).transpose(1, 0, 2)
    wanted = split @ split.transpose(0, 2, 1)
    np.testing.assert_allclose(device.download(out, F32, wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_empty_sum_keeps_row_gaps(device: Device, blas: OpenBlas) -> None:
    c = filled(device, np.full((3, 5), 7, F32))
    empty = device.alloc(0)
    blas.bind("openblas.sgemm", device, [empty, empty, c], [3, 4, 0, 0, 0, 0, 4, 5])()
    wanted = np.full((3, 5), 7, F32)
    wanted[:, :4] = 0
    np.testing.assert_array_equal(device.download(c, F32, (3, 5)), wanted)


def test_unsuitable_call_is_refused(device: Device, blas: OpenBlas) -> None:
    small = device.alloc(16)
    with pytest.raises(ArtifactError, match=r"openblas\.dgemm"):
        blas.bind("openblas.dgemm", device, [small] * 3, [2] * 8)
    with pytest.raises(ArtifactError, match=r"3 buffers .*scalars m, n, k"):
        blas.bind("openblas.sgemm", device, [small] * 2, [2] * 8)
    with pytest.raises(MeasureError, match="lda: expected at least 3, got 2"):
        blas.bind("openblas.sgemm", device, [small] * 3, [2, 2, 3, 0, 0, 2, 2, 2])
    with pytest.raises(MeasureError, match="scalar m: expected"):
        blas.bind("openblas.sgemm", device, [small] * 3, [2**31, 2, 2, 0, 0, 2, 2, 2])
    launch = blas.bind("openblas.sgemm", device, [small] * 3, [2, 3, 2, 0, 0, 2, 3, 3])
    with pytest.raises(MeasureError, match="buffer B: expected 24 bytes, got 16"):
        launch()
