"""Caches of compiled code: whose folders and files are loaded, and whose are refused."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from relax_tune.errors import BuildError
from relax_tune.runtime.device.binaries import Binaries, is_own_file, private_folder
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.program.program import KernelSource

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_folder_is_made_for_one_user(tmp_path: Path) -> None:
    with private_folder(tmp_path / "a" / "c") as folder:
        (folder / "x").write_text("1")
    assert mode(tmp_path / "a" / "c") == 0o700 and (tmp_path / "a" / "c" / "x").read_text() == "1"


def test_private_folder_open_to_others_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    folder.chmod(0o775)
    with private_folder(folder):
        assert mode(folder) == 0o700


def test_private_folder_refuses_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "real")
    with pytest.raises(BuildError, match=r"got a link to .*RELAX_TUNE_CACHE"), private_folder(tmp_path / "c"):
        pass


@root
def test_private_folder_refuses_another_user(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    os.chown(tmp_path / "c", NOBODY, NOBODY)
    with pytest.raises(BuildError, match=f"got one of user {NOBODY}"), private_folder(tmp_path / "c"):
        pass
    with pytest.raises(BuildError, match=f"got one of user {NOBODY}"):
        Binaries(tmp_path / "c").find("x")


def test_private_folder_put_in_place_of_the_open_one_is_not_used(tmp_path: Path) -> None:
    with private_folder(tmp_path / "c") as folder:
        (folder / "x").write_text("ours")
        (tmp_path / "c").rename(tmp_path / "old")
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "x").write_text("theirs")
        assert (folder / "x").read_text() == "ours"


def test_is_own_file_refuses_links_and_files_open_to_others(tmp_path: Path) -> None:
    file = tmp_path / "k.so"
    assert not is_own_file(file)
    file.touch(mode=0o600)
    assert is_own_file(file)
    (tmp_path / "link.so").symlink_to(file)
    assert not is_own_file(tmp_path / "link.so")
    file.chmod(0o664)
    assert not is_own_file(file)
    (tmp_path / "folder.so").mkdir()
    assert not is_own_file(tmp_path / "folder.so")


@pytest.mark.ccompiler
@pytest.mark.process
@needs_gcc
def test_c_device_compiles_anew_a_library_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    device = CDevice()
    kernels = [KernelSource("two", "c", "int two(void) { return 2; }")]
    assert device.compile(kernels)["two"] is not None
    (kept,) = [p for p in (tmp_path / "c").glob("*.so") if b"relax_tune_" not in p.read_bytes()]
    before = kept.stat().st_ino
    device.compile(kernels)
    assert kept.stat().st_ino == before
    kept.chmod(0o666)
    device.compile(kernels)
    assert kept.stat().st_ino != before and mode(kept) & 0o022 == 0
    assert mode(tmp_path / "c") == 0o700


@pytest.mark.ccompiler
@pytest.mark.process
@root
@needs_gcc
def test_c_device_refuses_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    (tmp_path / "c").mkdir()
    os.chown(tmp_path / "c", NOBODY, NOBODY)
    with pytest.raises(BuildError, match="only you may write"):
        CDevice()
