"""What is compiled ahead is in the driver's cache, and a process that ends while it does so costs nothing but time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.tuner.measure.device_process.precompiling import Precompiler
from relax_tune.tuner.measure.local import LocalRunner

pytestmark = pytest.mark.opencl


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[Precompiler]:
    """A process that compiles ahead, as the device process starts it, with its cache in `tmp_path`."""
    read_from, its_write = os.pipe()
    its_read, write_to = os.pipe()
    (tmp_path / "device").mkdir()
    cache = str(tmp_path / "device" / "cache")
    variables = {"POCL_CACHE_DIR": cache, "PYOPENCL_NO_CACHE": "1", "TMPDIR": str(tmp_path / "device")}
    module = "relax_tune.tuner.measure.device_process.start"
    process = subprocess.Popen(
        python_command("-m", module, "opencl", str(its_read), str(its_write), "precompile", "sandbox"),
        pass_fds=(its_read, its_write),
        cwd=tmp_path / "device",
        env=clean_environment({**os.environ, **variables}),
    )
    for descriptor in (its_read, its_write):
        os.close(descriptor)
    yield Precompiler(read_from, write_to)
    os.close(write_to)
    assert process.wait(LIMIT_SECS) in (0, -11), "it ends with the device process"
    os.close(read_from)


def compiled(tmp_path: Path) -> set[str]:
    """The kernels that the cache has for the processor's threads or for the serial driver, ready to run."""
    return {path.stem for path in (tmp_path / "device" / "cache").glob("**/*.so")}


def test_kernels_are_launched_ahead(ahead: Precompiler, tmp_path: Path) -> None:
    ahead.begin([request("good", "opencl"), request("syntax", "opencl")], [])
    ahead.wait()
    assert not ahead.ended and compiled(tmp_path) == {"kernel_good"}
    ahead.begin([request("also-good", "opencl")], ["kernel_also_good"])
    ahead.wait()
    assert not ahead.ended and compiled(tmp_path) == {"kernel_good", "kernel_also_good"}


def test_crash_ends_only_the_precompiling_process(ahead: Precompiler) -> None:
    ahead.begin([request("crash", "opencl")], [])
    ahead.wait()
    assert ahead.ended
    ahead.begin([request("good", "opencl")], [])
    ahead.wait()


def test_a_batch_with_a_crash_in_the_second_half_loses_no_result() -> None:
    kinds = ("good", "also-good", "stale", "crash", "wrong")
    with LocalRunner("opencl") as runner:
        results = runner.submit([request(kind, "opencl") for kind in kinds]).result(LIMIT_SECS)
    found = {r.id: r.stage for r in results}
    assert found["good"] is None and found["also-good"] is None
    assert found["crash"] == "crash" and found["wrong"] == "wrong-result"
