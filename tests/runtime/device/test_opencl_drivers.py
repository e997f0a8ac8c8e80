"""The family of OpenCL drivers: each runs the tests of OpenCL devices in a process of its own, where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.opencl_drivers import DRIVERS, Driver

pytestmark = [pytest.mark.process, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
CONTRACT = ("tests/runtime/device/test_device_contract.py", "tests/runtime/device/test_quirks.py")
SAMPLES = ("tests/schedules/rules/test_on_devices.py",)
MODEL = ("tests/tuner/e2e/test_minilm.py",)


@pytest.fixture(params=[pytest.param(d, marks=[pytest.mark.drivers] if d.linked else [], id=d.name) for d in DRIVERS])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Driver, Mapping[str, str]]:
    """A driver and the environment in which it is offered."""
    found: Driver = request.param
    offered = found.environment(tmp_path)
    if offered is None:
        pytest.skip(f"{found.name} is not installed: {found.install}")
    return found, offered


def passed(driver: tuple[Driver, Mapping[str, str]], files: tuple[str, ...], *more: str) -> int:
    """Run the tests of files that use an OpenCL device on a driver; return how many passed."""
    found, own = driver
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RELAX_TUNE_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "opencl", "-p", "no:cacheprovider", *more, *files]
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, **own}, capture_output=True, text=True, timeout=1800, check=False
    )
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0 and "skipped" not in done.stdout, f"{found.name}: {said}"
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, said
    return int(counted[1])


def test_driver_fulfils_the_device_contract(driver: tuple[Driver, Mapping[str, str]]) -> None:
    assert passed(driver, CONTRACT) > 40


@pytest.mark.heavy
def test_samples_of_rules_match_reference_on_driver(driver: tuple[Driver, Mapping[str, str]]) -> None:
    assert passed(driver, SAMPLES) > 10


@pytest.mark.heavy
@pytest.mark.minilm
def test_tuned_minilm_on_driver_gives_the_embeddings(driver: tuple[Driver, Mapping[str, str]]) -> None:
    assert passed(driver, MODEL, "--heavy") == 3
