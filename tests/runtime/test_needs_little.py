"""The runtime works where only NumPy with ml_dtypes and safetensors are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_tune.runtime.artifact import save_artifact

pytestmark = pytest.mark.process

BLOCKED = (
    *("xgboost", "optuna", "sqlalchemy", "alembic", "onnx", "torch", "typer", "rich", "scipy", "distributed"),
    *("pyopencl", "scipy_openblas32", "platformdirs", "tokenizers", "hypothesis", "pytest"),
    *("relax_tune.ir", "relax_tune.schedules", "relax_tune.database", "relax_tune.tuner"),
)
SCRIPT = """
import importlib, importlib.abc, pkgutil, sys

BLOCKED = set(sys.argv[2].split(","))

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked here")
        return None

sys.meta_path.insert(0, Blocker())
try:
    import xgboost
except ImportError:
    pass
else:
    sys.exit("the blocker does not block")

import relax_tune.runtime

names = [m.name for m in pkgutil.walk_packages(relax_tune.runtime.__path__, "relax_tune.runtime.")]
for name in names:
    importlib.import_module(name)
assert "relax_tune.runtime.device.opencl" in names and "relax_tune.runtime.library.openblas" in names

import numpy as np
from relax_tune.runtime.artifact import load_artifact

with load_artifact(sys.argv[1]).open() as model:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    print(model.run([x])[0].tolist())
"""


@pytest.mark.ccompiler
def test_an_artifact_runs_without_the_tuner_s_packages(tmp_path: Path, small: Any) -> None:
    path = save_artifact(tmp_path / "m.rta", small.program("c"), small.constants)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), ",".join(BLOCKED)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RELAX_TUNE_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([2 * float(3 * (3 * i + 1)) + 1.5 for i in range(5)])
