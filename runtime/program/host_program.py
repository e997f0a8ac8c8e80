"""The instructions of a `HostProgram`: a function that branches, calls others or depends on data, as plain numbers and text.

A host program works on *registers*. A register holds a NumPy array, a whole number (a symbol or a scalar), a tuple (a shape
or several values) or a function of the same artifact. Tensor work is done by outlined subgraphs, each a `Program`. A block
is a list of instructions. A branch names two later blocks, so loops exist only as calls of functions, and as `Repeat`.
`relax_tune.runtime.vm.machine` executes host programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, Union

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program import scalars as scalar_list
from relax_tune.runtime.program.host_operators import HOST_OPERATORS
from relax_tune.runtime.program.program import DTYPES, LANGUAGES, Program
from relax_tune.runtime.validation import (
    check_index,
    check_indices,
    check_list,
    check_schema,
    check_shown,
    parse_json,
    read_value,
    wrong,
)

SCHEMA = 1

_REGISTERS = 1 << 20
_ROUTINE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_PLACEHOLDER = re.compile(r"\{(\d{1,6})\}")

Want = Literal["tensor", "shape", "scalar", "tuple", "function"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The names that the instructions of a host program may use.

    parts: programs by name
    arity: number of parameters of each host program
    blocks: number of blocks of this one
    """

    parts: Mapping[str, Program]
    arity: Mapping[str, int]
    blocks: int


class _Instruction:
    """Base of instructions.

    READS, WRITES: names of the fields that hold registers which the instruction reads and sets. Registers that the blocks of a branch
        set are not among them.
    """

    __slots__ = ()
    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ("into",)

    @property
    def reads(self) -> tuple[int, ...]:
        return self._registers(self.READS)

    @property
    def writes(self) -> tuple[int, ...]:
        return self._registers(self.WRITES)

    def _registers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        values = (getattr(self, name) for name in names)
        return tuple(r for x in values if x is not None for r in ((x,) if isinstance(x, int) else x))

    @property
    def entered(self) -> tuple[int, ...]:
        """Blocks that the instruction chooses from."""
        return ()

    def verify(self, among: Surroundings, where: str) -> None:
        """Check names and counts. Raises ArtifactError saying where."""


@dataclass(frozen=True, slots=True)
class CallSubgraph(_Instruction):
    """Run the program `part` on the arrays in `args`, its symbols given the numbers in `symbols`; its results go `into`."""

    part: str
    args: tuple[int, ...]
    symbols: tuple[int, ...]
    into: tuple[int, ...]
    kind: Literal["part"] = "part"
    READS: ClassVar[tuple[str, ...]] = ("args", "symbols")

    def verify(self, among: Surroundings, where: str) -> None:
        part = among.parts.get(self.part)
        arity = None if part is None else (len(part.inputs), len(part.symbols), len(part.outputs))
        if arity is None or arity != (len(self.args), len(self.symbols), len(self.into)):
            raise wrong(where, "a program with as many inputs, symbols and outputs", self.part)


@dataclass(frozen=True, slots=True)
class Repeat(_Instruction):
    """Run the program `part` once for each number from `begin` to `end` - 1: a counted loop.

    A state is an array that an iteration passes on to the next. An iteration may also append a row to each of `rows`, arrays of
    `begin` rows at first. A *value* is the number of an output of `part`, then of a state, then of an array in `args`.

    begin, end: registers of the numbers. symbols: of the part's symbols; the one with the number `index` is the number of the iteration
    states, rows, args: registers of the first states, the first rows, and arrays that stay the same
    inputs: for each input of the part the number of its state, or of its array in `args` behind the states
    after: for each state its value in the next iteration. appended: for each of `rows` the value that is its row
    into: registers of the last states, then of the rows
    """

    part: str
    begin: int
    end: int
    symbols: tuple[int, ...]
    index: int | None
    states: tuple[int, ...]
    rows: tuple[int, ...]
    args: tuple[int, ...]
    inputs: tuple[int, ...]
    after: tuple[int, ...]
    appended: tuple[int, ...]
    into: tuple[int, ...]
    kind: Literal["repeat"] = "repeat"
    READS: ClassVar[tuple[str, ...]] = ("begin", "end", "symbols", "states", "rows", "args")

    def verify(self, among: Surroundings, where: str) -> None:
        part = among.parts.get(self.part)
        arity = None if part is None else (len(part.inputs), len(part.symbols))
        if part is None or arity != (len(self.inputs), len(self.symbols)):
            raise wrong(where, "a program with as many inputs and symbols", self.part)
        given = len(self.states) + len(self.args)
        check_indices(self.inputs, given, f"{where}.inputs", "state or argument")
        check_indices((*self.after, *self.appended), len(part.outputs) + given, where, "output, state or argument")
        if self.index is not None:
            check_index(self.index, len(self.symbols), f"{where}.index", "symbol")
        counts = len(self.after), len(self.appended), len(self.into)
        if counts != (len(self.states), len(self.rows), len(self.states) + len(self.rows)):
            raise wrong(where, "a value and a register for each state and row", counts)


@dataclass(frozen=True, slots=True)
class Transfer(_Instruction):
    """Copy an array to the memory of a device of kind `device`; nothing is done if it is there already."""

    value: int
    device: str
    into: int
    kind: Literal["transfer"] = "transfer"
    READS: ClassVar[tuple[str, ...]] = ("value",)

    def verify(self, among: Surroundings, where: str) -> None:
        if self.device not in LANGUAGES:
            raise wrong(f"{where}.device", f"one of {', '.join(LANGUAGES)}", self.device)


@dataclass(frozen=True, slots=True)
class CallHostProgram(_Instruction):
    """Call the host program `function`, or the one in the register `callee`. A tail call does not count as nested."""

    function: str | None
    callee: int | None
    args: tuple[int, ...]
    into: int
    kind: Literal["function"] = "function"
    READS: ClassVar[tuple[str, ...]] = ("args", "callee")

    def verify(self, among: Surroundings, where: str) -> None:
        if (self.function is None) is (self.callee is None):
            raise wrong(where, "a function or the register of one", (self.function, self.callee))
        if self.function is not None:
            _check_function(self.function, among, where)
            if among.arity[self.function] != len(self.args):
                raise wrong(f"{where}.args", f"{among.arity[self.function]} arguments", len(self.args))


@dataclass(frozen=True, slots=True)
class CallHostRoutine(_Instruction):
    """Call a routine of the host program by name."""

    routine: str
    args: tuple[int, ...]
    into: int
    kind: Literal["host"] = "host"
    READS: ClassVar[tuple[str, ...]] = ("args",)

    def verify(self, among: Surroundings, where: str) -> None:
        if not _ROUTINE.fullmatch(self.routine):
            raise wrong(f"{where}.routine", "a name of letters, digits, _ and .", self.routine)


@dataclass(frozen=True, slots=True)
class Apply(_Instruction):
    """Compute an operator in NumPy; see `relax_tune.runtime.program.host_operators`."""

    operator: str
    args: tuple[int, ...]
    into: int
    shown: str = ""
    kind: Literal["apply"] = "apply"
    READS: ClassVar[tuple[str, ...]] = ("args",)

    def verify(self, among: Surroundings, where: str) -> None:
        _check_lines(f"{where}.shown", self.shown)
        known = HOST_OPERATORS.get(self.operator)
        if known is None or known.arity != len(self.args):
            raise wrong(f"{where}.operator", f"one of {', '.join(HOST_OPERATORS)} and its arguments", self.operator)


@dataclass(frozen=True, slots=True)
class Branch(_Instruction):
    """Run block `then` if the register `cond` holds a true bool scalar, else `orelse`; then continue here."""

    cond: int
    then: int
    orelse: int
    shown: str = ""
    kind: Literal["branch"] = "branch"
    READS: ClassVar[tuple[str, ...]] = ("cond",)
    WRITES: ClassVar[tuple[str, ...]] = ()

    @property
    def entered(self) -> tuple[int, ...]:
        return (self.then, self.orelse)

    def verify(self, among: Surroundings, where: str) -> None:
        _check_lines(f"{where}.shown", self.shown)
        check_indices(self.entered, among.blocks, where, "block")


@dataclass(frozen=True, slots=True)
class Compute(_Instruction):
    """Evaluate the scalar list `code` over the numbers in `symbols`; the values of `slots`, as scalars of `dtypes`, go `into`."""

    code: tuple[int, ...]
    symbols: tuple[int, ...]
    slots: tuple[int, ...]
    dtypes: tuple[str, ...]
    into: tuple[int, ...]
    kind: Literal["compute"] = "compute"
    READS: ClassVar[tuple[str, ...]] = ("symbols",)

    def verify(self, among: Surroundings, where: str) -> None:
        try:
            scalar_list.verify(self.code, len(self.symbols))
        except ArtifactError as error:
            raise ArtifactError(f"{where}: {error}") from None
        check_indices(self.slots, len(self.code) // scalar_list.WIDTH, f"{where}.slots", "scalar slot")
        if not len(self.slots) == len(self.dtypes) == len(self.into) or not set(self.dtypes) <= set(DTYPES):
            raise wrong(where, "an element type and a register for every slot", (self.dtypes, self.into))


@dataclass(frozen=True, slots=True)
class Require(_Instruction):
    """Check that the register `cond` is true. `message` is a complete sentence; `{0}`, `{1}` ... stand for the numbers in `values`."""

    cond: int
    message: str
    values: tuple[int, ...]
    kind: Literal["require"] = "require"
    READS: ClassVar[tuple[str, ...]] = ("cond", "values")
    WRITES: ClassVar[tuple[str, ...]] = ()

    def verify(self, among: Surroundings, where: str) -> None:
        _check_lines(f"{where}.message", self.message)
        for match in _PLACEHOLDER.finditer(self.message):
            check_index(int(match[1]), len(self.values), f"{where}.message", "value")


@dataclass(frozen=True, slots=True)
class CheckValue(_Instruction):
    """Check the kind, element type and rank of a value; the cast of `match_cast`.

    want: the kind; dtype: the element type; count: the number of dims or fields (None: any). functions: the names that a
    function may have. into: registers of the dims, or of a scalar itself (empty: none).
    """

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
    READS: ClassVar[tuple[str, ...]] = ("value",)

    def verify(self, among: Surroundings, where: str) -> None:
        for text in (self.where, self.wanted):
            check_shown(f"{where}.expected", text)
        _check_lines(f"{where}.expected", self.shown)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise wrong(f"{where}.dtype", "an element type", self.dtype)
        dims = {"tensor": self.count, "shape": self.count, "scalar": 1}.get(self.want, 0)
        if self.into and len(self.into) != dims:
            raise wrong(f"{where}.into", f"{dims} registers", len(self.into))


@dataclass(frozen=True, slots=True)
class Pack(_Instruction):
    """Make a tuple of values, or a shape of numbers."""

    args: tuple[int, ...]
    into: int
    kind: Literal["pack"] = "pack"
    READS: ClassVar[tuple[str, ...]] = ("args",)


@dataclass(frozen=True, slots=True)
class GetItem(_Instruction):
    """Take a field of a tuple."""

    value: int
    index: int
    into: int
    kind: Literal["item"] = "item"
    READS: ClassVar[tuple[str, ...]] = ("value",)


@dataclass(frozen=True, slots=True)
class LoadWeight(_Instruction):
    """Load a constant of the artifact."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    into: int
    kind: Literal["weight"] = "weight"

    def verify(self, among: Surroundings, where: str) -> None:
        if self.dtype not in DTYPES or not self.name:
            raise wrong(f"{where}.dtype", "a constant's name and element type", (self.name, self.dtype))


@dataclass(frozen=True, slots=True)
class Number(_Instruction):
    """Make a floating scalar."""

    value: float
    dtype: str
    into: int
    kind: Literal["number"] = "number"

    def verify(self, among: Surroundings, where: str) -> None:
        if self.dtype not in DTYPES or "float" not in self.dtype:
            raise wrong(f"{where}.dtype", "a floating element type", self.dtype)


@dataclass(frozen=True, slots=True)
class Refer(_Instruction):
    """Make a function a value."""

    function: str
    into: int
    kind: Literal["refer"] = "refer"

    def verify(self, among: Surroundings, where: str) -> None:
        _check_function(self.function, among, where)


@dataclass(frozen=True, slots=True)
class Move(_Instruction):
    """Copy a value to another register."""

    value: int
    into: int
    kind: Literal["copy"] = "copy"
    READS: ClassVar[tuple[str, ...]] = ("value",)


Instruction = Union[
    CallSubgraph,
    Repeat,
    Transfer,
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
        """Return canonical JSON text: the same host program gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def instructions(self) -> Iterable[Instruction]:
        """Yield all instructions, block by block."""
        return (i for block in self.blocks for i in block)

    @property
    def weights(self) -> tuple[LoadWeight, ...]:
        """The instructions that load constants."""
        return tuple(i for i in self.instructions() if isinstance(i, LoadWeight))


def host_programs_from_json(text: str) -> tuple[HostProgram, ...]:
    """Read a list of `HostProgram.to_json` texts; hostile text is refused. Raises ArtifactError saying where."""
    data = parse_json(text, "host_programs")
    for position, item in enumerate(check_list(data, "host_programs", "a list")):
        check_schema(item, SCHEMA, f"host_programs[{position}]")
    return tuple(read_value(HostProgram, item, f"host_programs[{position}]") for position, item in enumerate(data))


def verify_host_programs(host_programs: Sequence[HostProgram], programs: Sequence[Program]) -> None:
    """Check every register, block, name and reference, so that executing can trust them. Raises ArtifactError saying where."""
    parts = {p.name: p for p in programs}
    names = [d.name for d in host_programs]
    # One order makes equal artifacts equal bytes, and a name twice would be two programs under one reference.
    if names != sorted(set(names)):
        raise wrong("host_programs", "distinct names in their order", names)
    taken = sorted(set(names) & set(parts))
    if taken:
        raise wrong("host_programs", "names that no program has", taken)
    arity = {d.name: len(d.params) for d in host_programs}
    for position, host_program in enumerate(host_programs):
        _verify(host_program, parts, arity, f"host_programs[{position}]")


def parts_of(host_programs: Iterable[HostProgram]) -> frozenset[str]:
    """Return the names of the subgraphs that host programs call."""
    return frozenset(i.part for d in host_programs for i in d.instructions() if isinstance(i, (CallSubgraph, Repeat)))


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
    among = Surroundings(parts, arity, len(host_program.blocks))
    for number, block in enumerate(host_program.blocks):
        for at, i in enumerate(block):
            here = f"{where}.blocks[{number}][{at}]"
            check_indices((*i.reads, *i.writes), host_program.registers, here, "register")
            i.verify(among, here)
            entered += i.entered
            # Branches lead forwards only, so that no block runs into itself and execution ends.
            if i.entered and min(i.entered) <= number:
                raise wrong(here, "blocks after its own", i.entered)
    # A block with two entries would need facts about registers from both; without an entry it would never run.
    if sorted(entered) != list(range(len(host_program.blocks))):
        raise wrong(f"{where}.blocks", "every block in one branch", entered)
    _verify_defined(host_program, where)


def _verify_defined(host_program: HostProgram, where: str) -> None:
    """Check that no instruction reads a register that may be unset. Sets of registers are bits of a number."""
    needs, gives = [0] * len(host_program.blocks), [0] * len(host_program.blocks)
    for number in reversed(range(len(host_program.blocks))):  # blocks of a branch come after it
        need = give = 0
        for i in host_program.blocks[number]:
            need |= _bits(i.reads) & ~give
            if i.entered:
                then, orelse = i.entered
                # A branch needs what either side needs, and sets only what both set.
                need |= (needs[then] | needs[orelse]) & ~give
                give |= gives[then] & gives[orelse]
            give |= _bits(i.writes)
        needs[number], gives[number] = need, give
    given = (1 << len(host_program.params)) - 1
    missing = (needs[0] | (1 << host_program.result & ~gives[0])) & ~given
    if missing:
        raise wrong(where, "registers that are set before they are read", missing.bit_length() - 1)


def _bits(registers: Iterable[int]) -> int:
    bits = 0
    for r in registers:
        bits |= 1 << r
    return bits


def _check_lines(where: str, text: str) -> None:
    check_shown(where, text.replace("\n", " "))


def _check_function(name: str, among: Surroundings, where: str) -> None:
    if name not in among.arity:
        raise wrong(f"{where}.function", "a host program of the artifact", name)
