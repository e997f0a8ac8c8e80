"""Tensors of a GGUF file as float32, decoded one at a time by the package gguf.

Tests: `tests/ir/frontend/gguf/test_importer.py`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.gguf.file import GgufFile
from relax_tune.summary import listed

READABLE = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
_EXPERT = re.compile(r"(.*_exps)\.(\d+)(\.weight)")


def require_gguf() -> Any:
    """Import the gguf package. Raises UserError naming the extra when it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(
            f"GGUF files need the package gguf, which cannot be imported: {error}; install it with: pip install 'relax-tune[gguf]'"
        ) from None


class GgufWeights:
    """Tensors of a file. Raises ParseError for unexpected shapes and unknown types.

    Attributes:
        names: names of all tensors
        unread: names of tensors that have not been read
    """

    def __init__(self, file: GgufFile) -> None:
        self.file, self.path = file, file.path
        self._gguf = require_gguf()
        self._types = {int(t): t for t in self._gguf.GGMLQuantizationType}
        self.names = frozenset(file.tensors)
        self.unread = set(file.tensors)
        self._check_places()

    def _check_places(self) -> None:
        """Refuse unknown types, tensors beyond the end of the file and tensors that overlap."""
        end, before = 0, ""
        for name, t in sorted(self.file.tensors.items(), key=lambda item: item[1].begin):
            if t.begin < end:
                raise self.file.wrong(f"tensor {name} after tensor {before}", f"place {t.begin} before {end}")
            size = self._size(name)
            self.file.bytes_of(name, size)
            end, before = t.begin + size, name

    def kind(self, name: str) -> str:
        """Return the name of the type of a tensor."""
        number = self.file.tensors[name].kind
        return str(self._types[number].name) if number in self._types else f"type {number}"

    def _size(self, name: str) -> int:
        """Return the bytes of a tensor."""
        kind, shape = self.kind(name), self.file.tensors[name].shape
        if kind not in READABLE:
            raise ParseError(
                f"{self.path}: tensor {name!r:.80} at byte {self.file.tensors[name].begin}: expected a type among "
                f"{', '.join(READABLE)}, got {kind}; load the Hugging Face folder that the file was converted from, or convert that to "
                "one of these types"
            )
        block, size = self._gguf.GGML_QUANT_SIZES[self._types[self.file.tensors[name].kind]]
        if shape[-1] % block:
            raise self.file.wrong(f"rows of tensor {name} in blocks of {block}, as {kind} has", shape)
        return math.prod(shape) // int(block) * int(size)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the dims of a tensor. Raises ParseError if it is missing."""
        if name not in self.file.tensors:
            layer = name.rpartition(".")[0].partition(".weight")[0]
            near = sorted(n for n in self.names if n.startswith(layer)) or sorted(self.names)
            present = f"there are {listed(near, 6)}" if near else "the file has no tensors"
            raise ParseError(
                f"{self.path}: expected a tensor {name!r:.80}, got none; {present}; is the file complete, and of this architecture?"
            )
        return self.file.tensors[name].shape

    def get(self, name: str, shape: Sequence[int]) -> NDArray[np.float32]:
        """Decode a tensor, or the part of one expert. Raises ParseError naming it, the expected and the actual shape."""
        expert = _EXPERT.fullmatch(name)
        stored, expected = (f"{expert[1]}{expert[3]}" if expert else name), tuple(shape)
        actual = self.shape(stored)
        if (actual[1:] if expert else actual) != expected or (expert and int(expert[2]) >= actual[0]):
            each = " for each expert" if expert else ""
            raise ParseError(
                f"{self.path}: {stored!r:.80}: expected shape {expected} by the metadata{each}, got {actual}; do metadata and tensors "
                "belong together?"
            )
        self.unread.discard(stored)
        size = self._size(stored)
        data = self.file.bytes_of(stored, size)
        if expert:
            part = size // actual[0]
            data = data[int(expert[2]) * part : (int(expert[2]) + 1) * part]
        rows = data.reshape(-1, len(data) // math.prod(expected[:-1]))
        decoded = self._gguf.dequantize(rows, self._types[self.file.tensors[stored].kind])
        return np.array(decoded, np.float32, order="C").reshape(expected)
