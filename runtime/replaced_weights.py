"""Other weights for the same programs: arrays in place of constants, checked by name, shape and type.

Tests: `tests/tuner/job/test_replaced_weights.py`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arrays import as_array

Array = NDArray[Any]
_INDICES = "bi"
_INDEX_BYTES = 4


def replaced_constants(constants: Mapping[str, Array], arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Return constants, some of them replaced.

    Args:
        constants: By name.
        arrays: By name; arrays of other libraries, too.

    Raises:
        UserError: A name that there is not, another shape or type, or changed integers of 32 bits and more, which may be indices that
            were proved valid when the programs were built.
    """
    result = dict(constants)
    for name, value in arrays.items():
        if name not in constants:
            raise UserError(_unknown(name, constants))
        old = constants[name]
        expected = f"{old.dtype} {old.shape}"
        where = f"weight {name}"
        new = as_array(value, where, expected, old.dtype.name)
        if new.shape != old.shape:
            raise UserError(f"{where}: expected {expected}, got shape {new.shape}")
        if not np.array_equal(new, old) and is_index(old):
            raise UserError(
                f"{where}: expected the integers of the artifact, which kernels may use as indices, got others; build the model again"
            )
        result[name] = np.ascontiguousarray(new).reshape(new.shape)
    return result


def is_index(array: Array) -> bool:
    """Return whether the elements of a constant may be indices; integers of fewer bits are quantised weights."""
    return array.dtype.kind in _INDICES and (array.dtype.kind == "b" or array.dtype.itemsize >= _INDEX_BYTES)


def _unknown(name: str, constants: Mapping[str, Array]) -> str:
    near = difflib.get_close_matches(name, constants, 3, 0.6)
    others = f"the nearest are {', '.join(near)}" if near else f"it has {len(constants)} others"
    return (
        f"weight {name:.120}: expected the name of a constant of the artifact, got none of them; {others}. A weight that the build "
        "packed or computed with has another name: rt.replace_weights takes packed ones, and whole models"
    )


def replaced_key(model: object, arrays: Mapping[str, Array]) -> str:
    """Return an identity of a model with other weights, from its own."""
    state = hashlib.blake2b(str(model).encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        state.update(f"{name}:{array.dtype}:{array.shape}".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


class Programs(Protocol):
    """The parts of an artifact that weights belong to."""

    @property
    def programs(self) -> Sequence[object]: ...
    @property
    def host_programs(self) -> Sequence[object]: ...
    @property
    def device_kind(self) -> str: ...


def check_same(now: Programs, given: Programs, name: str) -> None:
    """Raise UserError unless an artifact has the programs of an open model, which is for one device."""
    if "," in now.device_kind:
        raise UserError(
            f"{name}: expected a model for one device, got one for {now.device_kind}; open the other artifact"
        )
    if (now.device_kind, *now.programs, *now.host_programs) != (
        given.device_kind,
        *given.programs,
        *given.host_programs,
    ):
        raise UserError(
            f"{name}: expected an artifact of the same programs, got another; make it by rt.replace_weights of the artifact that is open"
        )
