"""Weights on a device: read in the mapped artifact where that is possible, and freed when they were only packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_tune.runtime.artifact import load_artifact, save_artifact
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.memory.weights import DeviceWeights, read_by_calls
from relax_tune.runtime.program.program import BufferSpec

pytestmark = pytest.mark.ccompiler


@pytest.fixture(scope="module")
def opened() -> Any:
    device = CDevice()
    yield device
    device.close()


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_constant_of_saved_artifact_has_address_in_mapped_file(
    opened: CDevice, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_tune.runtime.hashed_zip.BLOCK_BYTES", 64)  # smaller constants are read
    program = small.program("c")
    rows = program.buffers[1].shape[0] + 1  # the slot of the constant 4, after the one of 3
    spec = BufferSpec("wide", "float64", (rows, rows), "const")
    program = replace(program, buffers=(*program.buffers, spec))
    wide = np.arange(16.0).reshape(4, 4)
    path = save_artifact(tmp_path / "m.rta", program, {**small.constants, "wide": wide})
    constants = load_artifact(path).constants
    weights = DeviceWeights(opened, constants)
    buffer = weights.constant("wide", np.dtype(np.float64), (4, 4))
    assert buffer.address == address(constants["wide"]) and buffer.nbytes == 128
    np.testing.assert_array_equal(opened.download(buffer, np.dtype(np.float64), (4, 4)), wide)
    inner = constants["wide"].reshape(-1)[1:]  # within a cache line
    copied = DeviceWeights(opened, {"inner": inner}).constant("inner", inner.dtype, inner.shape)
    assert copied.address != address(inner) and copied.address % 64 == 0
    np.testing.assert_array_equal(opened.download(copied, inner.dtype, inner.shape), inner)
    weights.close()
    np.testing.assert_array_equal(constants["wide"], wide)


def test_constant_of_writable_array_is_copied(opened: CDevice) -> None:
    array = np.zeros(1024, np.float32)
    weights = DeviceWeights(opened, {"w": array})
    buffer = weights.constant("w", array.dtype, array.shape)
    array[:] = 1
    assert not opened.download(buffer, array.dtype, array.shape).any()
    weights.close()


def test_packed_weight_is_freed_after_packing(opened: CDevice, small: Any, tmp_path: Path) -> None:
    program = small.program("c")
    assert read_by_calls(program) == set()
    plain = replace(program.calls[1].variants[0].steps[0], buffers=(1, 4))
    calls = (
        program.calls[0],
        replace(program.calls[1], variants=(replace(program.calls[1].variants[0], steps=(plain,)),)),
    )
    assert read_by_calls(replace(program, calls=calls)) == {"bias"}
    with load_artifact(save_artifact(tmp_path / "m.rta", program, small.constants)).open(opened) as model:
        assert model.executor.buffer("bias").array is None and model.executor.buffer("packed").array is not None
        x = np.ones((5, 3), np.float32)
        np.testing.assert_allclose(model.run([x])[0], small.reference(x))
