"""Checks of a call's arguments before it runs. An error names the parameter, the wanted and the found value, and a
remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.signature import tensor_specs


def check_arguments(program: Program, inputs: Mapping[str, Any] | Sequence[Any]) -> list[NDArray[Any]]:
    """Check the arrays' number, rank and dtype; return them in the order of the parameters. Raises UserError naming the
    parameter.
    """
    arrays = in_order(program.name, [program.buffers[index].name for index in program.inputs], inputs)
    for position, array in enumerate(arrays):
        _check_array(program, position, array)
    return arrays


def check_values(program: Program, arrays: Sequence[NDArray[Any]]) -> None:
    """Check that values used as indices lie inside the indexed arrays. Raises UserError naming parameter, value and place."""
    for index, array in zip(program.inputs, arrays, strict=True):
        spec = program.buffers[index]
        fill = spec.fill
        if fill.kind != "integers" or array.dtype.kind not in "iu" or not array.size:
            continue
        if array.min() >= fill.low and array.max() < fill.high:
            continue
        where = np.unravel_index(int(np.argmax((array < fill.low) | (array >= fill.high))), array.shape)
        place = ", ".join(str(int(i)) for i in where)
        raise UserError(
            f"{program.name}: parameter {spec.name}: wanted values from {fill.low:.0f} to {fill.high - 1:.0f}, which the "
            f"model uses as indices, found {array[where]} at [{place}]; are the inputs (token ids, say) made for this model?"
        )


def in_order(function: str, names: Sequence[str], inputs: object) -> list[Any]:
    """Return the arguments of `function` in the order of its parameters `names`. Raises UserError for a missing or unknown one."""
    listed = ", ".join(names) or "none"
    if isinstance(inputs, Mapping):
        found = ", ".join(map(str, inputs)) or "none"
        for name in names:
            if name not in inputs:
                raise UserError(
                    f"{function}: wanted an array for parameter {name}, found arguments for {found}; "
                    f"give one array for each of {listed}"
                )
        unknown = [str(name) for name in inputs if name not in names]
        if unknown:
            raise UserError(
                f"{function}: wanted the parameters {listed}, found unknown {', '.join(unknown)}; leave them out"
            )
        return [inputs[name] for name in names]
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        raise UserError(
            f"{function}: wanted arrays by parameter name, or a list of them in the order {listed}, found "
            f"{_kind(inputs)}; a single array still goes into a list"
        )
    if len(inputs) != len(names):
        missing = f", missing {', '.join(names[len(inputs) :])}" if len(inputs) < len(names) else ""
        raise UserError(
            f"{function}: wanted {len(names)} arguments ({listed}), found {len(inputs)}{missing}; "
            "give them by name to be sure of their order"
        )
    return list(inputs)


def _check_array(program: Program, position: int, array: object) -> None:
    spec = program.buffers[program.inputs[position]]
    where = f"{program.name}: parameter {spec.name}"
    if not isinstance(array, np.ndarray):
        raise UserError(
            f"{where}: wanted a NumPy array ({_declared(program, position)}), found {_kind(array)}; "
            f"convert it with numpy.asarray(..., {_numpy_name(spec.dtype)})"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise UserError(f"{where}: wanted a plain NumPy array, found a masked one; call its filled() with a value")
    if array.ndim != len(spec.shape):
        raise UserError(
            f"{where}: wanted {len(spec.shape)} dimensions ({_declared(program, position)}), found {array.ndim} "
            f"{array.shape}; reshape it"
        )
    if array.dtype == np.dtype(spec.dtype):
        return
    raise UserError(
        f"{where}: wanted dtype {spec.dtype}, found {array.dtype}; convert it with astype({_numpy_name(spec.dtype)})"
    )


def _declared(program: Program, position: int) -> str:
    return str(tensor_specs(program, (program.inputs[position],))[0])


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _numpy_name(dtype: str) -> str:
    package = "ml_dtypes" if dtype == "bfloat16" else "numpy"
    return f"{package}.{'bool_' if dtype == 'bool' else dtype}"
