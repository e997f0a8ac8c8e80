"""Settings files that the user allowed, stored by path and content in the user's configuration folder.

An allowed file is an entry of `~/.config/relax-tune/allowed` whose name is the hash of path and content. So a file that was changed or
moved is not allowed.

Tests: `tests/tuner/test_settings.py`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import platformdirs

from relax_tune.errors import UserError


def is_allowed(path: Path, content: bytes) -> bool:
    """Return True if the user allowed this file with this content. Raises `UserError` if the configuration folder is a relative path."""
    return _note(path, content).is_file()


def allow(path: Path, content: bytes) -> None:
    """Store that the user allows this file with this content. Raises `UserError` if the configuration folder cannot be written."""
    note = _note(path, content)
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_bytes(os.fsencode(_place(path)) + b"\n")
    except OSError as error:
        raise UserError(
            f"{note.parent} cannot be written: {error.strerror}; fix its permissions, or set XDG_CONFIG_HOME to another folder"
        ) from None


def revoke(path: Path) -> int:
    """Remove all permissions of this file; return their number."""
    entry = os.fsencode(_place(path)) + b"\n"
    folder = _folder()
    notes = [n for n in folder.iterdir() if n.read_bytes() == entry] if folder.is_dir() else []
    for note in notes:
        note.unlink()
    return len(notes)


def _folder() -> Path:
    folder = Path(platformdirs.user_config_dir("relax-tune"))
    if not folder.is_absolute():
        raise UserError(
            f"Expected an absolute path in XDG_CONFIG_HOME, got one that leads to {str(folder)!r} in the current folder. "
            "With a relative path, the current folder could allow its own settings."
        )
    return folder / "allowed"


def _place(path: Path) -> Path:
    # The file itself is not resolved if it is a link, since paths in it are relative to the current folder.
    return path.parent.resolve() / path.name


def _note(path: Path, content: bytes) -> Path:
    key = hashlib.blake2b(os.fsencode(_place(path)) + b"\0" + content, digest_size=20)
    return _folder() / key.hexdigest()
