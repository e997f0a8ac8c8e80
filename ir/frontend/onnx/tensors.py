"""Read tensors and element types of ONNX files as NumPy arrays; the one module that imports the onnx package.

Tests: `tests/ir/frontend/onnx/test_file.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core import dtype as d
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.frontend.onnx.workarounds import element_types

Array = NDArray[Any]

# TensorProto.DataType by number; the format never changes them.
DTYPES: Mapping[int, DType] = {
    1: d.f32, 2: d.u8, 3: d.i8, 4: d.u16, 5: d.i16, 6: d.i32, 7: d.i64, 9: d.bool_, 10: d.f16, 11: d.f64,
    12: d.u32, 13: d.u64, 16: d.bf16, 17: d.f8e4m3fn, 18: d.f8e4m3fnuz, 19: d.f8e5m2, 20: d.f8e5m2fnuz, 21: d.u4, 22: d.i4, 23: d.f4e2m1,
    24: d.f8e8m0, 25: d.u2, 26: d.i2,
}  # fmt: skip
NUMBERS: Mapping[DType, int] = {element: number for number, element in DTYPES.items()}
_EXTERNAL = 1


def shortest(value: float) -> float:
    """Return the shortest decimal of the same 32-bit float: 1e-12 for 9.999999960041972e-13."""
    return float(str(np.float32(value)))


def require_onnx() -> Any:
    """Import the onnx package. Raises UserError naming the extra when it is not installed."""
    try:
        onnx = importlib.import_module("onnx")
        for part in ("defs", "helper", "numpy_helper"):
            importlib.import_module(f"onnx.{part}")
    except ImportError as error:
        raise UserError(
            f"expected the onnx package to read ONNX models, got: {error}; install it with: pip install 'relax-tune[onnx]'"
        ) from None
    return onnx


def element_type(number: int, where: str) -> DType:
    """Return the element type of a number of the format. Raises ParseError naming `where`."""
    element = DTYPES.get(number)
    if element is None:
        onnx = require_onnx()
        known = {v: k for k, v in onnx.TensorProto.DataType.items()}
        raise ParseError(
            f"{where}: expected a number of a supported element type, got {known.get(number, number)}; {element_types()}"
        )
    return element


def read_tensor(proto: Any, folder: Path | None) -> Array:
    """Read the values of a TensorProto. Raw data is viewed and external data mapped, not copied.

    Args:
        folder: Folder of external data files; None for a model from memory.

    Raises:
        ParseError: The values are missing, incomplete or outside the folder; the message names the tensor.
    """
    where = f"tensor {proto.name!r}"
    dtype = element_type(proto.data_type, where)
    shape = tuple(int(d) for d in proto.dims)
    if any(d < 0 for d in shape):
        raise ParseError(f"{where}: expected dims of 0 or more, got {shape}")
    size = math.prod(shape)
    size_in_bytes = -(-size * dtype.bits // 8)
    if proto.data_location == _EXTERNAL:
        return _external(proto, folder, dtype, shape, size_in_bytes, where)
    if proto.HasField("raw_data"):
        raw = proto.raw_data
        if len(raw) != size_in_bytes:
            raise ParseError(
                f"{where}: expected {size_in_bytes} bytes for {shape} of {dtype}, got {len(raw)}; is the file complete?"
            )
        if dtype.bits < 8:
            return unpacked(np.frombuffer(raw, np.uint8), dtype, size).reshape(shape)
        # Raw data is little-endian on every machine.
        return np.frombuffer(raw, dtype.numpy.newbyteorder("<")).astype(dtype.numpy, copy=False).reshape(shape)
    try:
        values = np.asarray(require_onnx().numpy_helper.to_array(proto))
    except (ValueError, TypeError) as error:
        raise ParseError(f"{where}: expected {size} values of {dtype}, got: {error}") from None
    return np.ascontiguousarray(values, dtype.numpy).reshape(shape)


def unpacked(data: NDArray[np.uint8], dtype: DType, size: int) -> Array:
    """Return the numbers of less than 8 bits that bytes hold, the first in the lowest bits."""
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    codes = (data[:, None] >> shifts) & ((1 << dtype.bits) - 1)
    return np.asarray(codes, np.uint8).reshape(-1)[:size].view(dtype.numpy)


def belongs_to(path: Path, folder: Path) -> bool:
    """Return whether a file is in the model's folder, or a blob of its repository in a hub's cache.

    The cache of the Hugging Face hub has `models--OWNER--NAME/snapshots/REVISION/...`, whose files are links into
    `models--OWNER--NAME/blobs`.

    Args:
        path: The file, with all links followed.
        folder: The model's folder, with all links followed.
    """
    repositories = (p.parent for p in folder.parents if p.name == "snapshots" and p.parent.name.startswith("models--"))
    return folder in path.parents or any(path.parent == r / "blobs" for r in repositories)


def _external(
    proto: Any, folder: Path | None, dtype: DType, shape: tuple[int, ...], size_in_bytes: int, where: str
) -> Array:
    entries = {e.key: e.value for e in proto.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ParseError(
            f"{where}: its values are in the file {location!r} in the folder of the model; load the model by its path, not from memory"
        )
    relative = PurePosixPath(location)
    if not location or relative.is_absolute() or ".." in relative.parts:
        raise ParseError(
            f"{where}: expected external data in a file inside the model's folder {folder}, got {location!r}"
        )
    path = folder / relative
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size_in_bytes))
    except ValueError:
        raise ParseError(f"{where}: expected a numeric offset and length of external data, got {entries}") from None
    # A link may lead out of the folder although its name does not: a foreign model must not read other files.
    if path.is_file() and not belongs_to(path.resolve(), folder.resolve()):
        raise ParseError(
            f"{where}: expected external data inside the model's folder, but {path} is a link out of it, to {path.resolve()}; "
            "put a copy in its place"
        )
    if not path.is_file():
        raise ParseError(f"{where}: external data {path} does not exist; put it into the folder of the model")
    file_size = path.stat().st_size
    if length != size_in_bytes or offset < 0 or offset + size_in_bytes > file_size:
        raise ParseError(
            f"{where}: expected {size_in_bytes} bytes at {offset} of {path} for {shape} of {dtype}, got a length of {length} in a "
            f"file of {file_size} bytes; is the file complete?"
        )
    # An empty mapping is an error of the system.
    if size_in_bytes == 0:
        return np.zeros(shape, dtype.numpy)
    if dtype.bits < 8:
        return unpacked(np.fromfile(path, np.uint8, size_in_bytes, offset=offset), dtype, math.prod(shape)).reshape(
            shape
        )
    if offset % dtype.bytes:
        # Elements of a mapping at such an offset would not be aligned, so they are read.
        data = np.fromfile(path, np.uint8, size_in_bytes, offset=offset)
        return np.frombuffer(data.tobytes(), dtype.numpy).reshape(shape)
    return np.memmap(path, dtype.numpy, "r", offset, shape)
