"""Files written whole: their mode, and names that nobody can wait at."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_tune.runtime.atomic_write import name_new, write_whole


@pytest.fixture(params=["without a name", "with a name"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of making a file: the second is for systems without O_TMPFILE."""
    if request.param == "with a name":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("way", "umask")
@pytest.mark.parametrize(("before", "after"), [(None, 0o640), (0o600, 0o600), (0o666, 0o640), (0o604, 0o600)])
def test_write_whole_honours_umask_and_narrower_mode(tmp_path: Path, before: int | None, after: int) -> None:
    target = tmp_path / "model.rta"
    if before is not None:
        target.touch()
        target.chmod(before)
    write_whole(target, memoryview(b"weights"))
    assert (target.read_bytes(), mode(target)) == (b"weights", after)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("links", [True, False])
def test_name_new_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """With hard links and without, neither a file nor a link that leads nowhere loses its name."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "taken").write_text("taken")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    whole = tmp_path / "whole"
    whole.write_text("new")
    for name in ("taken", "dangling"):
        with pytest.raises(FileExistsError):
            name_new(whole, tmp_path / name)
    name_new(whole, tmp_path / "free")
    assert (tmp_path / "free").read_text() == "new" and (tmp_path / "taken").read_text() == "taken"
    assert (tmp_path / "dangling").is_symlink() and not (tmp_path / "none").exists()
