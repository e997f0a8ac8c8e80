"""The programs of `examples/hpvm.py` on other devices than the processor: OpenCL, and CUDA on its emulation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.store import MemoryStore
from relax_tune.runtime.device.base import Device
from relax_tune.tuner.job.device_job import device_job

EXAMPLE = Path(__file__).parent.parent / "examples" / "hpvm.py"
NAMES = ("sgemm", "stencil", "spmv", "lbm", "edges")


@pytest.fixture(scope="module")
def hpvm() -> Any:
    spec = importlib.util.spec_from_file_location("hpvm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tuple(module.PROGRAMS) == NAMES
    return module


def check(hpvm: Any, name: str, device: Device, sizes: tuple[int, ...]) -> None:
    job = device_job(hpvm.PROGRAMS[name](), device.info, MemoryStore(), QUICK)
    with job.artifact(job.build("generic")).open(device) as model:
        for size in sizes:
            given = hpvm.arguments(name, size)
            (found,) = model.run(given)
            np.testing.assert_allclose(found, hpvm.reference(name, given), rtol=1e-4, atol=1e-4)


@pytest.mark.opencl
@pytest.mark.parametrize("name", NAMES)
def test_programs_opencl_match_numpy(hpvm: Any, name: str) -> None:
    with opened("opencl") as device:
        check(hpvm, name, device, (1, 5, 21))


@pytest.mark.ccompiler
@pytest.mark.parametrize("name", NAMES)
def test_programs_cuda_emulation_match_numpy(hpvm: Any, name: str, tmp_path: Path) -> None:
    device = emulated(tmp_path)
    check(hpvm, name, device, (1, 5))
    device.close()
