"""Limits of compilers and measured kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_tune.errors import BuildError
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, DEVICE_VARIABLES, limited, only
from relax_tune.runtime.program.program import KernelSource

SECRETS = ("RELAX_TUNE_DB", "RELAX_TUNE_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK")


@pytest.mark.parametrize("names", [COMPILER_VARIABLES, DEVICE_VARIABLES])
def test_only_leaves_secrets_out(names: object) -> None:
    given = dict.fromkeys((*SECRETS, "PATH", "HOME", "LC_ALL", "LD_LIBRARY_PATH"), "/x")
    assert sorted(only(names, given)) == ["HOME", "LC_ALL", "LD_LIBRARY_PATH", "PATH"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "POCL_CACHE_DIR", "CC", "RELAX_TUNE_CACHE", "TMPDIR"]
)
def test_device_process_reads_variables_of_devices(name: str) -> None:
    assert only(DEVICE_VARIABLES, {name: "x"}) == {name: "x"}


@pytest.mark.process
def test_limited_command_has_limits_and_gives_the_exit_code() -> None:
    code = (
        "import resource, sys\n"
        "print([resource.getrlimit(k)[0] for k in (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)], *sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(limited([sys.executable, "-c", code, "a b"], 1 << 32), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"[{1 << 32}, 0, {4 << 30}] a b\n", 7)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_compiler_gets_limits_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that writes down what it got, in place of the second compilation."""
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PGPASSWORD", "secret")
    device = CDevice()
    fake = tmp_path / "gcc"
    fake.write_text(
        f"#!/bin/sh\nenv > {tmp_path}/env; cat /proc/self/status /proc/self/limits > {tmp_path}/limits; pwd > {tmp_path}/cwd\nexit 1\n"
    )
    fake.chmod(0o755)
    device.compiler.program = str(fake)
    with pytest.raises(BuildError, match="refused the source"):
        device.compile([KernelSource("f", "c", "void f(void) {}")])
    assert "secret" not in (tmp_path / "env").read_text()
    limits = (tmp_path / "limits").read_text()
    assert "NoNewPrivs:\t1" in limits and "Max core file size        0 " in limits
    assert Path((tmp_path / "cwd").read_text().strip()).parent == tmp_path / "cache" / "c"
