"""Commands run no file of the folder that they are started in, and none of their child processes does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.device.webgpu.listing import run_separately
from relax_tune.tuner.allowed_files import is_allowed
from relax_tune.tuner.measure.cluster.processes import ClusterProcess
from relax_tune.tuner.measure.cluster.trust.loopback import loopback_folder
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.service.job_process import JobProcess
from relax_tune.tuner.service.work_order import WorkOrder

SCRIPT = """import sys
from relax_tune.tuner.cli.start import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""The text that pip installs as `relax-tune`."""
MODEL = """@prim_func(outputs=1)
def f(x: Buffer((n,), f32), y: Buffer((n,), f32)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            y[vi] = x[vi] * 2.0
"""
OTHERS = ("numpy", "ml_dtypes", "pyopencl", "scipy", "xgboost", "sitecustomize", "usercustomize", "relax_tune", "dask")
PROGRAMS = ("gcc", "cc", "as", "ld", "collect2", "node", "clang", "nvidia-smi", "ldconfig", "objdump", "nproc", "sh")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder whose modules and programs each leave a file in the folder `ran` next to it."""
    folder, ran = tmp_path / "hostile", tmp_path / "ran"
    folder.mkdir()
    ran.mkdir()
    for name in {*sys.stdlib_module_names, *OTHERS}:
        (folder / f"{name}.py").write_text(f"open({str(ran / name)!r}, 'w').close()\n")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\n: > '{ran}/{name}'\nexit 1\n")
        (folder / name).chmod(0o755)
    (folder / "m.relax").write_text(MODEL)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}:")
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "cache"))
    return folder


def ran(hostile: Path) -> list[str]:
    return sorted(p.name for p in (hostile.parent / "ran").iterdir())


def relax_tune(hostile: Path, *arguments: str) -> str:
    """Run the installed command in the hostile folder as a user would."""
    script = hostile.parent / "bin" / "relax-tune"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    own = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # its own modules are the user's word
    done = subprocess.run([sys.executable, str(script), *arguments], env=own, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.ccompiler
def test_tune_build_and_run_in_hostile_folder_run_no_file(hostile: Path) -> None:
    common = ("m.relax", "--target", "c", "--db", "sqlite:///t.db", "--bound", "n=1:64")
    relax_tune(hostile, "tune", *common, "--trials", "4", "--out", "t.rta", "--compare")
    relax_tune(hostile, "build", *common, "--out", "m.rta")
    save = "import numpy; numpy.savez('in.npz', x=numpy.ones(8, 'f4'))"
    subprocess.run([sys.executable, "-I", "-c", save], check=True)
    relax_tune(hostile, "run", "m.rta", "--inputs", "in.npz", "--out", "out.npz")
    assert all((hostile / name).is_file() for name in ("t.rta", "m.rta", "out.npz"))
    assert ran(hostile) == []


@pytest.mark.process
@pytest.mark.slow
def test_doctor_in_hostile_folder_runs_no_file(hostile: Path) -> None:
    assert "python" in relax_tune(hostile, "doctor")
    assert ran(hostile) == []


@pytest.mark.process
def test_python_m_in_hostile_folder_runs_no_module_after_the_start(hostile: Path) -> None:
    """`python -m` itself looks for the package, and what it imports, in the current folder."""
    for name in {*sys.stdlib_module_names, "relax_tune"} - {"zipfile", "ctypes"}:
        (hostile / f"{name}.py").unlink()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # "." in it is the hostile folder, too
    done = subprocess.run([sys.executable, "-m", "relax_tune", "--help"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "tune" in done.stdout, done.stderr
    assert ran(hostile) == []


def run_job() -> None:
    order = WorkOrder("id", "0" * 64, "m", {}, {}, {}, str(Path.cwd() / "files"))
    process = JobProcess(order)
    assert process.wait(60.0) is not None
    process.close()


def open_device() -> None:
    LocalRunner("c", lock=False).close()


def run_cluster_process() -> None:
    with ClusterProcess(["json.tool", "--help"], {}) as process:
        assert process.wait(60.0) == 0


def run_probe() -> None:
    assert run_separately(["-c", "import json; print(json.dumps(1))"]) == "1"


@pytest.mark.process
@pytest.mark.parametrize(
    "start", [run_job, run_cluster_process, run_probe, pytest.param(open_device, marks=pytest.mark.ccompiler)]
)
@pytest.mark.parametrize("path", [None, ":", ".", "{base}:"])
def test_child_process_in_hostile_folder_runs_no_module(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], None], path: str | None
) -> None:
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path.format(base=hostile.parent))
    start()
    assert ran(hostile) == []


@pytest.mark.parametrize(
    "folder, error, ask",
    [
        ("user_config_dir", UserError, lambda: is_allowed(Path("relax-tune.toml"), b"")),
        ("user_state_dir", MeasureError, lambda: loopback_folder(8786)),
    ],
)
def test_configuration_by_relative_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: str, error: type[Exception], ask: Callable[[], Any]
) -> None:
    monkeypatch.setattr(
        platformdirs, folder, lambda _: "own/relax-tune"
    )  # as old versions give it for XDG_CONFIG_HOME=own
    with pytest.raises(error, match="own/relax-tune"):
        ask()
