"""Files in memory without a copy: mapped, hashed in pieces on all processors, and let go of page by page.

Tests: `tests/runtime/test_mapped_file.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes at whose multiples memory of kernels starts: a cache line, and the widest vector (AVX-512); an aligned vector touches one line."""
_READ = 1 << 20
_THREADS = 16
Range = tuple[int, int]
"""The first byte, and the one after the last."""


def hash_ranges(descriptor: int, pieces: Sequence[Sequence[Range]]) -> list[str]:
    """Return the BLAKE2 hash of each piece of a file, in hexadecimal digits; a piece is one or more ranges.

    The bytes are read into small buffers: a mapping would count them as memory of this process.

    Raises:
        OSError: The file cannot be read, or is shorter.
    """
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, len(pieces), _THREADS))) as pool:
        return list(pool.map(lambda ranges: _hash(descriptor, ranges), pieces))


def _hash(descriptor: int, ranges: Sequence[Range]) -> str:
    state, buffer = hashlib.blake2b(digest_size=32), memoryview(bytearray(_READ))
    for at, end in ranges:
        while at < end:
            count = os.preadv(descriptor, [buffer[: min(_READ, end - at)]], at)
            if count == 0:
                raise OSError("the file was cut while it was read")
            state.update(buffer[:count])
            at += count
    return state.hexdigest()


def map_file(descriptor: int) -> memoryview:
    """Return a read-only view of a whole file; its bytes are read where the file system cannot map it. Raises OSError."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            return memoryview(file.read())


def is_lasting(array: NDArray[Any]) -> bool:
    """Return True if kernels may read an array where it is for as long as they run: nobody can write it, and it is in C order at a
    cache line.
    """
    flags = array.flags
    return not flags.writeable and flags.c_contiguous and bool(array.nbytes) and _address(array) % ALIGNMENT == 0


def drop_pages(array: NDArray[Any]) -> None:
    """Let go of a mapped array's whole pages, which are read again from the file when needed. Other arrays stay as they are."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    # Only of mappings that nobody can write: pages of others may differ from the file.
    if not (isinstance(mapped, mmap.mmap) and memoryview(mapped).readonly and array.flags.c_contiguous):
        return
    at = _address(array) - _address(np.frombuffer(mapped, np.uint8))
    first, end = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, (at + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):  # a mapping whose pages the system keeps
            mapped.madvise(mmap.MADV_DONTNEED, first, end - first)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
