"""The repository is laid out as the import package needs it, and the arrows between its parts hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("ir", "schedules", "tuner", "database", "runtime")
MOST_MODULES, MOST_LINES = 15, 500


def crowded_folders(root: Path) -> list[str]:
    """Name every folder below `root` with more than MOST_MODULES modules, not counting `__init__.py`."""
    modules = Counter(file.parent for file in root.rglob("*.py") if file.name != "__init__.py")
    return [f"{folder}: {n} modules" for folder, n in sorted(modules.items()) if n > MOST_MODULES]


def long_files(root: Path) -> list[str]:
    """Name every module below `root` with more than MOST_LINES lines."""
    lines = {file: len(file.read_text().splitlines()) for file in sorted(root.rglob("*.py"))}
    return [f"{file}: {n} lines" for file, n in lines.items() if n > MOST_LINES]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_link_is_a_link(name: str) -> None:
    link = ROOT / "src" / "relax_tune" / name
    assert link.is_dir(), (
        f"src/relax_tune/{name} should be a link to the folder {name}/, but is "
        f"{'a plain file: it was checked out without symbolic links' if link.is_file() else 'missing'}; run "
        "`git config core.symlinks true && git checkout -- src/relax_tune` (on Windows with developer mode on)"
    )
    assert link.is_symlink() and not os.path.isabs(os.readlink(link)), f"src/relax_tune/{name} must be a relative link"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.process
@pytest.mark.parametrize("name", FOLDERS)
def test_a_bare_import_is_refused(name: str) -> None:
    code = f"import sys; sys.path.insert(0, '.'); import {name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"ImportError: wanted the package relax_tune.{name}" in done.stderr


@pytest.mark.process
def test_the_arrows_between_folders() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed in this environment (pip install import-linter)")
    done = subprocess.run([str(tool), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_is_crowded(name: str) -> None:
    assert crowded_folders(ROOT / name) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_no_file_is_long(name: str) -> None:
    assert long_files(ROOT / name) == []


def test_crowded_folders_and_long_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for module in ["__init__", *(f"m{i}" for i in range(MOST_MODULES))]:
        (tmp_path / "part" / f"{module}.py").write_text("1\n" * MOST_LINES)
    assert crowded_folders(tmp_path) == long_files(tmp_path) == []
    (tmp_path / "part" / "more.py").write_text("1\n" * (MOST_LINES + 1))
    assert crowded_folders(tmp_path) == [f"{tmp_path / 'part'}: {MOST_MODULES + 1} modules"]
    assert long_files(tmp_path) == [f"{tmp_path / 'part' / 'more.py'}: {MOST_LINES + 1} lines"]


def test_every_test_left_to_heavy_exists() -> None:
    lines = (ROOT / "tests" / "support" / "heavy.txt").read_text().splitlines()
    texts = {file.relative_to(ROOT).as_posix(): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    defined = {name for text in texts.values() for name in re.findall(r"def (test_\w+)\(", text)}  # some are imported
    for name in {line.split("[")[0] for line in lines if not line.startswith("#")}:
        path, *_, function = name.split("::")
        assert path in texts and function in defined, f"tests/support/heavy.txt: {name} is no test"
