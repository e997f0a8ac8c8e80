"""Read tensors and element types of ONNX files as NumPy arrays; the one module that imports the onnx package."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import (
    ALL,
    DType,
    bf16,
    bool_,
    f4e2m1,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
    f16,
    f32,
    f64,
    i2,
    i4,
    i8,
    i16,
    i32,
    i64,
    u2,
    u4,
    u8,
    u16,
    u32,
    u64,
)

Array = NDArray[Any]

# TensorProto.DataType by number; the format never changes them.
DTYPES: Mapping[int, DType] = {
    1: f32, 2: u8, 3: i8, 4: u16, 5: i16, 6: i32, 7: i64, 9: bool_, 10: f16, 11: f64, 12: u32, 13: u64, 16: bf16,
    17: f8e4m3fn, 18: f8e4m3fnuz, 19: f8e5m2, 20: f8e5m2fnuz, 21: u4, 22: i4, 23: f4e2m1, 24: f8e8m0, 25: u2, 26: i2,
}  # fmt: skip
NUMBERS: Mapping[DType, int] = {d: n for n, d in DTYPES.items()}
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
            f"wanted the onnx package to read ONNX models, found: {error}; install it with: pip install 'relax-tune[onnx]'"
        ) from None
    return onnx


def element_type(number: int, where: str) -> DType:
    """Return the element type of a number of the format. Raises ParseError naming `where`."""
    found = DTYPES.get(number)
    if found is None:
        onnx = require_onnx()
        known = {v: k for k, v in onnx.TensorProto.DataType.items()}
        raise ParseError(
            f"{where}: wanted an element type among {', '.join(str(d) for d in ALL)}, "
            f"found {known.get(number, number)}; convert the model to one of them"
        )
    return found


def read_tensor(proto: Any, folder: Path | None) -> Array:
    """Read the values of a TensorProto. Raw data is viewed and external data mapped, not copied.

    folder: folder of external data files; None for a model from memory.
    Raises: ParseError naming the tensor."""
    where = f"tensor {proto.name!r}"
    dtype = element_type(proto.data_type, where)
    shape = tuple(int(d) for d in proto.dims)
    if any(d < 0 for d in shape):
        raise ParseError(f"{where}: wanted dims of 0 or more, found {shape}")
    size = int(np.prod(shape, dtype=np.int64))
    wanted = -(-size * dtype.bits // 8)
    if proto.data_location == _EXTERNAL:
        return _external(proto, folder, dtype, shape, wanted, where)
    if proto.HasField("raw_data"):
        raw = proto.raw_data
        if len(raw) != wanted:
            raise ParseError(
                f"{where}: wanted {wanted} bytes for {shape} of {dtype}, found {len(raw)}; is the file complete?"
            )
        if dtype.bits < 8:
            return unpacked(np.frombuffer(raw, np.uint8), dtype, size).reshape(shape)
        return np.frombuffer(raw, dtype.numpy.newbyteorder("<")).astype(dtype.numpy, copy=False).reshape(shape)
    try:
        values = np.asarray(require_onnx().numpy_helper.to_array(proto))
    except (ValueError, TypeError) as error:
        raise ParseError(f"{where}: wanted {size} values of {dtype}, found: {error}") from None
    return np.ascontiguousarray(values, dtype.numpy).reshape(shape)


def unpacked(data: NDArray[np.uint8], dtype: DType, size: int) -> Array:
    """Return the numbers of less than 8 bits that bytes hold, the first in the lowest bits."""
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    codes = (data[:, None] >> shifts) & ((1 << dtype.bits) - 1)
    return np.asarray(codes, np.uint8).reshape(-1)[:size].view(dtype.numpy)


def _external(proto: Any, folder: Path | None, dtype: DType, shape: tuple[int, ...], wanted: int, where: str) -> Array:
    entries = {e.key: e.value for e in proto.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ParseError(
            f"{where}: its values lie in the file {location!r} beside the model; load the model by its path, not from memory"
        )
    relative = PurePosixPath(location)
    if not location or relative.is_absolute() or ".." in relative.parts:
        raise ParseError(
            f"{where}: wanted external data in a file inside the model's folder {folder}, found {location!r}"
        )
    path = folder / relative
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", wanted))
    except ValueError:
        raise ParseError(f"{where}: wanted a numeric offset and length of external data, found {entries}") from None
    if path.is_file() and folder.resolve() not in path.resolve().parents:
        raise ParseError(
            f"{where}: wanted external data inside the model's folder, found that {path} is a link out of it, to {path.resolve()}; "
            "put a copy in its place"
        )
    if not path.is_file():
        raise ParseError(f"{where}: wanted external data in {path}, found no such file; it belongs beside the model")
    found = path.stat().st_size
    if length != wanted or offset < 0 or offset + wanted > found:
        raise ParseError(
            f"{where}: wanted {wanted} bytes at {offset} of {path} for {shape} of {dtype}, found a length of {length} in a "
            f"file of {found} bytes; is the file complete?"
        )
    if wanted == 0:
        return np.zeros(shape, dtype.numpy)
    if dtype.bits < 8:
        return unpacked(np.fromfile(path, np.uint8, wanted, offset=offset), dtype, math.prod(shape)).reshape(shape)
    if offset % dtype.bytes:
        data = np.fromfile(path, np.uint8, wanted, offset=offset)
        return np.frombuffer(data.tobytes(), dtype.numpy).reshape(shape)
    return np.memmap(path, dtype.numpy, "r", offset, shape)
