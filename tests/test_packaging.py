"""The wheel: it holds every module and data file of the repository, and works without the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
FOLDERS = ("database", "ir", "runtime", "schedules", "tuner")
# what scripts of the package are made from: `make web`
SOURCES = "tuner/web/browser/"
# modules that run where they are imported: alembic's own, and the program
PROGRAMS = ("relax_tune.database.migrations.env", "relax_tune.__main__")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMPORTS = """
import importlib, json, sys
missing, elsewhere = {}, []
for name in json.load(sys.stdin):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "relax_tune").partition(".")[0] == "relax_tune":
            raise
        missing[name] = error.name
        continue
    if not module.__file__.startswith(sys.prefix):
        elsewhere.append(module.__file__)
json.dump([missing, elsewhere], sys.stdout)
"""
RUNS = """
import numpy as np
import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Add

g = rt.GraphBuilder()
x = g.input("x", (g.symbol("n", 1, 8), 4))
rt.save_model(g.finish(g.call(Add(), x, x)), "tiny.relax")
np.savez("inputs.npz", x=np.arange(12, dtype=np.float32).reshape(3, 4))
"""


def tracked() -> list[str]:
    """The repository's files; a link to a folder is one."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("the tests are not in a git repository")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def shipped() -> set[str]:
    """Paths of the repository's modules and data in the wheel."""
    found = set()
    for name in tracked():
        top, _, _ = name.partition("/")
        if top in FOLDERS and not name.startswith(SOURCES):
            found.add(f"relax_tune/{name}")
        elif name.startswith("src/relax_tune/") and (ROOT / name).is_file():
            found.add(name.removeprefix("src/"))
    return found


def run(command: list[str], folder: Path, given: str | None = None, **more: str) -> str:
    """The output of a program that knows nothing of this repository."""
    hidden = ("PYTHONPATH", "RELAX_TUNE_", "PYTEST_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(hidden) and k != "CC"} | more
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, f"{' '.join(command)[:200]}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=["links", "no links"])
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the files as they are now, with symbolic links or, as on Windows, with text files in their place."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        if name.partition("/")[0] not in ("tests", "experiments", "docs"):
            target = folder / "origin" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-qm", "all"]):
        run([*git, *command], folder / "origin")
    links = str(request.param == "links").lower()
    run(["git", "-c", f"core.symlinks={links}", "clone", "-q", "origin", "clone"], folder)
    assert (folder / "clone" / "src" / "relax_tune" / "ir").is_symlink() == (request.param == "links")
    return folder / "clone"


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel that the checkout's source distribution gives."""
    folder = checkout.parent / "dist"
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", code], checkout)
    (source,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
    run([*pip, "--no-build-isolation", "--no-deps", str(source), "-w", str(folder)], folder)
    (built,) = folder.glob("*.whl")
    return built


def backend(folder: Path) -> Path:
    """A folder with the locked setuptools alone, so that pip sees nothing else of the locked environment."""
    folder.mkdir()
    found = metadata.distribution("setuptools")
    for part in {Path(f.parts[0]) for f in found.files or () if f.parts[0] != ".."}:
        source = Path(str(found.locate_file(part)))
        if source.exists():
            (folder / part).symlink_to(source)
    return folder


def environment(folder: Path, *what: str) -> Path:
    """A virtual environment with the locked packages and this one, as pip installs it; its folder of programs."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-index"]
    tools = backend(folder / "backend")
    run(
        [*pip, "--disable-pip-version-check", "--no-deps", "--no-build-isolation", *what], folder, PYTHONPATH=str(tools)
    )
    (site,) = (folder / "lib").glob("python*/site-packages")
    paths = [p for p in sys.path if p.endswith("site-packages")]
    (site / "locked.pth").write_text("\n".join(paths) + "\n")
    return programs


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("installed") / "venv", str(wheel))


def test_wheel_has_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == shipped()


def test_metadata_links_are_absolute(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        head, _, readme = archive.read(name).decode().partition("\n\n")
    assert head.count("Project-URL: ") == 4 and f"Version: {VERSION}\n" in head + "\n"
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    assert any(link.endswith(f"/blob/v{VERSION}/ARCHITECTURE.md") for link in links)


def test_every_public_name_can_be_imported(programs: Path, tmp_path: Path) -> None:
    code = "import relax_tune as rt; print(len([getattr(rt, name) for name in rt.__all__]))"
    assert int(run([str(programs / "python"), "-c", code], tmp_path)) >= 38


def test_installed_modules_can_all_be_imported(wheel: Path, programs: Path, tmp_path: Path) -> None:
    files = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    modules = sorted(n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in files)
    wanted = [m for m in modules if m not in PROGRAMS]
    assert len(wanted) > 700
    missing, elsewhere = json.loads(run([str(programs / "python"), "-c", IMPORTS], tmp_path, json.dumps(wanted)))
    assert not elsewhere
    assert not {package for package in missing.values() if can_import(package)}, missing


def can_import(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0


@pytest.mark.ccompiler
def test_installed_program_tunes_builds_and_runs(programs: Path, tmp_path: Path) -> None:
    more = {"RELAX_TUNE_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    program = str(programs / "relax-tune")
    assert "numpy" in run([program, "doctor"], tmp_path, **more)
    run([str(programs / "python"), "-c", RUNS], tmp_path, **more)
    run([program, "tune", "tiny.relax", "--target", "c", "--db", "records.db", "--trials", "4"], tmp_path, **more)
    run(
        [program, "build", "tiny.relax", "--target", "c", "--db", "records.db", "--out", "tiny.rta"],
        tmp_path,
        **more,
    )
    run([program, "run", "tiny.rta", "--inputs", "inputs.npz", "--out", "outputs.npz"], tmp_path, **more)
    code = "import numpy as np; (x,) = np.load('outputs.npz').values(); print((x == 2 * np.arange(12).reshape(3, 4)).all())"
    assert run([str(programs / "python"), "-c", code], tmp_path).strip() == "True"


def test_installed_package_is_a_program_and_has_a_version(programs: Path, tmp_path: Path) -> None:
    python = str(programs / "python")
    assert run([python, "-c", "import relax_tune as rt; print(rt.__version__)"], tmp_path).strip() == VERSION
    assert run([python, "-m", "relax_tune", "--version"], tmp_path) == run(
        [str(programs / "relax-tune"), "--version"], tmp_path
    )


def test_editable_install_works(checkout: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv", "-e", str(checkout))
    code = "import relax_tune.tuner.cli.start, relax_tune.ir.core.expr as e; print(e.__file__)"
    assert run([str(programs / "python"), "-c", code], tmp_path).startswith(str(checkout))
