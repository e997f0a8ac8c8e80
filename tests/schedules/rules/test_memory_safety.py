"""Candidates of each rule, and schedules by hand, touch no memory but their own, depend on nothing that was in it, and have no races.

C under AddressSanitizer, UndefinedBehaviorSanitizer and the access recorder, OpenCL under oclgrind, CUDA on a GPU under
compute-sanitizer, all in children. That the same
set-up catches wrong kernels is shown in `tests/runtime/test_artifact_memory.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ir.codegen.codegen_runner import opened
from tests.runtime.test_artifact_memory import sanitizer, simulator
from tests.support.candidates import MACHINES, by_rule, cases_of

from relax_tune.schedules.sketch import RULES, rules_for

CHILD = Path(__file__).with_name("checked.py")


def child(environment: dict[str, str], mode: str, where: Path, *under: str) -> None:
    """The child, run by the program `under`, which watches it."""
    command = [*under, sys.executable, str(CHILD), mode, str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0 and f"{mode} done" in done.stdout, done.stdout[-1000:] + done.stderr[:6000]


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_samples_c_with_sanitizers_find_nothing(tmp_path: Path) -> None:
    child(sanitizer(), "c", tmp_path)


@pytest.mark.process
@pytest.mark.opencl
@pytest.mark.slow
def test_samples_opencl_under_oclgrind_find_nothing(tmp_path: Path) -> None:
    child(simulator(tmp_path / "log"), "opencl", tmp_path / "log")


@pytest.mark.process
@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_samples_cuda_under_compute_sanitizer_find_nothing(tool: str, tmp_path: Path) -> None:
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed; it comes with CUDA's toolkit")
    opened("cuda").close()
    child(dict(os.environ), "cuda", tmp_path, program, "--tool", tool, "--error-exitcode", "9")


@pytest.mark.slow
def test_samples_every_rule_is_present() -> None:
    present = {
        rule
        for language, machine in MACHINES.items()
        for rule in rules_for(machine)
        if any(by_rule(case, language, rule) for case in cases_of(language))
    }
    # a missing rule needs a function in tests/support/candidates.py: CASES. The rules that only CUDA has are tested in test_mma.py and
    # test_wgmma.py; flash-decoding needs warp shuffles and is tested in test_cuda.py
    assert set(RULES) - present == {"gpu_mma", "gpu_wgmma", "gpu_flash_attention_mma", "gpu_flash_decoding"}
