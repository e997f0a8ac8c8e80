"""The repository is laid out as the import package needs it, and the arrows between its parts hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("ir", "schedules", "tuner", "database", "runtime")


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
