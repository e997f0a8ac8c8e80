"""The instructions of a `HostProgram`: a function that branches, calls others or depends on data, as plain numbers and text.

A host program works on *registers*. A register holds a NumPy array, a whole number (a symbol or a scalar), a tuple (a shape
or several values) or a function of the same artifact. Tensor work is done by outlined subgraphs, each a `Program`. A block
is a list of instructions. A branch names two later blocks, so loops exist only as calls of functions.
`relax_tune.runtime.vm` executes host programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Union

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program import scalars as scalar_list
from relax_tune.runtime.program.host_operators import HOST_OPERATORS
from relax_tune.runtime.program.program import DTYPES, Program
from relax_tune.runtime.validation import check_index, check_indices, check_shown, parse_json, read_value, wrong

SCHEMA = 1

Want = Literal["tensor", "shape", "scalar", "tuple", "function"]


@dataclass(frozen=True, slots=True)
class CallSubgraph:
    """Run the program `part` on the arrays in `args`, its symbols given the numbers in `symbols`; its results go `into`."""

    part: str
    args: tuple[int, ...]
    symbols: tuple[int, ...]
    into: tuple[int, ...]
    kind: Literal["part"] = "part"


@dataclass(frozen=True, slots=True)
class CallHostProgram:
    """Call the host program `function`, or the one in the register `callee`. A tail call does not count as nested."""

    function: str | None
    callee: int | None
    args: tuple[int, ...]
    into: int
    kind: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class CallHostRoutine:
    """Call a routine of the host program by name."""

    routine: str
    args: tuple[int, ...]
    into: int
    kind: Literal["host"] = "host"


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute an operator in NumPy; see `relax_tune.runtime.program.host_operators`."""

    operator: str
    args: tuple[int, ...]
    into: int
    shown: str = ""
    kind: Literal["apply"] = "apply"


@dataclass(frozen=True, slots=True)
class Branch:
    """Run block `then` if the register `cond` holds a true bool scalar, else `orelse`; then continue here."""

    cond: int
    then: int
    orelse: int
    shown: str = ""
    kind: Literal["branch"] = "branch"


@dataclass(frozen=True, slots=True)
class Compute:
    """Evaluate the scalar list `code` over the numbers in `symbols`; the values of `slots`, as scalars of `dtypes`, go `into`."""

    code: tuple[int, ...]
    symbols: tuple[int, ...]
    slots: tuple[int, ...]
    dtypes: tuple[str, ...]
    into: tuple[int, ...]
    kind: Literal["compute"] = "compute"


@dataclass(frozen=True, slots=True)
class Require:
    """Check that the register `cond` is true. `message` is a complete sentence; `{0}`, `{1}` ... stand for the numbers in `values`."""

    cond: int
    message: str
    values: tuple[int, ...]
    kind: Literal["require"] = "require"


@dataclass(frozen=True, slots=True)
class CheckValue:
    """Check the kind, element type and rank of a value; the cast of `match_cast`.

    want: the kind; dtype: the element type; count: the number of dims or fields (None: any). functions: the names that a
    function may have. into: registers of the dims, or of a whole scalar itself (empty: none)."""

    value: int
    want: Want
    dtype: str | None
    count: int | None
    functions: tuple[str, ...]
    into: tuple[int, ...]
    where: str
    wanted: str
    shown: str = ""
    kind: Literal["match"] = "match"


@dataclass(frozen=True, slots=True)
class Pack:
    """Make a tuple of values, or a shape of numbers."""

    args: tuple[int, ...]
    into: int
    kind: Literal["pack"] = "pack"


@dataclass(frozen=True, slots=True)
class GetItem:
    """Take a field of a tuple."""

    value: int
    index: int
    into: int
    kind: Literal["item"] = "item"


@dataclass(frozen=True, slots=True)
class LoadWeight:
    """Load a constant of the artifact."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    into: int
    kind: Literal["weight"] = "weight"


@dataclass(frozen=True, slots=True)
class Number:
    """Make a floating scalar."""

    value: float
    dtype: str
    into: int
    kind: Literal["number"] = "number"


@dataclass(frozen=True, slots=True)
class Refer:
    """Make a function a value."""

    function: str
    into: int
    kind: Literal["refer"] = "refer"


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a value to another register."""

    value: int
    into: int
    kind: Literal["copy"] = "copy"


Instruction = Union[
    CallSubgraph,
    CallHostProgram,
    CallHostRoutine,
    Apply,
    Branch,
    Compute,
    Require,
    CheckValue,
    Pack,
    GetItem,
    LoadWeight,
    Number,
    Refer,
    Move,
]


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter or a result.

    text: its annotation, for people. dtype, dims: of a tensor where they are known; dims are numbers or expressions over
    symbols, as text. path: indices that lead to it in the function's result, outermost first."""

    name: str
    want: Want | None
    text: str
    dtype: str | None = None
    dims: tuple[str, ...] | None = None
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A function; see the module docstring. It starts in block 0, and its first registers hold the parameters.

    result: the register of the result; entry: callable by name from outside."""

    name: str
    params: tuple[Value, ...]
    results: tuple[Value, ...]
    registers: int
    blocks: tuple[tuple[Instruction, ...], ...]
    result: int
    entry: bool = True
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Canonical JSON text: the same host program gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def instructions(self) -> Iterable[Instruction]:
        """All of them, block by block."""
        return (i for block in self.blocks for i in block)


def host_programs_from_json(text: str) -> tuple[HostProgram, ...]:
    """Read a list of `HostProgram.to_json` texts; hostile text is refused. Raises ArtifactError saying where."""
    data = parse_json(text, "host_programs")
    if not isinstance(data, list):
        raise wrong("host_programs", "a list", data)
    for position, item in enumerate(data):
        found = item.get("schema") if isinstance(item, dict) else None
        if type(found) is not int or found != SCHEMA:
            raise ArtifactError(
                f"host_programs[{position}]: wanted schema {SCHEMA}, found {found!r:.40}; rebuild the model or update relax-tune"
            )
    return tuple(read_value(HostProgram, item, f"host_programs[{position}]") for position, item in enumerate(data))


_REGISTERS = 1 << 20
_ROUTINE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_PLACEHOLDER = re.compile(r"\{(\d{1,6})\}")


def verify_host_programs(host_programs: Sequence[HostProgram], programs: Sequence[Program]) -> None:
    """Check every register, block, name and reference, so that executing can trust them. Raises ArtifactError saying where."""
    parts = {p.name: p for p in programs}
    names = [d.name for d in host_programs]
    if names != sorted(set(names)):
        raise wrong("host_programs", "distinct names in their order", names)
    taken = sorted(set(names) & set(parts))
    if taken:
        raise wrong("host_programs", "names that no program has", taken)
    arity = {d.name: len(d.params) for d in host_programs}
    for position, host_program in enumerate(host_programs):
        _verify(host_program, parts, arity, f"host_programs[{position}]")


def parts_of(host_programs: Iterable[HostProgram]) -> frozenset[str]:
    """The names of the subgraphs that host programs call."""
    return frozenset(i.part for d in host_programs for i in d.instructions() if isinstance(i, CallSubgraph))


def reads(i: Instruction) -> tuple[int, ...]:
    """The registers an instruction reads."""
    if isinstance(i, CallSubgraph):
        return (*i.args, *i.symbols)
    if isinstance(i, CallHostProgram):
        return i.args if i.callee is None else (*i.args, i.callee)
    if isinstance(i, (CallHostRoutine, Apply, Pack)):
        return i.args
    if isinstance(i, Branch):
        return (i.cond,)
    if isinstance(i, Compute):
        return i.symbols
    if isinstance(i, Require):
        return (i.cond, *i.values)
    return (i.value,) if isinstance(i, (CheckValue, GetItem, Move)) else ()


def writes(i: Instruction) -> tuple[int, ...]:
    """The registers an instruction sets, those of the blocks of a branch apart."""
    if isinstance(i, (Branch, Require)):
        return ()
    return (i.into,) if isinstance(i.into, int) else i.into


def _verify(host_program: HostProgram, parts: Mapping[str, Program], arity: Mapping[str, int], where: str) -> None:
    for what, text in (
        ("name", host_program.name),
        *(("params", f"{p.name} {p.text}") for p in (*host_program.params, *host_program.results)),
    ):
        check_shown(f"{where}.{what}", text)
    if not len(host_program.params) <= host_program.registers <= _REGISTERS:
        raise wrong(
            f"{where}.registers", f"{len(host_program.params)} to {_REGISTERS} registers", host_program.registers
        )
    if len({p.name for p in host_program.params}) < len(host_program.params):
        raise wrong(f"{where}.params", "distinct names", [p.name for p in host_program.params])
    for value in (*host_program.params, *host_program.results):
        if value.dtype is not None and value.dtype not in DTYPES:
            raise wrong(f"{where}.params", "an element type", value.dtype)
    if not host_program.blocks:
        raise wrong(f"{where}.blocks", "at least one block", ())
    check_index(host_program.result, host_program.registers, f"{where}.result", "register")
    entered = [0]
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            _verify_instruction(i, host_program, parts, arity, f"{where}.blocks[{number}][{at}]")
            if isinstance(i, Branch):
                entered += (i.then, i.orelse)
                if min(i.then, i.orelse) <= number:
                    raise wrong(f"{where}.blocks[{number}][{at}]", "blocks after its own", (i.then, i.orelse))
    if sorted(entered) != list(range(len(host_program.blocks))):
        raise wrong(f"{where}.blocks", "every block in one branch", entered)
    _verify_defined(host_program, where)


def _verify_defined(host_program: HostProgram, where: str) -> None:
    """Nothing reads a register that may not have been set. Sets of registers are bits of a number."""
    needs, gives = [0] * len(host_program.blocks), [0] * len(host_program.blocks)
    for number in reversed(range(len(host_program.blocks))):  # blocks of a branch come after it
        need = give = 0
        for i in host_program.blocks[number]:
            need |= _bits(reads(i)) & ~give
            if isinstance(i, Branch):
                need |= (needs[i.then] | needs[i.orelse]) & ~give
                give |= gives[i.then] & gives[i.orelse]
            give |= _bits(writes(i))
        needs[number], gives[number] = need, give
    given = (1 << len(host_program.params)) - 1
    missing = (needs[0] | (1 << host_program.result & ~gives[0])) & ~given
    if missing:
        raise wrong(where, "registers that are set before they are read", missing.bit_length() - 1)


def _bits(registers: Iterable[int]) -> int:
    found = 0
    for r in registers:
        found |= 1 << r
    return found


def _verify_instruction(
    i: Instruction, host_program: HostProgram, parts: Mapping[str, Program], arity: Mapping[str, int], where: str
) -> None:
    check_indices((*reads(i), *writes(i)), host_program.registers, where, "register")
    if isinstance(i, CallSubgraph):
        part = parts.get(i.part)
        wanted = None if part is None else (len(part.inputs), len(part.symbols), len(part.outputs))
        if wanted is None or wanted != (len(i.args), len(i.symbols), len(i.into)):
            raise wrong(where, "a program with as many inputs, symbols and outputs", i.part)
    elif isinstance(i, CallHostProgram):
        if (i.function is None) is (i.callee is None):
            raise wrong(where, "a function or the register of one", (i.function, i.callee))
        if i.function is not None:
            _function(i.function, arity, f"{where}.function")
            if arity[i.function] != len(i.args):
                raise wrong(f"{where}.args", f"{arity[i.function]} arguments", len(i.args))
    elif isinstance(i, Refer):
        _function(i.function, arity, f"{where}.function")
    elif isinstance(i, CallHostRoutine):
        if not _ROUTINE.fullmatch(i.routine):
            raise wrong(f"{where}.routine", "a name of letters, digits, _ and .", i.routine)
    elif isinstance(i, Apply):
        check_shown(f"{where}.shown", i.shown.replace("\n", " "))
        known = HOST_OPERATORS.get(i.operator)
        if known is None or known.arity != len(i.args):
            raise wrong(f"{where}.operator", f"one of {', '.join(HOST_OPERATORS)} and its arguments", i.operator)
    elif isinstance(i, Compute):
        try:
            scalar_list.verify(i.code, len(i.symbols))
        except ArtifactError as error:
            raise ArtifactError(f"{where}: {error}") from None
        check_indices(i.slots, len(i.code) // scalar_list.WIDTH, f"{where}.slots", "scalar slot")
        if not len(i.slots) == len(i.dtypes) == len(i.into) or not set(i.dtypes) <= set(DTYPES):
            raise wrong(where, "an element type and a register for every slot", (i.dtypes, i.into))
    elif isinstance(i, Require):
        check_shown(f"{where}.message", i.message.replace("\n", " "))
        for match in _PLACEHOLDER.finditer(i.message):
            check_index(int(match[1]), len(i.values), f"{where}.message", "value")
    elif isinstance(i, CheckValue):
        for text in (i.where, i.wanted, i.shown.replace("\n", " ")):
            check_shown(f"{where}.wanted", text)
        if i.dtype is not None and i.dtype not in DTYPES:
            raise wrong(f"{where}.dtype", "an element type", i.dtype)
        dims = {"tensor": i.count, "shape": i.count, "scalar": 1}.get(i.want, 0)
        if i.into and len(i.into) != dims:
            raise wrong(f"{where}.into", f"{dims} registers", len(i.into))
    elif isinstance(i, Branch):
        check_shown(f"{where}.shown", i.shown.replace("\n", " "))
        check_indices((i.then, i.orelse), len(host_program.blocks), where, "block")
    elif isinstance(i, Number):
        if i.dtype not in DTYPES or "float" not in i.dtype:
            raise wrong(f"{where}.dtype", "a floating element type", i.dtype)
    elif isinstance(i, LoadWeight) and (i.dtype not in DTYPES or not i.name):
        raise wrong(f"{where}.dtype", "a constant's name and element type", (i.name, i.dtype))


def _function(name: str, names: Collection[str], where: str) -> None:
    if name not in names:
        raise wrong(where, "a host program of the artifact", name)
