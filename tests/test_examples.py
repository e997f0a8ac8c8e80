"""Every example runs, from a folder of its own and with what it prints checked for what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Example -> (arguments, what its output has to match, marks).
CASES = {
    "first_kernel": ([], r"^best of 4: \{'tile': \d+\}, \d+ us\n\[1\.999994e\+06 ", ["ccompiler"]),
    "own_graph": (["--trials", "2", "--folder", "made"], r"n = 97: \(97, 64\), mean", ["ccompiler"]),
    "own_function": (
        ["--trials", "1"],
        r"functions: main swiglu\n(.*\n)*  swiglu: .*\n(.*\n)*n = 128: \(128, 96\), differs .* by [0-9.]+e-0[678] at most",
        ["opencl", "heavy"],
    ),
    "hpvm": (
        [],
        r"\A(\w+ of size \d+: \(.*\), 100\.00% of the elements as NumPy's\n){10}\Z",
        ["ccompiler", "heavy"],
    ),
    "onnx_model": (
        ["--trials", "1"],
        r"\(13, 20\) -> \(13, 5\)\n.*\nrefused: .*batch <= 64, got 65",
        ["ccompiler", "heavy"],
    ),
    "query_database": ([], r"softmax at s0=64: [\d.]+ us .*\b(tuned|generic)\b", ["ccompiler"]),
    "search_any_space": ([], r"^ 48 evaluations: best [\d.]+ ms with \{'tile_x': \d+", []),
    "sentence_search": (
        ["How does a compiler work?", "--db", "memory://"],
        r"^0\.\d+  Source code is turned into instructions",
        ["ccompiler", "minilm", "heavy"],
    ),
}


def test_every_example_is_run() -> None:
    assert set(CASES) == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[getattr(pytest.mark, m) for m in CASES[name][2]]) for name in CASES]
)
def test_example(name: str, tmp_path: Path) -> None:
    arguments, wanted, _ = CASES[name]
    settings = {"XDG_DATA_HOME": str(tmp_path), "PYTHONWARNINGS": "error::UserWarning", "RELAX_TUNE_EFFORT": "quick"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(wanted, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.process
def test_example_help_shows_usage(tmp_path: Path) -> None:
    for name in CASES:
        shown = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"], cwd=tmp_path, capture_output=True, text=True
        )
        assert shown.returncode == 0 and f"python examples/{name}.py" in shown.stdout


@pytest.mark.process
@pytest.mark.ccompiler
def test_query_example_missing_database_is_not_created(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "query_database.py"), str(tmp_path / "none.db")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "none.db" in done.stderr and not (tmp_path / "none.db").exists()
