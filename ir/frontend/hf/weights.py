"""Weights of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from relax_tune.errors import ParseError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F16", "BF16", "F32", "F64")
_OLDER = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")


def read_json(path: Path, wanted: str) -> Mapping[str, Any]:
    """Read the JSON object in a file; `wanted` describes it in errors. Raises ParseError."""
    data = _json(path, wanted)
    if not isinstance(data, dict):
        raise ParseError(f"{path}: wanted a JSON object, found {type(data).__name__}; download it again")
    return data


def read_json_list(path: Path, wanted: str) -> Sequence[Any]:
    """Read the JSON list in a file, as `read_json` does an object."""
    data = _json(path, wanted)
    if not isinstance(data, list):
        raise ParseError(f"{path}: wanted a JSON list, found {type(data).__name__}; download it again")
    return data


def _json(path: Path, wanted: str) -> Any:
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise ParseError(f"{path}: wanted a file with JSON, found something else; give {wanted}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParseError(f"wanted {wanted}, found: {error}; give the folder that holds it") from None
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{path}: wanted JSON, found something else: {error}; download it again") from None


class HfWeights:
    """Tensors of a model folder, read one at a time from mapped files. Raises ParseError for unreadable files.

    prefixes: what may stand before the names of an encoder's weights where a head stands beside it"""

    def __init__(self, folder: Path, prefixes: Sequence[str] = ()) -> None:
        self.path = folder / WEIGHTS
        self._files: dict[str, tuple[Path, Any]] = {}
        if not self.path.is_file() and (folder / INDEX).is_file():
            self.path = folder / INDEX
            self._open_shards(folder)
        else:
            self._open(self.path, None)
        self.names = frozenset(self._files)
        wrapped = (p for p in prefixes if any(n.startswith(p) for n in self.names))
        self._prefix = next(wrapped, "")

    def _open_shards(self, folder: Path) -> None:
        listed = read_json(self.path, f"an index of weights in {folder}").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ParseError(
                f"{self.path}: wanted an object weight_map from tensors to files, found {listed!r:.60}; download it again"
            )
        for name in sorted(set(listed.values())):
            if Path(name).name != name:
                raise ParseError(f"{self.path}: wanted names of files beside it, found {name!r:.80}; download it again")
            self._open(folder / name, {tensor for tensor, place in listed.items() if place == name})

    def _open(self, path: Path, listed: set[str] | None) -> None:
        """Map a file. listed: tensors that the index assigns to it."""
        if not path.is_file():
            beside = sorted({p.name for pattern in _OTHERS for p in path.parent.glob(pattern)})
            found = f"; there is {', '.join(beside[:6])}, which is not it" if beside else ""
            whose = "" if listed is None else f", which {self.path.name} lists"
            raise ParseError(
                f"wanted weights in {path}{whose}, found no such file{found}; download it, or save the model with "
                "safe_serialization=True"
            )
        try:
            file = cast(Any, safe_open(str(path), framework="numpy"))
            names = set(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ParseError(f"{path}: wanted a complete safetensors file, found: {error}; download it again") from None
        missing = sorted((listed or set()) - names)
        if missing:
            raise ParseError(
                f"{path}: wanted {len(listed or ())} tensors that {self.path.name} lists, found {missing[0]!r:.120} "
                "missing; download both again"
            )
        for name in names if listed is None else listed:
            self._files[name] = (path, file)

    def has(self, name: str) -> bool:
        """Return whether the encoder has a tensor `name`."""
        return self._prefix + name in self.names

    def get(self, name: str, shape: Sequence[int], inner: bool = True) -> NDArray[Any]:
        """Read the tensor `name` as float32. Raises ParseError naming it, the wanted and the found shape.

        inner: it is the encoder's, whose names begin with `bert.` and the like where a head stands beside it"""
        full, wanted = (self._prefix if inner else "") + name, tuple(shape)
        if full not in self.names:
            full = next(
                (n for n in (full[: -len(a)] + b for a, b in _OLDER if full.endswith(a)) if n in self.names), full
            )
        if full not in self.names:
            near = sorted(n for n in self.names if n.rpartition(".")[0] == full.rpartition(".")[0])[:6]
            beside = f"; beside it there is {', '.join(near)}" if near else f"; there are {len(self.names)} others"
            raise ParseError(
                f"{self.path}: wanted a tensor {full!r} of shape {wanted}, found none{beside}; "
                "do config.json and the weights belong together?"
            )
        path, file = self._files[full]
        try:
            part = file.get_slice(full)
            found, dtype = tuple(part.get_shape()), part.get_dtype()
            if found != wanted:
                raise ParseError(
                    f"{path}: {full!r}: wanted shape {wanted} by config.json, found {found}; "
                    "do config.json and the weights belong together?"
                )
            if dtype not in READABLE:
                raise ParseError(
                    f"{path}: {full!r}: wanted a dtype among {', '.join(READABLE)}, found {dtype}; "
                    "save the model in float32"
                )
            array = _bfloat16(path, full, wanted) if dtype == "BF16" else file.get_tensor(full)
        except (SafetensorError, OSError, TypeError, ValueError, LookupError) as error:
            raise ParseError(f"{path}: {full!r}: wanted a readable tensor, found: {error}; download it again") from None
        return np.ascontiguousarray(array, np.float32)


def _bfloat16(path: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Read a bfloat16 tensor from the bytes of a checked file, since NumPy has no such dtype."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = json.loads(file.read(length))[name]["data_offsets"][0]
    halves = np.fromfile(path, "<u2", math.prod(shape), offset=8 + length + begin)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
