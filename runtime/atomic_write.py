"""Atomic writing of files, and readable reasons of its failures."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from relax_tune.errors import system_reason

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(target: Path, data: memoryview) -> None:
    """Write a file atomically; see `write_with`."""
    write_with(target, lambda file: file.write(data))


def write_with(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: it appears whole or not at all, also to concurrent readers.

    On Linux it has no name until it is whole, so that not even a killed process leaves a part of it. Its mode is what the umask
    allows, and no wider than the mode of the file it replaces.

    Args:
        target: The file.
        write: Writes the content to a file that is open for reading, too.
    """
    try:
        descriptor = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        temporary = None
    except (AttributeError, OSError):  # not on this system, or not on this kind of file system
        temporary = str(unused_name(target))
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, os.fstat(descriptor).st_mode & target.stat().st_mode & 0o666)
            os.fsync(descriptor)
            if temporary is None:
                temporary = str(unused_name(target))
                # with a folder given, the link follows /proc's to the file itself
                os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor, follow_symlinks=True)
        os.replace(temporary, target)
    except BaseException:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise


def name_new(temporary: Path, target: Path) -> None:
    """Give a whole file of the same folder a name that no file has. Raises FileExistsError where one has it, a link too."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(temporary, target)


def unused_name(target: Path) -> Path:
    """Return a name in the same folder that nobody can guess."""
    return target.with_name(f".{target.name}-{os.urandom(8).hex()}")


def reason(error: OSError | ValueError) -> str:
    """Return the system's reason without numbers and temporary names, and a remedy."""
    full = isinstance(error, OSError) and error.errno in _FULL
    remedy = "free some space, then try again" if full else "choose another place, or fix this one"
    return f"{system_reason(error)}; {remedy}"
