"""oneDNN against NumPy: products at odd sizes and layouts, with what follows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np
import pytest
from tests.runtime.library.library_matrices import ACTIVATIONS, F32, filled, stored
from tests.support.tuner_models import opened

from relax_tune.errors import ArtifactError, MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.library.onednn import FOLLOWS, OneDnn
from relax_tune.runtime.library.onednn_primitives import PACKAGE
from relax_tune.runtime.library.registry import open_libraries

try:
    distribution(PACKAGE)
    MISSING = False
except PackageNotFoundError:
    MISSING = True
pytestmark = [
    pytest.mark.skipif(MISSING, reason=f"needs the package {PACKAGE}"),
    pytest.mark.ccompiler,
    pytest.mark.onednn,
]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opened("c") as found:
        yield found


@pytest.fixture(scope="module")
def dnn() -> OneDnn:
    return OneDnn()


def code(follows: Sequence[str]) -> int:
    return sum((FOLLOWS.index(name) + 1) << (4 * at) for at, name in enumerate(follows))


def check(device: Device, dnn: OneDnn, rng: np.random.Generator, sizes: Sequence[int], follows: Sequence[str]) -> None:
    batch, m, n, k = sizes
    plain = batch == 1 and bool(rng.integers(2))
    turned_a, turned_b = (bool(x) for x in rng.integers(2, size=2))
    a, a_memory, lda = stored(rng, batch, m, k, turned_a)
    shared = batch > 1 and bool(rng.integers(2))
    b, b_memory, ldb = stored(rng, 1 if shared else batch, k, n, turned_b)
    _, c_memory, ldc = stored(rng, batch, m, n, False)
    c_memory[...] = np.nan
    y, arrays, strides = a.astype(np.float64) @ b, [], []
    for name in follows:
        if name in ACTIVATIONS:
            y = ACTIVATIONS[name](y)
            continue
        dims = [d if rng.integers(2) else 1 for d in (batch, m, n)]
        array = rng.standard_normal(dims).astype(F32)
        y = y + array if name == "add" else y * array
        arrays.append(filled(device, array))
        whole = (dims[1] * dims[2], dims[2], 1)
        strides += [s if d > 1 or d == size else 0 for s, d, size in zip(whole, dims, (batch, m, n))]
    strides += [0] * (6 - len(strides))
    scalars = [m, n, k, int(turned_a), int(turned_b), lda, ldb, ldc]
    if not plain:
        per_a, per_b = (math.prod(memory.shape[1:]) for memory in (a_memory, b_memory))
        scalars = [batch, *scalars, per_a, 0 if shared else per_b, m * ldc]
    out = filled(device, c_memory)
    routine = "onednn.matmul" if plain else "onednn.matmul_batched"
    weights = filled(device, b_memory)
    if plain and rng.integers(2):
        routine, weights = "onednn.matmul_packed", packed(device, dnn, weights, (n, k, int(turned_b), ldb))
        scalars = [m, n, k, int(turned_a), lda, ldc]
    buffers = [filled(device, a_memory), weights, *arrays, out]
    launch = dnn.bind(routine, device, buffers, [*scalars, code(follows), *strides])
    for _ in range(2):
        launch()
    found = device.download(out, F32, c_memory.shape)
    np.testing.assert_allclose(
        found[:, :, :n], y, rtol=2e-4, atol=2e-4, err_msg=f"{sizes} {follows} {scalars} {strides}"
    )
    assert np.isnan(found[:, :, n:]).all()


def packed(device: Device, dnn: OneDnn, weights: Any, sizes: tuple[int, int, int, int]) -> Any:
    """Weights as the library wants them, in the memory that the table of alternatives gives them."""
    made = device.alloc(-(-sizes[0] // 64) * -(-sizes[1] // 64) * 64 * 64 * 4)
    dnn.bind("onednn.pack", device, [weights, made], sizes)()
    return made


def test_library_is_found_with_fingerprint(dnn: OneDnn) -> None:
    assert "onednn" in open_libraries()
    facts = dict(dnn.fingerprint())
    assert facts["version"].startswith("3.") and facts["threads"] == str(dnn.threads)
    assert list(dnn.fingerprint()) == sorted(dnn.fingerprint())


@pytest.mark.parametrize("seed", range(80))
def test_random_products(device: Device, dnn: OneDnn, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 1, 1, 0, 2, 3]))
    m, n, k = (int(x) for x in rng.choice([0, 1, 2, 3, 5, 7, 13, 16, 31, 64, 67], size=3))
    follows = [str(x) for x in rng.choice(FOLLOWS, size=rng.integers(0, 5))]
    while sum(x in ("add", "mul") for x in follows) > 2:
        follows.remove("add" if "add" in follows else "mul")
    check(device, dnn, rng, (batch, m, n, k), follows)


@pytest.mark.parametrize("follows", [("add", "gelu"), ("add", "add"), ("add", "relu", "mul"), ("add", "swish")])
def test_products_of_models(device: Device, dnn: OneDnn, follows: Sequence[str]) -> None:
    check(device, dnn, np.random.default_rng(9), (1, 127, 96, 257), follows)


def test_unsuitable_call_is_refused(device: Device, dnn: OneDnn) -> None:
    small, none = device.alloc(16), [0] * 7
    with pytest.raises(ArtifactError, match=r"onednn\.convolution"):
        dnn.bind("onednn.convolution", device, [small] * 3, [2] * 8)
    with pytest.raises(ArtifactError, match="expected the scalars m, n, k"):
        dnn.bind("onednn.matmul", device, [small] * 3, [2] * 8)
    plain = [2, 2, 2, 0, 0, 2, 2, 2]
    with pytest.raises(ArtifactError, match="expected 4 buffers for add, got 3"):
        dnn.bind("onednn.matmul", device, [small] * 3, [*plain, code(["add"]), *none[1:]])
    with pytest.raises(ArtifactError, match=r"places 1\.\.8, got 15"):
        dnn.bind("onednn.matmul", device, [small] * 3, [*plain, 15, *none[1:]])
    with pytest.raises(ArtifactError, match="2 arrays, got add, mul, add"):
        dnn.bind("onednn.matmul", device, [small] * 6, [*plain, code(["add", "mul", "add"]), *none[1:]])
    with pytest.raises(MeasureError, match="lda: expected at least 2, got 1"):
        dnn.bind("onednn.matmul", device, [small] * 3, [2, 2, 2, 0, 0, 1, 2, 2, *none])
    with pytest.raises(MeasureError, match="scalar m: expected"):
        dnn.bind("onednn.matmul", device, [small] * 3, [2**41, *plain[1:], *none])
    launch = dnn.bind("onednn.matmul", device, [small] * 3, [2, 3, 2, 0, 0, 2, 3, 3, *none])
    with pytest.raises(MeasureError, match="buffer 1: expected 24 bytes, got 16"):
        launch()
    with pytest.raises(ArtifactError, match="expected 2 buffers for weights, got 3"):
        dnn.bind("onednn.pack", device, [small] * 3, [2, 2, 0, 2])
    with pytest.raises(MeasureError, match=r"buffer 1: expected [0-9]+ bytes, got 16"):
        dnn.bind("onednn.pack", device, [device.alloc(1 << 16), small], [64, 64, 0, 64])()
