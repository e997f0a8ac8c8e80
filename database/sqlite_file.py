"""Checks of a database file before SQLite opens it, and the process that holds its lock.

SQLite would create a missing file, change the journal mode of another program's file and leave side files next to it, and it reports a
read-only file only at the first write. So the file is checked before.

Tests: `tests/database/test_opening.py`, `tests/wrong_input/test_databases.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
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
# Least similarity of names (difflib's ratio) that are suggested for a missing file, and the most entries of a folder to compare.
_SIMILARITY, _ENTRIES = 0.7, 10_000

Identity = tuple[int, int]


def prepare(path: Path, where: str, *, write: bool, create: bool, make_folder: bool) -> bool:
    """Check the file as `verify_file`, and create an empty one if requested. Returns True if it was created.

    Raises:
        DatabaseError: As `verify_file`, and if the folder or the file cannot be created.
    """
    try:
        if make_folder and create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if verify_file(path, where, write=write, create=create):
            return False
        path.touch(mode=0o600)  # records name machines, jobs and models
    except OSError as error:
        raise DatabaseError(
            f"{where}: the file cannot be created: {system_reason(error)}; choose another path with --db"
        ) from None
    return True


def remove_empty(path: Path) -> None:
    """Remove a file that was created before opening failed. A process that has opened it meanwhile reports that it is missing."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


def verify_file(path: Path, where: str, *, write: bool, create: bool) -> bool:
    """Check that SQLite can open the file as requested. Returns whether it exists.

    Raises:
        DatabaseError: The file is a folder or of another kind, truncated, missing (unless `create`), or has not the permissions.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    except (OSError, ValueError) as error:
        raise DatabaseError(
            f"{where}: expected a database file, got {system_reason(error)}; correct the path"
        ) from None
    if status is None:
        return _verify_missing(path, where, create)
    if stat.S_ISDIR(status.st_mode):
        raise DatabaseError(
            f"{where}: expected a database file, got a folder; give a file in it, such as {path}/records.db"
        )
    if not stat.S_ISREG(status.st_mode):
        raise DatabaseError(f"{where}: expected a database file, got a device or pipe; give a regular file")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DatabaseError(f"{where}: the file cannot be read: {system_reason(error)}; fix its permissions") from None
    if header and not header.startswith(_MAGIC):
        kind = next((name for start, name in _KNOWN if header.startswith(start)), "another kind of file")
        raise DatabaseError(f"{where}: expected a SQLite database, got {kind} (not a database); give another path")
    _verify_length(header, status.st_size, path, where)
    if write:
        _verify_writable(path, where)
    wal = path.with_name(path.name + "-wal")
    if (
        not os.access(path.parent, os.W_OK)
        and has_side_changes(path)
        and not path.with_name(path.name + "-shm").exists()
    ):
        raise DatabaseError(
            f"{where}: committed changes wait in {wal}, and SQLite can read them only in a folder it may write; copy both files "
            "to one and open the database there once, or fix the folder's permissions"
        )
    return True


def _verify_missing(path: Path, where: str, create: bool) -> bool:
    if not create:
        like = similar_databases(path)
        meant = f"; did you mean {' or '.join(map(str, like))}?" if like else ""
        raise DatabaseError(f"{where}: no file exists at this path{meant}; correct the path, or tune into it first")
    if not path.parent.is_dir():
        raise DatabaseError(f"{where}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DatabaseError(
            f"{where}: the file cannot be created: the folder {path.parent} is read-only; fix its permissions or give another path"
        )
    return False


def similar_databases(path: Path) -> list[Path]:
    """Return at most two SQLite files whose names resemble a missing file's, the most similar first.

    They are in its folder or, if that is missing too, in folders with similar names.
    """
    if path.parent.is_dir():
        return [file for name in _similar(path.name, path.parent) if _is_database(file := path.with_name(name))][:2]
    places = [path.parent.with_name(name) / path.name for name in _similar(path.parent.name, path.parent.parent)]
    return [place for place in places if _is_database(place)][:2]


def _similar(name: str, folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = {entry.name.casefold(): entry.name for entry in itertools.islice(entries, _ENTRIES)}
    except OSError:
        return []
    return [names[match] for match in difflib.get_close_matches(name.casefold(), names, 10, _SIMILARITY)]


def _is_database(path: Path) -> bool:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _verify_writable(path: Path, where: str) -> None:
    for place, what in ((path, "the file"), (path.parent, "its folder (which takes SQLite's side files)")):
        if not os.access(place, os.W_OK):
            raise DatabaseError(
                f"{where}: {what} is read-only; fix its permissions, or copy the database to a folder that you may write"
            )
    if is_full(path):
        raise DatabaseError(f"{where}: its disk is full; free some space")


def _verify_length(header: bytes, size: int, path: Path, where: str) -> None:
    """Refuse a truncated file. If changes wait in a side file, the header may count pages that the file does not have yet."""
    if not header or has_side_changes(path):
        return
    if len(header) < _HEADER_BYTES:
        raise DatabaseError(
            f"{where}: expected a SQLite database, got the first {size} bytes of one: cut short; restore a backup"
        )
    # SQLite's file format, "The Database Header": page size (1 stands for 65536), number of pages, change counter,
    # and the change counter for which the number of pages is valid.
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(header[28:32], "big")
    counted = header[24:28] == header[92:96]  # otherwise an old SQLite wrote the file and the count says nothing
    if counted and size < page * pages:
        raise DatabaseError(
            f"{where}: expected {page * pages} bytes ({pages} pages), got {size}: cut short; restore a backup, or import an "
            "export of it into a new database"
        )


def has_side_changes(path: Path) -> bool:
    """Return True if committed changes, or the undo log of an unfinished transaction, are in a side file."""
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(OSError):
            if path.with_name(path.name + suffix).stat().st_size:
                return True
    return False


def is_missing(path: Path) -> bool:
    """Return True if the file certainly does not exist; False if permissions hide the answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def identity_of(path: Path) -> Identity | None:
    """Return the device and inode of the file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def verify_same(path: Path, identity: Identity | None, where: str) -> None:
    """Check that the path still names the file that was opened: SQLite would go on writing to a deleted file.

    Raises:
        DatabaseError: The file was deleted, moved or replaced.
    """
    current = identity_of(path)
    if current != identity:
        what = "deleted" if current is None else "replaced"
        raise DatabaseError(
            f"{where}: the file was {what} after it was opened, so results that are not stored yet are lost; restore it (or start a "
            "new database), then run the command again"
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
    """Return the process that holds the write lock, such as `process 12, python`; None if it cannot be determined."""
    places: dict[tuple[str, int], None] = {}
    for name, byte in ((path.name + "-shm", _WAL_WRITE_BYTE), (path.name, _RESERVED_BYTE)):
        with contextlib.suppress(OSError):
            status = path.with_name(name).stat()
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            places[device, byte] = None
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # proc_locks(5): number, type, mode, access, process, device and inode, first byte, last byte.
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
