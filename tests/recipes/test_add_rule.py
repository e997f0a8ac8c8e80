"""The recipe "A schedule rule" of CONTRIBUTING.md, followed literally on a copy of the schedules: two files of the product change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = "schedules"

CHECK = """
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import MACHINES, arguments, problems
from tests.support.zoo import cases
from relax_tune.schedules import sketch as registry

assert registry.__file__.startswith({copy!r}), registry.__file__
func = next(c.func for c in cases() if c.name == "row_sum")
sketches = [s for s in registry.generate_sketches(func, MACHINES["c"]) if s.name.startswith("row_sums")]
assert [s.name for s in sketches] == ["row_sums.vectors"]
device = opened("c")
for values in ({{"V": 8}}, {{"V": 32}}):
    run = Compiled(device, "c", registry.instantiate(sketches[0], values))
    for dims in ({{"n": 5, "m": 70}}, {{"n": 1, "m": 3}}, {{"n": 3, "m": 0}}):
        arrays, scalars = arguments(func, dims)
        assert not problems(func, arrays, run(arrays, scalars), dims), (values, dims)
print("row_sums computes right")
"""


def copy_of_package(folder: Path) -> Path:
    """Build a source tree whose `schedules` are a copy, and whose other folders are links; return the copy."""
    package = folder / "src" / "relax_tune"
    package.mkdir(parents=True)
    for entry in (ROOT / "src" / "relax_tune").iterdir():
        if entry.name != COPIED and not entry.name.startswith("__pycache__"):
            (package / entry.name).symlink_to(entry.resolve())
    shutil.copytree(ROOT / COPIED, package / COPIED, ignore=shutil.ignore_patterns("__pycache__"))
    return package / COPIED


def files_of(folder: Path) -> dict[Path, str]:
    return {p.relative_to(folder): p.read_text() for p in folder.rglob("*.py")}


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_rule_added_by_recipe_generates_right_kernels(tmp_path: Path) -> None:
    schedules = copy_of_package(tmp_path)
    (recipe,) = re.findall(r"\n## A schedule rule\n\n```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)

    (schedules / "rules" / "cpu" / "row_sums.py").write_text(recipe)
    registry = schedules / "sketch.py"
    text = registry.read_text()
    text = text.replace("    rowwise,\n", "    row_sums,\n    rowwise,\n", 1)
    text = text.replace(
        '    "rowwise": rowwise.sketches,\n',
        '    "rowwise": rowwise.sketches,\n    "row_sums": row_sums.sketches,\n',
        1,
    )
    registry.write_text(text)

    before, after = files_of(ROOT / COPIED), files_of(schedules)
    assert {p for p in after if after[p] != before.get(p)} == {Path("sketch.py"), Path("rules/cpu/row_sums.py")}
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(copy=str(schedules))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(ROOT)]), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.stdout == "row_sums computes right\n", done.stderr[-3000:]
