"""Readable parameters and results of a program: names, dtypes, and shapes in terms of its symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from relax_tune.runtime.program.host_program import HostProgram, Value
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode

_INFIX = {Opcode.ADD: " + ", Opcode.SUB: " - ", Opcode.MUL: "*", Opcode.FLOORDIV: "//", Opcode.FLOORMOD: "%"}
_COMPARED = {
    Opcode.LT: " < ",
    Opcode.LE: " <= ",
    Opcode.EQ: " == ",
    Opcode.NE: " != ",
    Opcode.AND: " and ",
    Opcode.OR: " or ",
}
_NAMED = {Opcode.MIN: "min", Opcode.MAX: "max", Opcode.SELECT: "select", Opcode.NOT: "not"}
# Deeper parts of an expression are cut, so that shapes stay readable.
_DEPTH = 6


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. `shape` holds an int for a fixed dim, a symbol's name or an expression such as `b*n` for others."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A parameter or result that is no tensor, or one of unknown rank or element type: `text` is its annotation."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


Spec = Union[TensorSpec, ValueSpec]


def value_specs(values: Sequence[Value]) -> tuple[Spec, ...]:
    """Return the specs of the parameters or results of a host program."""
    specs: list[Spec] = []
    for v in values:
        if v.dtype is None or v.dims is None:
            specs.append(ValueSpec(v.name, v.text))
        else:
            specs.append(TensorSpec(v.name, np.dtype(v.dtype), tuple(int(d) if d.isdecimal() else d for d in v.dims)))
    return tuple(specs)


def function_specs(function: Program | HostProgram) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """Return the specs of the inputs and of the outputs of a function."""
    if isinstance(function, HostProgram):
        return value_specs(function.params), value_specs(function.results)
    return tensor_specs(function, function.inputs), tensor_specs(function, function.outputs)


def tensor_specs(program: Program, buffers: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the specs of some buffers of a verified program, such as `program.inputs`."""
    names = [symbol.name for symbol in program.symbols]
    specs = [program.buffers[index] for index in buffers]
    return tuple(
        TensorSpec(s.name, np.dtype(s.dtype), tuple(dim_of(program.scalars, slot, names) for slot in s.shape))
        for s in specs
    )


def dim_of(scalars: Sequence[int], slot: int, names: Sequence[str]) -> int | str:
    """Return a slot as a number if it is constant, else as text over the symbols' `names`."""
    opcode, operand = scalars[slot * WIDTH : slot * WIDTH + 2]
    return operand if opcode == Opcode.CONST else _text(scalars, slot, names, 0)


def _text(scalars: Sequence[int], slot: int, names: Sequence[str], depth: int) -> str:
    opcode, *operands = scalars[slot * WIDTH : slot * WIDTH + WIDTH]
    op = Opcode(opcode)
    if op is Opcode.CONST:
        return str(operands[0])
    if op is Opcode.SYMBOL:
        return names[operands[0]]
    if depth == _DEPTH:
        return "..."
    count = {Opcode.NOT: 1, Opcode.SELECT: 3}.get(op, 2)
    parts = [_text(scalars, o, names, depth + 1) for o in operands[:count]]
    if op in _NAMED:
        return f"{_NAMED[op]}({', '.join(parts)})"
    joined = _INFIX.get(op) or _COMPARED[op]
    return joined.join(part if _binds_tighter(scalars, o, op) else f"({part})" for part, o in zip(parts, operands))


def _binds_tighter(scalars: Sequence[int], slot: int, outer: Opcode) -> bool:
    """Return True if an operand needs no parentheses: an atom, a function call, or a product in a sum or product."""
    inner = Opcode(scalars[slot * WIDTH])
    if inner in (Opcode.CONST, Opcode.SYMBOL) or inner in _NAMED:
        return True
    return inner is Opcode.MUL and outer in (Opcode.ADD, Opcode.SUB, Opcode.MUL)
