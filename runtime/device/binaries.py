"""Compiled kernels kept between processes, in a folder that only this user may write.

Whoever can write there runs code in every process that loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from relax_tune.errors import BuildError

_BY_DESCRIPTOR = Path("/proc/self/fd")


def cache_folder() -> Path:
    """Return `$RELAX_TUNE_CACHE`, else `$XDG_CACHE_HOME/relax-tune`, else `~/.cache/relax-tune`."""
    explicit = os.environ.get("RELAX_TUNE_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "relax-tune"
    except RuntimeError as error:  # a user without a home
        raise BuildError(
            f"device: wanted a folder for compiled kernels, found: {error}; point RELAX_TUNE_CACHE at a writable folder"
        ) from None


def hashed(parts: Sequence[str]) -> str:
    """Return a hash of the parts, as a file name."""
    key = hashlib.blake2b(digest_size=20)
    for part in parts:
        key.update(f"{len(part)}:{part}".encode())
    return key.hexdigest()


@contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Open a folder that only this user may write, made if it is missing. Yields a path to it while it is open.

    The path goes by the open folder where the system can, so nobody can put another in its place. A folder of ours that
    others could read or write gets mode 0700.

    Raises BuildError for a link and for another user's folder; OSError where none can be made or opened.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise _refusal(folder, f"a link to {os.readlink(folder)}")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not _trusted(found.st_uid):
            raise _refusal(folder, f"one of user {found.st_uid}")
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
        elif found.st_mode & 0o022:
            raise _refusal(folder, f"that others may write it (mode {stat.S_IMODE(found.st_mode):o})")
        yield _BY_DESCRIPTOR / str(descriptor) if _BY_DESCRIPTOR.is_dir() else folder
    finally:
        os.close(descriptor)


def is_own_file(path: Path) -> bool:
    """Return True for a regular file, no link, that only this user or the administrator may write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _trusted(found.st_uid) and not found.st_mode & 0o022


def _trusted(user: int) -> bool:
    return user in (os.geteuid(), 0)


def _refusal(folder: Path, found: str) -> BuildError:
    return BuildError(
        f"device: wanted a folder for compiled kernels that only you may write at {folder}, found {found}; its owner could run "
        "code here: remove it, or point RELAX_TUNE_CACHE at a folder of your own"
    )


class Binaries:
    """A cache of machine code by a hash of its sources, with facts from its compiler.

    A damaged or truncated entry counts as missing, and an entry that cannot be written is dropped. Several processes
    may use one folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> tuple[bytes, Mapping[str, Any]] | None:
        """Return stored code and its facts. None if there is none, if the file is damaged, or if others may write it.

        Raises BuildError where the folder is another user's."""
        try:
            with private_folder(self.folder) as folder:
                kept = (folder / name).read_bytes() if is_own_file(folder / name) else b""
            head, _, code = kept.partition(b"\n")
            said = json.loads(head)
            facts = said["facts"]
            right = said["hash"] == _hash(code, facts)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (code, facts) if right else None

    def keep(self, name: str, code: bytes, facts: Mapping[str, Any]) -> None:
        """Store code and facts of JSON under a name. An error of the file system is ignored."""
        head = {"facts": facts, "hash": _hash(code, facts)}
        with suppress(OSError), private_folder(self.folder) as folder:
            number, made = tempfile.mkstemp(prefix=".build-", dir=folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n" + code)
                os.replace(made, folder / name)  # atomic: another process sees all of it or nothing
            except OSError:
                os.unlink(made)
                raise


def _hash(code: bytes, facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode() + b"\n" + code, digest_size=16).hexdigest()
