"""Binary forms of stored ids, keys and samples.

An id is one byte and its content: 0, the bytes of 32 leading hexadecimal digits, the rest as UTF-8; or 1 and UTF-8. Samples are
one byte and numbers, little-endian: `f` and 32-bit floats where these are exact, `d` and 64-bit floats otherwise; empty for none.
A key of a text is the first 16 bytes of its BLAKE2b hash.

Tests: `tests/formats/test_formats.py`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence

from relax_tune.database.records import SAMPLES_LIMIT
from relax_tune.errors import DatabaseError

_DIGITS = 32
_HASHED = re.compile(r"[0-9a-f]{32}")
SAMPLES_BYTES = 1 + 8 * SAMPLES_LIMIT
"""Bytes of the longest samples that a record may have."""


def pack_id(id: str) -> bytes:
    """Return the stored form of an id."""
    if _HASHED.match(id):
        return b"\0" + bytes.fromhex(id[:_DIGITS]) + id[_DIGITS:].encode()
    return b"\1" + id.encode()


def unpack_id(stored: bytes) -> str:
    """Return the id of a stored form. Raises `DatabaseError` for other bytes."""
    try:
        if stored[:1] == b"\0" and len(stored) > _DIGITS // 2:
            return stored[1 : 1 + _DIGITS // 2].hex() + stored[1 + _DIGITS // 2 :].decode()
        if stored[:1] == b"\1":
            return stored[1:].decode()
    except UnicodeDecodeError:
        pass
    raise DatabaseError(f"expected the stored form of an id, got {stored!r:.80}")


def pack_samples(samples: Sequence[float]) -> bytes:
    """Return the stored form of seconds, which loses nothing."""
    if not samples:
        return b""
    try:
        small = struct.pack(f"<{len(samples)}f", *samples)
    except OverflowError:
        small = b""
    # New samples are rounded to 32 bits (`single`); others, of older files, keep their 64.
    if small and struct.unpack(f"<{len(samples)}f", small) == tuple(samples):
        return b"f" + small
    return b"d" + struct.pack(f"<{len(samples)}d", *samples)


def unpack_samples(stored: bytes) -> tuple[float, ...]:
    """Return the seconds of a stored form. Raises `DatabaseError` for other bytes."""
    if not stored:
        return ()
    size = {b"f": 4, b"d": 8}.get(stored[:1], 0)
    if not size or (len(stored) - 1) % size:
        raise DatabaseError(f"samples: expected f or d and numbers, got {stored[:20]!r} of {len(stored)} bytes")
    return struct.unpack(f"<{(len(stored) - 1) // size}{stored[:1].decode()}", stored[1:])


def text_key(*texts: str) -> bytes:
    """Return the key of a row of shared texts."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        # Lengths distinguish ("ab", "c") from ("a", "bc").
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()
