"""The plugin that fails a CI run for skips it promised not to have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.opencl
@pytest.mark.skipif({skip}, reason="no device here")
def test_device(): pass

@pytest.mark.cuda
def test_other():
    pytest.skip("no GPU")

@pytest.mark.torch
@pytest.mark.opencl
def test_peer():
    pytest.skip("no torch")

@pytest.mark.chromium
@pytest.mark.ccompiler
def test_page():
    pytest.skip("Chromium is not installed")

@pytest.mark.opencl
@pytest.mark.xfail
def test_known():
    assert False
"""


def run(folder: Path, text: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_made.py").write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    opencl: o\n    cuda: c\n    torch: t\n    chromium: r\n    ccompiler: g\n"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "RELAX_TUNE_NEEDS", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.needs_plugin", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


PROMISED = {"CI": "true", "RELAX_TUNE_NEEDS": "opencl,ccompiler"}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_promised_need_may_not_be_skipped(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, TESTS.format(skip=True), "-ra", "-n", workers, **PROMISED)
    assert done.returncode == 1, done.stdout
    assert "test_device needs opencl" in done.stdout and "no device here" in done.stdout
    assert not any(f"test_{name} needs" in done.stdout for name in ("other", "peer", "page", "known"))
    *_, named, counts = done.stdout.strip().splitlines()
    assert re.match(r"ERROR \S*::test_device\b", named) and "1 error" in counts, done.stdout


def test_other_skips_and_expected_failures_are_fine(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS.format(skip=False), **PROMISED)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("environment", [{}, {"CI": "true"}, {"RELAX_TUNE_NEEDS": "opencl"}])
def test_nothing_is_promised_outside_ci(tmp_path: Path, environment: dict[str, str]) -> None:
    assert run(tmp_path, TESTS.format(skip=True), **environment).returncode == 0


def test_a_module_may_not_be_skipped_as_a_whole(tmp_path: Path) -> None:
    text = "import pytest\npytest.importorskip('no_such_module_here')\ndef test_a(): pass\n"
    for workers in ("0", "1"):
        done = run(tmp_path, text, "-n", workers, **PROMISED)
        assert done.returncode != 0 and "no_such_module_here" in done.stdout
        assert re.search(r"^ERROR \S*test_made.py", done.stdout, re.MULTILINE) and "1 error" in done.stdout, done.stdout


def test_a_module_naming_an_excused_need_may_be_skipped(tmp_path: Path) -> None:
    text = "import pytest\npytest.importorskip('no_such_module_here', reason='needs {}: more')\ndef test_a(): pass\n"
    for need, fails in (("torch", False), ("onnx", True)):
        done = run(tmp_path, text.format(need) + "def test_b(): pass\n", **PROMISED)
        assert ("skipped although" in done.stdout) == fails, done.stdout
