"""The recipe "A device" of CONTRIBUTING.md, followed literally by an installed distribution: one file, one entry point."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TUNE = """
import numpy as np
import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Exp
from relax_tune.tuner.cli.doctor import probe

assert probe("serial", "c") is None
graph = rt.GraphBuilder()
module = graph.finish(graph.call(Exp(), graph.input("x", (graph.symbol("n", 1, 64), 8))))
options = {"target": "serial", "db": "records.db", "effort": "quick"}
result = rt.tune(module, trials=1, **options)
assert not result.work.problems, result.work.problems
assert dict(result.target.fingerprint)["device"] == "serial"
artifact = rt.build(module, **options)
assert not artifact.notes, artifact.notes
x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
with artifact.open("serial") as model:
    np.testing.assert_allclose(model.run([x])[0], np.exp(x), rtol=1e-5)
    assert model.executor.device.info.name.startswith("serial ")
print("tuned")
"""


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_device_added_by_the_recipe_tunes_and_runs_a_model(tmp_path: Path) -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## A device\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    ((group, point),) = re.findall(r'\[project\.entry-points\."(.*)"\]\n *(\w+ = ".*")\n', recipe)
    site = tmp_path / "site"
    site.mkdir()
    (site / "serial_device.py").write_text(code)
    metadata = site / "serial_device-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: serial-device\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")])}
    environment.pop("RELAX_TUNE_SELF_TEST", None)
    done = subprocess.run(
        [sys.executable, "-c", TUNE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "tuned\n", done.stdout + done.stderr[-3000:]
