"""`relax-tune plan` of an artifact, and the records that plans are chosen from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.tuner_models import paper_job, row_scale
from typer.testing import CliRunner

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.plan.plans import failed_variants, pooled

KERNEL = VariantRecord("tuned", sketch="tiles", trace="[]", parameters='{"T": 4}')


def record(number: int, unit: str, failed: str | None = None) -> Measurement:
    """A correct measurement of a unit, or one that failed at a stage."""
    result = (
        {"status": "failed", "stage": failed, "message": "wrong"}
        if failed
        else {"samples_secs": (1e-6,), "checked": True}
    )
    return Measurement(f"{number}", "w", "t", KERNEL, {"s0": 4}, host="h", unit=unit, **result)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("correct", "failing", "excluded"),
    [
        ("ab", "c", False),  # one unit of three
        ("a", "b", False),
        ("", "a", True),
        ("a", "a", True),  # the same unit, so its result varies
        ("ab", "b", False),
        ("ab", "cd", True),
        ("abcdef", "gh", True),
        ("abcdef", "ggggg", False),  # many rows of one unit
    ],
)
def test_failure_of_one_unit_excludes_no_kernel_measured_by_others(correct: str, failing: str, excluded: bool) -> None:
    units = [(unit, None) for unit in correct] + [(unit, "wrong-result") for unit in failing]
    records = [record(number, unit, stage) for number, (unit, stage) in enumerate(units)]
    assert bool(failed_variants(records)) == excluded
    assert (KERNEL.key in pooled(records)[0]) == (bool(correct) and not excluded)


def test_lost_device_excludes_only_unknown_kernels() -> None:
    lost = record(0, "a", "device-lost")
    assert failed_variants([lost]) == {} and set(failed_variants([lost], lost=True)) == {KERNEL.key}


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
        *notes, error = done.stderr.splitlines()
        assert done.exit_code == 2 and error.startswith("error: ")
        assert (
            all(re.fullmatch(r"target \S+, chosen for auto; --target names another", n) for n in notes[:1])
            and len(notes) < 2
        )
