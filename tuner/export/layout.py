"""The places of a program's arrays in memory, and the numbers a call needs, as slots of one scalar list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import ARITY, INT64_MAX, WIDTH, Opcode, ScalarBuilder
from relax_tune.runtime.program.sharing import viewed_inputs

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """The place of an array: `kind` is `in`, `out`, `weights`, `packed` or `workspace`.

    at: its position among the arguments or results, its offset in bytes, or the slot of its offset in the workspace
    """

    kind: str
    at: int


@dataclass(eq=False)
class Layout:
    """The layout of one program.

    scalars: the program's list, and behind it the bytes of arrays and their offsets in the workspace
    slots: for each slot of the program, the slot here
    places: by buffer; a view has the place of its base
    nbytes: by buffer of the boundary, the slot of its bytes
    copied: arguments, by buffer, that are copied to their place before the call
    kept: for an argument in whose memory a result lies, the number of the result
    workspace: the slot of the bytes that a call needs
    """

    program: Program
    scalars: ScalarBuilder
    slots: Sequence[int]
    places: dict[int, ArrayPlace] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    workspace: int = 0


def lay_out(program: Program, fixed: Mapping[int, ArrayPlace], written: frozenset[int]) -> Layout:
    """Return the layout of a program.

    fixed: places of constants and packed weights; written: buffers that a kernel writes
    """
    b = ScalarBuilder()
    found = Layout(program, b, b.merge(program.scalars, [b.symbol(i) for i in range(len(program.symbols))]))
    found.places.update(fixed)
    crossing = {*program.inputs, *program.outputs, *(c.buffer for c in program.checked)}
    for index in sorted(crossing | {i for i, s in enumerate(program.buffers) if s.base is not None}):
        found.nbytes[index] = _bytes(found, index)
    offset = b.const(0)

    def take(size: int) -> ArrayPlace:
        nonlocal offset
        place = ArrayPlace("workspace", offset)
        units = b.op(Opcode.FLOORDIV, b.op(Opcode.ADD, size, b.const(ALIGNMENT - 1)), b.const(ALIGNMENT))
        offset = b.op(Opcode.ADD, offset, b.op(Opcode.MUL, units, b.const(ALIGNMENT)))
        return place

    storages = [take(found.slots[slot]) for slot in program.storages]
    viewed = viewed_inputs(program)
    views: dict[int, list[int]] = {}
    for index, spec in enumerate(program.buffers):
        if spec.base is not None:
            views.setdefault(spec.base, []).append(index)
    for index, spec in enumerate(program.buffers):
        if spec.storage is not None:
            found.places[index] = storages[spec.storage]
        elif spec.role == "output":
            own = index in program.outputs
            found.places[index] = ArrayPlace("out", program.outputs.index(index)) if own else take(_bytes(found, index))
        elif spec.role == "input":
            position = program.inputs.index(index)
            if index in viewed:
                found.kept[position] = program.outputs.index(viewed[index])
                found.places[index] = ArrayPlace("out", found.kept[position])
            elif index in views or index in written:
                room = found.nbytes[index]
                for view in views.get(index, ()):
                    room = b.op(Opcode.MAX, room, found.nbytes[view])
                found.places[index] = take(room)
            else:
                found.places[index] = ArrayPlace("in", position)
                continue
            found.copied.append(index)
    for index in range(len(program.buffers)):
        base = index
        while (under := program.buffers[base].base) is not None:
            base = under
        found.places[index] = found.places[base]
    found.workspace = offset
    return found


def _bytes(layout: Layout, index: int) -> int:
    """Return the slot of an array's bytes."""
    b, spec = layout.scalars, layout.program.buffers[index]
    size = b.const(np.dtype(spec.dtype).itemsize)
    for slot in spec.shape:
        size = b.op(Opcode.MUL, size, layout.slots[slot])
    return size


def workspace_bound(layout: Layout) -> int:
    """Return bytes that suffice for every call within the declared bounds; 0 where there is no such number."""
    bounds = [(s.lower, s.upper) for s in layout.program.symbols]
    known = [(low, high) for low, high in bounds if high is not None]
    high = _interval(layout.scalars.code, layout.workspace, known)[1] if len(known) == len(bounds) else None
    return high if high is not None and high <= INT64_MAX else 0


def _interval(
    code: Sequence[int], wanted: int, bounds: Sequence[tuple[int, int]]
) -> tuple[int, int] | tuple[None, None]:
    """Return the least and greatest value of a slot by interval arithmetic (Moore 1966).

    None where a divisor may be 0.
    """
    found: list[tuple[int, int] | None] = []
    for slot in range(wanted + 1):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        op = Opcode(opcode)
        if op is Opcode.CONST:
            found.append((operands[0], operands[0]))
            continue
        if op is Opcode.SYMBOL:
            found.append(bounds[operands[0]])
            continue
        given = [found[o] for o in operands[: ARITY[op]]]
        known = [g for g in given if g is not None]
        found.append(_combined(op, known) if len(known) == len(given) else None)
    return found[wanted] or (None, None)


def _combined(op: Opcode, given: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    a, b = given[0], given[1 % len(given)]
    if op is Opcode.ADD:
        return a[0] + b[0], a[1] + b[1]
    if op is Opcode.SUB:
        return a[0] - b[1], a[1] - b[0]
    if op is Opcode.MIN:
        return min(a[0], b[0]), min(a[1], b[1])
    if op is Opcode.MAX:
        return max(a[0], b[0]), max(a[1], b[1])
    if op is Opcode.SELECT:
        c = given[2]
        return min(b[0], c[0]), max(b[1], c[1])
    if op is Opcode.MUL:
        ends = [x * y for x in a for y in b]
        return min(ends), max(ends)
    if op in (Opcode.FLOORDIV, Opcode.FLOORMOD):
        if b[0] <= 0:
            return None
        ends = [x // y for x in a for y in b]
        return (min(ends), max(ends)) if op is Opcode.FLOORDIV else (0, b[1] - 1)
    return 0, 1
