"""Copy the data of a .pt2 archive without torch, so that neither pickles nor code reach torch."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.torch.archive_graph import (
    BYTES,
    TENSOR_META,
    Operators,
    boolean,
    key,
    mapped,
    optional,
    record,
    refuse,
)

MAX_JSON = 1 << 28
"""Bytes of a JSON member."""
CONFIG = "_config.json"
# Members of an archive by folder: the names of members with numbers.
FOLDERS: Mapping[str, str] = {"weights": r"weight_\d{1,9}", "constants": r"tensor_\d{1,9}"}
FIXED: Mapping[str, bytes] = {
    "archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "byteorder": b"little",
    "data/sample_inputs/model.pt": b"",
}  # fmt: skip
"""Members that torch requires, with their allowed contents. Without example inputs torch unpickles nothing."""


def data_archive(path: Path, known: Callable[[str], bool], extra: str) -> tuple[IO[bytes], str]:
    """Copy the graph and the weights of a .pt2 file into a temporary file.

    Args:
        known: Whether an operator, such as `torch.ops.aten.add.Tensor`, only computes results.
        extra: Name of an extra file; its text is the second result, empty without the file.

    Raises:
        ParseError: The file is not such an archive, or only torch could read it.
    """
    try:
        with zipfile.ZipFile(path) as source:
            members = _members(source)
            written: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
            with zipfile.ZipFile(written, "w") as target:
                for at, content in FIXED.items():
                    target.writestr(f"archive/{at}", content)
                target.writestr("archive/models/model.json", json.dumps(_program(source, members, known)))
                for folder in FOLDERS:
                    _write_weights(source, members, target, folder)
            dims = _text(source, members[f"extra/{extra}"]) if f"extra/{extra}" in members else ""
    except (zipfile.BadZipFile, OSError, NotImplementedError, EOFError, RecursionError) as error:
        raise ParseError(f"expected an archive of torch.export.save, got: {error!s:.200}") from None
    written.seek(0)
    return written, dims


def _members(source: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return members by path below the folder of the archive."""
    members: dict[str, zipfile.ZipInfo] = {}
    if not any(n.endswith("/archive_version") for n in source.namelist()):
        raise refuse(
            "members", "JSON and raw numbers, as newer versions of torch save them", sorted(source.namelist())[:4]
        )
    for info in source.infolist():
        at = info.filename.partition("/")[2]
        if at in members or info.compress_type != zipfile.ZIP_STORED:
            raise refuse(info.filename, "each member once, and none compressed", info.filename)
        members[at] = info
    order = _text(source, members["byteorder"]) if "byteorder" in members else "little"
    if order != "little":
        raise refuse("byteorder", "little", order)
    return members


def _text(source: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    if info.file_size > MAX_JSON:
        raise refuse(info.filename, f"at most {MAX_JSON} bytes of text", info.file_size)
    try:
        return source.read(info).decode()
    except UnicodeDecodeError as error:
        raise refuse(info.filename, "text in UTF-8", str(error)) from None


def _json(source: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    try:
        return json.loads(_text(source, info))
    except ValueError as error:
        raise refuse(info.filename, "JSON", str(error)) from None


def _program(source: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], known: Callable[[str], bool]) -> Any:
    models = [at for at in members if at.startswith("models/")]
    if len(models) != 1:
        raise refuse("models/", "one program", models)
    return Operators(known).program(_json(source, members[models[0]]), models[0])


def _write_weights(
    source: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], target: zipfile.ZipFile, folder: str
) -> None:
    """Copy the tensors of a folder, each described by its config, within the bytes that there are."""
    configs = [at for at in members if at.startswith(f"data/{folder}/") and at.endswith(CONFIG)]
    if len(configs) != 1:
        raise refuse(f"data/{folder}/", "one description of its tensors", configs)
    document = _json(source, members[configs[0]])
    entry = record(path_name=key, is_param=boolean, use_pickle=boolean, tensor_meta=optional(TENSOR_META))
    described = mapped(key, entry)(document.get("config") if isinstance(document, dict) else None, configs[0])
    for weight, weight_meta in described.items():
        where = f"data/{folder}: {weight}"
        at = str(weight_meta.get("path_name"))
        info = members.get(f"data/{folder}/{at}")
        if weight_meta.get("use_pickle") is not False or not re.fullmatch(FOLDERS[folder], at) or info is None:
            raise refuse(
                where, "numbers, in a member of the archive", "a pickle" if weight_meta.get("use_pickle") else at
            )
        _check_extent(weight_meta.get("tensor_meta") or {}, info.file_size, where)
    for at in sorted({str(weight_meta["path_name"]) for weight_meta in described.values()}):
        copied = zipfile.ZipInfo(f"archive/data/{folder}/{at}")
        copied.file_size = members[f"data/{folder}/{at}"].file_size
        with source.open(members[f"data/{folder}/{at}"]) as numbers, target.open(copied, "w") as copy:
            shutil.copyfileobj(numbers, copy, 1 << 20)
    target.writestr(f"archive/data/{folder}/model_{folder}{CONFIG}", json.dumps({"config": described}))


def _check_extent(meta: Mapping[str, Any], size: int, where: str) -> None:
    """Refuse a tensor that lies outside of its `size` bytes."""
    sizes, strides = (tuple(_known(meta.get(field, ()), where)) for field in ("sizes", "strides"))
    (start,) = _known([meta.get("storage_offset")], where)
    if "dtype" not in meta or len(sizes) != len(strides) or min((*sizes, *strides, start), default=0) < 0:
        raise refuse(where, "an element type, and as many sizes as strides, none below 0", meta)
    elements = size // BYTES[meta["dtype"]]
    last = start + sum((n - 1) * s for n, s in zip(sizes, strides)) if math.prod(sizes) else -1
    if last >= elements:
        raise refuse(where, f"a tensor within the {elements} elements of its member", f"element {last}")


def _known(dims: Any, where: str) -> Iterator[int]:
    for d in dims:
        if not isinstance(d, dict) or "as_int" not in d:
            raise refuse(where, "sizes that are numbers", d)
        yield d["as_int"]
