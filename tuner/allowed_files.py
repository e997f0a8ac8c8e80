"""Settings files that the user allowed: remembered by path and content in the user's configuration folder.

A file is a name in `~/.config/relax-tune/allowed`: the hash of its path and content. A changed or moved file is another one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import platformdirs

from relax_tune.errors import UserError


def is_allowed(path: Path, content: bytes) -> bool:
    """Return True if the user allowed this file with this content."""
    return _note(path, content).is_file()


def allow(path: Path, content: bytes) -> None:
    """Remember that the user allows this file with this content. Raises UserError where that cannot be kept."""
    note = _note(path, content)
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_bytes(os.fsencode(_place(path)) + b"\n")
    except OSError as error:
        raise UserError(
            f"wanted to keep what is allowed in {note.parent}, found: {error.strerror}; "
            "make that folder writable, or point XDG_CONFIG_HOME elsewhere"
        ) from None


def revoke(path: Path) -> int:
    """Forget every content of this file that was allowed. Returns their number."""
    wanted = os.fsencode(_place(path)) + b"\n"
    folder = _folder()
    notes = [n for n in folder.iterdir() if n.read_bytes() == wanted] if folder.is_dir() else []
    for note in notes:
        note.unlink()
    return len(notes)


def _folder() -> Path:
    return Path(platformdirs.user_config_dir("relax-tune")) / "allowed"


def _place(path: Path) -> Path:
    # The folder counts, not what a link leads to: paths in the file are relative to the current folder.
    return path.parent.resolve() / path.name


def _note(path: Path, content: bytes) -> Path:
    key = hashlib.blake2b(os.fsencode(_place(path)) + b"\0" + content, digest_size=20)
    return _folder() / key.hexdigest()
