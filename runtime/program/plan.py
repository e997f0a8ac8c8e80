"""Plans: the variant that a symbol binding dispatches.

A plan is an ordered, total list of (guard, variant). A guard is a scalar slot that is non-zero where the entry applies;
the first that applies wins, and the last entry is unconditional. `choice_slot` folds a plan into one slot, so one
evaluation of the scalar list decides every plan of a program.

Tests: `tests/runtime/program/test_plan_c.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_tune.errors import UserError
from relax_tune.runtime.program.program import CallSite, Program
from relax_tune.runtime.program.scalars import ARITY, WIDTH, Opcode, ScalarBuilder

_INFIX = {
    Opcode.ADD: "+",
    Opcode.SUB: "-",
    Opcode.MUL: "*",
    Opcode.FLOORDIV: "//",
    Opcode.FLOORMOD: "%",
    Opcode.LT: "<",
    Opcode.LE: "<=",
    Opcode.EQ: "==",
    Opcode.NE: "!=",
    Opcode.AND: "and",
    Opcode.OR: "or",
}
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a plan: dispatch `variant` where slot `guard` is non-zero; None means always."""

    guard: int | None
    variant: int


def choice_slot(builder: ScalarBuilder, plan: Sequence[Entry]) -> int:
    """Return the slot whose value is the variant of the first entry that applies.

    Raises: UserError when the plan is empty, its last entry has a guard, or an earlier one has none.
    """
    if not plan or plan[-1].guard is not None:
        raise UserError(f"plan: expected a last entry without a guard, got {list(plan)}")
    slot = builder.const(plan[-1].variant)
    # From the last entry backwards, so that the selection of the first entry is the outermost and decides first.
    for position in range(len(plan) - 2, -1, -1):
        guard = plan[position].guard
        if guard is None:
            raise UserError(f"plan: expected a guard on every entry but the last, got none on entry {position}")
        slot = builder.op(Opcode.SELECT, guard, builder.const(plan[position].variant), slot)
    return slot


def formula(program: Program, slot: int) -> str:
    """Return the expression of a slot, with the program's symbol names; cut where it grows long."""
    code = program.scalars
    texts: list[str] = []
    for at in range(slot + 1):
        opcode, *operands = code[at * WIDTH : at * WIDTH + WIDTH]
        op = Opcode(opcode)
        inner = [texts[operand] for operand in operands[: ARITY[op]]]
        if op is Opcode.CONST:
            text = str(operands[0])
        elif op is Opcode.SYMBOL:
            text = program.symbols[operands[0]].name
        elif op in _INFIX:
            text = f"({inner[0]} {_INFIX[op]} {inner[1]})"
        elif op is Opcode.SELECT:
            text = f"({inner[1]} if {inner[0]} else {inner[2]})"
        else:
            text = f"{op.name.lower()}({', '.join(inner)})"
        # Slots share operands, so that a text written out may double with every slot.
        texts.append(text if len(text) <= _LONGEST else f"<slot {at}>")
    text = texts[slot]
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def plan_of(program: Program, call: CallSite) -> list[Entry]:
    """Read a plan back from the SELECT chain of a call's choice slot. A choice that is no such chain gives entries for
    the part that is, or an empty list."""
    code, slot = program.scalars, call.choice
    entries: list[Entry] = []
    while True:
        opcode, a, b, c = code[slot * WIDTH : slot * WIDTH + WIDTH]
        if opcode == Opcode.CONST:
            return [*entries, Entry(None, a)]
        if opcode != Opcode.SELECT or code[b * WIDTH] != Opcode.CONST:
            return entries
        entries.append(Entry(a, code[b * WIDTH + 1]))
        slot = c


def explain(program: Program) -> str:
    """Return a table as text: for each call, where each variant is dispatched."""
    lines: list[str] = []
    for call in program.calls:
        lines.append(f"{call.name} (task {call.task})")
        entries = plan_of(program, call)
        if not entries:
            lines.append(f"  variant {formula(program, call.choice)}")
        for entry in entries:
            label = call.variants[entry.variant].label if 0 <= entry.variant < len(call.variants) else "missing"
            where = "otherwise" if entry.guard is None else f"if {formula(program, entry.guard)}"
            lines.append(f"  {label} (variant {entry.variant}) {where}")
    return "\n".join(lines)
