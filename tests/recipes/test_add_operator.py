"""CONTRIBUTING's recipe for an elementwise operator, followed literally in a copy of the product: three product files change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ir", "schedules", "tuner", "runtime", "database")
MOST_FILES = 3
# By file: the end of the table that an entry is added to, or "" for the end of the file.
PLACES = {
    "ir/core/scalar_ops.py": ")  # fmt: skip\n\nSCALAR_OPS",
    "ir/op/math/numeric.py": "",
    "ir/codegen/print/wgsl/functions.py": "}\n\n\ndef conversion",
}
SCRIPT = """
import numpy as np

from relax_tune.database.memory_store import MemoryStore
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchTensor
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

x = np.array([-8, -0.125, 0, 1, 2, 27], np.float32)
info = TorchTensor((6,), f32)
node = TorchCall("y", "aten.cbrt.default", (Ref("x"),), {}, info)
module = import_program(TorchProgram((), (("x", info),), {}, {}, (node,), (("y", Ref("y")),)))
assert "op.cbrt(x)" in print_text(module), print_text(module)
module = parse_module(print_text(module), OPERATORS)
np.testing.assert_allclose(run_function(module, "main", [x]), np.cbrt(x), rtol=1e-6)
device = open_device("c")
job = device_job(module, device.info, MemoryStore(), Settings(target="c", effort="quick"))
with job.artifact(job.build("generic")).open(device) as model:
    (y,) = model.run([x])
np.testing.assert_allclose(y, np.cbrt(x), rtol=1e-6)
"""


def recipe() -> dict[str, str]:
    """Return the code of the recipe by the file that it goes into."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## An elementwise operator\n")[2].partition("\n## ")[0]
    parts = section.split("```py\n")
    files = [re.findall(r"`(ir/[\w/]+\.py)`", prose)[-1] for prose in parts[:-1]]
    return dict(zip(files, (part.partition("```")[0] for part in parts[1:]), strict=True))


def copy_of_product(folder: Path) -> Path:
    """Copy the product so that it can be imported from `folder`."""
    package = folder / "relax_tune"
    package.mkdir()
    for file in (ROOT / "src" / "relax_tune").glob("*.py"):
        shutil.copy(file, package)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    return package


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_recipe_of_elementwise_operator_works_as_written(tmp_path: Path) -> None:
    package = copy_of_product(tmp_path)
    edits = recipe()
    assert set(edits) == set(PLACES) and len(edits) <= MOST_FILES
    for name, code in edits.items():
        file, place = package / name, PLACES[name]
        text = file.read_text()
        assert not place or text.count(place) == 1, name
        file.write_text(text.replace(place, f"    {code}{place}") if place else f"{text}\n\n{code}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
