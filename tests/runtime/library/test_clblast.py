"""CLBlast against NumPy on PoCL, and what is asked of it where it is not installed: a stand-in that computes in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from tests.runtime.library.clblast_stand_in import StandIn
from tests.runtime.library.library_matrices import F32, filled, stored
from tests.support.tuner_models import opened

from relax_tune.errors import ArtifactError, BuildError, MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.library import clblast
from relax_tune.runtime.library.clblast import ClBlast
from relax_tune.runtime.library.registry import how_to_install, open_libraries

SIZES = (0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opened("opencl") as found:
        yield found


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, marks=pytest.mark.clblast), pytest.param(False, marks=pytest.mark.opencl)],
    ids=["clblast", "stand-in"],
)
def blas(request: pytest.FixtureRequest, device: Device) -> ClBlast:
    if not request.param:
        return ClBlast(StandIn(device))
    try:
        return ClBlast()
    except BuildError as error:
        pytest.skip(str(error))


def check(
    device: Device, blas: ClBlast, rng: np.random.Generator, sizes: Sequence[int], turned: Sequence[bool]
) -> None:
    batch, m, n, k = sizes
    plain = batch == 1 and bool(rng.integers(2))
    a, a_memory, lda = stored(rng, batch, m, k, turned[0])
    shared = batch > 1 and bool(rng.integers(2))
    b, b_memory, ldb = stored(rng, 1 if shared else batch, k, n, turned[1])
    _, c_memory, ldc = stored(rng, batch, m, n, False)
    c_memory[...] = np.nan
    scalars = [m, n, k, *map(int, turned), lda, ldb, ldc]
    if not plain:
        per_a, per_b = (memory[0].size for memory in (a_memory, b_memory)) if batch else (0, 0)
        scalars = [batch, *scalars, per_a, 0 if shared else per_b, m * ldc]
    buffers = [filled(device, memory) for memory in (a_memory, b_memory, c_memory)]
    launch = blas.bind("clblast.sgemm" if plain else "clblast.sgemm_batched", device, buffers, scalars)
    for _ in range(2):
        launch()
    found = device.download(buffers[2], F32, c_memory.shape)
    np.testing.assert_allclose(found[:, :, :n], a.astype(float) @ b, rtol=2e-4, atol=2e-4, err_msg=f"{scalars}")
    assert np.isnan(found[:, :, n:]).all()
    for buffer in buffers:
        device.free(buffer)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products(device: Device, blas: ClBlast, turned: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(turned)
    for _ in range(30):
        check(device, blas, rng, (int(rng.choice([1, 1, 0, 2, 3])), *map(int, rng.choice(SIZES, size=3))), turned)


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_columns_and_empty_sums(device: Device, blas: ClBlast, batch: int) -> None:
    rng = np.random.default_rng(batch)
    for sizes in ((1, 65, 31), (65, 1, 31), (1, 1, 64), (1, 33, 1), (33, 1, 1), (1, 33, 0), (33, 1, 0), (5, 6, 0)):
        for turned in ((False, False), (False, True), (True, False), (True, True)):
            check(device, blas, rng, (batch, *sizes), turned)


def test_large_products(device: Device, blas: ClBlast) -> None:
    """Of whole tiles and nearly so, above the size from where CLBlast copies operands to tiles."""
    rng = np.random.default_rng(5)
    for sizes in ((1, 768, 640, 512), (1, 769, 641, 511), (2, 515, 520, 640)):
        check(device, blas, rng, sizes, (False, True))


def test_call_runs_in_queue_order(device: Device, blas: ClBlast) -> None:
    """A product of a product, twice, with nothing waited for in between."""
    rng = np.random.default_rng(8)
    x, w = (rng.standard_normal((64, 64)).astype(F32) / 8 for _ in range(2))
    first, second, weights = filled(device, x), filled(device, x), filled(device, w)
    there, back = (
        blas.bind("clblast.sgemm", device, [source, weights, target], [64, 64, 64, 0, 0, 64, 64, 64])
        for source, target in ((first, second), (second, first))
    )
    for _ in range(2):
        there()
        back()
    wanted = x @ w @ w @ w @ w
    np.testing.assert_allclose(device.download(first, F32, x.shape), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.clblast
def test_library_is_found_with_fingerprint() -> None:
    try:
        found = ClBlast()
    except BuildError as error:
        pytest.skip(str(error))
    assert "clblast" in open_libraries()
    facts = dict(found.fingerprint())
    assert "clblast" in facts["file"] and len(facts["build"]) == 16 and facts == dict(ClBlast().fingerprint())


def test_missing_library_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clblast, "_FILES", ("libclblast-none.so.1",))
    assert "clblast" not in open_libraries() and "apt install libclblast1" in how_to_install("clblast")
    with pytest.raises(BuildError, match=r"expected the library libclblast-none\.so\.1, got .*; install"):
        ClBlast()


class Elsewhere:
    """A device that enqueues nothing and knows no memory."""

    def __init__(self, kind: str) -> None:
        self.info = type("Info", (), {"kind": kind, "name": "elsewhere"})()

    def native(self, buffers: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
        return 1, (0,) * len(buffers)

    def alloc(self, nbytes: int, lasting: bool = False) -> Any:
        return type("Memory", (), {"nbytes": nbytes})()

    def free(self, buffer: Any) -> None: ...

    def synchronize(self) -> None: ...


def elsewhere(kind: str = "opencl") -> Device:
    return cast(Device, Elsewhere(kind))


class Refusing:
    """A library whose functions answer with these statuses, in order; it is asked nothing where there are none."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.statuses.pop(0)


def test_unsuitable_call_is_refused_before_library_runs() -> None:
    blas, device, small, huge = ClBlast(Refusing()), elsewhere(), *map(elsewhere().alloc, (16, 2**40))
    with pytest.raises(ArtifactError, match=r"one of clblast\.sgemm, .*, got clblast\.hgemm"):
        blas.bind("clblast.hgemm", device, [small] * 3, [2] * 8)
    with pytest.raises(ArtifactError, match=r"3 buffers .*scalars m, n, k"):
        blas.bind("clblast.sgemm", device, [small] * 2, [2] * 8)
    with pytest.raises(MeasureError, match="lda: expected at least 3, got 2"):
        blas.bind("clblast.sgemm", device, [small] * 3, [2, 2, 3, 0, 0, 2, 2, 2])
    with pytest.raises(MeasureError, match="buffer B: expected 24 bytes, got 16"):
        blas.bind("clblast.sgemm", device, [small] * 3, [2, 3, 2, 0, 0, 2, 3, 3])
    for sizes in ((2**16, 2**16, 2), (2, 2, 2**30), (2**31 - 1, 1, 2)):
        m, n, k = sizes
        with pytest.raises(MeasureError, match="at most 2147483647 elements"):
            blas.bind("clblast.sgemm", device, [huge] * 3, [m, n, k, 0, 0, k, n, n])
    with pytest.raises(MeasureError, match="expected an OpenCL device, got elsewhere"):
        blas.bind("clblast.sgemm", elsewhere("cuda"), [small] * 3, [2, 2, 2, 0, 0, 2, 2, 2])
    blas.bind("clblast.sgemm", device, [small] * 3, [0, 2, 2, 0, 0, 2, 2, 2])()
    blas.bind("clblast.sgemm_batched", device, [small] * 3, [0, 2, 2, 2, 0, 0, 2, 2, 2, 4, 4, 4])()


def test_a_status_is_an_error_when_binding_and_when_launching() -> None:
    """The first call of a function, which compiles, is made once for a device."""
    blas, device, scalars = ClBlast(Refusing(-11, 0, -2041, 0)), elsewhere(), [2, 2, 2, 0, 0, 2, 2, 2]
    buffers = [device.alloc(16)] * 3
    with pytest.raises(MeasureError, match="expected CLBlastSgemm to succeed, got status -11"):
        blas.bind("clblast.sgemm", device, buffers, scalars)
    launch = blas.bind("clblast.sgemm", device, buffers, scalars)
    with pytest.raises(MeasureError, match="got status -2041"):
        launch()
    blas.bind("clblast.sgemm", device, buffers, scalars)()
