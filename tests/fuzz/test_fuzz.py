"""The fuzzer's checks, its stored findings, and a fixed run of it, in a separate process.

Their children are forked, which is safe only where no thread pool of OpenMP or OpenCL runs yet; other tests start these.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("fuzz_checks.py")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.ccompiler
@pytest.mark.opencl
def test_fuzz_checks_in_a_fresh_process_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
