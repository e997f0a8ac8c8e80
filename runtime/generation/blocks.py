"""Blocks of a pool of keys and values: which are free, how many texts share each, and which tokens a full one holds.

Tests: `tests/runtime/generation/test_scheduler.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the identity of a full block: of its tokens, and of all tokens before them. before: key of the block before it"""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


class BlockPool:
    """The blocks of a pool, by number.

    A block is free or has references, one for each text that reads it. A free block keeps its key until it is taken for other tokens,
    the longest unused one first, so that a later text with the same beginning finds it.

    Attributes:
        count: Number of blocks.
        references: Of each block.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = [0] * count
        self._free: dict[int, None] = dict.fromkeys(range(count))  # in the order in which they are taken
        self._of_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    def take(self) -> int:
        """Return a free block, with one reference. Its elements are of no text any more."""
        block = next(iter(self._free))
        del self._free[block]
        if block in self._keys:
            del self._of_key[self._keys.pop(block)]
        self.references[block] = 1
        return block

    def share(self, key: bytes) -> int | None:
        """Return the block of a key, with one more reference; None if there is none."""
        block = self._of_key.get(key)
        if block is not None:
            self._free.pop(block, None)
            self.references[block] += 1
        return block

    def name(self, block: int, key: bytes) -> int:
        """Give a full block its key. Return the block to read in its place: an earlier one of the same key, or itself."""
        other = self.share(key)
        if other is not None:
            self.release(block)
            return other
        self._of_key[key], self._keys[block] = block, key
        return block

    def release(self, block: int) -> None:
        """Drop a reference."""
        self.references[block] -= 1
        if not self.references[block]:
            self._free[block] = None
