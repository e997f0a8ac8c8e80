"""Compiled kernels cached between processes, in a folder that only this user may write.

Anyone who can write there runs code in every process that loads it.
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

from relax_tune.errors import BuildError, warn

_BY_DESCRIPTOR = Path("/proc/self/fd")


def cache_folder() -> Path:
    """Return `$RELAX_TUNE_CACHE`, else `$XDG_CACHE_HOME/relax-tune`, else `~/.cache/relax-tune`.

    Raises BuildError for a relative path and for a user without a home.
    """
    explicit = os.environ.get("RELAX_TUNE_CACHE")
    if explicit and not os.path.isabs(explicit):
        raise BuildError(
            f"device: Expected an absolute path in RELAX_TUNE_CACHE, got {explicit!r}. Compiled kernels are programs, and a relative path "
            "would load modules of the current folder."
        )
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "relax-tune"
    except RuntimeError as error:  # a user without a home
        raise BuildError(
            f"device: expected a folder for compiled kernels, got: {error}; point RELAX_TUNE_CACHE at a writable folder"
        ) from None


def hashed(parts: Sequence[str]) -> str:
    """Return a hash of the parts, as a file name."""
    key = hashlib.blake2b(digest_size=20)
    for part in parts:
        # With lengths, so that ("ab", "c") and ("a", "bc") have different hashes.
        key.update(f"{len(part)}:{part}".encode())
    return key.hexdigest()


@contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Open a folder that only this user may write; it is created if it is missing. Yields a path to it while it is open.

    The path goes by the open folder where the system can, so nobody can put another in its place. A folder of ours that
    others could read or write gets mode 0700.

    Raises BuildError for a link and for another user's folder; OSError if it cannot be created or opened.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise _refusal(folder, f"a link to {os.readlink(folder)}")
    # The checks are of the open folder and not of its name: between a check by name and its use, somebody could put
    # another folder there.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not _trusted(status.st_uid):
            raise _refusal(folder, f"one of user {status.st_uid}")
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
        elif status.st_mode & 0o022:
            raise _refusal(folder, f"that others may write it (mode {stat.S_IMODE(status.st_mode):o})")
        yield _BY_DESCRIPTOR / str(descriptor) if _BY_DESCRIPTOR.is_dir() else folder
    finally:
        os.close(descriptor)


def is_own_file(path: Path) -> bool:
    """Return True for a regular file, no link, that only this user or the administrator may write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    # Writable by the group or by others: its content could be anything by the time it is loaded.
    return stat.S_ISREG(status.st_mode) and _trusted(status.st_uid) and not status.st_mode & 0o022


_SEAL = b"\nrelax-tune blake2b "
_SEAL_BYTES = len(_SEAL) + 32


def seal(path: Path) -> None:
    """Append a hash of its content to a file; loaders of libraries read no bytes after theirs.

    A library that a crash cut short is mapped all the same, and ends the process that touches its missing pages. The hash also
    finds pages that were never written, so nothing is flushed to the disk before a file gets its name.
    """
    digest = hashlib.blake2b(path.read_bytes(), digest_size=32).digest()
    with path.open("ab") as file:
        file.write(_SEAL + digest)


def sealed_content(path: Path) -> bytes | None:
    """Return the content that `seal` hashed. None for a file that is missing, damaged, or not this user's own."""
    try:
        data = path.read_bytes() if is_own_file(path) else b""
    except OSError:
        return None
    content, end = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    return content if end == _SEAL + hashlib.blake2b(content, digest_size=32).digest() else None


def warn_of_damage(path: Path) -> None:
    """Warn of a compiled file that is there and is not used."""
    if is_own_file(path):
        text = f"{path.name}: Expected a whole file in the cache of compiled kernels, got a damaged one. It is compiled again."
        warn(text)


def _trusted(user: int) -> bool:
    return user in (os.geteuid(), 0)


def _refusal(folder: Path, got: str) -> BuildError:
    return BuildError(
        f"device: expected a folder for compiled kernels that only you may write at {folder}, got {got}; its owner could run "
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
                content = (folder / name).read_bytes() if is_own_file(folder / name) else b""
            head, _, code = content.partition(b"\n")
            header = json.loads(head)
            facts = header["facts"]
            right = header["hash"] == _hash(code, facts)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (code, facts) if right else None

    def store(self, name: str, code: bytes, facts: Mapping[str, Any]) -> None:
        """Store code and facts of JSON under a name. An error of the file system is ignored."""
        head = {"facts": facts, "hash": _hash(code, facts)}
        with suppress(OSError), private_folder(self.folder) as folder:
            number, temporary = tempfile.mkstemp(prefix=".build-", dir=folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n" + code)
                os.replace(temporary, folder / name)  # atomic: another process sees all of it or nothing
            except OSError:
                os.unlink(temporary)
                raise


def _hash(code: bytes, facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode() + b"\n" + code, digest_size=16).hexdigest()
