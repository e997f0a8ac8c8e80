"""`--target cuda` works like other targets, with child processes: on the emulation, without the packages of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

HERE = Path(__file__).parent


@pytest.mark.ccompiler
def test_a_model_is_tuned_built_and_run(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE / "packages"), str(HERE.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "tuned.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": path, "RELAX_TUNE_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "listed ['emulated']" in done.stdout
