"""Goldens are the same whatever processor tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.effort import thinned
from tests.support.processors import HERE, PROCESSORS, VARIABLE, executed, report

ROOT = Path(__file__).parent.parent
# texts of schedules, kernels, keys and choices, and the page that prints all stages of one function
GOLDEN = (
    "tests/schedules/primitives/test_golden.py",
    "tests/ir/check/test_structural.py",
    "tests/ir/codegen/test_wgsl.py",
    "tests/docs/test_worked_example.py",
    "tests/tuner/plan/test_coverage.py::test_f32_choices_on_avx2_are_the_priors",
)


def run_as(processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests in another process, with a described processor in place of this machine's."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI", "RELAX_TUNE_"))}
    given = variables | {VARIABLE: processor, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=given)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("processor", thinned([p.values[0].name for p in executed()]))
def test_goldens_do_not_depend_on_the_processor(processor: str) -> None:
    done = run_as(processor, *GOLDEN)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"stands in for it: {processor}" in done.stdout


@pytest.mark.process
def test_unknown_processor_is_refused() -> None:
    done = run_as("abacus", "tests/test_layout.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "abacus" in done.stderr


def test_report_names_the_processor_and_every_description() -> None:
    lines = report()
    words = set(" ".join(lines).replace(",", " ").replace(";", " ").split())
    assert lines[0].startswith("processor: ") and set(PROCESSORS) <= words
    assert {f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16") if f in HERE} <= words
