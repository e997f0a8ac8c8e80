"""Arrays of other libraries as NumPy arrays: over the same memory where it can be, and without a change of their numbers.

Tests: `tests/runtime/test_arrays.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.device.base import SharesMemory
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.program.program import FLOATING, SMALL_FLOATS

REACHED = (1, 3, 11, 13)
"""Types of devices in DLPack whose memory the processor reads: its own, pinned memory of CUDA and ROCm, managed memory."""
DLPACK_DEVICES: Mapping[int, str] = {
    2: "cuda",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    14: "oneapi",
    15: "webgpu",
}
INTEGERS_OF_BITS: Mapping[int, str] = {1: "uint8", 2: "int16"}
"""Types of torch by bytes, through which types that NumPy lacks are read."""
LACKED = ("bfloat16", *(name for name in SMALL_FLOATS if name != "float4_e2m1fn"))
"""Types that NumPy has only through ml_dtypes; torch names them the same. Its float4 has two numbers in a byte, the one here one."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, which is imported only by others."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def any_tensor(inputs: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Return whether some arguments, by name or in order, are tensors of torch."""
    if "torch" not in sys.modules:
        return False
    return any(map(is_tensor, inputs.values() if isinstance(inputs, Mapping) else inputs))


def as_array(value: object, where: str, expected: str, dtype: str | None, in_place: bool = False) -> NDArray[Any]:
    """Return an argument as an array of a type, over the memory of the argument where its type, layout and device allow that.

    Integers become integers of another type, and floats wider ones, if no number changes. Numbers of Python and nested lists, which
    have no type, become numbers of the type, rounded to it.

    Args:
        value: A NumPy array, nested lists, a number, a tensor of torch, or an object with `__dlpack__` or `__array__`.
        where: What the message of an error begins with.
        expected: The expected array, for such a message.
        dtype: Name of the type; None for any type.
        in_place: Refuse copies, since the array is read again later.

    Raises:
        UserError: The value is no array, is not in the host's memory, or has numbers that the type lacks.
    """
    plain = isinstance(value, (list, tuple, bool, int, float, complex, np.generic))
    shares = isinstance(value, np.ndarray) or is_tensor(value) or hasattr(value, "__dlpack__")
    if in_place and (not shares or isinstance(value, (np.generic, DeviceArray))):
        raise UserError(
            f"{where}: expected an array that stays the same ({expected}), got {kind_of(value)}; give a NumPy array or a tensor"
        )
    array = host_array(value, where, expected)
    if dtype is None or array.dtype == np.dtype(dtype):
        return array
    if in_place:
        raise UserError(
            f"{where}: expected dtype {dtype}, got {array.dtype}, which cannot be read in place; {_conversion(value, dtype)}"
        )
    converted = _of_type(array, where, dtype, plain)
    if converted is None:
        raise UserError(f"{where}: expected dtype {dtype}, got {array.dtype}; {_conversion(value, dtype)}")
    return converted


def host_array(value: object, where: str, expected: str) -> NDArray[Any]:
    """Return a value as an array without a conversion of its type; see `as_array`."""
    if isinstance(value, np.ndarray):
        # It is an ndarray, too, and its masked elements may hold any number.
        if isinstance(value, np.ma.MaskedArray):
            raise UserError(f"{where}: expected a plain NumPy array, got a masked one; call its filled() with a value")
        return value
    if isinstance(value, DeviceArray):
        return value.numpy()
    if is_tensor(value):
        return _of_tensor(value, where)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        device, number = value.__dlpack_device__()
        if int(device) not in REACHED:
            _refuse_device(where, value, f"{DLPACK_DEVICES.get(int(device), 'another device')}:{number}")
    if value is None or isinstance(value, (str, bytes)):
        _refuse_kind(where, value, expected)
    try:
        if hasattr(value, "__dlpack__"):
            try:
                return np.asarray(np.from_dlpack(value))
            except Exception:  # types that NumPy's form of DLPack lacks, such as bfloat16
                if not hasattr(value, "__array__"):
                    raise
        array = np.asarray(value)
    # The methods are of other libraries, whose errors may be of any class.
    except Exception as error:
        raise UserError(
            f"{where}: expected an array ({expected}), got {kind_of(value)} that makes none: {error!s:.200}; give numbers, in rows of "
            "equal length"
        ) from error
    if array.dtype == object:
        _refuse_kind(where, value, expected)
    return array


def _refuse_kind(where: str, value: object, expected: str) -> NoReturn:
    raise UserError(
        f"{where}: expected an array ({expected}), got {kind_of(value)}; give a NumPy array, a tensor or nested lists of numbers"
    )


def _of_tensor(tensor: Any, where: str) -> NDArray[Any]:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise UserError(
            f"{where}: expected a dense tensor, got one of layout {str(tensor.layout).removeprefix('torch.')}; call its to_dense()"
        )
    if tensor.device.type == "meta":
        raise UserError(f"{where}: expected a tensor with memory, got one on the device meta; give one with numbers")
    if tensor.device.type != "cpu":
        _refuse_device(where, tensor, str(tensor.device))
    name = str(tensor.dtype).removeprefix("torch.")
    detached = tensor.detach()
    try:
        if name in LACKED:
            bits = detached.view(getattr(torch, INTEGERS_OF_BITS[tensor.element_size()])).numpy()
            return np.asarray(bits.view(np.dtype(name)))
        return np.asarray(detached.numpy(force=True))
    # a type that NumPy lacks, or a tensor without memory, as in a trace
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{where}: expected a tensor of numbers in memory, got one of {name}: {error!s:.200}; convert it with its to()"
        ) from error


def _refuse_device(where: str, value: object, device: str) -> NoReturn:
    advice = "call its cpu()" if is_tensor(value) else "copy it to the processor"
    raise UserError(f"{where}: expected an array in the host's memory, got {kind_of(value)} on {device}; {advice}")


def _of_type(array: NDArray[Any], where: str, dtype: str, plain: bool) -> NDArray[Any] | None:
    """Return an array converted to a type; None if its own type does not permit that.

    plain: it was written as Python's numbers, which have no type
    """
    given, want = array.dtype, np.dtype(dtype)
    if plain and not array.size and given == np.float64:
        return array.astype(want)  # an empty list
    if _whole(given) and _whole(want):
        _check_integers(array, where, dtype)
        return array.astype(want)
    numbers = (_whole(given) and given != np.bool_) or given.name in FLOATING
    if given.name in FLOATING and dtype in FLOATING and np.can_cast(given, want):
        return array.astype(want)
    if plain and numbers and dtype in FLOATING:
        with np.errstate(over="ignore"):
            rounded = array.astype(want)
        _check_finite(array, rounded, where, dtype)
        return rounded
    return None


def _conversion(value: object, dtype: str) -> str:
    """Return the advice to convert a value to a type."""
    return f"convert it with {f'to(torch.{dtype})' if is_tensor(value) else f'astype({numpy_name(dtype)})'}"


def _whole(dtype: np.dtype[Any]) -> bool:
    """Return whether the type is one of integers, or bool."""
    return dtype.kind in "biu" or dtype.name in ("int2", "uint2", "int4", "uint4")


def _check_integers(array: NDArray[Any], where: str, dtype: str) -> None:
    """Raise UserError naming an element that is no number of the integer type."""
    if not array.size or np.can_cast(array.dtype, np.dtype(dtype)):
        return
    low, high = (0, 1) if dtype == "bool" else (int((i := ml_dtypes.iinfo(np.dtype(dtype))).min), int(i.max))
    if int(array.min()) < low or int(array.max()) > high:
        # compared as Python's integers, since a limit may be no number of the array's type
        wrong = np.array([not low <= x <= high for x in array.reshape(-1).tolist()])
        _refuse_element(array, int(np.argmax(wrong)), where, f"numbers from {low} to {high} ({dtype})")


def _check_finite(array: NDArray[Any], rounded: NDArray[Any], where: str, dtype: str) -> None:
    """Raise UserError naming an element that the float type has no finite number for."""
    wrong = np.isfinite(array) & ~np.isfinite(rounded.astype(np.float64))
    if wrong.any():
        _refuse_element(array, int(np.argmax(wrong)), where, f"numbers in the range of {dtype}")


def _refuse_element(array: NDArray[Any], at: int, where: str, expected: str) -> NoReturn:
    place = np.unravel_index(at, array.shape)
    raise UserError(
        f"{where}: expected {expected}, got {array[place]} at [{', '.join(str(int(i)) for i in place)}]; correct it"
    )


def kind_of(value: object) -> str:
    """Return the class of a value, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def numpy_name(dtype: str) -> str:
    """Return the Python name of a type, for messages."""
    package = "ml_dtypes" if hasattr(ml_dtypes, dtype) else "numpy"
    return f"{package}.{'bool_' if dtype == 'bool' else dtype}"


def as_tensors(results: Iterable[Any]) -> list[Any]:
    """Return the arrays among results as tensors of torch, over the same memory; values that torch has no type for as they are."""
    return [as_tensor(r) if isinstance(r, np.ndarray) else _of_device(r) for r in results]


def _of_device(value: Any) -> Any:
    """Return an array that stays on a device of torch as a tensor there."""
    stays = isinstance(value, DeviceArray) and isinstance(value.memory.device, SharesMemory)
    return sys.modules["torch"].from_dlpack(value) if stays else value


def as_tensor(array: NDArray[Any]) -> Any:
    """Return an array as a tensor of torch over the same memory, or unchanged if torch lacks the type."""
    torch: Any = sys.modules["torch"]
    name = array.dtype.name
    if name in LACKED and hasattr(torch, name):
        bits = torch.from_numpy(array.view(INTEGERS_OF_BITS[array.itemsize]))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(array) if array.dtype.isbuiltin == 1 and hasattr(torch, name) else array
