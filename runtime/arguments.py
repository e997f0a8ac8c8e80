"""Checks of a call's arguments before it runs. Errors name the parameter, what was expected and got, and a remedy.

Tests: `tests/runtime/test_executor.py`, `tests/wrong_input/test_inputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.arrays import as_array, kind_of
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.memory.borrowed import borrow, is_on
from relax_tune.runtime.memory.resident import DeviceArray, on_host
from relax_tune.runtime.program.program import DTYPES, BufferSpec, CheckedIndex, Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode
from relax_tune.runtime.signature import tensor_specs

FEW = 8
Limits: TypeAlias = tuple[int, int, int, int]
"""Elements that are used as indices: the least value, one more than the largest, and which elements (`InputRange`)."""
_DTYPES = {name: np.dtype(name) for name in DTYPES}


def check_arguments(
    program: Program,
    inputs: Mapping[str, Any] | Sequence[Any],
    device: Device,
    known: Collection[int] = (),
    in_place: bool = False,
) -> list[NDArray[Any] | DeviceArray]:
    """Return arguments as arrays of the parameters' types and ranks, in the order of the parameters.

    Args:
        program: The program.
        inputs: Arguments by name, or in order.
        device: The program's device: arrays of other libraries in its memory stay there.
        known: Positions of arrays that need no check, in a list of all.
        in_place: Refuse arguments that must be copied to be such arrays.

    Raises:
        UserError: An argument does not fit; the message names the parameter.
    """
    if not known:
        inputs = in_order(program.name, [program.buffers[index].name for index in program.inputs], inputs)
    arrays = list(inputs)
    buffers = program.buffers
    for position, index in enumerate(program.inputs):
        array, spec = arrays[position], buffers[index]
        # First the arrays that need nothing, in few steps: this is done in every call. NumPy has one object for each of its types.
        if type(array) is np.ndarray and array.dtype is _DTYPES[spec.dtype] and array.ndim == len(spec.shape):
            continue
        if position not in known:
            arrays[position] = _as_parameter(program, position, array, device, in_place)
    return arrays


def check_values(
    program: Program,
    arrays: Sequence[NDArray[Any] | DeviceArray],
    values: Sequence[int],
    passed: Container[int] = (),
) -> None:
    """Check that values used as indices lie inside the indexed arrays. Raises UserError naming parameter, value and place.

    values: value of each scalar slot; passed: inputs that need no check
    """
    for index, array in zip(program.inputs, arrays, strict=True):
        fill = program.buffers[index].fill
        if fill.kind == "integers" and array.dtype.kind in "iu" and index not in passed:
            _check_range(program, index, on_host(array), int(fill.low), int(fill.high))
    for used in program.ranges:
        # Arguments that stayed the same were checked by an earlier call.
        if used.buffer in passed:
            continue
        array = on_host(arrays[program.inputs.index(used.buffer)])
        low, high = values[used.low], values[used.high]
        _check_range(program, used.buffer, array, low, high, used.every, used.column)


def _check_range(
    program: Program, index: int, array: NDArray[Any], low: int, high: int, every: int = 1, column: int = 0
) -> None:
    if within(array, (low, high, every, column)):
        return
    used = array if every == 1 else array.reshape(-1)[column::every]
    at = int(np.argmax((used < low) | (used >= high))) * every + column
    place = np.unravel_index(at, array.shape)
    raise UserError(
        f"{program.name}: parameter {program.buffers[index].name}: expected values from {low} to {high - 1}, which the "
        f"model uses as indices, got {array[place]} at [{', '.join(str(int(i)) for i in place)}]; are the inputs (token "
        "ids, say) meant for this model?"
    )


def within(array: NDArray[Any], limits: Limits) -> bool:
    """Return whether all elements that are used as indices are within limits."""
    low, high, every, column = limits
    if array.size == 1:
        return bool(column or low <= array.item() < high)
    used = array if every == 1 else array.reshape(-1)[column::every]
    # Few numbers are compared by Python: between the steps of a decoder the instruction cache is cold, and NumPy's code is large.
    least, most = (min, max) if used.size <= FEW else (np.min, np.max)
    numbers = used.reshape(-1).tolist() if used.size <= FEW else used
    return not used.size or bool(least(numbers) >= low and most(numbers) < high)


def index_limits(program: Program, index: int, values: Sequence[int]) -> list[Limits]:
    """Return the limits of an input's elements; `values` as of `check_values`."""
    fill = program.buffers[index].fill
    integers = fill.kind == "integers" and np.dtype(program.buffers[index].dtype).kind in "iu"
    return [
        *([(int(fill.low), int(fill.high), 1, 0)] if integers else []),
        *((values[r.low], values[r.high], r.every, r.column) for r in program.ranges if r.buffer == index),
    ]


def check_computed(program: Program, check: CheckedIndex, array: NDArray[Any], size: int) -> None:
    """Check indices that a call computed. Raises UserError naming operator, value, range and place."""
    used = array.reshape(-1)[check.column :: check.every]
    wrong = (used < 0) | (used >= size)
    if wrong.any():
        place = np.unravel_index(int(np.argmax(wrong)) * check.every + check.column, array.shape)
        raise UserError(
            f"{program.name}: {check.operator}: expected indices of at least 0 and below {size}, got {array[place]} "
            f"at [{', '.join(str(int(i)) for i in place)}]; are the inputs meant for this model?"
        )


def in_order(function: str, names: Sequence[str], inputs: object) -> list[Any]:
    """Return the arguments of `function` in the order of its parameters `names`. Raises UserError for a missing or unknown one."""
    # First what most calls give: making messages would take longer than the rest.
    if isinstance(inputs, (list, tuple)) and len(inputs) == len(names):
        return list(inputs)
    listed = ", ".join(names) or "none"
    if isinstance(inputs, Mapping):
        got = ", ".join(map(str, inputs)) or "none"
        for name in names:
            if name not in inputs:
                raise UserError(
                    f"{function}: expected an array for parameter {name}, got arguments for {got}; "
                    f"give one array for each of {listed}"
                )
        unknown = [str(name) for name in inputs if name not in names]
        if unknown:
            raise UserError(
                f"{function}: expected the parameters {listed}, got unknown {', '.join(unknown)}; leave them out"
            )
        return [inputs[name] for name in names]
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        raise UserError(
            f"{function}: expected arrays by parameter name, or a list of them in the order {listed}, got "
            f"{kind_of(inputs)}; a single array still goes into a list"
        )
    if len(inputs) != len(names):
        missing = f", missing {', '.join(names[len(inputs) :])}" if len(inputs) < len(names) else ""
        raise UserError(
            f"{function}: expected {len(names)} arguments ({listed}), got {len(inputs)}{missing}; "
            "give them by name to be sure of their order"
        )
    return list(inputs)


def _as_parameter(
    program: Program, position: int, value: Any, device: Device, in_place: bool
) -> NDArray[Any] | DeviceArray:
    """Return an argument as an array of the parameter's type and rank."""
    spec = program.buffers[program.inputs[position]]
    where, declared = f"{program.name}: parameter {spec.name}", _declared(program, position)
    array: NDArray[Any] | DeviceArray
    if is_on(value, device):
        array = borrow(value, device, where, spec.dtype)
    elif isinstance(value, DeviceArray) and value.dtype == _DTYPES[spec.dtype] and not in_place:
        array = value
    else:
        array = as_array(value, where, declared, spec.dtype, in_place)
    if array.ndim != len(spec.shape):
        raise UserError(
            f"{where}: expected {len(spec.shape)} dimensions ({declared}), got {array.ndim} {array.shape}; reshape it"
        )
    return array


def _declared(program: Program, position: int) -> str:
    return str(tensor_specs(program, (program.inputs[position],))[0])


def find_binders(program: Program) -> dict[int, tuple[int, int]]:
    """Return for each symbol the (input position, dim) whose slot is that symbol itself; the first one binds it."""
    binders: dict[int, tuple[int, int]] = {}
    for position, index in enumerate(program.inputs):
        spec: BufferSpec = program.buffers[index]
        for dim, slot in enumerate(spec.shape):
            if program.scalars[slot * WIDTH] == Opcode.SYMBOL:
                # Any later dim of the same symbol is compared with the first in `match_symbols`.
                binders.setdefault(program.scalars[slot * WIDTH + 1], (position, dim))
    return binders


def check_binders(program: Program) -> None:
    """Check that the inputs' dims determine every symbol, as `Executor.run` needs.

    Raises: ArtifactError naming the symbols without a value. `Executor.bind` takes values for any."""
    binders = find_binders(program)
    missing = [symbol.name for index, symbol in enumerate(program.symbols) if index not in binders]
    if missing:
        raise ArtifactError(f"{program.name}: expected a dim of an input for every symbol, got none for {missing}")


def match_symbols(
    program: Program,
    binders: Mapping[int, tuple[int, int]],
    arrays: Sequence[NDArray[Any] | DeviceArray],
    given: Sequence[int] | None,
    evaluate: Callable[[tuple[int, ...], Callable[[int], str]], list[int]],
) -> tuple[tuple[int, ...], list[int]]:
    """Return symbol values, given or read off the dims of the inputs, and all slots. Every other dim is checked.

    binders: as of `find_binders`; evaluate: computes the slots of symbol values, given what says where a symbol's came from
    """
    symbols = [0] * len(program.symbols)
    if given is not None:
        symbols = list(given)
    elif len(binders) < len(symbols):
        check_binders(program)
    for index, (position, dim) in binders.items() if given is None else ():
        symbols[index] = arrays[position].shape[dim]

    def origin(symbol: int) -> str:
        if given is not None:
            return "its caller"
        position, dim = binders[symbol]
        return f"dim {dim} of parameter {program.buffers[program.inputs[position]].name}"

    key = tuple(symbols)
    values = evaluate(key, origin)
    dims_of: dict[tuple[int, ...], tuple[int, ...]] = {}  # many parameters have the same dims
    for index, array in zip(program.inputs, arrays):
        spec = program.buffers[index]
        dims = dims_of.get(spec.shape)
        if dims is None:
            dims = dims_of[spec.shape] = tuple([values[slot] for slot in spec.shape])
        if array.shape != dims:
            dim = next(d for d, (got, size) in enumerate(zip(array.shape, dims)) if got != size)
            known = [f"{s.name} = {symbols[i]} from {origin(i)}" for i, s in enumerate(program.symbols)]
            raise UserError(
                f"{program.name}: parameter {spec.name}: expected {dims[dim]} in dim {dim}, "
                f"got {array.shape[dim]} ({'; '.join([f'shape {array.shape}', *known])}); make the dims agree"
            )
    return key, values
