"""`relax-tune plan` of an artifact."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tuner_models import paper_job, row_scale
from typer.testing import CliRunner

from relax_tune.tuner.cli.app import app


def test_plan_command_shows_dispatch_and_writes_c(tmp_path: Path) -> None:
    job = paper_job(row_scale)
    artifact = job.artifact(job.build()).save(tmp_path / "m.rta")
    (task,) = job.tasks
    done = CliRunner().invoke(app, ["plan", str(artifact)])
    assert done.exit_code == 0
    assert f"softmax (task {task.key})" in done.stdout and "predicted (variant 0)" in done.stdout
    target = tmp_path / "new" / "plans.c"
    done = CliRunner().invoke(app, ["plan", str(artifact), "--c", str(target), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["c"] == str(target)
    assert "int32_t main_plan(const int64_t* symbols" in target.read_text()
    for wrong in (["plan", str(target)], ["plan", str(artifact), "--c", str(tmp_path)]):
        done = CliRunner().invoke(app, wrong)
        assert done.exit_code == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
