"""Weights of a Hugging Face folder: one safetensors file, or several with an index.

Tests: `tests/ir/frontend/hf/test_folder.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from relax_tune.errors import ParseError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BY_BYTES: Mapping[str, Any] = {
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
READABLE = ("F16", "BF16", "F32", "F64")
_OLDER = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")


def read_json(path: Path, expected: str) -> Mapping[str, Any]:
    """Read the JSON object in a file; `expected` describes it in errors. Raises ParseError."""
    data = _json(path, expected)
    if not isinstance(data, dict):
        raise ParseError(f"{path}: expected a JSON object, got {type(data).__name__}; download it again")
    return data


def read_json_list(path: Path, expected: str) -> Sequence[Any]:
    """Read the JSON list in a file, as `read_json` does an object."""
    data = _json(path, expected)
    if not isinstance(data, list):
        raise ParseError(f"{path}: expected a JSON list, got {type(data).__name__}; download it again")
    return data


def _json(path: Path, expected: str) -> Any:
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise ParseError(f"{path}: this is not a regular file; give {expected}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParseError(f"expected {expected}: {error}; give the folder that holds it") from None
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{path}: expected JSON: {error}; download it again") from None


class HfWeights:
    """Tensors of a model folder, read one at a time from mapped files. Raises ParseError for unreadable files.

    Args:
        file: name of the file of all tensors
    """

    def __init__(self, folder: Path, file: str = WEIGHTS) -> None:
        self.path = folder / file
        self._files: dict[str, tuple[Path, Any]] = {}
        if file == WEIGHTS and not self.path.is_file() and (folder / INDEX).is_file():
            self.path = folder / INDEX
            self._open_shards(folder)
        else:
            self._open(self.path, None)
        self.names = frozenset(self._files)

    def _open_shards(self, folder: Path) -> None:
        listed = read_json(self.path, f"an index of weights in {folder}").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ParseError(
                f"{self.path}: expected an object weight_map from tensors to files, got {listed!r:.60}; download it again"
            )
        for name in sorted(set(listed.values())):
            if Path(name).name != name:
                raise ParseError(
                    f"{self.path}: expected names of files in its folder, got {name!r:.80}; download it again"
                )
            self._open(folder / name, {tensor for tensor, place in listed.items() if place == name})

    def _open(self, path: Path, listed: set[str] | None) -> None:
        """Map a file. listed: tensors that the index assigns to it."""
        if not path.is_file():
            others = sorted({p.name for pattern in _OTHERS for p in path.parent.glob(pattern)})
            present = f"; the folder has {', '.join(others[:6])}" if others else ""
            listing = "" if listed is None else f", which {self.path.name} lists,"
            raise ParseError(
                f"{path}{listing} does not exist{present}; download it, or write it with transformers: "
                "AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            file = cast(Any, safe_open(str(path), framework="numpy"))
            names = set(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ParseError(f"{path}: expected a complete safetensors file: {error}; download it again") from None
        missing = sorted((listed or set()) - names)
        if missing:
            raise ParseError(
                f"{path}: tensor {missing[0]!r:.120}, which {self.path.name} lists, is missing; download both again"
            )
        for name in names if listed is None else listed:
            self._files[name] = (path, file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ParseError for a missing one."""
        if name not in self.names:
            raise ParseError(f"{self.path}: expected a tensor {name!r}, got none; download it again")
        return tuple(self._files[name][1].get_slice(name).get_shape())

    def integers(self, name: str) -> NDArray[np.int64]:
        """Read a tensor of integers. Raises ParseError for another one."""
        array = self.raw(name)
        if array.dtype.kind not in "iu":
            raise ParseError(f"{self.path}: {name!r}: expected integers, got {array.dtype}; download it again")
        return array.astype(np.int64)

    def raw(self, name: str) -> NDArray[Any]:
        """Read a tensor in its own type. Raises ParseError for one that is missing or cannot be read."""
        shape = self.shape(name)
        path, file = self._files[name]
        try:
            kind = file.get_slice(name).get_dtype()
            array = _bytes(path, name, shape, BY_BYTES[kind]) if kind in BY_BYTES else file.get_tensor(name)
        except (SafetensorError, OSError, TypeError, ValueError, LookupError) as error:
            raise ParseError(f"{path}: {name!r}: the tensor cannot be read: {error}; download it again") from None
        return np.asarray(array)

    def get(self, name: str, shape: Sequence[int]) -> NDArray[Any]:
        """Read the tensor `name` as float32. Raises ParseError naming it, the expected and the actual shape."""
        expected = tuple(shape)
        if name not in self.names:
            older = (name[: -len(new)] + old for new, old in _OLDER if name.endswith(new))
            name = next((n for n in older if n in self.names), name)
        if name not in self.names:
            near = sorted(n for n in self.names if n.rpartition(".")[0] == name.rpartition(".")[0])[:6]
            present = f"; there is {', '.join(near)}" if near else f"; there are {len(self.names)} others"
            raise ParseError(
                f"{self.path}: expected a tensor {name!r} of shape {expected}, got none{present}; "
                "do config.json and the weights belong together?"
            )
        path, file = self._files[name]
        try:
            part = file.get_slice(name)
            actual, dtype = tuple(part.get_shape()), part.get_dtype()
            if actual != expected:
                raise ParseError(
                    f"{path}: {name!r}: expected shape {expected} by config.json, got {actual}; "
                    "do config.json and the weights belong together?"
                )
            if dtype not in READABLE:
                known = ", ".join(READABLE)
                raise ParseError(
                    f"{path}: {name!r}: expected a dtype among {known}, got {dtype}; save the model in float32"
                )
        except (SafetensorError, OSError, TypeError, ValueError, LookupError) as error:
            raise ParseError(f"{path}: {name!r}: the tensor cannot be read: {error}; download it again") from None
        return np.ascontiguousarray(self.raw(name), np.float32)


def _bytes(path: Path, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Read a tensor from the bytes of a checked file, of a type that NumPy lacks."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = json.loads(file.read(length))[name]["data_offsets"][0]
    return np.fromfile(path, dtype, math.prod(shape), offset=8 + length + begin).reshape(shape)
