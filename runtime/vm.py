"""The virtual machine of host programs: it works on registers, and executors run the subgraphs.

Calls are kept on a list of its own, so neither a deep recursion nor a long loop of calls grows Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.arguments import in_order
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray, on_host
from relax_tune.runtime.program.host_operators import HOST_OPERATORS, is_shape
from relax_tune.runtime.program.host_program import (
    Apply,
    Branch,
    CallHostProgram,
    CallHostRoutine,
    CallSubgraph,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    Instruction,
    LoadWeight,
    Move,
    Number,
    Pack,
    Refer,
    Require,
    Want,
)
from relax_tune.runtime.program.program import format_message
from relax_tune.runtime.program.scalars import INT64_MAX, INT64_MIN, Evaluator, compile_scalars

MAX_DEPTH = 1000
"""The deepest nesting of calls. A tail call does not count."""

Host = Callable[..., Any]
"""A routine of the host program: it takes arrays (not writable), shapes and scalars, and returns the declared results.
"""

Place = tuple[int, int]
"""A block, and an instruction in it."""


@dataclass(frozen=True, slots=True)
class FunctionValue:
    """The value of a function."""

    name: str


class CallFrame:
    """The frame of an active call: its registers, and where to continue when blocks end."""

    __slots__ = ("at", "code", "hosts", "into", "outer", "registers")

    def __init__(self, code: _Code, args: Sequence[Any], into: int, hosts: Mapping[str, Host]) -> None:
        self.code, self.into, self.hosts = code, into, hosts
        self.registers: list[Any] = [*args, *[None] * (code.program.registers - len(args))]
        self.at: Place = (0, 0)
        self.outer: list[Place] = []

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return self.code.program.name

    def values(self, registers: Sequence[int]) -> list[Any]:
        return [self.registers[r] for r in registers]

    def numbers(self, registers: Sequence[int]) -> list[int]:
        return [_number(self.registers[r], self.name) for r in registers]


class _Code:
    """A host program, ready to execute."""

    def __init__(self, host_program: HostProgram) -> None:
        self.program = host_program
        self.last = _last_calls(host_program)
        found = [i for i in host_program.instructions() if isinstance(i, Compute)]
        # by identity: to hash an instruction takes longer than to compute it
        self.computes: dict[int, Evaluator] = {id(i): compile_scalars(i.code, len(i.symbols)) for i in found}


class VirtualMachine:
    """An interpreter of verified host programs. Threads may call `run` at once; each call has frames of its own.

    executors: one for each subgraph, by name; constants: constants that host programs load.
    pool: of a device with memory of its own, where arrays stay between subgraphs; None elsewhere
    execute: an attribute; the execution of each class of instruction but calls of host programs and branches
    """

    execute: Mapping[type[Instruction], Execute]

    def __init__(
        self,
        host_programs: Sequence[HostProgram],
        executors: Mapping[str, Executor],
        constants: Mapping[str, NDArray[Any]],
        pool: BufferPool | None = None,
    ) -> None:
        self.executors, self.pool = executors, pool
        self.execute = EXECUTE
        self._codes = {d.name: _Code(d) for d in host_programs}
        self.weights: dict[str, NDArray[Any] | DeviceArray] = {
            w.name: _guarded(constants[w.name]) for d in host_programs for w in d.weights
        }

    def run(
        self, name: str, inputs: Mapping[str, Any] | Sequence[Any], hosts: Mapping[str, Host] | None = None
    ) -> list[Any]:
        """Call a host program: values by parameter name or in order; results in order, arrays fresh.

        Raises: UserError naming the function, the value, what was wanted of it and what was found.
        """
        seen = set[int]()
        return [_fresh(value, seen) for value in self.results_of(name, inputs, hosts)]

    def results_of(
        self, name: str, inputs: Mapping[str, Any] | Sequence[Any], hosts: Mapping[str, Host] | None = None
    ) -> list[Any]:
        """Call a host program as `run`; its results may be borrowed from arguments and weights."""
        host_program = self._codes[self.resolved(name, inputs)].program
        given = in_order(name, [p.name for p in host_program.params], inputs)
        args = [_argument(a, p.want) for a, p in zip(given, host_program.params, strict=True)]
        found = self.complete(self._call(host_program.name, args, hosts or {}))
        results = []
        for result in host_program.results:
            value = found
            for index in result.path:
                value = _item(value, index, name)
            results.append(value)
        return results

    def resolved(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> str:
        """Return the host program that runs for a function: the same here."""
        return name

    def complete(self, value: Any) -> Any:
        """Return a result with all that it is made of: the same here."""
        return value

    def _call(self, name: str, args: Sequence[Any], hosts: Mapping[str, Host]) -> Any:
        frames = [CallFrame(self._codes[name], args, 0, hosts)]
        while True:
            frame = frames[-1]
            block, at = frame.at
            blocks = frame.code.program.blocks
            if at == len(blocks[block]):
                if frame.outer:
                    frame.at = frame.outer.pop()
                    continue
                frames.pop()
                result = frame.registers[frame.code.program.result]
                if not frames:
                    return result
                frames[-1].registers[frame.into] = result
                continue
            i = blocks[block][at]
            here, frame.at = frame.at, (block, at + 1)
            if isinstance(i, CallHostProgram):
                code, given = self._callee(i, frame)
                if here in frame.code.last:
                    frames[-1] = CallFrame(code, given, frame.into, hosts)
                    continue
                if len(frames) > MAX_DEPTH:
                    raise UserError(
                        f"{frame.name}: wanted at most {MAX_DEPTH} calls inside one another, found more at the call "
                        f"of {code.program.name}; does its recursion end? (a call whose result is returned as it is does not count)"
                    )
                frames.append(CallFrame(code, given, i.into, hosts))
            elif isinstance(i, Branch):
                frame.outer.append(frame.at)
                self.await_reads(i, frame)
                frame.at = (i.then if _condition(frame, i) else i.orelse, 0)
            elif type(i) in self.execute:
                self.execute[type(i)](self, i, frame)
            else:
                raise ArtifactError(f"{frame.name}: wanted an instruction, found {i!r:.200}")

    def await_reads(self, i: Instruction, frame: CallFrame) -> Any:
        """Wait for the values that an instruction reads: nothing here, where every instruction is done before the next."""

    def resident(self, value: Any) -> Any:
        """Return an array in the device's memory; other values as they are."""
        if self.pool is None or not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            return value
        return self.pool.upload(value)

    def weight(self, name: str) -> NDArray[Any] | DeviceArray:
        """Return a constant, which is copied to the device once."""
        found = self.weights[name]
        if self.pool is not None and isinstance(found, np.ndarray):
            found = self.weights[name] = self.pool.upload(found)
        return found

    def close(self) -> None:
        """Give the memory of arrays back to the device."""
        self.weights.clear()
        if self.pool is not None:
            self.pool.close()

    def _callee(self, i: CallHostProgram, frame: CallFrame) -> tuple[_Code, list[Any]]:
        r, where = frame.registers, frame.name
        name = i.function
        if i.callee is not None:
            target = r[i.callee]
            if not isinstance(target, FunctionValue):
                raise UserError(f"{where}: wanted a function to call, found {describe(target)}")
            name = target.name
        assert name is not None
        given = frame.values(i.args)
        code = self._codes[self.resolved(name, given)]
        if len(i.args) != len(code.program.params):
            raise UserError(f"{name}: wanted {len(code.program.params)} arguments, found {len(i.args)}")
        return code, given


def _run_subgraph(vm: VirtualMachine, i: CallSubgraph, frame: CallFrame) -> None:
    for r in i.args if vm.pool is not None else ():
        frame.registers[r] = vm.resident(frame.registers[r])
    found = vm.executors[i.part].run(frame.values(i.args), frame.numbers(i.symbols), in_place=True, pool=vm.pool)
    for into, array in zip(i.into, found, strict=True):
        frame.registers[into] = array


def _compute(vm: VirtualMachine, i: Compute, frame: CallFrame) -> None:
    try:
        values = frame.code.computes[id(i)](frame.numbers(i.symbols))
    except UserError as error:
        raise UserError(f"{frame.name}: {error}") from None
    for into, slot, dtype in zip(i.into, i.slots, i.dtypes, strict=True):
        frame.registers[into] = _scalar(values[slot], dtype)


def _require(vm: VirtualMachine, i: Require, frame: CallFrame) -> None:
    if not frame.registers[i.cond]:
        raise UserError(f"{frame.name}: {format_message(i.message, frame.values(i.values))}")


def _apply(vm: VirtualMachine, i: Apply, frame: CallFrame) -> Any:
    args = frame.values(i.args)
    try:
        if args and isinstance(args[0], DeviceArray):
            if i.operator == "shape_of":
                return args[0].shape
            if i.operator == "reshape_to" and is_shape(args[1]):
                return args[0].reshape(args[1])
        return HOST_OPERATORS[i.operator].run(*(on_host(a) for a in args))
    except UserError as error:
        raise UserError(f"{frame.name}: {error}{_below(i.shown)}") from None


def _last_calls(host_program: HostProgram) -> frozenset[Place]:
    """Return the places of calls whose results the calling function returns at once."""
    around: dict[int, Place] = {}
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            around |= dict.fromkeys(i.entered, (number, at))
    found = set[Place]()
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            if isinstance(i, CallHostProgram) and _is_last(host_program, number, at, i.into, around):
                found.add((number, at))
    return frozenset(found)


def _is_last(host_program: HostProgram, block: int, at: int, register: int, around: Mapping[int, Place]) -> bool:
    while True:
        for i in host_program.blocks[block][at + 1 :]:
            if not isinstance(i, Move) or i.value != register:
                return False
            register = i.into
        if block not in around:
            return register == host_program.result
        block, at = around[block]


def _item(value: Any, index: int, where: str) -> Any:
    if not isinstance(value, tuple) or not 0 <= index < len(value):
        raise UserError(f"{where}: wanted a tuple with an item {index}, found {describe(value)}")
    return value[index]


def _condition(frame: CallFrame, i: Branch) -> bool:
    value = on_host(frame.registers[i.cond])
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype == np.bool_:
        return bool(value)
    raise UserError(
        f"{frame.name}: wanted a scalar of bool as the condition of an `if`, found {describe(value)}{_below(i.shown)}"
    )


def _match(vm: VirtualMachine, i: CheckValue, frame: CallFrame) -> None:
    r, where = frame.registers, frame.name
    value = r[i.value]

    def refuse(found: str) -> UserError:
        return UserError(f"{where}: {i.where}: wanted {i.wanted}, found {found}{_below(i.shown)}")

    if i.want == "tensor":
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
    """Return whether a value is a scalar of the same kind: bool, whole number or float."""
    if not isinstance(value, (bool, int, float, np.generic)) or dtype is None:
        return False
    found, wanted = np.asarray(value).dtype.kind, np.dtype(dtype).kind
    return found == wanted or (found in "iu" and wanted in "iu")


def _number(value: Any, where: str) -> int:
    if isinstance(value, (int, np.integer)) and INT64_MIN <= value <= INT64_MAX:
        return int(value)
    raise UserError(f"{where}: wanted a whole number of 64 bits, found {describe(value)}")


def _scalar(value: int, dtype: str) -> Any:
    if dtype == "int64":
        return value
    return bool(value) if dtype == "bool" else np.dtype(dtype).type(value)


def _host(vm: VirtualMachine, i: CallHostRoutine, frame: CallFrame) -> Any:
    routine = frame.hosts.get(i.routine)
    if routine is None:
        raise UserError(
            f"{frame.name}: wanted the host routine {i.routine!r}; given: {', '.join(frame.hosts) or 'none'}; "
            f"give it as host={{{i.routine!r}: ...}}"
        )
    try:
        return _given(routine(*map(_given, frame.values(i.args))))
    except Exception as error:
        error.add_note(f"in the host routine {i.routine!r}, called by {frame.name}")
        raise


def _argument(value: Any, want: Want | None) -> Any:
    """Convert an argument of a call from outside. A shape or scalar may be an array, as in a file of arrays."""
    if isinstance(value, np.ndarray) and want == "shape" and value.ndim == 1 and value.dtype.kind in "iu":
        return tuple(int(d) for d in value)
    if isinstance(value, np.ndarray) and want == "scalar" and value.ndim == 0:
        return value[()]
    return _given(value)


def _given(value: Any) -> Any:
    """Convert a value that crosses to or from host code.

    Arrays become read-only, lists tuples, and whole numbers in them Python's own.
    """
    if isinstance(value, (np.ndarray, DeviceArray)):
        return _guarded(on_host(value))
    if isinstance(value, (tuple, list)):
        return tuple(int(v) if isinstance(v, np.integer) else _given(v) for v in value)
    return value


def _guarded(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of the same memory."""
    view = array.view()
    view.flags.writeable = False
    return view


def _fresh(value: Any, seen: set[int]) -> Any:
    """Return a result with arrays of its own: shared, borrowed and read-only ones are copied."""
    if isinstance(value, tuple):
        return tuple(_fresh(v, seen) for v in value)
    if isinstance(value, DeviceArray):
        return value.download(value) if value.host is None else value.host.copy()
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.owndata and value.flags.writeable and id(value) not in seen:
        seen.add(id(value))
        return value
    return value.copy()


def _below(shown: str) -> str:
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


Execute = Callable[[VirtualMachine, Any, CallFrame], Any]


def _result(compute: Execute) -> Execute:
    """Make the execution of an instruction that sets the register `into`."""

    def execute(vm: VirtualMachine, i: Any, frame: CallFrame) -> None:
        frame.registers[i.into] = compute(vm, i, frame)

    return execute


# the execution of each class of instruction but calls and branches, which change the frames
EXECUTE: Mapping[type[Instruction], Execute] = {
    CallSubgraph: _run_subgraph,
    Compute: _compute,
    Require: _require,
    CheckValue: _match,
    Pack: _result(lambda vm, i, frame: tuple(frame.values(i.args))),
    GetItem: _result(lambda vm, i, frame: _item(frame.registers[i.value], i.index, frame.name)),
    Move: _result(lambda vm, i, frame: frame.registers[i.value]),
    Apply: _result(_apply),
    CallHostRoutine: _result(_host),
    LoadWeight: _result(lambda vm, i, frame: vm.weight(i.name)),
    Number: _result(lambda vm, i, frame: np.dtype(i.dtype).type(i.value)),
    Refer: _result(lambda vm, i, frame: FunctionValue(i.function)),
}
