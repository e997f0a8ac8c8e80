"""All plans of a program as one C function without branches.

Only the slots that the choices depend on are computed, in the order of the scalar list. Selections and comparisons are
masks, so the time does not depend on the shape. The evaluator raises for a division by zero or a result outside int64.
Here the function returns 1 in that case, and every choice is 0, a variant that every call has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import ARITY, INT64_MIN, WIDTH, Opcode

PRELUDE = """#include <stdint.h>

static inline int64_t plan_pick(int64_t c, int64_t a, int64_t b) { return b ^ ((a ^ b) & -(int64_t)(c != 0)); }

static inline int64_t plan_add(int64_t a, int64_t b, int32_t* bad) {
  int64_t x;
  *bad |= __builtin_add_overflow(a, b, &x);
  return x;
}

static inline int64_t plan_sub(int64_t a, int64_t b, int32_t* bad) {
  int64_t x;
  *bad |= __builtin_sub_overflow(a, b, &x);
  return x;
}

static inline int64_t plan_mul(int64_t a, int64_t b, int32_t* bad) {
  int64_t x;
  *bad |= __builtin_mul_overflow(a, b, &x);
  return x;
}

/* Quotients are rounded down and remainders have the sign of the divisor. */
static inline int64_t plan_div(int64_t a, int64_t b, int32_t* bad) {
  int32_t over = (a == INT64_MIN) & (b == -1);
  int64_t d = plan_pick((b == 0) | over, 1, b);
  *bad |= (b == 0) | over;
  return a / d - ((a % d != 0) & ((a ^ d) < 0));
}

static inline int64_t plan_mod(int64_t a, int64_t b, int32_t* bad) {
  int64_t d = plan_pick((b == 0) | (b == -1), 1, b);
  *bad |= b == 0;
  int64_t r = a % d;
  return r + (d & -(int64_t)((r != 0) & ((r ^ d) < 0)));
}
"""
_TEXT: dict[Opcode, str] = {
    Opcode.ADD: "plan_add({a}, {b}, &bad)",
    Opcode.SUB: "plan_sub({a}, {b}, &bad)",
    Opcode.MUL: "plan_mul({a}, {b}, &bad)",
    Opcode.FLOORDIV: "plan_div({a}, {b}, &bad)",
    Opcode.FLOORMOD: "plan_mod({a}, {b}, &bad)",
    Opcode.MIN: "plan_pick({a} < {b}, {a}, {b})",
    Opcode.MAX: "plan_pick({a} > {b}, {a}, {b})",
    Opcode.LT: "{a} < {b}",
    Opcode.LE: "{a} <= {b}",
    Opcode.EQ: "{a} == {b}",
    Opcode.NE: "{a} != {b}",
    Opcode.AND: "({a} != 0) & ({b} != 0)",
    Opcode.OR: "({a} != 0) | ({b} != 0)",
    Opcode.NOT: "{a} == 0",
    Opcode.SELECT: "plan_pick({a}, {b}, {c})",
}


def plans_in_c(programs: Sequence[Program]) -> str:
    """Return a C file (gcc or clang) with a function `NAME_plan(symbols, choices)` for each program.

    Given the value of every symbol, in the program's order and within its bounds, it writes the variant of every call
    and returns 0.
    """
    texts = [PRELUDE]
    names: set[str] = set()
    for program in programs:
        plain = re.sub(r"\W", "_", program.name, flags=re.ASCII)
        plain = plain if plain and not plain[0].isdigit() else f"f{plain}"
        name = next(n for n in (plain, *(f"{plain}_{k}" for k in range(len(programs)))) if n not in names)
        names.add(name)
        texts.append(_function(f"{name}_plan", program))
    return "\n".join(texts)


def choices_in_c(name: str, code: Sequence[int], choices: Sequence[int]) -> str:
    """Return one function over a verified scalar list. choices: the slots whose values are the choices"""
    lines = [f"int32_t {name}(const int64_t* symbols, int32_t* choices) {{", *slots_in_c(code, choices)]
    lines += [f"  choices[{call}] = (int32_t)x{slot} & (bad - 1);" for call, slot in enumerate(choices)]
    return "\n".join([*lines, "  (void)symbols, (void)choices;", "  return bad;", "}", ""])


def slots_in_c(code: Sequence[int], slots: Sequence[int]) -> list[str]:
    """Return lines that compute slots of a verified scalar list without branches.

    They read `symbols` and declare `bad`, and the slot s as `xs`.
    """
    # Operands have lower slots than their users, so one pass from the end finds all that are needed.
    needed = set(slots)
    for slot in range(len(code) // WIDTH - 1, -1, -1):
        if slot in needed:
            opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
            needed.update(operands[: ARITY[Opcode(opcode)]])
    lines = ["  int32_t bad = 0;"]
    for slot in sorted(needed):
        opcode, *operands = code[slot * WIDTH : slot * WIDTH + WIDTH]
        op = Opcode(opcode)
        if op is Opcode.CONST:
            # C has no literal for it: -9223372036854775808 is a minus before a number that no int64 holds.
            value = "INT64_MIN" if operands[0] == INT64_MIN else f"INT64_C({operands[0]})"
        elif op is Opcode.SYMBOL:
            value = f"symbols[{operands[0]}]"
        else:
            value = _TEXT[op].format(**{letter: f"x{operand}" for letter, operand in zip("abc", operands)})
        lines.append(f"  const int64_t x{slot} = {value};")
    return lines


def _function(name: str, program: Program) -> str:
    symbols = ", ".join(s.name for s in program.symbols) or "none"
    lines = [f"The variant of each call of {program.name}.", f"symbols: {symbols}", "choices:"]
    for number, call in enumerate(program.calls):
        variants = ", ".join(f"{place} {variant.label}" for place, variant in enumerate(call.variants))
        lines.append(f"  {number} {call.name} (task {call.task}): {variants}")
    # A name from a model must not end the comment.
    comment = "\n   ".join(line.replace("*/", "* /") for line in lines)
    return f"/* {comment} */\n{choices_in_c(name, program.scalars, [c.choice for c in program.calls])}"
