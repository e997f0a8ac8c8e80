"""The files that a model consists of, of each format that `load_model` reads from a path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from relax_tune.errors import UserError
from relax_tune.ir.frontend.onnx.file import read_model
from relax_tune.ir.frontend.source import find_model
from relax_tune.ir.frontend.text import SUFFIX, WEIGHTS

# What folders of models hold beside programs, pickled weights and other formats, which nothing here opens.
_OF_FOLDERS = (".json", ".safetensors", ".txt", ".model", ".jinja")


def model_files(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of a model and the names in it of the model's files, sorted.

    Links are followed, as loading follows them. Raises UserError when there is no model."""
    path = find_model(path)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in _OF_FOLDERS and p.is_file())
        names = [p.relative_to(path).as_posix() for p in found]
        names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
        if not {"config.json", "modules.json"} & set(names):
            raise UserError(f"{path}: wanted the folder of a Hugging Face model, found none of its files; give another")
        return path, names
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; give the model to tune")
    names = [path.name]
    if path.suffix == SUFFIX:
        names += [p.name for p in map(path.with_suffix, WEIGHTS) if p.is_file()]
    if path.suffix == ".onnx":
        proto, _ = read_model(path)
        names += sorted(set(_beside(proto.graph)))
    missing = [name for name in names if not (is_inside(name) and (path.parent / name).is_file())]
    if missing:
        raise UserError(
            f"{path}: wanted its file {missing[0]!r:.200} in the folder beside it, found none; give the whole model"
        )
    return path.parent, names


def _beside(graph: Any) -> Iterator[str]:
    """Yield the files in which the tensors of an ONNX graph lie."""
    for tensor in graph.initializer:
        yield from (e.value for e in tensor.external_data if e.key == "location")
    for node in graph.node:
        for attribute in node.attribute:
            yield from (e.value for e in attribute.t.external_data if e.key == "location")
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _beside(inner)


def is_inside(name: str) -> bool:
    """Return True if a name leads to no place outside of its folder, links aside."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
