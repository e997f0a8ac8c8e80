"""Compiled kernels kept between processes, in a folder of this user's."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_tune.errors import BuildError


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


class Binaries:
    """A cache of machine code by a hash of its sources, with facts from its compiler.

    A damaged or truncated entry counts as missing, and an entry that cannot be written is dropped. Several processes
    may use one folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> tuple[bytes, Mapping[str, Any]] | None:
        """Return stored code and its facts, None if there is none or the file is damaged."""
        try:
            head, _, code = (self.folder / name).read_bytes().partition(b"\n")
            said = json.loads(head)
            facts = said["facts"]
            right = said["hash"] == _hash(code, facts)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (code, facts) if right else None

    def keep(self, name: str, code: bytes, facts: Mapping[str, Any]) -> None:
        """Store code and facts of JSON under a name. An error of the file system is ignored."""
        head = {"facts": facts, "hash": _hash(code, facts)}
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            number, made = tempfile.mkstemp(prefix=".build-", dir=self.folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n" + code)
                os.replace(made, self.folder / name)  # atomic: another process sees all of it or nothing
            except OSError:
                os.unlink(made)
                raise


def _hash(code: bytes, facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode() + b"\n" + code, digest_size=16).hexdigest()
