"""A producer and a consumer of DLPack in ctypes, by the standard's header and independent of the product's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

CODES = {
    "bool": (6, 8), "int8": (0, 8), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "float16": (2, 16), "float32": (2, 32),
    "float64": (2, 64), "bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8),
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", DELETER),
        ("flags", ctypes.c_uint64), ("tensor", Tensor),
    )  # fmt: skip


STRUCTS: dict[bytes, Any] = {b"dltensor": Managed, b"dltensor_versioned": Versioned}


def function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


new = function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
name_of = function("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
rename = function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
pointer = function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)


class Produced:
    """An array of another library in the memory of a device.

    Attributes:
        streams: The streams that consumers have named.
        alive: Capsules whose deleters were not called.
        ended: Calls of deleters.
    """

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        device: tuple[int, int] = (2, 0),
        strides: Sequence[int] | None = None,
        versioned: bool = True,
        read_only: bool = False,
        offset: int = 0,
        lanes: int = 1,
    ) -> None:
        self.address, self.dtype, self.shape, self.device, self.strides = address, dtype, shape, device, strides
        self.versioned, self.read_only, self.offset, self.lanes = versioned, read_only, offset, lanes
        self.streams = list[Any]()
        self.alive, self.ended = dict[int, Any](), 0
        self._deleter = DELETER(self._end)

    def _end(self, address: int) -> None:
        self.ended += 1
        del self.alive[address]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        managed = STRUCTS[name]()
        dims = (ctypes.c_int64 * len(self.shape))(*self.shape)
        steps = None if self.strides is None else (ctypes.c_int64 * len(self.strides))(*self.strides)
        t = managed.tensor
        t.data, (t.device_type, t.device_id), t.ndim = self.address, self.device, len(self.shape)
        (t.code, t.bits), t.lanes, t.byte_offset = CODES[self.dtype], self.lanes, self.offset
        t.shape = dims
        if steps is not None:
            t.strides = steps
        managed.deleter = self._deleter
        if self.versioned:
            managed.major, managed.minor, managed.flags = 1, 0, int(self.read_only)
        address = ctypes.addressof(managed)
        self.alive[address] = managed, dims, steps
        return new(address, name, None)


class Consumed:
    """An array that was taken from a capsule, as another library reads it. `end` calls the deleter, once."""

    def __init__(self, capsule: Any) -> None:
        name = name_of(capsule)
        self._managed = STRUCTS[name].from_address(pointer(capsule, name))
        self._used = b"used_" + name
        assert rename(capsule, self._used) == 0
        t = self._managed.tensor
        self.versioned, self.device = name.endswith(b"versioned"), (t.device_type, t.device_id)
        self.dtype, self.address = NAMES[t.code, t.bits], int(t.data or 0) + t.byte_offset
        self.shape = tuple(t.shape[n] for n in range(t.ndim))
        self.strides = tuple(t.strides[n] for n in range(t.ndim)) if t.strides else None

    def read(self) -> Any:
        """Return a copy of the elements, which the emulated device has in the host's memory."""
        dtype = np.dtype(self.dtype)
        bits = np.dtype(f"u{dtype.itemsize}")
        array = np.frombuffer(ctypes.string_at(self.address, bits.itemsize * int(np.prod(self.shape))), bits)
        if self.strides is None:
            return array.reshape(self.shape).view(dtype)
        steps = tuple(s * bits.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(array, self.shape, steps).copy().view(dtype)

    def end(self) -> None:
        self._managed.deleter(ctypes.addressof(self._managed))
