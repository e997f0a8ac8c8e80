"""The flat int64 instruction list, and its only evaluator.

Shapes, sizes, grids, guards, checks and choices of a built program are scalar expressions over its symbols. The build
turns all of them into one list; an instruction is four int64 numbers `(opcode, a, b, c)` and its *slot* is its index.
Operands are slots of earlier instructions, so one pass from front to back evaluates everything exactly once.

Semantics are Python's on whole numbers: division floors, comparisons give 0 or 1, `AND`/`OR`/`NOT` take any non-zero
number as true, `SELECT a b c` is `b if a else c` (both sides are evaluated). A result outside int64 is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

from relax_tune.errors import ArtifactError, UserError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
WIDTH = 4
_CHUNK = 2048


class Opcode(IntEnum):
    """Opcodes. The comment says which of a, b, c are used; unused ones must be 0."""

    CONST = 0  # a: the value
    SYMBOL = 1  # a: index into the program's symbols
    ADD = 2  # a, b
    SUB = 3  # a, b
    MUL = 4  # a, b
    FLOORDIV = 5  # a, b
    FLOORMOD = 6  # a, b
    MIN = 7  # a, b
    MAX = 8  # a, b
    LT = 9  # a, b
    LE = 10  # a, b
    EQ = 11  # a, b
    NE = 12  # a, b
    AND = 13  # a, b
    OR = 14  # a, b
    NOT = 15  # a
    SELECT = 16  # a condition, b when non-zero, c when zero


ARITY: dict[Opcode, int] = {op: 2 for op in Opcode} | {
    Opcode.CONST: 0,
    Opcode.SYMBOL: 0,
    Opcode.NOT: 1,
    Opcode.SELECT: 3,
}
COMMUTATIVE = frozenset({Opcode.ADD, Opcode.MUL, Opcode.MIN, Opcode.MAX, Opcode.EQ, Opcode.NE, Opcode.AND, Opcode.OR})

# Statement text per opcode. {i} is the slot, {a} {b} {c} are operand names; only verified whole numbers are put in.
_RANGE = "\n if not -9223372036854775808<=x{i}<=9223372036854775807: over({i},x{i})"
_TEXT: dict[Opcode, str] = {
    Opcode.CONST: " x{i}={k}",
    Opcode.SYMBOL: " x{i}=s[{k}]",
    Opcode.ADD: " x{i}={a}+{b}" + _RANGE,
    Opcode.SUB: " x{i}={a}-{b}" + _RANGE,
    Opcode.MUL: " x{i}={a}*{b}" + _RANGE,
    Opcode.FLOORDIV: " if not {b}: zero({i},{a})\n x{i}={a}//{b}" + _RANGE,
    Opcode.FLOORMOD: " if not {b}: zero({i},{a})\n x{i}={a}%{b}",
    Opcode.MIN: " x{i}={a} if {a}<={b} else {b}",
    Opcode.MAX: " x{i}={a} if {a}>={b} else {b}",
    Opcode.LT: " x{i}=1 if {a}<{b} else 0",
    Opcode.LE: " x{i}=1 if {a}<={b} else 0",
    Opcode.EQ: " x{i}=1 if {a}=={b} else 0",
    Opcode.NE: " x{i}=1 if {a}!={b} else 0",
    Opcode.AND: " x{i}=1 if {a} and {b} else 0",
    Opcode.OR: " x{i}=1 if {a} or {b} else 0",
    Opcode.NOT: " x{i}=0 if {a} else 1",
    Opcode.SELECT: " x{i}={b} if {a} else {c}",
}

Evaluator = Callable[[Sequence[int]], list[int]]


def verify(code: Sequence[int], n_symbols: int) -> None:
    """Check every number of `code`. Raises ArtifactError naming the slot, what was expected and what it got."""
    if len(code) % WIDTH:
        raise ArtifactError(f"scalar list: expected a multiple of {WIDTH} numbers, got {len(code)}")
    last = max(Opcode)
    for index, number in enumerate(code):
        if type(number) is not int or not INT64_MIN <= number <= INT64_MAX:
            raise ArtifactError(f"scalar slot {index // WIDTH}: expected int64 numbers, got {number!r:.40}")
    for slot in range(len(code) // WIDTH):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        if not 0 <= opcode <= last:
            raise ArtifactError(f"scalar slot {slot}: expected an opcode 0..{int(last)}, got {opcode}")
        op = Opcode(opcode)
        used = ARITY[op]
        if op is Opcode.SYMBOL and not 0 <= operands[0] < n_symbols:
            raise ArtifactError(f"scalar slot {slot}: expected a symbol 0..{n_symbols - 1}, got {operands[0]}")
        if used == 0:
            used = 1  # the immediate
        else:
            for operand in operands[:used]:
                if not 0 <= operand < slot:
                    raise ArtifactError(f"scalar slot {slot} ({op.name}): expected an earlier slot, got {operand}")
        if any(operands[used:]):
            raise ArtifactError(f"scalar slot {slot} ({op.name}): expected 0 for unused operands, got {operands}")


def _over(slot: int, value: int) -> None:
    raise UserError(f"scalar slot {slot}: the result {value} does not fit in int64; use smaller symbol values")


def _zero(slot: int, dividend: int) -> None:
    raise UserError(f"scalar slot {slot}: {dividend} is divided by zero; the program needs a check or a SELECT divisor")


def compile_scalars(code: Sequence[int], n_symbols: int) -> Evaluator:
    """Verify once and return a fast function `symbol values -> value of every slot`.

    The list becomes Python functions of straight-line assignments. That is safe for hostile lists. The text consists of the
    fixed templates above and of ints that `verify` has checked, never of strings of the input. The functions see no
    builtins, and no globals but the two that raise.

    Raises: ArtifactError for a bad list. The function raises UserError for symbol values of a wrong count, type or
    range, for a division by zero and for a result outside int64, naming the slot.
    """
    verify(code, n_symbols)
    n_slots = len(code) // WIDTH
    parts = [_compile_part(code, start, min(start + _CHUNK, n_slots)) for start in range(0, n_slots, _CHUNK)]

    def run(symbols: Sequence[int]) -> list[int]:
        if len(symbols) != n_symbols:
            raise UserError(f"scalars: expected {n_symbols} symbol values, got {len(symbols)}")
        for index, value in enumerate(symbols):
            if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
                raise UserError(f"scalars: expected an int64 for symbol {index}, got {value!r}")
        values: list[int] = []
        for part in parts:
            part(symbols, values)
        return values

    return run


def _compile_part(code: Sequence[int], start: int, stop: int) -> Callable[[Sequence[int], list[int]], None]:
    def name(slot: int) -> str:
        return f"x{slot}" if slot >= start else f"v[{slot}]"

    lines = ["def part(s,v):"]
    for slot in range(start, stop):
        opcode, a, b, c = code[slot * WIDTH : slot * WIDTH + WIDTH]
        op = Opcode(opcode)
        if ARITY[op] == 0:
            lines.append(_TEXT[op].format(i=slot, k=a))
        else:
            lines.append(_TEXT[op].format(i=slot, a=name(a), b=name(b), c=name(c)))
    lines.append(f" v.extend(({','.join(f'x{slot}' for slot in range(start, stop))},))")
    scope: dict[str, Any] = {"__builtins__": {}, "over": _over, "zero": _zero}
    exec(compile("\n".join(lines), "<scalars>", "exec"), scope)
    part: Callable[[Sequence[int], list[int]], None] = scope["part"]
    return part


@lru_cache(maxsize=64)
def _cached(code: tuple[int, ...], n_symbols: int) -> Evaluator:
    return compile_scalars(code, n_symbols)


def evaluate(code: Sequence[int], symbol_values: Sequence[int]) -> list[int]:
    """Return the value of every slot. Raises as `compile_scalars` and its result do. To evaluate one list often, keep the
    function `compile_scalars` returns."""
    if any(type(number) is not int for number in code):
        verify(code, len(symbol_values))  # keeps True == 1 from finding a cached list
    return _cached(tuple(code), len(symbol_values))(symbol_values)


def symbolic_slots(code: Sequence[int], symbol: int | None = None) -> list[bool]:
    """Return for each slot of a verified list whether its value depends on a symbol; None for any symbol."""
    depends: list[bool] = []
    for slot in range(len(code) // WIDTH):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        op = Opcode(opcode)
        read = op is Opcode.SYMBOL and symbol in (None, operands[0])
        depends.append(read or any(depends[operand] for operand in operands[: ARITY[op]]))
    return depends


def only_slots(code: Sequence[int], slots: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Return the part of a verified list that some of its slots need, and their numbers in it."""
    needed = [False] * (len(code) // WIDTH)
    for slot in slots:
        needed[slot] = True
    numbers: dict[int, int] = {}
    short: list[int] = []
    for slot in reversed(range(len(needed))):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        for operand in operands[: ARITY[Opcode(opcode)]] if needed[slot] else ():
            needed[operand] = True
    for slot in (n for n, is_needed in enumerate(needed) if is_needed):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        arity = ARITY[Opcode(opcode)]
        numbers[slot] = len(numbers)
        short += (opcode, *(numbers[operand] for operand in operands[:arity]), *operands[arity:])
    return tuple(short), [numbers[slot] for slot in slots]


def constant_values(code: Sequence[int], n_symbols: int) -> list[int | None]:
    """Return the value of each slot that depends on no symbol; None for the others. Raises as `compile_scalars` does."""
    verify(code, n_symbols)
    depends = symbolic_slots(code)
    plain: list[int] = []
    for slot, symbolic in enumerate(depends):
        plain += (Opcode.CONST, 0, 0, 0) if symbolic else code[slot * WIDTH : slot * WIDTH + WIDTH]
    values = compile_scalars([int(number) for number in plain], 0)(())
    return [None if symbolic else value for symbolic, value in zip(depends, values)]


class ScalarBuilder:
    """A builder of an instruction list. Equal instructions share a slot (operands of commutative opcodes are sorted).

    An instruction over constants becomes a constant, unless it would be an error at run time.
    """

    def __init__(self) -> None:
        self._code: list[int] = []
        self._slots: dict[tuple[int, int, int, int], int] = {}
        self._constants: dict[int, int] = {}

    @property
    def code(self) -> tuple[int, ...]:
        """The list so far, for `Program.scalars`."""
        return tuple(self._code)

    def __len__(self) -> int:
        return len(self._code) // WIDTH

    def const(self, value: int) -> int:
        """Return slot of a constant. Raises UserError outside int64."""
        value = int(value)
        if not INT64_MIN <= value <= INT64_MAX:
            raise UserError(f"scalar constant: expected an int64, got {value}")
        slot = self._intern((int(Opcode.CONST), value, 0, 0))
        self._constants[slot] = value
        return slot

    def symbol(self, index: int) -> int:
        """Return slot of the program symbol with this index."""
        return self._intern((int(Opcode.SYMBOL), int(index), 0, 0))

    def op(self, op: Opcode, a: int, b: int = 0, c: int = 0) -> int:
        """Return the slot of one instruction over earlier slots. Raises UserError for a slot that does not exist."""
        arity = ARITY[op]
        operands = (a, b, c)
        if arity == 0:
            raise UserError(f"scalar {op.name}: expected const() or symbol(), got op()")
        for operand in operands[:arity]:
            if not 0 <= operand < len(self):
                raise UserError(f"scalar {op.name}: expected a slot below {len(self)}, got {operand}")
        if op in COMMUTATIVE and b < a:
            a, b = b, a
        folded = self._fold(op, a, b, c)
        if folded is not None:
            return folded
        return self._intern((int(op), a, b if arity > 1 else 0, c if arity > 2 else 0))

    def merge(self, other: Sequence[int], symbol_slots: Sequence[int]) -> list[int]:
        """Inline another list: its symbol `i` becomes slot `symbol_slots[i]` of this one. Returns, for each slot of
        `other`, the slot here. Raises ArtifactError when `other` is malformed."""
        verify(other, len(symbol_slots))
        mapped: list[int] = []
        for slot in range(len(other) // WIDTH):
            opcode, *operands = other[slot * WIDTH : slot * WIDTH + WIDTH]
            op = Opcode(opcode)
            if op is Opcode.CONST:
                mapped.append(self.const(operands[0]))
            elif op is Opcode.SYMBOL:
                mapped.append(symbol_slots[operands[0]])
            else:
                mapped.append(self.op(op, *(mapped[operand] for operand in operands[: ARITY[op]])))
        return mapped

    def _intern(self, instruction: tuple[int, int, int, int]) -> int:
        slot = self._slots.get(instruction)
        if slot is None:
            slot = self._slots[instruction] = len(self)
            self._code.extend(instruction)
        return slot

    def _fold(self, op: Opcode, a: int, b: int, c: int) -> int | None:
        constants = self._constants
        if op is Opcode.SELECT:
            if b == c:
                return b
            return None if a not in constants else (b if constants[a] else c)
        used = (a, b)[: ARITY[op]]
        if any(slot not in constants for slot in used):
            return None
        code = (int(Opcode.SYMBOL), 0, 0, 0, int(Opcode.SYMBOL), len(used) - 1, 0, 0, int(op), 0, len(used) - 1, 0)
        try:
            return self.const(_cached(code, len(used))([constants[slot] for slot in used])[-1])
        except UserError:  # a division by zero or an overflow stays an instruction, which raises only if evaluated
            return None
