"""Checks of a database's file before SQLite opens it, and the process that holds it.

SQLite makes a missing file, changes the mode of a foreign one and leaves side files next to it. It notices a read-only file
only when it writes. So the file is checked first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from relax_tune.errors import DatabaseError, system_reason

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_KNOWN = (
    (b"\x89PNG\r\n", "a PNG image"),
    (b"PK\x03\x04", "a zip file (an artifact?)"),
    (b"\x7fELF", "a program"),
    (b"\x1f\x8b", "a gzip file"),
    (b"%PDF", "a PDF document"),
    (b"{", "JSON text"),
)
# Where SQLite takes its write locks: a byte of the shared-memory file in WAL mode, bytes of the file itself otherwise.
_WAL_WRITE_BYTE, _RESERVED_BYTE = 120, 0x40000001

_SIDE_BYTES = 2**16

Identity = tuple[int, int]


def prepare(path: Path, where: str, *, write: bool, create: bool, make_folder: bool) -> bool:
    """Check the file (see `verify_file`), and create an empty one if requested. Returns True if it was created.

    Raises:
        DatabaseError: as `verify_file`, and when the folder or the file cannot be made.
    """
    try:
        if make_folder and create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if verify_file(path, where, write=write, create=create):
            return False
        path.touch(mode=0o600)  # records name machines, jobs and models
    except OSError as error:
        raise DatabaseError(
            f"{where}: wanted to make this file, found {system_reason(error)}; choose another place with --db"
        ) from None
    return True


def remove_empty(path: Path) -> None:
    """Remove a file that was created in vain. Another process that has opened it finds it gone."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


def verify_file(path: Path, where: str, *, write: bool, create: bool) -> bool:
    """Check that SQLite can open the file as requested. Returns whether it exists.

    Raises:
        DatabaseError: a folder or another kind of file, cut short, missing (unless `create`), or not to be written or read.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise DatabaseError(
            f"{where}: wanted a database file, found {system_reason(error)}; correct the path"
        ) from None
    if found is None:
        return _verify_missing(path, where, create)
    if stat.S_ISDIR(found.st_mode):
        raise DatabaseError(
            f"{where}: wanted a database file, found a folder; give a file in it, such as {path}/records.db"
        )
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseError(f"{where}: wanted a database file, found a device or pipe; give a regular file")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DatabaseError(
            f"{where}: wanted a readable file, found {system_reason(error)}; fix its permissions"
        ) from None
    if header and not header.startswith(_MAGIC):
        kind = next((name for start, name in _KNOWN if header.startswith(start)), "another kind of file")
        raise DatabaseError(f"{where}: wanted a SQLite database, found {kind} (not a database); give another path")
    _verify_length(header, found.st_size, path, where)
    if write:
        _verify_writable(path, where)
    beside = path.with_name(path.name + "-wal")
    if (
        not os.access(path.parent, os.W_OK)
        and has_changes_beside(path)
        and not path.with_name(path.name + "-shm").exists()
    ):
        raise DatabaseError(
            f"{where}: wanted a folder where the changes waiting in {beside} can be read in, found it read-only; open the "
            "database once where it may be written (copy both files), or fix the folder's permissions"
        )
    return True


def _verify_missing(path: Path, where: str, create: bool) -> bool:
    if not create:
        raise DatabaseError(
            f"{where}: wanted an existing database, found no file; correct the path, or tune into it first"
        )
    if not path.parent.is_dir():
        raise DatabaseError(f"{where}: wanted the folder {path.parent}, found none; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DatabaseError(
            f"{where}: wanted to make this file, found the folder {path.parent} read-only; fix its permissions or give a file "
            "elsewhere"
        )
    return False


def _verify_writable(path: Path, where: str) -> None:
    for place, what in ((path, "the file"), (path.parent, "its folder (which takes SQLite's side files)")):
        if not os.access(place, os.W_OK):
            raise DatabaseError(
                f"{where}: wanted to write it, found {what} read-only; fix its permissions, or copy the database to where you "
                "may write"
            )
    if is_full(path):
        raise DatabaseError(f"{where}: wanted to write it, found its disk full; free some space")


def _verify_length(header: bytes, size: int, path: Path, where: str) -> None:
    """Refuse a truncated file. With changes waiting in a side file the header may be ahead of the file."""
    if not header or has_changes_beside(path):
        return
    if len(header) < _HEADER_BYTES:
        raise DatabaseError(
            f"{where}: wanted a SQLite database, found the first {size} bytes of one: cut short; restore a backup"
        )
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(header[28:32], "big")
    counted = header[24:28] == header[92:96]  # otherwise an old SQLite wrote the file and the count says nothing
    if counted and size < page * pages:
        raise DatabaseError(
            f"{where}: wanted {page * pages} bytes ({pages} pages), found {size}: cut short; restore a backup, or import an "
            "export of it into a new database"
        )


def has_changes_beside(path: Path) -> bool:
    """Return True if committed changes, or an unfinished transaction's undo log, wait in a side file."""
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(OSError):
            if path.with_name(path.name + suffix).stat().st_size:
                return True
    return False


def is_missing(path: Path) -> bool:
    """Return True if there is certainly no such file, rather than one that cannot be seen."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def identity_of(path: Path) -> Identity | None:
    """Return the device and inode of the file; None when there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def verify_same(path: Path, identity: Identity | None, where: str) -> None:
    """Check that the file is still the one that was opened: SQLite would keep writing to a deleted one.

    Raises:
        DatabaseError: it was deleted, moved or replaced.
    """
    found = identity_of(path)
    if found != identity:
        what = "none" if found is None else "another"
        raise DatabaseError(
            f"{where}: wanted the file that was opened, found {what}: it was deleted or replaced meanwhile, and what was "
            "not stored yet is lost; put it back (or begin a new one), then run again"
        )


def address(path: Path, *, read_only: bool, strictly: bool) -> str:
    """Return the URI that opens an existing file; it never creates one.

    strictly: not even SQLite's own bookkeeping may be written. Otherwise a reader that may write opens the file like a
        writer (the caller must then refuse to write), because only such a connection removes the side files when it
        closes.
    """
    may_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) and not is_full(path)
    if not read_only or (may_write and not strictly):
        return f"{path.as_uri()}?mode=rw"
    if path.with_name(path.name + "-wal").exists():
        return f"{path.as_uri()}?mode=ro"
    # No process is writing now, and we cannot (or, if another user owns the file, should not) leave side files.
    return f"{path.as_uri()}?mode=ro&immutable=1"


def is_full(path: Path) -> bool:
    """Return True if the file's disk has no room for SQLite's side files."""
    try:
        return shutil.disk_usage(path.parent).free < _SIDE_BYTES
    except OSError:
        return False


def holder(path: Path) -> str | None:
    """Return the process that is writing the database now, as ` (process 12, python)`; None when that cannot be known."""
    places: dict[tuple[str, int], None] = {}
    for name, byte in ((path.name + "-shm", _WAL_WRITE_BYTE), (path.name, _RESERVED_BYTE)):
        with contextlib.suppress(OSError):
            found = path.with_name(name).stat()
            device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            places[device, byte] = None
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) != 8 or fields[1] != "POSIX" or fields[3] != "WRITE" or int(fields[4]) <= 0:
                continue
            last = float("inf") if fields[7] == "EOF" else int(fields[7])
            for device, byte in places:
                if fields[5] == device and int(fields[6]) <= byte <= last:
                    name = ""
                    with contextlib.suppress(OSError):
                        name = ", " + Path("/proc", fields[4], "comm").read_text().strip()
                    return f"process {fields[4]}{name}"
    return None
