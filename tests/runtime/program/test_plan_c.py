"""Plans as C: compiled, and compared with the evaluator."""

from __future__ import annotations

import ctypes
import platform
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_tune.errors import UserError
from relax_tune.runtime.program.plan_c import choices_in_c, plans_in_c
from relax_tune.runtime.program.scalars import ARITY, INT64_MAX, INT64_MIN, WIDTH, Opcode, evaluate

pytestmark = pytest.mark.ccompiler
EDGES = (0, 1, -1, 2, 3, 7, -7, 64, 1000, -1000, 2**31, 2**62, INT64_MAX, INT64_MIN, INT64_MIN + 1)
SYMBOLS = 3


def compiled(folder: Path, source: str, *flags: str) -> ctypes.CDLL:
    (folder / "plans.c").write_text(source)
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-o", str(folder / "plans.so"), str(folder / "plans.c")], check=True)
    return ctypes.CDLL(str(folder / "plans.so"))


def called(function: Any, symbols: list[int], count: int) -> tuple[int, list[int]]:
    values = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
    choices = (ctypes.c_int32 * (count + 1))(*[77] * (count + 1))
    status = function(values, choices)
    assert choices[count] == 77, "nothing is written behind the last choice"
    return status, list(choices)[:count]


def random_code(rng: random.Random) -> list[int]:
    code: list[int] = []
    for slot in range(rng.randint(1, 24)):
        op = rng.choice([op for op in Opcode if slot or ARITY[op] == 0])
        if op is Opcode.CONST:
            operands = [rng.choice(EDGES)]
        elif op is Opcode.SYMBOL:
            operands = [rng.randrange(SYMBOLS)]
        else:
            operands = [rng.randrange(slot) for _ in range(ARITY[op])]
        code += [int(op), *operands, *[0] * (3 - len(operands))]
    return code


def reachable(code: list[int], slots: list[int]) -> list[int]:
    """The list with zeros for what the slots do not depend on."""
    needed = set(slots)
    for slot in reversed(range(len(code) // WIDTH)):
        if slot in needed:
            op = Opcode(code[slot * WIDTH])
            needed |= set(code[slot * WIDTH + 1 : slot * WIDTH + 1 + ARITY[op]])
    rows = [code[s * WIDTH : s * WIDTH + WIDTH] if s in needed else [0] * WIDTH for s in range(len(code) // WIDTH)]
    return [number for row in rows for number in row]


@pytest.mark.process
@pytest.mark.parametrize("flags", [(), ("-ftrapv",)])
def test_c_plan_agrees_with_evaluator(tmp_path: Path, flags: tuple[str, ...]) -> None:
    rng = random.Random(len(flags))
    made = []
    for _ in range(150):
        code = random_code(rng)
        made.append((code, [rng.randrange(len(code) // WIDTH) for _ in range(rng.randint(1, 3))]))
    body = "\n".join(choices_in_c(f"f{n}", code, slots) for n, (code, slots) in enumerate(made))
    library = compiled(tmp_path, f"{plans_in_c(())}\n{body}", *flags)
    seen = set()
    for n, (code, slots) in enumerate(made):
        for _ in range(20):
            symbols = [rng.choice(EDGES) if rng.random() < 0.6 else rng.randint(-20, 20) for _ in range(SYMBOLS)]
            try:
                values = evaluate(reachable(code, slots), symbols)
                wanted = (0, [(values[s] + 2**31) % 2**32 - 2**31 for s in slots])
            except UserError:
                wanted = (1, [0] * len(slots))
            assert called(library[f"f{n}"], symbols, len(slots)) == wanted, (code, slots, symbols)
            seen.add(wanted[0])
    assert seen == {0, 1}


@pytest.mark.process
def test_the_plans_of_a_program(tmp_path: Path, small: Any) -> None:
    program = small.program("c")
    odd = replace(program, name="1st*/ part")
    source = plans_in_c([program, odd, odd])
    names = re.findall(r"^int32_t (\w+)\(const", source, re.M)
    assert names[0] == f"{program.name}_plan" and len(set(names)) == 3
    # a C name must not begin with a digit
    assert all(not name[0].isdigit() for name in names)
    library = compiled(tmp_path, source)
    for n in (0, 1, 4, 5, 1000):
        values = evaluate(program.scalars, [n])
        for name in names:
            assert called(library[name], [n], len(program.calls)) == (0, [values[c.choice] for c in program.calls])
    if platform.machine() == "x86_64":
        text = subprocess.run(
            ["gcc", "-O2", "-S", "-o", "-", str(tmp_path / "plans.c")], check=True, capture_output=True, text=True
        ).stdout
        assert not re.findall(r"^\s+j(?!mp)\w+", text, re.M), "branches"
