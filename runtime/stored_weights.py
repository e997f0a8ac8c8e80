"""Arrays by name as safetensors, from and to pieces of memory that are not copied.

Tests: `tests/runtime/test_stored_weights.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.json_shapes import has_shape
from relax_tune.runtime.mapped_file import ALIGNMENT
from relax_tune.runtime.program.program import SMALL

Array = NDArray[Any]
_TYPES: Mapping[str, str] = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
_LIMIT = 1 << 62
_NAMES: Mapping[str, str] = {dtype: name for name, dtype in _TYPES.items()}


def weights_to_bytes(weights: Mapping[str, Array]) -> list[memoryview]:
    """Return arrays as the pieces of a safetensors file, by name; arrays of a small type as their bytes, since safetensors lacks most
    such types.

    The bytes of an array start at a multiple of `ALIGNMENT` in the file. Arrays of other sizes come last, since there are no gaps.
    """
    # `ascontiguousarray` turns an array without dims into one of one dim, hence `reshape`.
    arrays = {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in sorted(weights.items())}
    ordered = sorted(arrays, key=lambda n: arrays[n].nbytes % ALIGNMENT != 0)
    header, at = dict[str, Any](), 0
    for name in ordered:
        array = arrays[name]
        dtype = "U8" if array.dtype.name in SMALL else _NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    pieces = [memoryview(len(text).to_bytes(8, "little") + text)]
    return pieces + [arrays[name].reshape(-1).view(np.uint8).data for name in ordered]


def weights_from_bytes(data: bytes | memoryview, small: Mapping[str, str]) -> dict[str, Array]:
    """Return the arrays of a safetensors file, which share its memory.

    Args:
        data: The bytes.
        small: Type of each array of a small type, by name.

    Raises:
        ValueError: The bytes are something else.
    """
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    if not 8 <= len(view) >= start:
        raise ValueError("its header ends beyond it")
    try:
        header = json.loads(bytes(view[8:start]))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header lists no arrays")
    header.pop("__metadata__", None)
    body, arrays, at = view[start:], dict[str, Array](), 0
    for name, entry in sorted(header.items(), key=_offset_of):
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if entry["dtype"] not in _TYPES or not all(type(d) is int and 0 <= d < _LIMIT for d in (begin, end, *shape)):
            raise ValueError(f"array {name!r:.80} has another type, or sizes that are none")
        dtype = np.dtype(small.get(name, "uint8") if entry["dtype"] == "U8" else _TYPES[entry["dtype"]])
        if begin != at or end - begin != math.prod(shape) * dtype.itemsize or end > len(body):
            raise ValueError(f"array {name!r:.80} has another size or place")
        arrays[name] = np.frombuffer(body[begin:end], np.uint8).view(dtype).reshape(shape)
        at = end
    if at != len(body):
        raise ValueError("it is longer than its arrays")
    return arrays


def _offset_of(item: tuple[str, Any]) -> tuple[int, int]:
    """Return the place of an array in a header, by which they follow each other. Raises ValueError for something else."""
    name, entry = item
    if not has_shape(entry, {"dtype": str, "shape": list, "data_offsets": (int, int)}):
        raise ValueError(f"array {name!r:.80} has no type, shape and place")
    begin, end = entry["data_offsets"]
    return begin, end
