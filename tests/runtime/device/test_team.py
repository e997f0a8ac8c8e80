"""The team of threads that runs the loops of kernels: every iteration runs once, without a race, whoever is delayed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from relax_tune.runtime.device.c_compiler import TEAM

STRESS = Path(__file__).with_name("team_stress.c")

pytestmark = [pytest.mark.ccompiler, pytest.mark.process]


def stress(folder: Path, threads: int, loops: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile team.c with the stress program and run it."""
    program = folder / "stress"
    strict = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")
    command = ["gcc", "-O1", "-g", *strict, *flags, str(TEAM), str(STRESS), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    options = {"TSAN_OPTIONS": "exitcode=66 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [str(program), str(threads), str(loops)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **options},
    )


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_team_of_threads_runs_every_iteration_once(tmp_path: Path, threads: int) -> None:
    done = stress(tmp_path, threads, 100)
    assert (done.returncode, done.stdout) == (0, "all ran once\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_team_under_sanitizers_has_no_finding(tmp_path: Path, sanitizers: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    done = stress(tmp_path, 3, 20, f"-fsanitize={sanitizers}")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run with this system's address layout")
    assert (done.returncode, done.stdout) == (0, "all ran once\n"), done.stdout + done.stderr[:6000]


def test_team_is_strict_c11(tmp_path: Path) -> None:
    """Exports compile it with whatever flags their users have."""
    strict = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread")
    subprocess.run(["gcc", "-O2", *strict, "-c", str(TEAM), "-o", str(tmp_path / "team.o")], check=True, timeout=60)
