"""The repository is laid out as the import package needs it, and the arrows between its parts hold."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("ir", "schedules", "tuner", "database", "runtime")
MOST_LINES = 600
# Hosts of package indexes: who installs says where from, in the settings of pip, uv or npm.
INDEXES = re.compile(
    rb"\b(pypi\.(python\.)?org|pythonhosted\.org|npmjs\.(org|com)|yarnpkg\.com|npmmirror\.com|jsr\.io|anaconda\.(org|com)"
    rb"|crates\.io|golang\.org|rubygems\.org|download\.pytorch\.org|pypi\.nvidia\.com|index\.docker\.io)\b"
)


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
    assert f"ImportError: expected the package relax_tune.{name}" in done.stderr


@pytest.mark.process
def test_the_arrows_between_folders() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed in this environment (pip install import-linter)")
    done = subprocess.run([str(tool), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_no_file_is_long(name: str) -> None:
    assert long_files(ROOT / name) == []


def test_long_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "short.py").write_text("1\n" * MOST_LINES)
    assert long_files(tmp_path) == []
    (tmp_path / "part" / "long.py").write_text("1\n" * (MOST_LINES + 1))
    assert long_files(tmp_path) == [f"{tmp_path / 'part' / 'long.py'}: {MOST_LINES + 1} lines"]


def modules_without_tests(root: Path) -> list[str]:
    """Name every product module that has no test file at its mirrored path and names none that exists.

    `ir/op/math/bits.py` is mirrored by `tests/ir/op/math/test_bits.py`; a module tested elsewhere says
    "Tests: `tests/path/test_x.py`" in its docstring.
    """
    lacking = []
    for file in sorted(f for folder in FOLDERS for f in (root / folder).rglob("*.py") if f.name != "__init__.py"):
        relative = file.relative_to(root)
        if (root / "tests" / relative.parent / f"test_{relative.name}").exists():
            continue
        named = re.findall(
            r"`(tests/[\w/]+\.py)`", (ast.get_docstring(ast.parse(file.read_text())) or "").partition("Tests:")[2]
        )
        if not named or any(not (root / name).exists() for name in named):
            lacking.append(relative.as_posix())
    return lacking


def test_every_module_has_or_names_tests() -> None:
    assert modules_without_tests(ROOT) == []


def named_indexes(root: Path, names: list[str]) -> list[str]:
    """Name every file that has the host of a package index, with the host."""
    texts = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    return [f"{name}: {found[0].decode()}" for name, text in texts.items() if (found := INDEXES.search(text))]


@pytest.mark.process
def test_no_file_names_a_package_index() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the tests are not in a git repository")
    names = [name for name in done.stdout.split("\0") if name]
    assert len(names) > 1000
    assert named_indexes(ROOT, names) == []


@pytest.mark.parametrize("host", ["pypi.{}", "files.pythonhosted.{}", "registry.npmjs.{}", "test.pypi.{}"])
def test_package_indexes_are_named(host: str, tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text(f'"resolved": "https://{host.format("org")}/a"')
    (tmp_path / "fine.txt").write_text("pip install a; the registry.example of the docs, a registry.register(b)")
    assert [n.partition(":")[0] for n in named_indexes(tmp_path, ["x.lock", "fine.txt"])] == ["x.lock"]


def test_every_test_left_to_heavy_exists() -> None:
    lines = (ROOT / "tests" / "support" / "heavy.txt").read_text().splitlines()
    texts = {file.relative_to(ROOT).as_posix(): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    defined = {name for text in texts.values() for name in re.findall(r"def (test_\w+)\(", text)}  # some are imported
    for name in {line.split("[")[0] for line in lines if not line.startswith("#")}:
        path, *_, function = name.split("::")
        assert path in texts and function in defined, f"tests/support/heavy.txt: {name} is no test"
