"""What the tuner built runs where nothing of the compiler, the tuner or their dependencies can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import DEVICES, QUICK, feed_forward, feed_forward_reference, opened

from relax_tune.database.store import MemoryStore
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.process

BLOCKED = (
    *("xgboost", "optuna", "sqlalchemy", "alembic", "typer", "rich", "onnx", "torch", "distributed"),
    *("relax_tune.ir", "relax_tune.schedules", "relax_tune.tuner", "relax_tune.database"),
)
SCRIPT = """
import importlib.abc, sys

BLOCKED = tuple(sys.argv[3].split(","))

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED):
            raise ImportError(f"{name} is blocked here")
        return None

sys.meta_path.insert(0, Blocker())
import numpy as np
from relax_tune.runtime.artifact import load_artifact

given = np.load(sys.argv[2])
with load_artifact(sys.argv[1]).open() as model:
    np.savez(sys.argv[2] + ".out.npz", **{name: model.run([given[name]])[0] for name in given.files})
got = sorted(m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in BLOCKED))
sys.exit(f"imported {got}" if got else 0)
"""


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("policy", ["generic", "library"])
def test_a_built_model_runs_alone(kind: str, policy: Any, tmp_path: Path) -> None:
    module = feed_forward()
    with opened(kind) as device:
        job = device_job(module, device.info, MemoryStore(), QUICK)
    built = job.build(policy)
    labels = {v.label for c in built.program.calls for v in c.variants}
    assert labels == {"generic"} if policy == "generic" else "library" in labels
    path = job.artifact(built).save(tmp_path / "m.rta")
    rng = np.random.default_rng(1)
    inputs = {f"x{n}": rng.standard_normal((n, 24)).astype(np.float32) for n in (1, 7, 97)}
    np.savez(tmp_path / "in.npz", **inputs)  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "in.npz"), ",".join(BLOCKED)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RELAX_TUNE_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "in.npz.out.npz") as found:
        for name, x in inputs.items():
            np.testing.assert_allclose(found[name], feed_forward_reference(module, x), rtol=1e-4, atol=1e-4)
