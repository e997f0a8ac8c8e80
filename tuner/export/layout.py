"""The places of a program's arrays in memory, and the numbers a call needs, as slots of one scalar list.

Tests: `tests/tuner/export/test_c_export.py`.
"""

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
    """The place of an array.

    Attributes:
        kind: `in`, `out`, `weights`, `packed` or `workspace`.
        at: Position among the arguments or results, offset in bytes, or slot of the offset in the workspace.
    """

    kind: str
    at: int


@dataclass(eq=False)
class Layout:
    """The layout of one program.

    Attributes:
        scalars: The program's list, followed by the bytes of arrays and their offsets in the workspace.
        slots: For each slot of the program, its slot in `scalars`.
        places: By buffer; a view has the place of its base.
        nbytes: Slot of the bytes of each buffer that crosses the boundary.
        copied: Buffers of arguments that are copied to their place before the call.
        aliased: For an argument whose memory a result takes, the number of the result.
        workspace: Slot of the bytes that a call needs.
    """

    program: Program
    scalars: ScalarBuilder
    slots: Sequence[int]
    places: dict[int, ArrayPlace] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)
    aliased: dict[int, int] = field(default_factory=dict)
    workspace: int = 0


def lay_out(program: Program, fixed: Mapping[int, ArrayPlace], written: frozenset[int]) -> Layout:
    """Return the layout of a program.

    Args:
        fixed: Places of constants and packed weights.
        written: Buffers that a kernel writes.
    """
    b = ScalarBuilder()
    layout = Layout(program, b, b.merge(program.scalars, [b.symbol(i) for i in range(len(program.symbols))]))
    layout.places.update(fixed)
    crossing = {*program.inputs, *program.outputs, *(c.buffer for c in program.checked)}
    for index in sorted(crossing | {i for i, s in enumerate(program.buffers) if s.base is not None}):
        layout.nbytes[index] = _bytes(layout, index)
    offset = b.const(0)

    def take(size: int) -> ArrayPlace:
        nonlocal offset
        place = ArrayPlace("workspace", offset)
        units = b.op(Opcode.FLOORDIV, b.op(Opcode.ADD, size, b.const(ALIGNMENT - 1)), b.const(ALIGNMENT))
        offset = b.op(Opcode.ADD, offset, b.op(Opcode.MUL, units, b.const(ALIGNMENT)))
        return place

    storages = [take(layout.slots[slot]) for slot in program.storages]
    viewed = viewed_inputs(program)
    views: dict[int, list[int]] = {}
    for index, spec in enumerate(program.buffers):
        if spec.base is not None:
            views.setdefault(spec.base, []).append(index)
    for index, spec in enumerate(program.buffers):
        if spec.storage is not None:
            layout.places[index] = storages[spec.storage]
        elif spec.role == "output":
            own = index in program.outputs
            layout.places[index] = (
                ArrayPlace("out", program.outputs.index(index)) if own else take(_bytes(layout, index))
            )
        elif spec.role == "input":
            position = program.inputs.index(index)
            if index in viewed:
                layout.aliased[position] = program.outputs.index(viewed[index])
                layout.places[index] = ArrayPlace("out", layout.aliased[position])
            elif index in views or index in written:
                room = layout.nbytes[index]
                for view in views.get(index, ()):
                    room = b.op(Opcode.MAX, room, layout.nbytes[view])
                layout.places[index] = take(room)
            else:
                layout.places[index] = ArrayPlace("in", position)
                continue
            layout.copied.append(index)
    for index in range(len(program.buffers)):
        base = index
        while (under := program.buffers[base].base) is not None:
            base = under
        layout.places[index] = layout.places[base]
    layout.workspace = offset
    return layout


def _bytes(layout: Layout, index: int) -> int:
    """Return the slot of an array's bytes."""
    b, spec = layout.scalars, layout.program.buffers[index]
    size = b.const(np.dtype(spec.dtype).itemsize)
    for slot in spec.shape:
        size = b.op(Opcode.MUL, size, layout.slots[slot])
    return size


def workspace_bound(layout: Layout) -> int:
    """Return bytes that suffice for every call within the declared bounds; 0 if no number suffices."""
    bounds = [(s.lower, s.upper) for s in layout.program.symbols]
    known = [(low, high) for low, high in bounds if high is not None]
    high = _interval(layout.scalars.code, layout.workspace, known)[1] if len(known) == len(bounds) else None
    return high if high is not None and high <= INT64_MAX else 0


def _interval(
    code: Sequence[int], result: int, bounds: Sequence[tuple[int, int]]
) -> tuple[int, int] | tuple[None, None]:
    """Return the least and greatest value of a slot by interval arithmetic (Moore 1966); None if a divisor may be 0."""
    intervals: list[tuple[int, int] | None] = []
    for slot in range(result + 1):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        op = Opcode(opcode)
        if op is Opcode.CONST:
            intervals.append((operands[0], operands[0]))
            continue
        if op is Opcode.SYMBOL:
            intervals.append(bounds[operands[0]])
            continue
        operands_known = [intervals[o] for o in operands[: ARITY[op]]]
        known = [g for g in operands_known if g is not None]
        intervals.append(_combined(op, known) if len(known) == len(operands_known) else None)
    return intervals[result] or (None, None)


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
