"""The files of a model, for each format that `load_model` reads from a path.

Tests: `tests/tuner/service/test_content.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from relax_tune.errors import UserError
from relax_tune.ir.frontend.onnx.file import read_model
from relax_tune.ir.frontend.onnx.tensors import belongs_to
from relax_tune.ir.frontend.source import find_model
from relax_tune.ir.frontend.text import SUFFIX, WEIGHTS
from relax_tune.printable import printable

# Files of a model folder that are stored. Programs, pickled weights and other formats are not, since no importer reads them.
_FOLDER_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
# Longest name of common file systems.
_NAME_BYTES = 255


def model_files(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of a model, and the names of the model's files in it.

    A link in the folder may lead only to the blobs of a hub's cache: the files are stored where others read them.

    Raises:
        UserError: The path is not a model, or a file of the model is missing or a link to another folder.
    """
    path = find_model(path)
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*") if p.suffix in _FOLDER_SUFFIXES and p.is_file())
        names = [p.relative_to(path).as_posix() for p in paths]
        names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
        if not {"config.json", "modules.json"} & set(names):
            raise UserError(f"{path}: not the folder of a Hugging Face model: config.json is missing; give another")
        _check_links(path, names)
        return path, names
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; give the model to tune")
    names = [path.name]
    if path.suffix == SUFFIX:
        names += [p.name for p in map(path.with_suffix, WEIGHTS) if p.is_file()]
    if path.suffix == ".onnx":
        proto, _ = read_model(path)
        names += sorted(set(_external_files(proto.graph)))
    missing = [name for name in names if not (is_inside(name) and (path.parent / name).is_file())]
    if missing:
        raise UserError(f"{path}: its file {missing[0]!r:.200} is not in the same folder; give the whole model")
    _check_links(path.parent, names[1:])
    return path.parent, names


def _check_links(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError for a file that is a link to another folder."""
    for name in names:
        target = (folder / name).resolve()
        if not belongs_to(target, folder.resolve()):
            raise UserError(
                f"{folder / name}: expected a file of the model, got a link to {target}, which the job would copy to where others read "
                "it; put a copy in its place"
            )


def _external_files(graph: Any) -> Iterator[str]:
    """Yield the names of the files with external tensors of an ONNX graph."""
    for tensor in graph.initializer:
        yield from (e.value for e in tensor.external_data if e.key == "location")
    for node in graph.node:
        for attribute in node.attribute:
            yield from (e.value for e in attribute.t.external_data if e.key == "location")
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _external_files(inner)


def is_inside(name: str) -> bool:
    """Return True if a file can have this name and it is inside of its folder (links are not resolved)."""
    path = PurePosixPath(name)
    plain = printable(name) == name and not set("\\\n\t") & set(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        plain = False
    return bool(path.parts) and plain and not path.is_absolute() and ".." not in path.parts


def are_files(names: Sequence[str]) -> bool:
    """Return True if files of these names can exist in one folder: all inside of it, distinct, and none a folder of another."""
    if not all(map(is_inside, names)):
        return False
    parts = {PurePosixPath(name).parts for name in names}
    folders = {path[:count] for path in parts for count in range(1, len(path))}
    short = all(len(os.fsencode(part)) <= _NAME_BYTES for path in parts for part in path)
    return short and len(parts) == len(names) and not parts & folders


def artifact_stem(name: str) -> str:
    """Return a name with the characters that file names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"
