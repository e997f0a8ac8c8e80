"""Child processes are started by one helper alone, and run nothing of the current folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from relax_tune.errors import BuildError
from relax_tune.runtime.child_process import clean_environment, find_program, python_command
from relax_tune.runtime.device.binaries import cache_folder
from relax_tune.runtime.device.c_compiler import find_compiler

ROOT = Path(__file__).parents[2]
HELPER = "runtime/child_process.py"
STARTERS = {"subprocess": {"run", "Popen", "TimeoutExpired", "CompletedProcess", "PIPE", "DEVNULL"}}
"""What of the modules that start programs may be named; `os.execv` and others may not."""
OF_OS = {"system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty"}
MODULES = {"multiprocessing", "pty", "runpy", "concurrent.futures.process", "asyncio.subprocess", "code", "imp"}

ANY_WAY = re.compile(
    r"\bos\b|sys|shutil|subprocess|shell|python3?\b|ProcessPoolExecutor|multiprocessing|runpy"
    r"|import.*\b(pty|code|imp)\b|from (pty|code|imp)\b"
)


def other_ways(text: str) -> list[str]:
    """Name what a module's text starts programs by, other than `subprocess` with a command of the helper or a program by path."""
    found = []
    if not ANY_WAY.search(text):  # most modules
        return []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name("sys"), attr="executable" | "_base_executable" as name):
                found.append(f"sys.{name}")
            case ast.Attribute(value=ast.Name("os"), attr=name) if name in OF_OS or name.startswith(("exec", "spawn")):
                found.append(f"os.{name}")
            case ast.Attribute(value=ast.Name("subprocess"), attr=name) if name not in STARTERS["subprocess"]:
                found.append(f"subprocess.{name}")
            case ast.Attribute(value=ast.Name("shutil"), attr="which"):
                found.append("shutil.which")
            case ast.Attribute(
                attr="create_subprocess_exec" | "create_subprocess_shell" | "ProcessPoolExecutor" as name
            ):
                found.append(name)
            case ast.Import(names=names):
                found += [n.name for n in names if n.name in MODULES or n.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                own = {"sys": {"executable"}, "subprocess": {n.name for n in names}, "shutil": {"which"}}
                own |= {"concurrent.futures": {"ProcessPoolExecutor"}, "os": OF_OS}
                found += [f"{module}.{n.name}" for n in names if n.name in own.get(module, ())]
                found += [module] if module.partition(".")[0] in MODULES or module in MODULES else []
            case ast.keyword(arg="shell"):
                found.append("shell=")
            case ast.List(elts=[ast.Constant(str(value)), *_]) | ast.Tuple(elts=[ast.Constant(str(value)), *_]) if (
                value.partition(" ")[0] in ("python", "python3")
            ):
                found.append(repr(value))
    return found


def commands(text: str) -> tuple[int, int]:
    """Count the uses of commands of Python, and of the environment that goes with them."""
    if "python_command" not in text:
        return 0, 0
    called = [n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return called.count("python_command"), called.count("clean_environment")


def product() -> list[Path]:
    folders = ("ir", "schedules", "tuner", "database", "runtime", "src/relax_tune", "deploy")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if "node_modules" not in f.parts]
    assert len(files) > 300
    return files


def test_no_other_module_starts_python() -> None:
    allowed = {
        HELPER: ["sys.executable", "shutil.which", "shutil.which"],
        "deploy/slurm/fleet.py": ["sys.executable"],  # in a command with -P, which dask-jobqueue writes
        "tuner/measure/device_process/sandbox.py": [
            "os.fork"
        ],  # of a process that runs no other module, to try namespaces
    }
    found = {str(f.relative_to(ROOT)): ways for f in product() if (ways := other_ways(f.read_text()))}
    assert found == allowed
    assert '{sys.executable} -P"' in (ROOT / "deploy/slurm/fleet.py").read_text()


def test_each_command_of_python_has_a_clean_environment() -> None:
    used = {str(f.relative_to(ROOT)): counts for f in product() if (counts := commands(f.read_text()))[0]}
    assert len(used) >= 5 and all(environments >= uses for uses, environments in used.values()), used


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nrun([sys.executable])",
        "from sys import executable",
        "import multiprocessing",
        "from multiprocessing import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import os\nos.execv('/bin/true', [])",
        "import os\nos.spawnl(0, 'x')",
        "import os\nos.system('x')",
        "from os import system",
        "import subprocess\nsubprocess.check_output([])",
        "from subprocess import run",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import subprocess\nsubprocess.run(['python3', '-m', 'x'])",
        "import asyncio\nasyncio.create_subprocess_exec('x')",
        "import shutil\nshutil.which('gcc')",
    ],
)
def test_other_ways_are_seen(text: str) -> None:
    assert other_ways(text)


@pytest.mark.process
@pytest.mark.parametrize("path", [None, "", ":", ".", "./", "a", ":{own}", "{own}::"])
def test_python_command_has_no_module_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    for folder in (tmp_path, tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text("print('ran')")
    given = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        given["PYTHONPATH"] = path.format(own=own)
    code = "import json, sys; print(json.dumps(sys.path))"
    done = subprocess.run(
        python_command("-c", code), env=clean_environment(given), capture_output=True, text=True, check=True
    )
    folders = [Path(entry).resolve() for entry in json.loads(done.stdout)]
    assert tmp_path not in folders and tmp_path / "a" not in folders
    assert (own in folders) == (path is not None and "{own}" in path)


def test_clean_environment_drops_relative_entries() -> None:
    given = {
        "PATH": ":/usr/bin:.:bin:/bin:",
        "LD_LIBRARY_PATH": ":",
        "PYTHONPYCACHEPREFIX": "c",
        "PYTHONHOME": "/opt",
        "A": ":",
    }
    assert clean_environment(given) == {"PATH": "/usr/bin:/bin", "PYTHONHOME": "/opt", "A": ":"}
    assert given["PATH"].startswith(":")


@pytest.mark.parametrize("path", [".", "", "bin", ":bin", "./bin:"])
def test_find_program_looks_not_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for folder in (tmp_path, tmp_path / "bin"):
        (folder / "some-tool").write_text("#!/bin/sh\n")
        (folder / "some-tool").chmod(0o755)
    monkeypatch.setenv("PATH", path)
    assert find_program("some-tool") is None
    assert find_program("./some-tool") is None
    assert find_program(str(tmp_path / "some-tool")) == str(tmp_path / "some-tool")
    monkeypatch.setenv("PATH", f"{path}:{tmp_path / 'bin'}")
    assert find_program("some-tool") == str(tmp_path / "bin" / "some-tool")


def test_find_compiler_by_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gcc").write_text("#!/bin/sh\n: > ran\n")
    (tmp_path / "gcc").chmod(0o755)
    for value in ("./gcc", "../" + tmp_path.name + "/gcc"):
        monkeypatch.setenv("CC", value)
        with pytest.raises(BuildError, match="absolute path"):
            find_compiler()
    assert not (tmp_path / "ran").exists()


def test_cache_folder_by_relative_path_is_refused_or_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", "cache")
    with pytest.raises(BuildError, match="RELAX_TUNE_CACHE"):
        cache_folder()
    monkeypatch.delenv("RELAX_TUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # which the XDG specification says to ignore
    assert cache_folder().is_absolute()
