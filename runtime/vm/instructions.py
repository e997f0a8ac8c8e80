"""Instructions of host programs: the frames they work on, and what each class of them does.

An execution takes the machine, the instruction and the frame. Those here ignore the machine; the ones that need it are in `machine`.
Tests: `tests/runtime/program/test_host_program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arrays import as_array, host_array
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.memory.borrowed import borrow, is_on
from relax_tune.runtime.memory.resident import DeviceArray, on_host
from relax_tune.runtime.program.host_operators import HOST_OPERATORS, is_shape
from relax_tune.runtime.program.host_program import (
    Apply,
    Branch,
    CallHostProgram,
    CallHostRoutine,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    Instruction,
    Move,
    Number,
    Pack,
    Refer,
    Require,
    Value,
)
from relax_tune.runtime.program.program import format_message
from relax_tune.runtime.program.scalars import INT64_MAX, INT64_MIN, Evaluator, compile_scalars

Host: TypeAlias = Callable[..., Any]
"""A routine of the host program: takes read-only arrays, shapes and scalars, and returns the declared results."""

Place: TypeAlias = tuple[int, int]
"""A block, and an instruction in it."""


@dataclass(frozen=True, slots=True)
class FunctionValue:
    """The value of a function."""

    name: str


class CallFrame:
    """The frame of an active call.

    Attributes:
        into: Register of the caller's frame that receives the result.
        at: The next instruction.
        outer: Where to continue when the present block of a branch ends, innermost last.
    """

    __slots__ = ("at", "code", "hosts", "into", "outer", "registers")

    def __init__(self, code: Code, args: Sequence[Any], into: int, hosts: Mapping[str, Host]) -> None:
        self.code, self.into, self.hosts = code, into, hosts
        self.registers: list[Any] = [*args, *[None] * (code.program.registers - len(args))]
        self.at: Place = (0, 0)
        self.outer: list[Place] = []

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return self.code.program.name

    def values(self, registers: Sequence[int]) -> list[Any]:
        return [self.registers[r] for r in registers]

    def numbers(self, registers: Sequence[int]) -> list[int]:
        return [_number(self.registers[r], self.name) for r in registers]


class Code:
    """A host program, ready to execute.

    Attributes:
        tail_calls: Places of the calls whose results the function returns unchanged.
        computes: Compiled scalar code of each `Compute`, by the instruction's identity: hashing one takes longer than computing it.
    """

    def __init__(self, host_program: HostProgram) -> None:
        self.program = host_program
        self.tail_calls = _tail_calls(host_program)
        computes = [i for i in host_program.instructions() if isinstance(i, Compute)]
        self.computes: dict[int, Evaluator] = {id(i): compile_scalars(i.code, len(i.symbols)) for i in computes}


def _compute(vm: object, i: Compute, frame: CallFrame) -> None:
    try:
        values = frame.code.computes[id(i)](frame.numbers(i.symbols))
    except UserError as error:
        raise UserError(f"{frame.name}: {error}") from None
    for into, slot, dtype in zip(i.into, i.slots, i.dtypes, strict=True):
        frame.registers[into] = _scalar(values[slot], dtype)


def _require(vm: object, i: Require, frame: CallFrame) -> None:
    if not frame.registers[i.cond]:
        raise UserError(f"{frame.name}: {format_message(i.message, frame.values(i.values))}")


def _apply(vm: object, i: Apply, frame: CallFrame) -> Any:
    args = frame.values(i.args)
    try:
        if args and isinstance(args[0], DeviceArray):
            # Shapes are known on the host: neither operation needs the elements, so nothing is downloaded.
            if i.operator == "shape_of":
                return args[0].shape
            if i.operator == "reshape_to" and is_shape(args[1]) and not args[0].outer:
                return args[0].reshape(args[1])
        return HOST_OPERATORS[i.operator].run(*(on_host(a) for a in args))
    except UserError as error:
        raise UserError(f"{frame.name}: {error}{_excerpt(i.shown)}") from None


def _tail_calls(host_program: HostProgram) -> frozenset[Place]:
    """Return the places of calls whose results the calling function returns unchanged."""
    around: dict[int, Place] = {}
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            # A block of a branch continues behind the branch that entered it.
            around |= dict.fromkeys(i.entered, (number, at))
    places = set[Place]()
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            if isinstance(i, CallHostProgram) and _is_tail(host_program, number, at, i.into, around):
                places.add((number, at))
    return frozenset(places)


def _is_tail(host_program: HostProgram, block: int, at: int, register: int, around: Mapping[int, Place]) -> bool:
    while True:
        # Only copies of the result may follow. At the end of its block, a value leaves through the branch that
        # entered the block.
        for i in host_program.blocks[block][at + 1 :]:
            if not isinstance(i, Move) or i.value != register:
                return False
            register = i.into
        if block not in around:
            return register == host_program.result
        block, at = around[block]


def item(value: Any, index: int, where: str) -> Any:
    """Return a field of a tuple. Raises UserError for another value or a missing field."""
    if not isinstance(value, tuple) or not 0 <= index < len(value):
        raise UserError(f"{where}: expected a tuple with an item {index}, got {describe(value)}")
    return value[index]


def condition(frame: CallFrame, i: Branch) -> bool:
    """Return the condition of a branch. Raises UserError unless it is a bool scalar."""
    value = on_host(frame.registers[i.cond])
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype == np.bool_:
        return bool(value)
    raise UserError(
        f"{frame.name}: expected a scalar of bool as the condition of an `if`, got {describe(value)}{_excerpt(i.shown)}"
    )


def _match(vm: object, i: CheckValue, frame: CallFrame) -> None:
    r, where = frame.registers, frame.name
    value = r[i.value]

    def refuse(got: str) -> UserError:
        return UserError(f"{where}: {i.where}: expected {i.wanted}, got {got}{_excerpt(i.shown)}")

    if i.want == "tensor":
        # A masked array is an ndarray, but kernels would read the elements under its mask.
        if not isinstance(value, (np.ndarray, DeviceArray)) or isinstance(value, np.ma.MaskedArray):
            raise refuse(describe(value))
        if i.count is not None and value.ndim != i.count:
            raise refuse(f"{value.ndim} dims {value.shape}")
        if i.dtype is not None and value.dtype != np.dtype(i.dtype):
            raise refuse(str(value.dtype))
        dims: Sequence[int] = value.shape
    elif i.want == "shape":
        if not is_shape(value) or (i.count is not None and len(value) != i.count):
            raise refuse(describe(value))
        dims = value
    elif i.want == "scalar":
        if not _fits_scalar(value, i.dtype):
            raise refuse(describe(value))
        dims = (int(value),) if i.into else ()
    elif i.want == "tuple":
        if not isinstance(value, tuple) or (i.count is not None and len(value) != i.count):
            raise refuse(describe(value))
        return
    else:
        if not isinstance(value, FunctionValue) or value.name not in i.functions:
            raise refuse(describe(value))
        return
    if i.into:
        for into, dim in zip(i.into, dims, strict=True):
            r[into] = int(dim)


def _fits_scalar(value: Any, dtype: str | None) -> bool:
    """Return whether a value is a scalar of the same kind as a dtype: bool, integer or float."""
    if not isinstance(value, (bool, int, float, np.generic)) or dtype is None:
        return False
    # Python's numbers have no width, so widths are not compared.
    kind, declared = np.asarray(value).dtype.kind, np.dtype(dtype).kind
    return kind == declared or (kind in "iu" and declared in "iu")


def _number(value: Any, where: str) -> int:
    if isinstance(value, (int, np.integer)) and INT64_MIN <= value <= INT64_MAX:
        return int(value)
    raise UserError(f"{where}: expected a 64-bit integer, got {describe(value)}")


def _scalar(value: int, dtype: str) -> Any:
    if dtype == "int64":
        return value
    return bool(value) if dtype == "bool" else np.dtype(dtype).type(value)


def _host(vm: object, i: CallHostRoutine, frame: CallFrame) -> Any:
    routine = frame.hosts.get(i.routine)
    if routine is None:
        raise UserError(
            f"{frame.name}: expected the host routine {i.routine!r}; given: {', '.join(frame.hosts) or 'none'}; "
            f"give it as host={{{i.routine!r}: ...}}"
        )
    try:
        return crossing(routine(*map(crossing, frame.values(i.args))))
    except Exception as error:
        # A note keeps the class of the exception, by which the host program may catch it.
        error.add_note(f"in the host routine {i.routine!r}, called by {frame.name}")
        raise


def argument(value: Any, param: Value, function: str, device: Device | None = None) -> Any:
    """Convert an argument of a call from outside. A shape or scalar may be an array, as in a file of arrays.

    device: the device whose memory arrays of other libraries may stay in
    """
    where, want = f"{function}: parameter {param.name}", param.want
    if want == "tensor":
        if device is not None and param.dtype is not None and is_on(value, device):
            return borrow(value, device, where, param.dtype)
        value = as_array(value, where, param.text, param.dtype)
    elif want in ("shape", "scalar") and hasattr(value, "__array__"):
        value = host_array(value, where, param.text)
    if isinstance(value, np.ndarray) and want == "shape" and value.ndim == 1 and value.dtype.kind in "iu":
        return tuple(int(d) for d in value)
    if isinstance(value, np.ndarray) and want == "scalar" and value.ndim == 0:
        return value[()]
    return crossing(value)


def crossing(value: Any) -> Any:
    """Convert a value that crosses between host code and the machine.

    Arrays become read-only, lists become tuples, and NumPy integers in them become Python's.
    """
    if isinstance(value, (np.ndarray, DeviceArray)):
        return read_only(on_host(value))
    if isinstance(value, (tuple, list)):
        return tuple(int(v) if isinstance(v, np.integer) else crossing(v) for v in value)
    return value


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of the same memory."""
    view = array.view()
    view.flags.writeable = False
    return view


def fresh(value: Any, returned: set[int]) -> Any:
    """Return a result whose arrays nothing else uses: shared, borrowed and read-only ones are copied.

    Args:
        value: A result.
        returned: Identities of the arrays of earlier results, to which the arrays of this one are added.
    """
    if isinstance(value, tuple):
        return tuple(fresh(v, returned) for v in value)
    if isinstance(value, DeviceArray):
        return value.memory.download(value) if value.host is None else value.host.copy()
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.owndata and value.flags.writeable and id(value) not in returned:
        returned.add(id(value))
        return value
    return value.copy()


def _excerpt(shown: str) -> str:
    """Return the excerpt of the source program that ends a message."""
    return f"\n{shown}" if shown else ""


def describe(value: object) -> str:
    """Describe a value in an error message."""
    if isinstance(value, (np.ndarray, DeviceArray)):
        return f"an array of {value.dtype} with shape {value.shape}"
    if isinstance(value, FunctionValue):
        return f"the function {value.name}"
    if isinstance(value, (bool, int, float, np.generic)):
        return f"the number {value}"
    if isinstance(value, tuple):
        return f"{value!r:.200}" if is_shape(value) else f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


Execute: TypeAlias = Callable[[Any, Any, CallFrame], Any]
"""Executes an instruction: machine, instruction, frame. Its result is ignored."""


def sets_into(compute: Execute) -> Execute:
    """Return the execution of an instruction whose value goes into the register `into`."""

    def execute(vm: object, i: Any, frame: CallFrame) -> None:
        frame.registers[i.into] = compute(vm, i, frame)

    return execute


EXECUTE: Mapping[type[Instruction], Execute] = {
    Compute: _compute,
    Require: _require,
    CheckValue: _match,
    Pack: sets_into(lambda vm, i, frame: tuple(frame.values(i.args))),
    GetItem: sets_into(lambda vm, i, frame: item(frame.registers[i.value], i.index, frame.name)),
    Move: sets_into(lambda vm, i, frame: frame.registers[i.value]),
    Apply: sets_into(_apply),
    CallHostRoutine: sets_into(_host),
    Number: sets_into(lambda vm, i, frame: np.dtype(i.dtype).type(i.value)),
    Refer: sets_into(lambda vm, i, frame: FunctionValue(i.function)),
}
"""Execution of each class of instruction that needs neither the machine nor the frames of other calls."""
