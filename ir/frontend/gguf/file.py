"""Read the header of GGUF files: metadata and the places of tensors.

The format follows the GGUF specification, versions 2 and 3. Each size is checked against the file before memory is allocated.
The reader of the package gguf is not used: it creates several objects per element of an array before any check.

Tests: `tests/ir/frontend/gguf/test_importer.py`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 1 << 16, 1 << 17, 1 << 22
MOST_DIMS, MOST_ELEMENTS = 4, 1 << 40
MOST_ALIGNMENT = 1 << 16
# Numbers of the types of values.
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
TEXT, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file.

    Attributes:
        shape: dims, the last one contiguous, as in NumPy
        kind: number of its type
        begin: offset of its first byte in the file
    """

    shape: tuple[int, ...]
    kind: int
    begin: int


class GgufFile:
    """A mapped file. Raises ParseError for a truncated file and for impossible sizes.

    Attributes:
        fields: metadata without arrays of texts
        tensors: tensors by name
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ParseError(f"{path}: expected a GGUF file: {error}; download it again") from None
        self._at = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self._read()

    def wrong(self, expected: str, actual: object) -> ParseError:
        got = actual if isinstance(actual, str) else repr(actual)  # a text is a statement of this module
        return ParseError(f"{self.path}: expected {expected}, got {got:.80}; download the file again")

    def _read(self) -> None:
        if self.data[: len(MAGIC)] != MAGIC:
            raise self.wrong("a GGUF file, which begins with GGUF", self.data[: len(MAGIC)])
        self._at = len(MAGIC)
        version = self._one("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise self.wrong(
                f"GGUF version {' or '.join(map(str, VERSIONS))}, little-endian", "big-endian" if swapped else version
            )
        tensors, keys = self._one("Q"), self._one("Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            raise self.wrong(f"at most {MOST_TENSORS} tensors and {MOST_KEYS} keys", (tensors, keys))
        for _ in range(keys):
            name = self._text("the name of a key")
            if name in self.fields:
                raise self.wrong("each key once", f"{name!r} twice")
            self.fields[name] = self._value(self._one("I"), name)
        for _ in range(tensors):
            name = self._text("the name of a tensor")
            if name in self.tensors:
                raise self.wrong("each tensor once", f"{name!r} twice")
            self.tensors[name] = self._tensor(name)
        self._place()

    def _tensor(self, name: str) -> Stored:
        count = self._one("I")
        if not 1 <= count <= MOST_DIMS:
            raise self.wrong(f"1 to {MOST_DIMS} dims of tensor {name}", count)
        dims = [self._one("Q") for _ in range(count)]
        total = 1
        for d in dims:
            total *= d
            if d < 1 or total > MOST_ELEMENTS:
                raise self.wrong(f"dims of tensor {name} from 1 to {MOST_ELEMENTS} elements in all", dims)
        return Stored(tuple(reversed(dims)), self._one("I"), self._one("Q"))

    def _place(self) -> None:
        """Turn the offsets of tensors, which count from the end of the header, into offsets in the file."""
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment as a power of two up to {MOST_ALIGNMENT}", alignment)
        first = -(-self._at // alignment) * alignment
        for name, t in self.tensors.items():
            if t.begin % alignment:
                raise self.wrong(f"the place of tensor {name} in the file, a multiple of {alignment}", t.begin)
            if first + t.begin >= len(self.data):
                end = f"the end of the file after {len(self.data)} bytes"
                raise self.wrong(f"tensor {name} at byte {first + t.begin} of the file", end)
            self.tensors[name] = Stored(t.shape, t.kind, first + t.begin)

    def bytes_of(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return a view of the bytes of a tensor. Raises ParseError if the file ends before them."""
        begin = self.tensors[name].begin
        if begin + size > len(self.data):
            raise self.wrong(f"{size} bytes of tensor {name}", f"{max(0, len(self.data) - begin)} bytes")
        return np.frombuffer(self.data, np.uint8, size, begin)

    # values

    def _take(self, size: int, what: str) -> int:
        """Return the offset of the next `size` bytes, and advance past them."""
        begin = self._at
        if size > len(self.data) - begin:
            raise self.wrong(f"{size} bytes of {what}", f"the end of the file after {len(self.data) - begin}")
        self._at = begin + size
        return begin

    def _one(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self._take(struct.calcsize(f"<{code}"), "the header"))[0]

    def _text(self, what: str) -> str:
        size = self._one("Q")
        begin = self._take(size, what)
        try:
            return bytes(self.data[begin : begin + size]).decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} in UTF-8", str(error)) from None

    def _value(self, kind: int, name: str) -> Any:
        if kind in SCALARS:
            value = self._one(SCALARS[kind])
            # the shortest decimal of a float32, such as 1e-05, as a config.json has it
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind == TEXT:
            return self._text(f"key {name}")
        if kind != ARRAY:
            raise self.wrong(f"the type of key {name} from 0 to 12", kind)
        element, count = self._one("I"), self._one("Q")
        if element in SCALARS:
            form = np.dtype(SCALARS[element]).newbyteorder("<")
            return np.frombuffer(self.data, form, count, self._take(count * form.itemsize, f"key {name}"))
        if element != TEXT or count > MOST_TEXTS:
            raise self.wrong(f"key {name} as an array of numbers, or of at most {MOST_TEXTS} texts", (element, count))
        for _ in range(count):  # words and merges of the tokenizer, which no result depends on
            self._take(self._one("Q"), f"key {name}")
        return None
