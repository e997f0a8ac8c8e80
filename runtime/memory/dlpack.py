"""DLPack of arrays in the memory of a device (https://dmlc.github.io/dlpack, array API standard 2024.12).

NumPy makes and takes the capsules, so each is taken once, and C code calls each deleter once, also while the interpreter ends. Its
form of DLPack lacks devices and some types, so these are renamed in the capsule. No element is read.

Tests: `tests/runtime/memory/test_dlpack.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes  # noqa: F401  registers the types that NumPy lacks
import numpy as np
from numpy.typing import NDArray

CPU = 1
"""The type of the processor among devices."""
_INTEGER, _UNSIGNED, _FLOAT, _BOOL = 0, 1, 2, 6
TYPES: Mapping[tuple[int, int], str] = {
    **{(_INTEGER, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(_UNSIGNED, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(_FLOAT, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(_BOOL, 8): "bool", (4, 16): "bfloat16", (10, 8): "float8_e4m3fn", (11, 8): "float8_e4m3fnuz"},
    **{(12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz", (14, 8): "float8_e8m0fnu"},
}
"""Names of types, by code and bits."""
_CODES = {name: code for code, name in TYPES.items()}
_OWN = (_INTEGER, _UNSIGNED, _FLOAT, _BOOL)
"""Codes that NumPy's form has; other types pass as unsigned integers."""
_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether NumPy knows capsules with a version, in which an array may be read-only."""


class _Tensor(ctypes.Structure):
    """The struct DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("number", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_LAYOUTS = ((b"dltensor_versioned", 16 + 2 * ctypes.sizeof(ctypes.c_void_p)), (b"dltensor", 0))
"""Names of capsules, and where the DLTensor begins in the struct of each: after version, context, deleter and flags, or first."""


def _capsule_function(name: str, result: Any) -> Any:
    # Another prototype than the one in `ctypes.pythonapi`, which all modules of the process share.
    prototype = ctypes.PYFUNCTYPE(result, ctypes.py_object, ctypes.c_char_p)
    return prototype((name, ctypes.pythonapi))


_is_valid = _capsule_function("PyCapsule_IsValid", ctypes.c_int)
_pointer = _capsule_function("PyCapsule_GetPointer", ctypes.c_void_p)


def _tensor_of(capsule: object) -> tuple[_Tensor, bool]:
    """Return the struct in a capsule that nobody has taken, and whether it is read-only. Raises BufferError for another object."""
    for name, offset in _LAYOUTS:
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            if offset and ctypes.c_uint32.from_address(address).value != 1:
                raise BufferError("expected DLPack of version 1")
            flags = ctypes.c_uint64.from_address(address + offset - 8).value if offset else 0
            return _Tensor.from_address(address + offset), bool(flags & 1)
    raise BufferError(f"expected a capsule of DLPack, got a {type(capsule).__name__}")


@contextmanager
def _renamed(tensor: _Tensor, **fields: int) -> Iterator[None]:
    """Give a struct other fields for a while: its producer may read them in the deleter."""
    before = {name: getattr(tensor, name) for name in fields}
    for name, value in fields.items():
        setattr(tensor, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(tensor, name, value)


class _Given:
    """A producer of a capsule that is at hand."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def imported(value: Any, stream: int) -> tuple[NDArray[Any], bool]:
    """Return an array of a producer, over its memory on a device, and whether it is read-only. Its elements are not the host's to read.

    The producer's deleter is called when the array ends.

    Args:
        value: The producer.
        stream: The queue that will read the memory, which waits for the producer's work.

    Raises:
        BufferError: The producer gives no capsule, or one of an unknown type. Its own errors may be of any class.
    """
    capsule = _capsule_of(value, stream)
    tensor, read_only = _tensor_of(capsule)
    name = TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if name is None:
        raise BufferError(f"expected numbers, got DLPack's type {tensor.code} of {tensor.bits} bits x {tensor.lanes}")
    with _renamed(tensor, kind=CPU, number=0, code=tensor.code if tensor.code in _OWN else _UNSIGNED):
        array = np.from_dlpack(_Given(capsule))
    return array if tensor.code in _OWN else array.view(np.dtype(name)), read_only


def _capsule_of(value: Any, stream: int) -> object:
    if _VERSIONED:
        try:
            return value.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # a producer of the standard before 2023.12
            pass
    return value.__dlpack__(stream=stream)


class _Memory:
    """Memory on a device, as the base of an array that nobody reads here."""

    def __init__(self, address: int, dtype: np.dtype[Any], dims: tuple[int, ...], owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": dims, "typestr": dtype.str}


def exported(
    address: int,
    dtype: np.dtype[Any],
    dims: tuple[int, ...],
    outer: int,
    device: tuple[int, int],
    owner: object,
    max_version: tuple[int, int] | None,
) -> object:
    """Return a capsule of an array on a device. Its deleter ends the reference to `owner`, which owns the memory.

    Args:
        address: Address of the first element on the device.
        dtype: Type of the elements.
        dims: Dims in the order in which they are stored.
        outer: The dim of the array that is stored first.
        device: Type and number of the device.
        owner: Owner of the memory.
        max_version: The newest version that the consumer knows; None for those before versions.

    Raises:
        BufferError: DLPack lacks the type.
    """
    if dtype.name not in _CODES:
        raise BufferError(f"expected a type of DLPack, got {dtype}; read numpy()")
    code, bits = _CODES[dtype.name]
    carried = dtype if code in _OWN else np.dtype(f"uint{bits}")
    array = np.asarray(_Memory(address, carried, dims, owner))
    array = np.moveaxis(array, 0, outer) if outer else array
    capsule: object = array.__dlpack__(max_version=max_version) if _VERSIONED else array.__dlpack__()
    tensor, _ = _tensor_of(capsule)
    (tensor.kind, tensor.number), tensor.code = device, code
    return capsule
