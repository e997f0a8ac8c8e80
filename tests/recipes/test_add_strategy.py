"""The recipe "A search strategy" of CONTRIBUTING, followed literally in a copy of the product: one product file is new."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TUNE = """
from dataclasses import replace
from tests.support.tuner_models import QUICK, RecordedRunner, paper_job, row_scale
from relax_tune.tuner.search import strategies
from relax_tune.tuner.search.registry import strategy_names
assert "local" in strategy_names(), strategy_names()
job = paper_job(row_scale, settings=replace(QUICK, strategy="local", trials=6), fresh=True)
summary = job.tune(RecordedRunner())
print(strategies.__file__, summary.trials)
"""


@pytest.mark.process
@pytest.mark.slow
def test_strategy_added_by_the_recipe_tunes_a_task(tmp_path: Path) -> None:
    for folder in ("ir", "runtime", "schedules", "database", "tuner"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.prior", "node_modules")
        )
    package = tmp_path / "src" / "relax_tune"
    shutil.copytree(ROOT / "src" / "relax_tune", package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("## A search strategy\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    (tmp_path / "tuner" / "search" / "strategies" / "local.py").write_text(code)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", TUNE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, trials = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path) and int(trials) == 6
